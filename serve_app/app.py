"""The Serve application `rankline`: what is deployed, with which resources, and how its code reaches the replicas.

A replica outlives the job that deployed it, and Ray drops a job's uploaded package ten minutes after its last
use. So the replicas depend on no package: the sources of `serve_app` travel inside the deployment itself, and each
replica unpacks them into a private directory of its node. The class below is the only thing pickled by value.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

APP = "rankline"
DEPLOYMENT = "engine"


@dataclass(frozen=True)
class Spec:
    """One deployment. `flags` are vLLM's own, by their own names."""

    model: str
    served_model_name: str
    flags: Mapping[str, Any]
    num_replicas: int = 1
    gpus: int = 0
    cpus: float = 1.0
    threads: int | None = None
    max_requests: int = 1024
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    hang_s: float = 120.0
    drain_s: float = 600.0
    require_key: bool = False
    autoscaling: Mapping[str, float] | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    surge: bool = False


def sources() -> dict[str, bytes]:
    """This package's source files, by name."""
    here = Path(__file__).parent
    return {file.name: file.read_bytes() for file in sorted(here.glob("*.py"))}


def build(spec: Spec, *, user_config: dict[str, Any], code: Mapping[str, bytes] | None = None) -> Any:
    """The bound Serve application of `spec`; needs an initialized Ray.

    `user_config` ({"keys": [...], "adapters": [...]}) reaches running replicas without a restart. `code` is what
    `sources` returned at an earlier deployment; None takes today's.
    """
    from ray import cloudpickle, serve

    from serve_app import autoscaling

    for module in (sys.modules[__name__], autoscaling):  # neither replicas nor the controller can import them
        cloudpickle.register_pickle_by_value(module)
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "num_replicas": spec.num_replicas,
        "user_config": user_config,
        "max_ongoing_requests": spec.max_requests + 1024,  # above our own admission, whose refusal is OpenAI-shaped
        "graceful_shutdown_timeout_s": spec.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 5,
        "health_check_timeout_s": 60,  # a burst may hold the loop for seconds, and a dead engine exits by itself
        "max_constructor_retry_count": 1,  # the first start error is the user's to read
        "max_surge_percent": 100 if spec.surge else 0,
        "logging_config": {"enable_access_log": False},
        "ray_actor_options": {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            # `local:///` is a directory that is always there: without it a replica would inherit the working
            # directory of the job that deployed it, and could not start again once Ray has dropped that package.
            "runtime_env": {"working_dir": "local:///", "env_vars": _environment(spec)},
        },
    }
    if spec.autoscaling is not None:
        del options["num_replicas"]
        settings = {**spec.autoscaling, "slots": spec.flags["max_num_seqs"]}
        options["autoscaling_config"] = {
            "min_replicas": int(settings["min_replicas"]),
            "max_replicas": int(settings["max_replicas"]),
            "initial_replicas": max(1, int(settings["min_replicas"])),
            "metrics_interval_s": 1,
            "look_back_period_s": 2,
            "upscale_delay_s": 0,  # the policy itself knows when to wait
            "downscale_delay_s": 0,
            "policy": {"policy_function": autoscaling.QueueDepth, "policy_kwargs": settings},
        }
    deployment = serve.deployment(**options)(serve.ingress()(Shell))
    return deployment.bind(dict(code or sources()), _for_a_replica(spec))


class Shell:
    """What Serve starts in a replica: unpacks the sources and hands over to `serve_app.replica`."""

    async def __init__(self, code: dict[str, bytes], spec: dict[str, Any]) -> None:
        path = _unpack(code)
        if path not in sys.path:
            sys.path.insert(0, path)
        from serve_app import replica

        self._replica = replica.Replica(spec, code_path=path)
        await self._replica.start()

    async def __serve_build_asgi_app__(self) -> Any:
        return self._replica.app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        await self._replica.reconfigure(user_config)

    async def check_health(self) -> None:
        await self._replica.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.stats()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.stop()


def _for_a_replica(spec: Spec) -> dict[str, Any]:
    """What a replica needs to know. Anything that differs here starts new replicas, so the rest stays out."""
    whole = asdict(spec)
    for name in ("num_replicas", "autoscaling", "surge", "cpus", "drain_s"):
        del whole[name]
    return {**whole, "sharers": 1 if spec.gpus else spec.num_replicas}


def _environment(spec: Spec) -> dict[str, str]:
    """Environment of a replica. Ray would otherwise set OMP_NUM_THREADS to its logical CPUs."""
    env = {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # a token then crosses no thread on its way out
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_MAX_N_SEQUENCES": "128",  # answers of one request, as at OpenAI; vLLM's own limit is 16,384
        # Serve waits 30 s by default for load balancers to forget a replica; HAProxy has forgotten it in a second.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not spec.gpus:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # lets the CPU back end run the model inside the engine process
    return {**env, **spec.env}


def _digest(code: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(code.items()):
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


def _unpack(code: Mapping[str, bytes]) -> str:
    """Write the sources once per node and user; returns the directory for sys.path."""
    base = Path(tempfile.gettempdir()) / f"rankline-code-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    stat = base.lstat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise PermissionError(f"{base} belongs to someone else or is open to others: remove it")
    target = base / _digest(code)[:16]
    if not target.is_dir():
        work = Path(tempfile.mkdtemp(dir=base))
        package = work / "serve_app"
        package.mkdir()
        for name, text in code.items():
            (package / name).write_bytes(text)
        try:
            work.rename(target)
        except OSError:  # another replica was first: the same content
            import shutil

            shutil.rmtree(work)
    return str(target)
