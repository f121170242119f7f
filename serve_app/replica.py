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

from serve_app.auth import Keyring, keyring
from serve_app.guard import Guard

if TYPE_CHECKING:
    from serve_app.engine import Engine

START_ERROR = "rankline could not start the engine: "


class Replica:
    """State of one replica. `app` is there after `start`."""

    def __init__(self, spec: dict[str, Any], *, code_path: str) -> None:
        self.spec = spec
        self.engine: Engine | None = None
        self.app: Guard | None = None
        self._code_path = code_path
        self._watch: asyncio.Task[None] | None = None

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
        self.app = Guard(
            self.engine.app,
            load=self.engine,
            keys=Keyring([]),
            require_key=self.spec["require_key"],  # from the first moment: the keys themselves come with reconfigure
            max_requests=self.spec["max_requests"],
            max_body_bytes=self.spec["max_body_bytes"],
            body_timeout_s=self.spec["body_timeout_s"],
        )
        self._watch = asyncio.create_task(self._leave_with_the_engine())
        print(
            f"rankline replica ready in {time.monotonic() - began:.1f} s: imports {imported - began:.1f} s, "
            f"engine process {self.engine.pid()}",
            flush=True,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take over what may change while serving: the API keys and the mounted adapters."""
        assert self.engine is not None
        assert self.app is not None
        self.app.keys = keyring(user_config["keys"])
        if self.spec["flags"].get("enable_lora"):
            await self.engine.mount(user_config["adapters"])

    async def check_health(self) -> None:
        """Raise when the engine is dead or hangs; Serve then replaces this replica. O(1)."""
        if self.engine is None or self.app is None:
            raise RuntimeError("the engine has not started")
        await self.engine.llm.check_health()
        silent = time.monotonic() - max(self.engine.pulse.last_step, self.app.busy_since)
        if self.engine.unfinished() and silent > self.spec["hang_s"]:
            raise RuntimeError(f"the engine has made no step for {silent:.0f} s with requests waiting")

    def stats(self) -> dict[str, float]:
        """Running and waiting requests and the share of the KV cache in use, for autoscaling."""
        if self.engine is None or self.app is None:
            return {}
        pulse = self.engine.pulse
        if not self.engine.unfinished():  # an idle engine reports nothing, so the last report is stale
            return {"running": 0.0, "waiting": float(self.app.active), "kv_cache_usage": 0.0}
        # Requests that the engine has not reported yet are waiting, whatever it says.
        waiting = max(pulse.waiting, max(self.app.active, self.engine.unfinished()) - pulse.running)
        return {"running": float(pulse.running), "waiting": float(waiting), "kv_cache_usage": pulse.kv_cache_usage}

    async def stop(self) -> None:
        """Stop the engine process and wait for its end."""
        if self._watch is not None:
            self._watch.cancel()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.shutdown)

    async def _leave_with_the_engine(self) -> None:
        """End this process within a second of its engine's death.

        A replica with a dead engine fails fast, so a proxy that counts connections would send it ever more.
        """
        assert self.engine is not None
        while not self.engine.dead:
            await asyncio.sleep(0.1)
        assert self.app is not None
        self.app.closing = True
        print("the engine process has died: this replica leaves", file=sys.stderr, flush=True)
        await asyncio.sleep(0.5)  # requests under way get their error, and leave for another replica
        os._exit(1)


def prepare_fork_server(spec: dict[str, Any], code_path: str) -> None:
    """Start the process that imports serve_app.engine beside us, for EngineCore to be forked from."""
    if not spec["gpus"]:
        threads = spec["threads"] or max(1, len(os.sched_getaffinity(0)) // spec["sharers"])
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
