"""Everything `describe` says about a model directory, an adapter or a GGUF file, as plain values.

Headers and small JSON files are read, weights are not; nothing that came with the model is executed or unpickled,
except the chat template in its sandbox. What is missing or broken is listed, so that the rest can still be shown.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from jobs import architecture, safetensors_header, text_facts
from jobs.errors import UserError
from jobs.gguf_header import Gguf
from jobs.safetensors_header import Tensor
from jobs.text_facts import read_json

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
ROLES = {
    "config.json": "architecture",
    "generation_config.json": "sampling defaults and end ids",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer settings",
    "special_tokens_map.json": "special tokens",
    "vocab.json": "tokenizer vocabulary, older form",
    "merges.txt": "tokenizer merges, older form",
    "tokenizer.model": "SentencePiece tokenizer",
    "chat_template.jinja": "chat template",
    safetensors_header.INDEX: "which shard holds which tensor",
    "adapter_config.json": "LoRA settings and base",
    "base.lock.json": "base model's source and SHA-256",
    "manifest.json": "lineage of this artifact",
}


def of_directory(path: Path) -> dict[str, Any]:
    """Facts of a model or adapter directory. Keys: kind, path, files, problems, missing, and one per section."""
    found = [file for file in sorted(path.iterdir()) if file.is_file()]
    files = [{"name": file.name, "bytes": file.stat().st_size, "role": role(file.name)} for file in found]
    names = {file.name for file in found}
    problems: list[str] = []
    kind = "adapter" if "adapter_config.json" in names else "model"
    facts: dict[str, Any] = {"kind": kind, "path": str(path), "files": files, "problems": problems}
    facts["base_lock"] = _lock(path)
    generation = read_json(path / "generation_config.json", problems) or {}
    if kind == "adapter":
        facts["adapter"] = adapter(path, problems)
        arch, config = None, {}
    else:
        config = read_json(path / "config.json", problems) or {}
        arch = _architecture(config, path / "config.json", problems) if config else None
        facts["architecture"] = None if arch is None else vars(arch) | {"words": words(arch)}
        facts["kv_cache"] = None if arch is None else kv_cache(arch)
        facts["runs_code"] = sorted(cast(dict[str, Any], config.get("auto_map") or {}))
        facts["quantization"] = config.get("quantization_config")
        facts |= _weights(path, arch, problems)
    facts["missing"] = _missing(path, names, kind)
    facts["tokenizer"] = text_facts.tokenizer(path, arch, config, generation, problems)
    facts["chat_template"] = text_facts.template(path, facts["tokenizer"], problems)
    facts["generation"] = generation
    return facts


def of_gguf(path: Path, gguf: Gguf) -> dict[str, Any]:
    """Facts of a GGUF file, in the same sections."""
    keys, problems = gguf.keys, cast(list[str], [])
    name = str(keys.get("general.architecture", "unknown"))

    def number(key: str, default: int = 0) -> int:
        value = keys.get(f"{name}.{key}", default)
        return value if type(value) is int else default

    heads = max(1, number("attention.head_count"))
    vocabulary = keys.get("tokenizer.ggml.tokens")
    vocab = vocabulary["count"] if isinstance(vocabulary, dict) else len(vocabulary or [])
    arch = architecture.Architecture(
        name=f"{name} (GGUF)",
        model_type=name,
        layers=number("block_count"),
        hidden=number("embedding_length"),
        intermediate=number("feed_forward_length"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=number("attention.key_length", number("embedding_length") // heads),
        vocab=vocab,
        context=number("context_length"),
        tied="output.weight" not in gguf.tensors,
        dtype="float16",
        experts=number("expert_count"),
    )
    source = keys.get("tokenizer.chat_template")
    shown = [(t.name, t.dtype, t.shape, t.elements, t.bytes, path.name) for t in gguf.tensors.values()]
    return {
        "kind": "gguf",
        "path": str(path),
        "files": [{"name": path.name, "bytes": path.stat().st_size, "role": f"GGUF version {gguf.version}"}],
        "problems": problems,
        "missing": ["a safetensors directory: serving here takes that form, convert the file first"],
        "base_lock": None,
        "architecture": vars(arch) | {"words": words(arch)},
        "kv_cache": kv_cache(arch),
        "parameters": _counts((n, d, e, b) for n, d, _, e, b, _ in shown),
        "tensors": _table(shown),
        "keys": {k: v for k, v in keys.items() if k != "tokenizer.chat_template" and not isinstance(v, dict)},
        "tokenizer": {
            "type": str(keys.get("tokenizer.ggml.model", "none")),
            "entries": vocab,
            "ends": {"tokenizer.ggml.eos_token_id": keys.get("tokenizer.ggml.eos_token_id")},
        },
        "chat_template": text_facts.compiled(source, str(path), {}, problems) if isinstance(source, str) else None,
        "generation": {},
    }


def role(name: str) -> str:
    """What a file of a model directory is for, by its name."""
    if name in ROLES:
        return ROLES[name]
    if name.endswith(".safetensors"):
        return "LoRA weights" if name.startswith("adapter") else "weights"
    if name.endswith(PICKLES):
        return "pickle: loading it can run code; never opened here"
    if name.endswith(".py"):
        return "Python code of the model: never run here"
    if name.endswith(".gguf"):
        return "weights for llama.cpp: give this file to describe"
    return "" if name.startswith(".") or "." not in name else "text" if name.endswith((".md", ".txt")) else "other"


def words(arch: architecture.Architecture) -> str:
    """The architecture in one plain sentence."""
    shared = arch.heads // max(1, arch.kv_heads)
    share = f"each shared by {shared} heads" if shared > 1 else "one per head"
    mlp = f"{arch.experts} experts of {arch.intermediate:,}" if arch.experts else f"an MLP of {arch.intermediate:,}"
    head = "is the embedding table itself (tied)" if arch.tied else "has its own weights"
    window = f" Sliding-window layers look back {arch.sliding_window:,} tokens." if arch.sliding_window else ""
    return (
        f"A decoder of {arch.layers} layers on vectors of {arch.hidden:,}. Each layer: attention with {arch.heads} "
        f"heads of {arch.head_dim} and {arch.kv_heads} KV heads ({share}), then {mlp}. Vocabulary of {arch.vocab:,} "
        f"rows; the output head {head}. Context of {arch.context:,} tokens.{window}"
    )


def kv_cache(arch: architecture.Architecture) -> dict[str, Any]:
    """Bytes per token at the model's own precision, written out, and for one request of the whole context."""
    dtype = arch.dtype if arch.dtype in architecture.BYTES else "bfloat16"
    each = architecture.kv_bytes_per_token(arch, dtype)
    text = architecture.kv_arithmetic(arch, dtype)
    return {"bytes_per_token": each, "arithmetic": text, "dtype": dtype, "bytes_at_context": each * arch.context}


