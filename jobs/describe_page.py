"""The facts of `describe` as a page for a terminal."""

import difflib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.text_page import Page, size

SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
PART = "(part of a character)"


def show(page: Page, facts: Mapping[str, Any], *, every_tensor: bool) -> None:
    """A whole model, adapter or GGUF file."""
    total = sum(file["bytes"] for file in facts["files"])
    what = {"model": "model", "adapter": "LoRA adapter", "gguf": "GGUF file"}[facts["kind"]]
    page.line(f"{facts['path']}: {what}, {len(facts['files'])} file{'s'[: len(facts['files']) != 1]}, {size(total)}")
    page.section("FILES")
    page.table([[file["name"], size(file["bytes"]), file["role"]] for file in facts["files"]], right=(1,))
    page.section("TO SERVE IT")
    if facts["kind"] == "adapter":
        page.field("kind", "an adapter, no complete model: merge it into its base (python -m jobs.merge)")
    page.field("missing", "; ".join(facts["missing"]) or "nothing")
    if facts.get("runs_code"):
        page.field("own code", f"config.json asks for Python code ({', '.join(facts['runs_code'])}): never run here")
    if facts.get("quantization"):
        page.field("quantized", json.dumps(facts["quantization"]))
    lock = facts["base_lock"]
    page.field("base lock", f"{lock['source']} at {lock['revision']}" if lock else "none")
    if facts["kind"] == "adapter":
        _show_adapter(page, facts["adapter"])
    else:
        _show_shape(page, facts)
    if facts["kind"] != "adapter" or facts["tokenizer"] is not None:
        _show_text_side(page, facts)
    if facts["kind"] == "model":
        _show_generation(page, facts["generation"])
    _show_tensors(page, facts.get("tensors") or facts.get("adapter", {}).get("tensors", []), every=every_tensor)


def _show_adapter(page: Page, adapter: Mapping[str, Any]) -> None:
    page.section("ADAPTER")
    rule = "alpha/sqrt(r)" if adapter["use_rslora"] else "alpha/r"
    page.field("base", f"{adapter['base']} at {adapter['revision'] or 'no stated revision'}")
    page.field("rank", f"r {adapter['r']}, alpha {adapter['lora_alpha']}: scaled by {rule} = {adapter['scale']}")
    page.field("modules", ", ".join(f"{count} {name}" for name, count in sorted(adapter["modules"].items())) or "none")
    page.field("parameters", f"{adapter['parameters']:,}")
    if adapter["use_dora"] or adapter["modules_to_save"]:
        page.field("also", f"DoRA: {adapter['use_dora']}, whole modules saved: {adapter['modules_to_save']}")


def _show_shape(page: Page, facts: Mapping[str, Any]) -> None:
    arch, counts, cache = facts["architecture"], facts["parameters"], facts["kv_cache"]
    if arch is not None:
        page.section(f"ARCHITECTURE: {arch['name']}, {arch['dtype']}")
        page.wrapped(arch["words"])
    if counts is not None:
        page.section(f"PARAMETERS: {counts['total']:,} ({size(counts['bytes'])}), counted from {counts['source']}")
        rows = [[part, f"{n:,}", f"{100 * n / counts['total']:.1f} %"] for part, n in counts["parts"].items()]
        page.table(rows, right=(1, 2))
        if arch is not None and arch["tied"] and "head" not in counts["parts"]:
            page.line("  the head shares the embeddings' rows: counted once")
        page.field("dtypes", ", ".join(f"{name} {n:,}" for name, n in counts["dtypes"].items()))
    if arch is not None and cache is not None:
        page.section("KV CACHE")
        page.line(f"  {cache['arithmetic']}")
        page.line(f"  one request of {arch['context']:,} tokens, the whole context: {size(cache['bytes_at_context'])}")


