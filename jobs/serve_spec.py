"""From a run's config to what is deployed: engine flags, resources, and the checks that need no engine."""

import ast
import difflib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.config import Config, Serve, is_loopback, resolve_storage
from jobs.errors import UserError

if TYPE_CHECKING:
    from serve_app.app import Spec

# Flags of `vllm serve` that belong to its own HTTP server or process layout, which Ray Serve replaces.
NOT_OURS = {
    "host", "port", "uds", "root_path", "headless", "api_key", "api_server_count", "middleware", "ssl_keyfile",
    "ssl_certfile", "ssl_ca_certs", "model", "generation_config_file",
}  # fmt: skip


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM allows for max_lora_rank


def make_spec(config: Config, model: Path) -> "Spec":
    """What to deploy. Needs an initialized Ray, whose resources decide between GPU and CPU."""
    import ray

    from serve_app.app import Spec

    wanted = config.serve
    total, free = ray.cluster_resources(), ray.available_resources()
    on_gpus = total.get("GPU", 0) > 0
    gpus = wanted.tensor_parallel_size if on_gpus else 0
    most = wanted.max_replicas or wanted.num_replicas
    if on_gpus and total["GPU"] < gpus * most:
        raise UserError(
            f"{most} replicas x serve.tensor_parallel_size {gpus} need {gpus * most} GPUs; the cluster has "
            f"{total['GPU']:g}: lower serve.{'max' if wanted.max_replicas else 'num'}_replicas"
        )
    env = {"HF_HUB_OFFLINE": "1"}
    cache = resolve_storage(config.model.cache)
    if "://" not in cache:  # compiled kernels outlive the replica, and the next one finds them again
        env["VLLM_CACHE_ROOT"] = f"{cache}/.vllm"
    return Spec(
        model=str(model),
        served_model_name=wanted.served_model_name,
        flags=engine_flags(config, model, on_gpus=on_gpus),
        num_replicas=wanted.num_replicas,
        gpus=gpus,
        cpus=wanted.cpus_per_replica,
        threads=wanted.cpu_threads,
        max_requests=wanted.max_requests or max(1024, 4 * wanted.max_num_seqs),
        max_body_bytes=wanted.max_body_bytes,
        body_timeout_s=wanted.body_timeout_s,
        require_key=needs_key(config),
        drain_s=float(wanted.drain_timeout_s),
        env=env,
        surge=free.get("GPU", 0) >= gpus if on_gpus else _has_room_beside(config, model),
        autoscaling=None
        if wanted.max_replicas is None
        else {
            "min_replicas": wanted.min_replicas,
            "max_replicas": wanted.max_replicas,
            "waiting_per_replica": wanted.waiting_per_replica,
            "scale_down_delay_s": wanted.scale_down_delay_s,
        },
    )


def _has_room_beside(config: Config, model: Path) -> bool:
    """Whether a second replica fits into this machine's memory, so that the first serves until it is ready.

    UserError when not even one does.
    """
    import psutil

    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    needed = 1.2 * weights + config.serve.kv_cache_gib * 2**30
    memory = psutil.virtual_memory()
    if needed > memory.total:
        raise UserError(
            f"{needed / 2**30:.1f} GiB for the weights and serve.kv_cache_gib {config.serve.kv_cache_gib:g} are over "
            f"this machine's {memory.total / 2**30:.1f} GiB of memory: lower serve.kv_cache_gib"
        )
    return memory.available > needed + 3 * 2**30


