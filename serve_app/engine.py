"""The vLLM engine of a replica. The only file that imports vLLM's internals (0.29).

A replica is two processes: this one (HTTP, tokenizer, detokenizer) and vLLM's EngineCore with the model. vLLM would
import everything once more in the second. Here that process is forked from a fork server which imports this module
while the replica itself imports it, so on two cores or more the imports cost their time once. The fork server ends
with the replica, and the engine with the fork server, however the replica ends: no orphan keeps the GPU's memory.
"""

import ctypes
import itertools
import json
import multiprocessing
import multiprocessing.context
import os
import signal
import time
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import vllm.entrypoints.launchers.api_server.app_state as app_state
import vllm.v1.engine.core  # noqa: F401  # pyright: ignore[reportUnusedImport]  # EngineCore inherits these imports
import vllm.v1.engine.utils as engine_utils
from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelList
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

if current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker  # noqa: F401  # pyright: ignore[reportUnusedImport]
else:
    import vllm.v1.worker.gpu_worker  # noqa: F401  # pyright: ignore[reportUnusedImport]


@dataclass(frozen=True)
class Engine:
    """A running engine and vLLM's own HTTP application for it."""

    llm: AsyncLLM
    app: FastAPI
    pulse: "Pulse"

    def pid(self) -> int | None:
        """Process id of EngineCore."""
        manager = self.llm.engine_core.resources.engine_manager
        processes = getattr(manager, "processes", None) or []
        return processes[0].pid if processes else None

    @property
    def dead(self) -> bool:
        return self.llm.errored

    def unfinished(self) -> int:
        """Requests in the engine, waiting and running; one with n answers counts n."""
        return self.llm.get_num_unfinished_requests()

    async def mount(self, adapters: Sequence[Mapping[str, str]]) -> None:
        """Serve exactly these adapters ({"name", "version", "path"}) beside the model.

        One is loaded before its name points to it, and each version has a name and id of its own in the engine, which
        keys cached prefixes by the name: a request under way ends on the version that it began with. RuntimeError
        when the engine refuses one.
        """
        served: dict[str, LoRARequest] = self.app.state.openai_serving_models.lora_requests
        for adapter in adapters:
            inner = f"{adapter['name']}@{adapter['version']}"
            now = served.get(adapter["name"])
            if now is None or now.lora_name != inner:
                request = LoRARequest(lora_name=inner, lora_int_id=next(_ADAPTER_IDS), lora_path=adapter["path"])
                await self.llm.add_lora(request)
                served[adapter["name"]] = request
        for name in served.keys() - {adapter["name"] for adapter in adapters}:
            del served[name]

    def shutdown(self) -> None:
        """Stop EngineCore and wait until it is gone; blocks for some seconds."""
        self.llm.shutdown()


class Models(OpenAIServingModels):
    """vLLM's list of models, showing adapters under their public names (without the version)."""

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        name = super().model_name(lora_request)
        return name if lora_request is None else name.rpartition("@")[0]

    async def show_available_models(self) -> ModelList:
        shown = await super().show_available_models()
        for card, name in zip(shown.data[len(self.base_model_paths) :], self.lora_requests, strict=True):
            card.id = name
        return shown


_ADAPTER_IDS = itertools.count(1)


async def start(flags: Mapping[str, Any]) -> Engine:
    """Start the engine and build vLLM's application, as `vllm serve` would with the same flags.

    Raises ValueError for flags that vLLM refuses, and RuntimeError when the engine process fails.
    """
    args = parse(flags)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    # Without this usage context vLLM takes smaller batch defaults, and serves slower.
    usage = UsageContext.OPENAI_API_SERVER
    vllm_config = engine_args.create_engine_config(usage_context=usage)
    engine_utils.get_mp_context = ForkServer
    app_state.OpenAIServingModels = Models
    pulse: list[Pulse] = []

    def observe(config: VllmConfig, index: int) -> Pulse:
        pulse.append(Pulse(config, index))
        return pulse[-1]

    llm = AsyncLLM.from_vllm_config(
        vllm_config=vllm_config,
        stat_loggers=[observe],
        usage_context=usage,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )
    try:
        await llm.reset_mm_cache()  # the dummy data of memory profiling
        tasks = await llm.get_supported_tasks()
        app = build_app(args, tasks, llm.model_config)
        await app_state.init_app_state(llm, app.state, args, tasks)
        app.state.server = types.SimpleNamespace(should_exit=False)  # vLLM's error handler sets it
    except BaseException:
        llm.shutdown()
        raise
    return Engine(llm=llm, app=app, pulse=pulse[0])


def parse(flags: Mapping[str, Any]) -> Any:
    """The namespace of `vllm serve` for these flags; ValueError in vLLM's words for one that it refuses."""
    parser = FlexibleArgumentParser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"vLLM refuses the engine flags: {message}")

    parser = make_arg_parser(parser)
    parser.error = refuse  # type: ignore[method-assign]  # argparse would end the process
    repeated = {option for action in parser._actions if action.nargs in ("+", "*") for option in action.option_strings}
    args = parser.parse_args(command_line(flags, repeated=repeated))
    assert args is not None
    validate_parsed_serve_args(args)
    return args


def command_line(flags: Mapping[str, Any], *, repeated: Collection[str]) -> list[str]:
    """Flags as `vllm serve` takes them: True and False as --x and --no-x, None left out, tables as JSON.

    A list becomes several words for an option in `repeated`, and JSON for any other.
    """
    argv: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple) and flag in repeated:
            argv += [flag, *(json.dumps(v) if isinstance(v, Mapping) else str(v) for v in value)]
        elif isinstance(value, Mapping | list | tuple):
            argv += [flag, json.dumps(value)]
        else:
            argv += [flag, str(value)]
    return argv


class Pulse(StatLoggerBase):
    """The last that the engine said about itself; one assignment per engine step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_cache_usage = 0.0
        self.last_step = time.monotonic()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        self.last_step = time.monotonic()
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        pass


class ForkServer(multiprocessing.context.ForkServerContext):
    """Process context for vLLM: forks from the prepared fork server, with this process's environment of now."""

    def Process(self, *, target: Any, name: str, kwargs: Mapping[str, Any]) -> Any:  # type: ignore[override]  # noqa: N802
        arguments = {"environ": dict(os.environ), "target": target, "kwargs": dict(kwargs)}
        return super().Process(target=run_child, name=name, kwargs=arguments)


def run_child(*, environ: Mapping[str, str], target: Any, kwargs: Mapping[str, Any]) -> None:
    """Body of EngineCore's process."""
    die_with_parent()
    os.environ.clear()
    os.environ.update(environ)
    if current_platform.is_cuda() and not cuda_works():
        # Something that we import has begun to use CUDA in the fork server, which no fork survives.
        print("CUDA was touched before the fork: importing once more in a process of its own", flush=True)
        process = multiprocessing.get_context("spawn").Process(target=run_spawned, args=(target, dict(kwargs)))
        process.start()
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        process.join()
        raise SystemExit(process.exitcode)
    target(**kwargs)


def run_spawned(target: Any, kwargs: dict[str, Any]) -> None:
    """Body of EngineCore's process where it could not be forked."""
    die_with_parent()
    target(**kwargs)


def cuda_works() -> bool:
    """Whether this process may use CUDA; the engine initializes it next in any case."""
    return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux)."""
    set_parent_death_signal = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