def _show_text_side(page: Page, facts: Mapping[str, Any]) -> None:
    tokens, template = facts["tokenizer"], facts["chat_template"]
    page.section("TOKENIZER")
    if tokens is None:
        page.line("  none here")
    else:
        merges = f", {tokens['merges']:,} merges" if tokens.get("merges") else ""
        page.field("kind", f"{tokens['type']}, {tokens['entries']:,} entries{merges}")
        for name, token in tokens.get("special", {}).items():
            page.field(name, f"{token['text']}  (id {token['id']})")
        ends = {name: value for name, value in tokens["ends"].items() if value is not None}
        page.field("ends a turn", ", ".join(f"{value} by {name}" for name, value in ends.items()) or "no id is named")
        added = [f"{t['id']}\xa0{t['text']}" for t in tokens.get("added", [])]
        more = f", and {len(added) - 30} more" if len(added) > 30 else ""
        page.field("added", ", ".join(added[:30]) + more or "none")
    page.section("CHAT TEMPLATE")
    if template is None:
        page.line("  none here")
        return
    does = template["behaviour"]
    page.field("from", template["where"])
    marks = "yes" if does["marks_assistant"] else "no: a loss mask has to come from the rendered prefix"
    page.field("marks answers", marks)
    page.field("thinking", "switch enable_thinking" if does["thinking"] else "no switch")
    page.field("tools", "yes" if does["tools"] else "no")
    refused = "the trial was refused"
    kept = {True: "kept in earlier turns", False: "dropped from earlier turns", None: refused}
    page.field("<think> text", kept[does["keeps_earlier_thinking"]])
    rewritten = "rewritten as it grows: an answer's text differs once it is history"
    page.field("history", {True: "unchanged as it grows", False: rewritten, None: refused}[does["stable_prefix"]])
    own = does["default_system"]
    page.field("system", f"adds its own: {own!r}" if own else "adds none of its own")
    page.field("end of turn", repr(does["end_of_turn"]))
    plain = template["renders"]["plain"]
    for name, text in template["renders"].items():
        page.line(f"  {name}:" if name == "plain" else f"  {name}, where it differs:")
        page.quoted(text if name == "plain" else _difference(plain, text))


def _difference(plain: str, other: str) -> str:
    """The lines of `other` that `plain` lacks, with the line before for place."""
    a, b = plain.splitlines(), other.splitlines()
    shown: list[str] = []
    for tag, _, _, begin, end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag in ("insert", "replace"):
            shown += b[max(0, begin - 1) : end]
    return "\n".join(shown) or "(the same)"


def _show_generation(page: Page, generation: Mapping[str, Any]) -> None:
    page.section("GENERATION DEFAULTS")
    stated = [f"{key} {generation[key]}" for key in SAMPLING if generation.get(key) is not None]
    page.field("the model's", ", ".join(stated) or "none stated")
    page.field(
        "serving",
        "with --generation-config vllm these are not used: a request that names none gets temperature 1, top_p 1 and "
        "no top_k. The end ids are still the model's.",
    )


def _show_tensors(page: Page, tensors: Sequence[Mapping[str, Any]], *, every: bool) -> None:
    if not tensors:
        return
    page.section(f"TENSORS: {len(tensors)}" + ("" if every else ", layers grouped (--tensors lists each)"))
    groups: dict[tuple[str, str, str], list[int]] = {}
    for one in tensors:
        name = one["name"] if every else re.sub(r"\.\d+\.", ".*.", one["name"])
        key = (name, one["dtype"], " x ".join(map(str, one["shape"])) or "scalar")
        groups.setdefault(key, []).append(one["bytes"])
    rows: list[list[str]] = []
    for (name, dtype, shape), sizes in groups.items():
        rows.append([name, f"{len(sizes)} x" if len(sizes) > 1 else "", dtype, shape, size(sum(sizes))])
    page.table(rows, right=(1, 4))


def show_tokens(page: Page, text: str, pieces: Sequence[Mapping[str, Any]]) -> None:
    """One text's pieces, joined and then one a line with their ids."""
    page.section(f"{len(pieces)} tokens: {text}")
    shown = [p["piece"] if p["whole"] else PART for p in pieces]
    page.wrapped(" · ".join(shown))
    page.table([[str(p["id"]), _visible(p["piece"]) if p["whole"] else PART] for p in pieces], right=(0,))


def _visible(piece: str) -> str:
    """A piece in quotes, with the names of what cannot be seen."""
    odd = [c for c in piece if not c.isprintable() or unicodedata.category(c)[0] == "M"]
    names = ", ".join(unicodedata.name(c, f"U+{ord(c):04X}") for c in odd)
    return json.dumps(piece, ensure_ascii=False) + (f"  {names}" if names else "")


def show_tensor(page: Page, one: Mapping[str, Any]) -> None:
    """One tensor's statistics and corner."""
    shape = " x ".join(map(str, one["shape"])) or "scalar"
    page.section(f"{one['name']}: {one['dtype']}, {shape}, {size(one['bytes'])}, in {one['file']}")
    for key in ("min", "max", "mean", "std"):
        page.field(key, "none" if one[key] is None else f"{one[key]:.6g}")
    page.field("odd values", f"{one['nan']:,} NaN, {one['infinite']:,} infinite, {one['zeros']:,} zeros")
    page.line("  corner:")
    page.table([[f"{value:.4g}" for value in row] for row in one["corner"]], right=tuple(range(8)))
