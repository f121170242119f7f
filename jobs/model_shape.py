"""The shape of a config's base model, from whatever is at hand, without loading weights.

In order: the model's directory, the copy in the model cache, a table of known models, the hub's config.json alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import architecture, safetensors_header
from jobs.architecture import Architecture
from jobs.config import Config, resolve_storage
from jobs.errors import UserError


@dataclass(frozen=True)
class Shape:
    """An architecture, its number of parameters, and where both were read."""

    arch: Architecture
    parameters: int
    source: str


def find(config: Config) -> Shape:
    """The shape of config.model.source. Raises UserError that says what is missing and how to provide it."""
    source = config.model.source
    directory = Path(resolve_storage(source)) if "://" not in source else None
    if directory is None or not (directory / "config.json").is_file():
        directory = _cached(config)
    if directory is not None:
        return of_directory(directory)
    if source in architecture.KNOWN:
        arch = architecture.KNOWN[source]
        return Shape(arch, sum(architecture.parameters(arch).values()), "the table of known models")
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _from_hub(source, config.model.revision)
    raise UserError(
        f"model.source {source!r}: no config.json there and no copy in {config.model.cache}: name a model directory, a "
        f"hub id, or one of {', '.join(architecture.KNOWN)}"
    )


def of_directory(directory: Path) -> Shape:
    """The shape of a model directory: config.json, and the weights' headers where there are weights."""
    file = directory / "config.json"
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON ({error}): copy it again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: expected a JSON object: copy it again")
    arch = architecture.from_config(raw, str(file))
    if any(directory.glob("*.safetensors")):
        tensors = safetensors_header.read_model(directory)
        return Shape(arch, sum(tensor.elements for tensor in tensors.values()), str(directory))
    return Shape(arch, sum(architecture.parameters(arch).values()), str(file))


def _cached(config: Config) -> Path | None:
    where = resolve_storage(config.model.cache)
    for lock in sorted(Path(where).glob("*/base.lock.json")) if "://" not in where else []:
        try:
            held = json.loads(lock.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if held.get("source") == config.model.source and config.model.revision in (None, held.get("revision")):
            return lock.parent
    return None


def _from_hub(source: str, revision: str | None) -> Shape:
    from huggingface_hub import hf_hub_download

    try:
        file = Path(hf_hub_download(source, "config.json", revision=revision))
    except Exception as error:  # network, name, token, offline mode: the library has a type for each
        raise UserError(
            f"model.source {source}: could not fetch its config.json ({str(error).splitlines()[0][:160]}): name a "
            f"directory that holds it, or one of {', '.join(architecture.KNOWN)}"
        ) from None
    return of_directory(file.parent)
