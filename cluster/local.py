"""A Ray head on this machine, loopback only and behind a token: start it, join it, stop exactly what was started.

    python -m cluster.local start|status|stop [--config FILE] [key=value ...]
    python -m cluster.local run [--keep] [--config FILE] -- COMMAND ...     start, run COMMAND, always stop

State lies in .rankline/ under RANKLINE_ROOT or the working directory: head.json, the token (mode 600) and the log
of the last start. `start` and `stop` may be repeated: what runs already stays, what is gone already is no error.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from cluster import environment, processes
from jobs import cli
from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import Progress, say

PROJECT = Path(__file__).resolve().parent.parent
# `ray start`, but without the Ray Client server: one more port that runs code, and 100 MB, for nothing here.
RAY = "from ray.scripts import scripts; scripts.get_ray_client_dependency_error = lambda: 'off'; scripts.main()"


@dataclass(frozen=True)
class Head:
    """A head that `start` began: its mark, its addresses, and the ports that are its own."""

    cluster_id: str
    address: str
    dashboard: str
    token_path: str
    temp_dir: str
    root: str
    ports: tuple[int, ...]
    ready: bool


def start(config: Config) -> Head:
    """Start the head, or return the one that runs. UserError when a port is taken or Ray does not start."""
    with _alone():
        head = running()
        if head is not None:
            say("cluster", f"already running: {head.dashboard}")
            return head
        _end_leftovers()
        ports = (config.serve.port, config.cluster.dashboard_port)
        for port, key in zip(ports, ("serve.port", "cluster.dashboard_port"), strict=True):
            if who := processes.holder(port):
                raise UserError(f"{key}={port}: the port is held by {who}: end that process or choose another port")
        head = Head(
            cluster_id=uuid.uuid4().hex,
            address=f"127.0.0.1:{processes.free_port(6379)}",
            dashboard=f"http://127.0.0.1:{config.cluster.dashboard_port}",
            token_path=str(environment.token()),
            temp_dir=str(environment.temp_dir()),
            root=str(environment.root()),
            ports=ports,
            ready=False,
        )
        _write(head)  # before anything starts: a start that is cut off can be stopped
        try:
            _ray_start(config, head)
        except BaseException:
            _end_leftovers()
            raise
        _write(replace(head, ready=True))
        return head


def stop() -> int:
    """End what `start` began, however it was left, and wait until its ports are free. Returns how many processes."""
    with _alone():
        return _end_leftovers()


def running() -> Head | None:
    """The head that `start` left running here, or None. One whose main processes are gone counts as not running."""
    head = _read()
    if head is None or not head.ready:
        return None
    names = {_program(process) for process in processes.marked(head.cluster_id)}
    return head if {"raylet", "gcs_server", "dashboard.py"} <= names else None


def connect(config: Config, *, private: bool = True) -> None:
    """Join Ray: inside a job its cluster, else cluster.address, else the running local head, else a private cluster.

    The private one lives in this process and ends with it. With `private=False` there must be a cluster to join,
    and UserError says how to start one.
    """
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            return
    in_a_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    address = (None if in_a_job else config.cluster.address) or os.environ.get("RAY_ADDRESS")
    if address is None and (head := running()) is not None:
        os.environ.update(client_environment(head))
        address = head.address
    if address is None and not private:
        raise UserError(
            "no Ray cluster to join: start one with `python -m cluster.local start` (or use `make serve`), "
            "or name it with cluster.address=HOST:PORT"
        )
    if address is not None:
        environment.bypass_proxies(os.environ)
        _init(address=address)
        return
    # Workers change their directory, so what `resolve_storage` calls "here" has to travel with them.
    os.environ.setdefault("RANKLINE_ROOT", str(environment.root()))
    place = environment.temp_dir()
    os.environ.update(environment.variables(place, environment.token()))
    _init(
        address="local",
        num_cpus=config.cluster.num_cpus or environment.logical_cpus(),
        include_dashboard=False,
        object_store_memory=environment.store_bytes(),
        _temp_dir=str(place),
    )


def client_environment(head: Head) -> dict[str, str]:
    """What a process needs in its environment to talk to the head: Ray itself and its Jobs API."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": head.token_path,
        "RAY_ADDRESS": head.address,
        "RAY_API_SERVER_ADDRESS": head.dashboard,
        "RANKLINE_ROOT": head.root,
        **environment.ON_LOOPBACK,
        **(environment.direct() if any(name.lower().endswith("_proxy") for name in os.environ) else {}),
    }


def _init(**arguments: Any) -> None:
    import logging

    import ray
    from ray import _raylet
    from ray._private import ray_constants

    # Both were read from the environment if something imported ray before us.
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1") != "0"
    raylet: Any = _raylet  # compiled, without types
    raylet.Config.initialize("")
    try:
        ray.init(logging_level=logging.WARNING, **arguments)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"cannot join Ray at {arguments['address']}: {str(error).strip().splitlines()[0]}. Look with "
            "`python -m cluster.local status`; a head that died is cleared by `python -m cluster.local stop`"
        ) from None


