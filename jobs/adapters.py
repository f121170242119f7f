"""What is in a LoRA adapter directory, read without PEFT or torch.

Only headers are read, so that serving can look at an adapter before it is advertised; whether it fits a base model
is jobs.adapter_fit's question. The meaning of adapter_config.json (patterns, scaling) is that of PEFT 0.21, see
peft/tuners/lora/model.py. What cannot be merged exactly is refused by name: PEFT only warns, and gives the base.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import safetensors_header
from jobs.errors import UserError
from jobs.safetensors_header import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FLOATS = ("BF16", "F16", "F32", "F64")
# Each of these changes more than W + s·BA.
UNMERGEABLE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
HARMLESS = (
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
)  # fmt: skip
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base's weights as well
_KEY = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?P<leaf>\.weight|\.bias)?"
)


@dataclass(frozen=True)
class Update:
    """The update of one module: its tensors' keys in the adapter file, and what multiplies BA."""

    module: str
    prefixed: bool  # whether the keys start as PEFT's do; without it PEFT loads nothing
    rank: int
    scaling: float
    a: str
    b: str
    magnitude: str | None = None
    bias: str | None = None
    embedding: bool = False


@dataclass(frozen=True)
class Adapter:
    """A well-formed adapter: `updates` by module; `replaced` maps a base tensor's name to the key that replaces it."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    updates: Mapping[str, Update]
    replaced: Mapping[str, str]
    warnings: list[str] = field(default_factory=lambda: list[str]())

    @property
    def file(self) -> Path:
        return self.path / WEIGHTS

    @property
    def max_rank(self) -> int:
        """Largest rank of any module, patterns included: what the server's max_lora_rank must cover."""
        return max(update.rank for update in self.updates.values())


def read(path: Path) -> Adapter:
    """Read an adapter directory's config and tensor headers.

    Raises UserError naming the file and the field or tensor: no LoRA tensors, empty or half-present pairs, ranks
    that differ from the config, kinds of adapter that cannot be merged exactly.
    """
    config = _config(path)
    file = path / WEIGHTS
    if not file.is_file():
        others = sorted(p.name for p in path.glob("adapter_model.*"))
        raise UserError(f"{file}: is missing{f' (found {others[0]}: save it as safetensors)' if others else ''}")
    tensors = safetensors_header.read_file(file)[0]
    parts: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for key in tensors:
        bare = key.removeprefix(PREFIX)
        match = _KEY.fullmatch(bare)
        if match is None:
            replaced[bare.replace(".base_layer.", ".") if bare != key else key] = key
            continue
        part = match["part"] + (".bias" if match["leaf"] == ".bias" else "")
        found = parts.setdefault(match["module"], {})
        if part in found:
            raise UserError(f"{file}: both {found[part]} and {key} are there: keep one of them")
        found[part] = key
    if not parts:
        raise UserError(f"{file}: holds no LoRA tensors ({len(tensors)} tensors in all): save the adapter again")
    updates = {module: _update(file, config, tensors, module, found) for module, found in parts.items()}
    unknown = sorted(k for k, v in config.items() if v and k not in UNMERGEABLE + HARMLESS)
    warnings = [f"{path / CONFIG}: this version ignores {', '.join(unknown)}"] if unknown else []
    return Adapter(path, config, tensors, updates, replaced, warnings)


def scaling(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank of a module and the factor on BA: alpha/r, or alpha/sqrt(r) with rsLoRA, patterns applied."""
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def model_config(model: Path) -> dict[str, Any]:
    """A model directory's config.json. Raises UserError when it is missing or no JSON object."""
    return read_json(model / "config.json", "is this a model directory?")


def is_tied(model: Path) -> bool:
    """Whether a model directory's config shares the embedding with the head."""
    tree = model_config(model)
    return bool(tree.get("tie_word_embeddings", tree.get("text_config", {}).get("tie_word_embeddings", False)))


def read_json(file: Path, hint: str) -> dict[str, Any]:
    """A JSON object. Raises UserError naming the file, with `hint`."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: is missing; {hint}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); {hint}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: should hold a JSON object; {hint}")
    return tree


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The first pattern that matches wins; each is a regex that must match the module's name at a dot, to its end."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"{path}: no such adapter directory")
    file = path / CONFIG
    config = read_json(file, "is this an adapter directory?")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {config.get('peft_type')!r}; only LORA adapters can be merged here")
    for key in ("r", "lora_alpha"):
        if isinstance(config.get(key), bool) or not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise UserError(f"{file}: {key} should be a number over zero, found {config.get(key)!r}")
    for key in UNMERGEABLE:
        if config.get(key):
            raise UserError(f"{file}: {key} is set ({config[key]!r}); that is more than W + s·BA, train without it")
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        raise UserError(
            f"{file}: init_lora_weights is {config['init_lora_weights']!r}, which also changed the base's weights in "
            "training: convert it to a plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(key) or {}:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"{file}: {key} {pattern!r} is no regular expression: {error}") from None
    return config


def _update(
    file: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], module: str, found: Mapping[str, str]
) -> Update:
    embedding = any(part.startswith("lora_embedding") for part in found)
    name_a, name_b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    some = next(iter(found.values()))
    for name in (name_a, name_b):
        if name not in found:
            raise UserError(f"{file}: {some} has no partner {module}.{name}: the adapter is incomplete, save it again")
    a, b = found[name_a], found[name_b]
    for key in found.values():
        if 0 in tensors[key].shape:
            raise UserError(
                f"{file}: {key} is empty, shape {list(tensors[key].shape)}: it was saved while its weights lay on "
                "other workers (sharded training); gather them and save it again"
            )
    for key in (a, b):
        if len(tensors[key].shape) != 2:
            raise UserError(f"{file}: {key} has shape {list(tensors[key].shape)}; only matrices can be merged here")
        if tensors[key].dtype not in FLOATS:
            raise UserError(f"{file}: {key} has dtype {tensors[key].dtype}; expected one of {FLOATS}")
    rank, scale = scaling(config, module)
    if tensors[a].shape[0] != rank or tensors[b].shape[1] != rank:
        raise UserError(
            f"{file}: {a} {list(tensors[a].shape)} and {b} {list(tensors[b].shape)} should have rank {rank}, as r and "
            f"rank_pattern of {CONFIG} say"
        )
    for key, part in (("use_dora", "lora_magnitude_vector"), ("lora_bias", f"{name_b}.bias")):
        if bool(config.get(key)) != (part in found):
            raise UserError(f"{file}: {key} is {bool(config.get(key))} in {CONFIG}, but {module} has {sorted(found)}")
    if config.get("use_dora") and (embedding or config.get("lora_bias")):
        raise UserError(f"{file}: {module}: use_dora on an embedding or with lora_bias cannot be merged exactly")
    return Update(
        module=module,
        prefixed=all(key.startswith(PREFIX) for key in found.values()),
        rank=rank,
        scaling=scale,
        a=a,
        b=b,
        magnitude=found.get("lora_magnitude_vector"),
        bias=found.get("lora_B.bias"),
        embedding=embedding,
    )