def adapter(path: Path, problems: list[str]) -> dict[str, Any]:
    """LoRA settings, base, and what the tensors' headers say: ranks, modules, pairs that lack a half."""
    config = read_json(path / "adapter_config.json", problems) or {}
    r, alpha, rs = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora"))
    scale = alpha / (r**0.5 if rs else r) if isinstance(r, int) and isinstance(alpha, int | float) and r > 0 else None
    facts: dict[str, Any] = {
        key: config.get(key)
        for key in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")
    }
    facts |= {"base": config.get("base_model_name_or_path"), "revision": config.get("revision"), "scale": scale}
    tensors: dict[str, Tensor] = {}
    file = path / "adapter_model.safetensors"
    if file.is_file():
        try:
            tensors = safetensors_header.read_file(file)[0]
        except UserError as error:
            problems.append(str(error))
    halves = {name.rpartition(".lora_")[0]: cast(set[str], set()) for name in tensors if ".lora_" in name}
    for name in tensors:
        module, found, rest = name.rpartition(".lora_")
        if found:
            halves[module].add(rest[:1])
    if file.is_file() and not halves and not problems:
        problems.append(f"{file}: holds no LoRA tensors: this adapter changes nothing")
    lone = sorted(module for module, found in halves.items() if not {"A", "B"} <= found and "embedding" not in module)
    if lone:
        many = f" ({len(lone)} such)" if len(lone) > 1 else ""
        problems.append(f"{file}: {lone[0]} has only one of lora_A and lora_B{many}: save the adapter again")
    shown = [(t.name, t.dtype, t.shape, t.elements, t.bytes, t.file.name) for t in tensors.values()]
    modules = Counter(module.rpartition(".")[2] for module in halves)
    return facts | {"modules": dict(modules), "parameters": sum(s[3] for s in shown), "tensors": _table(shown)}


