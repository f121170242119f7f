"""What would make a plan fit: the smallest changes of the config, cheapest first."""

from collections.abc import Sequence

from jobs import config as config_module
from jobs import estimate
from jobs.config import Config
from jobs.errors import UserError
from jobs.gpus import Gpu
from jobs.memory import GIB
from jobs.model_shape import Shape


def changed(config: Config, override: str) -> Config:
    """`config` with one more section.key=value. Raises UserError where the change breaks a rule."""
    tree = config.model_dump()
    key, _, text = override.partition("=")
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    node[leaf] = {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
    if text.replace(".", "", 1).isdigit() and "." in text:
        node[leaf] = float(text)
    return config_module.validate(tree, override)


MORE_GPUS = "serve.tensor_parallel_size"


def fixes(config: Config, shape: Shape, gpu: Gpu, *, stage: str) -> list[tuple[list[str], str, str]]:
    """Smallest changes that make a stage fit, cheapest first: [(overrides, what they cost, what is then there)].

    Each change that is enough alone is listed. Where only more GPUs would be, the fewest changes that do it together
    on this one come first. Empty when nothing here is enough.
    """
    changes = _train_changes(config) if stage == "train" else _serve_changes(config)
    found: list[tuple[list[str], str, str]] = []
    for options, cost in changes:
        for override in options:
            there = _fits_with(config, shape, gpu, stage, [override])
            if there:
                found.append(([override], cost, there))
                break
    here = [change for change in changes if not change[0][0].startswith(MORE_GPUS)]
    if all(overrides[0].startswith(MORE_GPUS) for overrides, _, _ in found):
        together = _together(config, shape, gpu, stage, here)
        found = [*([together] if together else []), *found]
    return found


def _together(
    config: Config, shape: Shape, gpu: Gpu, stage: str, changes: Sequence[tuple[list[str], str]]
) -> tuple[list[str], str, str] | None:
    """Changes one after the other until it fits, each as small as it can be, less those that turn out not needed."""
    taken: list[tuple[str, str]] = []
    for options, cost in changes:
        for override in options:
            if _fits_with(config, shape, gpu, stage, [*(o for o, _ in taken), override]):
                taken.append((override, cost))
                for spare in list(taken[:-1]):
                    rest = [pair for pair in taken if pair != spare]
                    if _fits_with(config, shape, gpu, stage, [o for o, _ in rest]):
                        taken = rest
                overrides = [o for o, _ in taken]
                there = _fits_with(config, shape, gpu, stage, overrides)
                return (overrides, "; ".join(cost for _, cost in taken), there) if there else None
        taken.append((options[-1], cost))
    return None


def _fits_with(config: Config, shape: Shape, gpu: Gpu, stage: str, overrides: Sequence[str]) -> str | None:
    try:
        for override in overrides:
            config = changed(config, override)
    except UserError:
        return None
    if stage == "train":
        train = estimate.training(config, shape, cpu=False)
        return f"{train.needed / GIB:.1f} GiB" if train.needed <= gpu.total else None
    serve = estimate.serving(config, shape, gpu)
    return f"{serve.max_concurrency:.1f} full-length requests" if serve.max_concurrency >= 1 else None


def _train_changes(config: Config) -> list[tuple[list[str], str]]:
    train, longest = config.train, config.data.max_seq_len
    smaller = [n for n in _halved(train.micro_batch_tokens) if n > longest] + [longest]
    changes: list[tuple[list[str], str]] = []
    if smaller[0] < train.micro_batch_tokens:
        changes.append(([f"train.micro_batch_tokens={n}" for n in smaller], "the same gradients in more passes"))
    if not train.gradient_checkpointing:
        changes.append((["train.gradient_checkpointing=true"], "about a third more compute"))
    if train.quantization == "none":
        changes.append((["train.quantization=nf4"], "the frozen base is rounded to 4 bits"))
    if config.lora.r > 8:
        changes.append(([f"lora.r={n}" for n in _halved(config.lora.r) if n >= 8], "a smaller adapter"))
    return changes


def _serve_changes(config: Config) -> list[tuple[list[str], str]]:
    serve = config.serve
    changes: list[tuple[list[str], str]] = []
    more = [share for share in (0.9, 0.92, 0.95) if share > serve.gpu_memory_utilization]
    if more:
        changes.append(([f"serve.gpu_memory_utilization={n}" for n in more], "less room for anything else on the card"))
    if serve.max_num_seqs > 16:
        fewer = [n for n in _halved(serve.max_num_seqs) if n >= 16]
        changes.append(([f"serve.max_num_seqs={n}" for n in fewer], "fewer requests run together"))
    batched = max(2048, serve.max_num_seqs)
    changes.append(([f"serve.max_num_batched_tokens={batched}"], "slower first tokens of long prompts"))
    shorter = [n for n in _halved(serve.max_model_len) if n >= 512]
    if shorter:
        changes.append(([f"serve.max_model_len={n}" for n in shorter], "longer prompts are refused"))
    changes.append((["serve.engine_args.kv_cache_dtype=fp8"], "keys and values are rounded to 8 bits"))
    gpu_counts = [serve.tensor_parallel_size * n for n in (2, 4, 8)]
    changes.append(([f"serve.tensor_parallel_size={n}" for n in gpu_counts], "more GPUs for one replica"))
    return changes


def _halved(number: int) -> list[int]:
    found: list[int] = []
    while number > 1:
        number //= 2
        found.append(number)
    return found
