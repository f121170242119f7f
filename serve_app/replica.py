"""One replica: starts its engine, guards its application, tells Serve how it is, and stops it cleanly."""

import asyncio
import glob
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.engine import Engine

START_ERROR = "rankline could not start the engine: "


class Replica:
    """State of one replica. `app` is there after `start`."""

    def __init__(self, spec: dict[str, Any], *, code_path: str) -> None:
        self.spec = spec
        self.engine: Engine | None = None
        self.app: Any = None
        self._code_path = code_path

    async def start(self) -> None:
        """Start the engine; RuntimeError holding START_ERROR and the engine's own words when it fails."""
        began = time.monotonic()
        log = OwnLog()
        prepare_fork_server(self.spec, self._code_path)
        try:
            from serve_app import engine

            imported = time.monotonic()
            self.engine = await engine.start(self.spec["flags"])
        except Exception as error:
            raise RuntimeError(f"{START_ERROR}{log.cause(error)}") from error
        self.app = self.engine.app
        print(
            f"rankline replica ready in {time.monotonic() - began:.1f} s: imports {imported - began:.1f} s, "
            f"engine process {self.engine.pid()}",
            flush=True,
        )

    async def check_health(self) -> None:
        """Raise when the engine is dead; Serve then replaces this replica."""
        if self.engine is None:
            raise RuntimeError("the engine has not started")
        await self.engine.llm.check_health()

    async def stop(self) -> None:
        """Stop the engine process and wait for its end."""
        if self.engine is not None:
            await asyncio.to_thread(self.engine.shutdown)


def prepare_fork_server(spec: dict[str, Any], code_path: str) -> None:
    """Start the process that imports serve_app.engine beside us, for EngineCore to be forked from."""
    if not spec["gpus"]:
        threads = spec["threads"] or max(1, len(os.sched_getaffinity(0)) // spec["num_replicas"])
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["LD_PRELOAD"] = cpu_preload()
        # vLLM's CPU back end sets these two before it spawns the engine: too late for a forked one.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        os.environ["TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] = "1"
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = code_path if path is None else f"{code_path}{os.pathsep}{path}"
    multiprocessing.set_forkserver_preload(["serve_app.engine"])
    multiprocessing.forkserver.ensure_running()
    if path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path


def cpu_preload() -> str:
    """Libraries that vLLM's CPU back end wants preloaded: tcmalloc from its wheel and torch's OpenMP."""
    found = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p]
    vllm, torch = importlib.util.find_spec("vllm"), importlib.util.find_spec("torch")
    if vllm is not None and vllm.origin and not any("libtcmalloc" in p for p in found):
        libraries = Path(vllm.origin).parent / "libs"
        tcmalloc = glob.glob(f"{libraries}/libtcmalloc_minimal*.so*") or glob.glob(f"{libraries}/libtcmalloc.so*")
        found = tcmalloc[:1] + found
    if torch is not None and torch.origin and not any("omp" in p for p in found):
        package = Path(torch.origin).parent
        found += (glob.glob(f"{package.parent}/torch.libs/libgomp*.so*") + glob.glob(f"{package}/lib/libgomp*.so*"))[:1]
    return ":".join(found)


class OwnLog:
    """Sends what this process and its children write to a file of their own, beside Serve's logs of the session.

    Ray copies a worker's output to every terminal that is attached to the cluster, and vLLM says a lot. And vLLM's
    front end only says "see root cause above" when the engine fails: the cause stands in this file.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        worker_log = Path(os.readlink("/proc/self/fd/2"))
        if worker_log.parent.name != "logs":  # not a Ray worker's log: leave it alone
            return
        self.path = worker_log.parent / "serve" / f"rankline_{os.getpid()}.log"
        self.path.parent.mkdir(exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)

    def cause(self, error: BaseException) -> str:
        """The engine's own error if it logged one, else `error` in one line."""
        text = self.path.read_text("utf-8", "replace") if self.path else ""
        found = engine_cause(text) or in_one_line(error)
        return found if self.path is None else f"{found} (its log: {self.path})"


def in_one_line(error: BaseException) -> str:
    """An exception's type and message; pydantic's many lines become the messages alone."""
    problems = error.errors() if hasattr(error, "errors") else None  # type: ignore[attr-defined]
    text = "; ".join(str(p["msg"]) for p in problems) if problems else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"


def engine_cause(log: str) -> str | None:
    """The first exception that the engine process reported in `log`, without log prefixes."""
    for line in log.splitlines():
        match = re.search(r"\(EngineCore[^)]*\).*?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt): .+)$", line)
        if match and "Engine core initialization failed" not in line:
            return match.group(1).strip()
    return None