def _ray_start(config: Config, head: Head) -> None:
    inherited = {
        **os.environ,
        **environment.variables(Path(head.temp_dir), Path(head.token_path)),
        processes.MARK: head.cluster_id,
        "RANKLINE_ROOT": head.root,
        # Replicas outlive the job that deployed them, and with it Ray's copy of its working directory.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    inherited.pop("RAY_ADDRESS", None)
    _forget_old_sessions(Path(head.temp_dir))
    command = [sys.executable, "-c", RAY, "start", "--head", "--disable-usage-stats", "--include-dashboard=true"]
    command += ["--node-ip-address=127.0.0.1", f"--port={head.address.rpartition(':')[2]}"]
    command += [f"--temp-dir={head.temp_dir}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={config.cluster.dashboard_port}"]
    command += [f"--dashboard-agent-listen-port={processes.free_port(52365)}"]
    command += [f"--num-cpus={config.cluster.num_cpus or environment.logical_cpus()}"]
    if (store := environment.store_bytes()) is not None:
        command += [f"--object-store-memory={store}"]
    log = Path(head.root) / ".rankline" / "head.log"
    with open(log, "wb") as output, Progress("cluster", unit=" s") as progress:
        # Its own session: a Ctrl-C at the terminal reaches the submitter, which stops its job, not Ray underneath it.
        process = subprocess.Popen(
            command, env=inherited, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        began = time.monotonic()
        while process.poll() is None:
            progress.update(round(time.monotonic() - began), "starting Ray")
            if time.monotonic() - began > 120:
                process.kill()
            time.sleep(0.1)
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise UserError(f"Ray did not start (exit status {process.returncode}): {lines[-1]}. All it said is in {log}")
    say("cluster", f"Ray started in {time.monotonic() - began:.0f} s, dashboard at {head.dashboard}")


def _end_leftovers() -> int:
    head = _read()
    if head is None:
        return 0
    ended = processes.end(head.cluster_id)
    deadline = time.monotonic() + 20
    while any(processes.holder(port) for port in head.ports) and ended and time.monotonic() < deadline:
        time.sleep(0.1)
    _state().unlink(missing_ok=True)
    return ended


def _forget_old_sessions(place: Path) -> None:
    """Keep the logs of the last session, and the session of any process that still lives."""
    sessions = sorted(path for path in place.glob("session_*_*") if path.is_dir() and not path.is_symlink())
    for session in sessions[:-1]:
        if not psutil.pid_exists(int(session.name.rpartition("_")[2])):
            shutil.rmtree(session, ignore_errors=True)


def _program(process: Any) -> str:
    with contextlib.suppress(Exception):
        line = process.cmdline()
        return next((Path(part).name for part in line if Path(part).name in ("dashboard.py",)), Path(line[0]).name)
    return ""


def _state() -> Path:
    return environment.root() / ".rankline" / "head.json"


def _read() -> Head | None:
    try:
        found: dict[str, Any] = json.loads(_state().read_text(encoding="utf-8"))
        ports: list[int] = found.pop("ports")
        return Head(**found, ports=tuple(ports))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{_state()}: cannot be read ({error}): end the head's processes yourself, then delete it"
        ) from None


def _write(head: Head) -> None:
    draft = environment.folder() / f"head.{os.getpid()}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        json.dump(asdict(head), handle, indent=1)
    draft.rename(_state())


@contextlib.contextmanager
def _alone() -> Generator[None]:
    """One start or stop at a time per root."""
    with open(environment.folder() / "lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _status(_config: Config) -> None:
    head = running()
    if head is None:
        raise UserError("no local head is running: start one with `python -m cluster.local start`")
    found = processes.marked(head.cluster_id)
    say("cluster", f"running: {len(found)} processes, dashboard {head.dashboard}")
    say("cluster", f"logs are in {head.temp_dir}/session_latest/logs")
    print("For `ray job submit`, `ray status` or ray.init() in a shell of yours:")
    for key, value in client_environment(head).items():
        print(f"  export {key}={shlex.quote(value)}")


def _stop(_config: Config) -> None:
    ended = stop()
    say("cluster", f"stopped, {ended} processes ended" if ended else "nothing was running")


def _start(config: Config) -> None:
    start(config)
    say("cluster", "`python -m cluster.local status` prints what a shell needs; `python -m cluster.local stop` ends it")


def _run(config: Config, command: list[str], *, keep: bool) -> int:
    """Run a command beside a head and return its exit status.

    A head that was running stays. One that was started here is stopped in any case, or with `keep` if anything fails.
    """
    ours, status = running() is None, 1
    child: subprocess.Popen[bytes] | None = None
    stopped = False

    def interrupt(number: int, _frame: Any) -> None:
        nonlocal stopped
        # A Ctrl-C reaches the child by itself; a SIGTERM to us alone has to be handed on.
        if number == signal.SIGTERM and child is not None:
            child.terminate()
        if child is None and not stopped:
            stopped = True
            raise KeyboardInterrupt

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        start(config)
        child = subprocess.Popen(command)
        status = child.wait()
        return status
    finally:
        if ours and (status or not keep):
            stopped = True  # a second Ctrl-C does not cut the cleaning up short
            _stop(config)


def _main() -> None:
    arguments, command = sys.argv[1:], None
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, command = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m cluster.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("start", "status", "stop", "run"))
    parser.add_argument("--keep", action="store_true", help="run: leave the head up when the command succeeded")
    parser.add_argument("--config", metavar="FILE", help="YAML config; without one the defaults hold")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override, for example serve.port=8001")
    args = parser.parse_args(arguments)
    if (args.action == "run") != bool(command):
        parser.error("run needs a command after --, and only run takes one")

    def act() -> None:
        config = config_module.load(args.config, args.overrides)
        if args.action == "run":
            sys.exit(_run(config, list(command or ()), keep=args.keep))
        else:
            {"start": _start, "status": _status, "stop": _stop}[args.action](config)

    cli.guard(act)


if __name__ == "__main__":
    _main()
