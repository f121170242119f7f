"""Whether an adapter fits a base model exactly: every tensor has its place, shape and finite values.

Used before merging and before serving advertises an adapter. All refusals are UserErrors that name the tensor.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs import safetensors_header
from jobs.adapters import CONFIG, PREFIX, Adapter, Update, is_tied, read
from jobs.errors import UserError
from jobs.safetensors_header import Tensor

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")  # input embedding's name, by architecture
HEAD = "lm_head"


def validate(path: Path, base: Path) -> Adapter:
    """Read an adapter; refuse it unless it fits the base model directory exactly and its numbers are finite."""
    adapter = read(path)
    check_base(adapter, safetensors_header.read_model(base), where=base, tied=is_tied(base))
    check_values(adapter)
    return adapter


def check_base(adapter: Adapter, base: Mapping[str, Tensor], *, where: Path, tied: bool) -> None:
    """Refuse an adapter that does not fit the base's tensors, with names, shapes and how many modules matched.

    `base`: the base's tensors by name; `where`: its directory; `tied`: its config shares embedding and head.
    """
    file = adapter.file
    fits = {u.module for u in adapter.updates.values() if u.prefixed and f"{u.module}.weight" in base}
    unknown = [u.a for u in adapter.updates.values() if u.module not in fits]
    head = [u.a for u in adapter.updates.values() if u.prefixed and tied and _last(u.module) == HEAD]
    if head:
        raise UserError(
            f"{file}: {head[0]} adapts the head, which {where} shares with its embedding (tie_word_embeddings): "
            "train without lm_head in target_modules"
        )
    unknown += [k for name, k in adapter.replaced.items() if name not in base and name != f"{HEAD}.weight"]
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        example = next((name for name in modules(base) if "proj" in name or "attn" in name), "MODULE")
        raise UserError(
            f"{file}: {len(fits)} of {len(adapter.updates)} modules match the base {where}, which has no place for "
            f"{shown}. Keys should look like {PREFIX}{example}.lora_A.weight: is this the right base?"
        )
    for update in adapter.updates.values():
        _check_update(adapter, update, base, where=where, tied=tied)
    _check_replaced(adapter, base, where=where, tied=tied)
    missing = [m for m in modules(base) if m not in adapter.updates and targeted(adapter.config, m)]
    if missing:
        raise UserError(
            f"{file}: {len(fits)} of {len(fits) + len(missing)} modules that target_modules names have tensors; "
            f"{missing[0]} has none: the adapter is incomplete, save it again"
        )


def check_values(adapter: Adapter) -> None:
    """Refuse NaN and infinities, warn where the adapter changes nothing. Reads every tensor."""
    import torch

    from jobs import safetensors_io

    for key, entry in adapter.tensors.items():
        bad = int((~torch.isfinite(safetensors_io.load(entry))).sum())
        if bad:
            raise UserError(f"{adapter.file}: {key} holds {bad} NaN or infinite values: the training run went wrong")
    zero = [u for u in adapter.updates.values() if not bool(safetensors_io.load(adapter.tensors[u.b]).any())]
    if len(zero) == len(adapter.updates) and not adapter.replaced and not adapter.config.get("use_dora"):
        adapter.warnings.append(f"{adapter.file}: every lora_B is zero: this adapter changes nothing")
    elif zero:
        adapter.warnings.append(f"{adapter.file}: lora_B is zero in {len(zero)} of {len(adapter.updates)} modules")


def check_mountable(adapter: Adapter) -> None:
    """Refuse what vLLM 0.29 would mount with another meaning than PEFT's; merging takes it.

    vLLM's PEFTHelper reads one rank and one alpha for all modules and skips the patterns without a word.
    """
    config = adapter.config
    scales = {u.scaling for u in adapter.updates.values()}
    patterns = bool(config.get("rank_pattern") or config.get("alpha_pattern")) and len(scales) > 1
    reasons = {
        f"rank_pattern or alpha_pattern give it {len(scales)} scales": patterns,
        "use_dora": bool(config.get("use_dora")),
        "modules_to_save, biases or saved embeddings": bool(adapter.replaced),
        "an adapted embedding": any(u.embedding for u in adapter.updates.values()),
        "lora_bias": any(u.bias for u in adapter.updates.values()),
    }
    if not patterns and scales != {_plain_scale(config)}:
        reasons["rank_pattern or alpha_pattern"] = True
    found = [text for text, holds in reasons.items() if holds]
    if found:
        raise UserError(
            f"{adapter.path}: cannot be mounted beside its base exactly ({'; '.join(found)}). Merge it: "
            f"python -m jobs.merge --model BASE --adapter {adapter.path} --output DIR"
        )


def modules(base: Mapping[str, Tensor]) -> Iterator[str]:
    """Names of the base's modules with a weight matrix, in file order."""
    for name, entry in base.items():
        if name.endswith(".weight") and len(entry.shape) == 2:
            yield name.removesuffix(".weight")


