"""What `describe` says about a model's text side: tokenizer, special tokens, the ids that end a turn, chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jobs import architecture, chat_template
from jobs.errors import UserError

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenizer(
    path: Path,
    arch: architecture.Architecture | None,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    problems: list[str],
) -> dict[str, Any] | None:
    """Kind, size, special tokens and the ids that end a turn, from tokenizer.json and its companions."""
    tree = read_json(path / "tokenizer.json", problems)
    if tree is None:
        return None
    model = cast(dict[str, Any], tree.get("model") or {})
    added = [t for t in cast(list[Any], tree.get("added_tokens") or []) if isinstance(t, dict)]
    ids = {str(t.get("content")): t.get("id") for t in added}
    vocabulary = cast(dict[str, Any], model.get("vocab")) if isinstance(model.get("vocab"), dict) else {}
    settings = read_json(path / "tokenizer_config.json", problems) or {}
    older = read_json(path / "special_tokens_map.json", problems) or {}
    special: dict[str, Any] = {}
    for name in SPECIAL:
        value = settings.get(name, older.get(name))
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = {"text": text, "id": ids.get(text, vocabulary.get(text))}
    highest = max([i for i in [*ids.values(), *vocabulary.values()] if isinstance(i, int)], default=-1)
    if arch is not None and highest >= arch.vocab:
        problems.append(
            f"{path / 'tokenizer.json'}: gives ids up to {highest:,}, but config.json has a vocabulary of "
            f"{arch.vocab:,} rows: tokenizer and model do not belong together"
        )
    return {
        "type": str(model.get("type", "unknown")),
        "entries": len(vocabulary) + sum(1 for text in ids if text not in vocabulary),
        "highest_id": highest,
        "merges": len(cast(list[Any], model.get("merges") or [])),
        "special": special,
        "added": [{"text": text, "id": i} for text, i in ids.items()],
        "ends": {
            "generation_config.json": generation.get("eos_token_id"),
            "config.json": config.get("eos_token_id"),
            "tokenizer": special.get("eos_token", {}).get("id"),
        },
    }


def template(path: Path, tokens: Mapping[str, Any] | None, problems: list[str]) -> dict[str, Any] | None:
    """The chat template's file, source, behaviour and sample renders; None when the model has none."""
    where, source = path / "chat_template.jinja", None
    if where.is_file():
        try:
            source = where.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{where}: cannot read it: {error}")
    if source is None:
        where = path / "tokenizer_config.json"
        value = (read_json(where, []) or {}).get("chat_template")
        source = value
        if isinstance(value, list):  # several templates by name
            named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
            source = named.get("default")
    if not isinstance(source, str):
        return None
    special = {name: t["text"] for name, t in (tokens or {}).get("special", {}).items()}
    found = compiled(source, str(where), special, problems)
    if found is not None and tokens is not None:
        end, known = (found["behaviour"]["end_of_turn"] or "").strip(), tokens["ends"]
        ids = {t["text"]: t["id"] for t in tokens["added"]}
        stops = {i for value in known.values() for i in (value if isinstance(value, list) else [value])}
        if end in ids and ids[end] not in stops:
            problems.append(
                f"{path}: the template ends a turn with {end!r} (id {ids[end]}), which is no end-of-sequence id: the "
                "model would not stop. Add the id to eos_token_id in generation_config.json"
            )
    return found


def compiled(source: str, where: str, special: Mapping[str, str], problems: list[str]) -> dict[str, Any] | None:
    try:
        template = chat_template.Template(source, where=where, special=special)
        return {
            "where": where,
            "behaviour": chat_template.behaviour(template),
            "renders": chat_template.renders(template),
            "characters": len(source),
        }
    except UserError as error:
        problems.append(str(error))
        return None


def read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is none, or a broken one, told in `problems`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path}: not readable as JSON ({str(error)[:80]}): copy it again")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path}: expected a JSON object, found {type(value).__name__}: copy it again")
        return None
    return cast(dict[str, Any], value)