def _weights(path: Path, arch: architecture.Architecture | None, problems: list[str]) -> dict[str, Any]:
    """Parameters and tensors from the headers; by formula where there are no weights."""
    try:
        tensors = safetensors_header.read_model(path) if any(path.glob("*.safetensors*")) else {}
    except UserError as error:
        problems.append(str(error))
        tensors = {}
    if tensors:
        shown = [(t.name, t.dtype, t.shape, t.elements, t.bytes, t.file.name) for t in tensors.values()]
        return {"parameters": _counts((n, d, e, b) for n, d, _, e, b, _ in shown), "tensors": _table(shown)}
    if arch is None:
        return {"parameters": None, "tensors": []}
    try:
        parts = architecture.parameters(arch)
    except UserError:
        return {"parameters": None, "tensors": []}
    width = architecture.BYTES.get(arch.dtype, 2)
    total = sum(parts.values())
    counts = {"total": total, "parts": parts, "dtypes": {arch.dtype: total}, "bytes": total * width}
    return {"parameters": counts | {"source": "config.json"}, "tensors": []}


def _counts(tensors: Iterable[tuple[str, str, int, int]]) -> dict[str, Any]:
    parts: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    size = 0
    for name, dtype, elements, held in tensors:
        parts[architecture.part_of(name)] += elements
        dtypes[dtype] += elements
        size += held
    order = ("embeddings", "attention", "mlp", "norms", "head", "other")
    named = {part: parts[part] for part in order if parts[part]}
    return {"total": parts.total(), "parts": named, "dtypes": dict(dtypes), "bytes": size, "source": "headers"}


def _table(shown: Iterable[tuple[str, str, tuple[int, ...], int, int, str]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": dtype, "shape": list(shape), "bytes": size, "file": file}
        for name, dtype, shape, _, size, file in shown
    ]


def _missing(path: Path, names: set[str], kind: str) -> list[str]:
    missing: list[str] = []
    if kind == "adapter":
        if "adapter_model.safetensors" not in names:
            only = ", only a pickle, which is not opened" if "adapter_model.bin" in names else ""
            missing.append(f"adapter_model.safetensors{only}")
        return missing
    if "config.json" not in names:
        missing.append("config.json")
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        missing.append("a tokenizer (tokenizer.json)")
    if safetensors_header.INDEX in names:
        try:
            shards = sorted(set(safetensors_header.read_index(path / safetensors_header.INDEX).values()))
            missing += [shard for shard in shards if shard not in names]
        except UserError:
            pass  # told as a problem where the weights are read
    elif not any(name.endswith(".safetensors") for name in names):
        pickles = [name for name in names if name.endswith(PICKLES)]
        only = f": only pickles, {', '.join(sorted(pickles)[:3])}, which can run code when loaded: convert them"
        missing.append(f"weights (safetensors){only if pickles else ''}")
    return missing


def _architecture(config: Mapping[str, Any], where: Path, problems: list[str]) -> architecture.Architecture | None:
    try:
        return architecture.from_config(config, str(where))
    except UserError as error:
        problems.append(str(error))
        return None


def _lock(path: Path) -> dict[str, Any] | None:
    for place in (path, path.parent):
        found = read_json(place / "base.lock.json", [])
        if found is not None:
            return {key: found.get(key) for key in ("source", "revision", "files")}
    return None
