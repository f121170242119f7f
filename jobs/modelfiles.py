"""The files beside the weights of a merged model: config, generation config, tokenizer, chat template, model card."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jobs import adapters
from jobs.adapters import Adapter
from jobs.errors import UserError

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "*.tiktoken", "tekken.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates",
)  # fmt: skip
TEMPLATE = "chat_template.jinja"
OTHERS = ("LICENSE*", "NOTICE*", "*.py")  # *.py: code that config.json's auto_map names
# Flags that only sampling reads: beside do_sample=false, transformers refuses to save them.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAMS = ("early_stopping", "length_penalty")


def write(base: Path, adapter: Adapter, out: Path, *, rows: int | None) -> None:
    """Write everything but weights and card into `out`. `rows`: rows of a resized vocabulary, None for the base's.

    Raises UserError when a resized vocabulary comes without the tokenizer that it was trained with.
    """
    config = adapters.model_config(base)
    if config.pop("quantization_config", None) is not None:
        adapter.warnings.append(
            f"{base / 'config.json'}: its weights are not quantized: quantization_config was left out"
        )
    for key in ("_name_or_path", "_model_name_or_path", "_attn_implementation", "torch_dtype"):
        config.pop(key, None)
    config["dtype"] = "bfloat16"
    text = config.get("text_config", config)
    if rows is not None:
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = False
        text["vocab_size"] = rows
    _dump(out / "config.json", config)
    source = _tokenizer_source(base, adapter, rows)
    for pattern in TOKENIZER:
        for path in source.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, out / path.name)
    for pattern in OTHERS:
        for path in base.glob(pattern):
            shutil.copyfile(path, out / path.name)
    _inference_template(out)
    _generation_config(base, config, out)


def write_card(out: Path, facts: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """README.md: what was merged into what, so that a model found later can be traced. `facts` are jobs.merge's."""
    base, adapter = facts["base"], facts["adapter"]
    scale = "alpha/sqrt(r)" if adapter["use_rslora"] else "alpha/r"
    source = f"{base['source']} (revision {base['revision']})" if base["revision"] else str(base["source"])
    rows = {
        "Base": f"{source}, {facts['base_check']}",
        **{f"Base file {name}": f"SHA-256 `{digest}`" for name, digest in base["files"].items()},
        "Adapter": f"`{adapter['path']}`",
        "Adapter weights": f"SHA-256 `{adapter['sha256']}`",
        "Update": f"rank {adapter['r']}, alpha {adapter['lora_alpha']}, scale {scale}"
        + (", DoRA" if adapter["use_dora"] else ""),
        "Merged": f"{figures['tensors_merged']} of {figures['tensors']} tensors: float32(W + s·BA), once to BF16",
        **{f"From {name}": f"`{value}`" for name, value in facts["lineage"].items()},
    }
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(base["source"])) is not None
    head = [f"base_model: {base['source']}"] if is_hub_id else []
    lines = [
        "---",
        *head,
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        "",
        "# Merged model",
        "",
    ]
    lines += ["A base model with a LoRA adapter merged into its weights; it needs no adapter at run time.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    lines += ["Its license is the base model's, and what the training data adds to it.", ""]
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _tokenizer_source(base: Path, adapter: Adapter, rows: int | None) -> Path:
    """The adapter's tokenizer where it brings one (its template is what it was trained with), else the base's."""
    mine = adapter.path / "tokenizer.json"
    if not mine.is_file():
        if rows is not None:
            raise UserError(
                f"{adapter.file}: resizes the vocabulary to {rows} rows, but {adapter.path} has no tokenizer.json: put "
                "the tokenizer that it was trained with beside it"
            )
        return base
    length = _length(mine)
    have = rows if rows is not None else _vocab_size(base)
    if have is not None and length > have:
        raise UserError(
            f"{mine}: has {length} tokens, but the merged embedding has {have} rows: is it another tokenizer?"
        )
    theirs = base / "tokenizer.json"
    if theirs.is_file() and theirs.read_bytes() != mine.read_bytes():
        adapter.warnings.append(f"{mine}: differs from the base's tokenizer; the merged model takes the adapter's")
    if _template(adapter.path) is None and _template(base) is not None:
        raise UserError(f"{adapter.path}: brings a tokenizer without a chat template: put {TEMPLATE} beside it")
    return adapter.path


def _length(tokenizer: Path) -> int:
    tree = adapters.read_json(tokenizer, "save the tokenizer again")
    ids = [int(token["id"]) for token in tree.get("added_tokens", [])]
    vocabulary = tree.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        ids += [int(i) for i in cast(dict[str, int], vocabulary).values()]
    else:
        ids.append(len(vocabulary) - 1)
    return max(ids, default=-1) + 1


def _vocab_size(base: Path) -> int | None:
    config = adapters.model_config(base)
    return config.get("text_config", config).get("vocab_size")


def _template(path: Path) -> str | None:
    if (path / TEMPLATE).is_file():
        return (path / TEMPLATE).read_text(encoding="utf-8")
    if (path / "tokenizer_config.json").is_file():
        template = adapters.read_json(path / "tokenizer_config.json", "save the tokenizer again").get("chat_template")
        return template if isinstance(template, str) else None
    return None


def _inference_template(out: Path) -> None:
    """Training templates mark the answer with {% generation %}, which only transformers knows: the marks become an
    `if true`, whose white space control stays as it was."""
    template = _template(out)
    if template is None or not re.search(r"{%-?\s*generation\b", template):
        return
    plain = re.sub(r"{%([-+]?)\s*generation\s*([-+]?)%}", r"{%\1 if true \2%}", template)
    plain = re.sub(r"{%([-+]?)\s*endgeneration\s*([-+]?)%}", r"{%\1 endif \2%}", plain)
    (out / TEMPLATE).write_text(plain, encoding="utf-8")
    config = adapters.read_json(out / "tokenizer_config.json", "save the tokenizer again")
    if config.pop("chat_template", None) is not None:
        _dump(out / "tokenizer_config.json", config)


def _generation_config(base: Path, config: Mapping[str, Any], out: Path) -> None:
    """The base's, less what transformers ignores but refuses to save; without one, the special tokens of the config."""
    file = base / "generation_config.json"
    if file.is_file():
        tree = adapters.read_json(file, "copy the base model again")
    else:
        tree = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}
    if tree.get("do_sample") is not True:
        tree = {k: v for k, v in tree.items() if k not in SAMPLING}
    if tree.get("num_beams", 1) in (1, None):
        tree = {k: v for k, v in tree.items() if k not in BEAMS}
    tree.pop("_from_model_config", None)
    _dump(out / "generation_config.json", tree)


def _dump(file: Path, tree: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