def targeted(config: Mapping[str, Any], module: str) -> bool:
    """Whether the config gives this module an adapter: PEFT's check_target_module_exists, for names or a regex."""
    exclude, targets = config.get("exclude_modules"), config.get("target_modules")
    if isinstance(exclude, str):
        if re.fullmatch(exclude, module):
            return False
    elif any(_ends(module, name) for name in exclude or ()):
        return False
    if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in config.get("modules_to_save") or ()):
        return False
    if isinstance(targets, str):
        # "all-linear" is resolved into names when PEFT saves; unresolved, it cannot be checked by name
        return targets != "all-linear" and re.fullmatch(targets, module) is not None
    if module in (targets or ()):
        return True
    if not any(_ends(module, name) for name in targets or ()):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
        if match:
            return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def resized(adapter: Adapter, base: Mapping[str, Tensor]) -> int | None:
    """Rows of the embedding and head that the adapter brings, if it replaces both; None if it does not."""
    names = [name for name in adapter.replaced if _is_vocabulary(name)]
    if len(names) < 2:
        return None
    return adapter.tensors[adapter.replaced[names[0]]].shape[0]


def _check_update(adapter: Adapter, update: Update, base: Mapping[str, Tensor], *, where: Path, tied: bool) -> None:
    file, tensors = adapter.file, adapter.tensors
    weight = base[f"{update.module}.weight"]
    rows, columns = tensors[update.b].shape[0], tensors[update.a].shape[1]
    stored_transposed = update.embedding or bool(adapter.config.get("fan_in_fan_out"))
    expected = (columns, rows) if stored_transposed else (rows, columns)
    if weight.shape != expected:
        raise UserError(
            f"{file}: {update.a} {list(tensors[update.a].shape)} and {update.b} {list(tensors[update.b].shape)} make "
            f"an update of {list(expected)}, but {update.module}.weight of {where} is {list(weight.shape)}: "
            "is it another base?"
        )
    if tied and _last(update.module) in EMBEDDINGS:
        raise UserError(
            f"{file}: {update.a} adapts the embedding, which {where} shares with its head (tie_word_embeddings), so "
            f"the merged head would change too: train without {_last(update.module)} in target_modules"
        )
    if update.magnitude and tensors[update.magnitude].shape != (rows,):
        raise UserError(
            f"{file}: {update.magnitude} has shape {list(tensors[update.magnitude].shape)}, expected one value for "
            f"each of {rows} rows"
        )
    if update.bias and f"{update.module}.bias" not in base:
        raise UserError(f"{file}: {update.bias} has no bias to be added to: {update.module} of {where} has none")


def _check_replaced(adapter: Adapter, base: Mapping[str, Tensor], *, where: Path, tied: bool) -> None:
    file, config = adapter.file, adapter.config
    vocabulary = {n: adapter.tensors[k] for n, k in adapter.replaced.items() if _is_vocabulary(n)}
    if vocabulary and tied and len(vocabulary) < 2:
        name = next(iter(vocabulary))
        raise UserError(
            f"{file}: {adapter.replaced[name]} replaces {name} alone, but {where} shares embedding and head "
            "(tie_word_embeddings): save both through modules_to_save"
        )
    if len({entry.shape[0] for entry in vocabulary.values()}) > 1:
        found = ", ".join(f"{adapter.replaced[n]} {list(e.shape)}" for n, e in vocabulary.items())
        raise UserError(f"{file}: embedding and head should have the same number of rows: {found}")
    width = next((e.shape[1] for n, e in base.items() if _is_vocabulary(n) and len(e.shape) == 2), None)
    for name, key in adapter.replaced.items():
        entry = adapter.tensors[key]
        module = name.rpartition(".")[0]
        named = any(re.match(rf"(^|.*\.){m}($|\..*)", module) for m in config.get("modules_to_save") or ())
        as_bias = name.endswith(".bias") and config.get("bias", "none") != "none"
        if not (named or as_bias or name in vocabulary):
            raise UserError(f"{file}: {key} is no LoRA tensor, and modules_to_save of {CONFIG} does not name {module}")
        if len(vocabulary) == 2 and name in vocabulary:
            fits = len(entry.shape) == 2 and entry.shape[1] == width
        else:
            fits = name in base and entry.shape == base[name].shape
        if not fits:
            found = f"{name} of {where} is {list(base[name].shape)}" if name in base else f"{where} has no {name}"
            raise UserError(f"{file}: {key} is {list(entry.shape)}, but {found}: is it another base?")


def _plain_scale(config: Mapping[str, Any]) -> float:
    return config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])


def _is_vocabulary(name: str) -> bool:
    return name == f"{HEAD}.weight" or (name.endswith(".weight") and _last(name.removesuffix(".weight")) in EMBEDDINGS)


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")