def engine_flags(config: Config, model: Path, *, on_gpus: bool) -> dict[str, Any]:
    """The flags of `vllm serve` that this config stands for."""
    wanted = config.serve
    check_flags(wanted.engine_args)
    flags: dict[str, Any] = {
        "model": str(model),
        "served_model_name": wanted.served_model_name,
        "max_model_len": wanted.max_model_len,
        "max_num_seqs": wanted.max_num_seqs,
        "max_num_batched_tokens": wanted.max_num_batched_tokens,
        "tensor_parallel_size": wanted.tensor_parallel_size if on_gpus else 1,
        "enable_prefix_caching": wanted.enable_prefix_caching,
        "enforce_eager": wanted.enforce_eager,
        "load_format": wanted.load_format,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "generation_config": "vllm",  # the model's own file would change sampling defaults
        "allowed_origins": [],  # no web page of another origin may call a service on loopback
        "disable_fastapi_docs": True,
    }
    if on_gpus:
        flags["gpu_memory_utilization"] = wanted.gpu_memory_utilization
    else:
        flags["kv_cache_memory_bytes"] = int(wanted.kv_cache_gib * 2**30)
    if wanted.adapters:
        from jobs import adapters

        most = max(adapters.read(Path(resolve_storage(path))).max_rank for path in wanted.adapters.values())
        if most > LORA_RANKS[-1]:
            raise UserError(
                f"serve.adapters: rank {most} is over {LORA_RANKS[-1]}, the largest that vLLM mounts: merge it"
            )
        flags["enable_lora"] = True
        flags["max_lora_rank"] = next(rank for rank in LORA_RANKS if rank >= most)
        flags["max_loras"] = 1 << len(wanted.adapters).bit_length()  # room to replace one without a restart
    return flags | wanted.engine_args


def mounted(config: Config, base: Path) -> list[dict[str, str]]:
    """The adapters to serve beside `base`, each validated against it first; the version is a hash of its files."""
    from jobs import adapter_fit, artifacts

    found: list[dict[str, str]] = []
    for name, where in config.serve.adapters.items():
        path = Path(resolve_storage(where))
        if name == config.serve.served_model_name:
            raise UserError(f"serve.adapters: {name!r} is serve.served_model_name, the base's own name: choose another")
        adapter_fit.check_mountable(adapter_fit.validate(path, base))
        hashes = [artifacts.sha256_file(file) for file in sorted(path.glob("adapter_*"))]
        found.append({"name": name, "version": artifacts.sha256_json(hashes)[:12], "path": str(path)})
    return found


def check_flags(given: Iterable[str]) -> None:
    """UserError for a key of serve.engine_args that vLLM does not have, or that is not passed on to it here."""
    known = vllm_flags()
    for name in given:
        if name in Serve.model_fields:
            raise UserError(f"serve.engine_args: {name!r} has a key of its own: serve.{name}")
        if name in NOT_OURS:
            raise UserError(f"serve.engine_args: {name!r} belongs to vLLM's own server, which Ray Serve replaces here")
        if known and name.replace("-", "_") not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"serve.engine_args: vLLM has no flag {name!r}{hint}")


def vllm_flags() -> set[str]:
    """Names of vLLM's engine and front-end flags, read from its source: importing it takes ten seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return set()
    names: set[str] = set()
    for file in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
        tree = ast.parse((Path(found.origin).parent / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                names |= {target.id for target in fields if isinstance(target, ast.Name)}
    return names


def check_model(model: Path) -> None:
    """UserError for a directory that no engine could load."""
    if not model.is_dir():
        raise UserError(f"{model}: no such model directory: run `python -m jobs.merge` first")
    try:
        json.loads((model / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{model}: no config.json, so this is no model directory") from None
    except ValueError as error:
        raise UserError(f"{model / 'config.json'}: not valid JSON: {error}") from None
    if not any(model.glob("tokenizer*")):
        raise UserError(f"{model}: no tokenizer files")


def needs_key(config: Config) -> bool:
    """Whether this service asks for an API key."""
    if config.serve.require_api_key is not None:
        return config.serve.require_api_key
    return not is_loopback(config.serve.host)


def base_url(config: Config) -> str:
    """Where the service listens, as seen from its own machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(config.serve.host, config.serve.host)
    return f"http://{host}:{config.serve.port}"
