"""What a safetensors file or sharded model holds, from its headers alone: nothing is loaded or executed.

Format: eight bytes (little endian) give the length of a JSON header, then the header, then the tensors' bytes without
gaps (github.com/huggingface/safetensors, "Format"). Every length and offset is checked against the file before it is
used, so that a damaged or hostile file costs one clear message and no memory.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jobs.errors import UserError

MAX_HEADER = 100_000_000  # the library's own limit, bytes
INDEX = "model.safetensors.index.json"
TORN = "index and shards do not belong together, copy the whole model again"
BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32},
    **{"I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


@dataclass(frozen=True)
class Tensor:
    """One tensor's place: `start` and `end` are byte offsets from the beginning of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.end - self.start


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one file by name, and its free `__metadata__`. Raises UserError naming the file and the fault."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            first = handle.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8:
                raise _broken(path, f"{size} bytes are too few for a safetensors file")
            if length > MAX_HEADER or 8 + length > size:
                fault = f"says that its header has {length:,} bytes, more than {MAX_HEADER:,}: not read"
                if length <= MAX_HEADER:
                    fault = f"cut off inside its header: {size:,} bytes, the header ends at {8 + length:,}"
                raise _broken(path, _other_format(first) or fault)
            raw = handle.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}") from None
    return _parse(path, raw, data_start=8 + length, size=size)


def read_model(directory: Path) -> dict[str, Tensor]:
    """The tensors of a model directory: its index's shards, or model.safetensors, or the only safetensors file there.

    Raises UserError for a missing or broken shard, and for an index that names files elsewhere or other tensors than
    the shards hold.
    """
    index = directory / INDEX
    if index.is_file():
        return _read_sharded(directory, index)
    single = directory / "model.safetensors"
    if not single.is_file():
        found = sorted(directory.glob("*.safetensors"))
        if len(found) > 1:
            raise UserError(f"{directory}: {len(found)} safetensors files and no {INDEX}: copy the index as well")
        if not found:
            raise UserError(f"{directory}: no safetensors file and no {INDEX}: copy the weights as well")
        single = found[0]
    return read_file(single)[0]


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name. Refuses shard names that are not plain names in the index's own directory."""
    try:
        value = json.loads(index.read_text(encoding="utf-8"))
        shards = value["weight_map"]
        if not isinstance(shards, dict) or not shards:
            raise TypeError
    except OSError as error:
        raise UserError(f"{index}: cannot read it: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f'{index}: expected {{"weight_map": {{tensor: file}}}}: copy the index again') from None
    for name, file in cast(dict[str, Any], shards).items():
        plain = isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")
        if not plain or not file.endswith(".safetensors"):
            raise UserError(
                f"{index}: tensor {name!r} is said to lie in {file!r}: only safetensors files beside the index are read"
            )
    return cast(dict[str, str], shards)


def _read_sharded(directory: Path, index: Path) -> dict[str, Tensor]:
    where = read_index(index)
    names = sorted(set(where.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"{index}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:5])}: copy them as well"
        )
    tensors: dict[str, Tensor] = {}
    for file in names:
        held = read_file(directory / file)[0]
        for name in held:
            if where.get(name) != file:
                said = f"the index puts it in {where[name]}" if name in where else "the index does not name it"
                raise UserError(f"{directory / file}: holds tensor {name!r}, but {said}: {TORN}")
        tensors |= held
    lost = [name for name in where if name not in tensors]
    if lost:
        raise UserError(
            f"{index}: names tensor {lost[0]!r} in {where[lost[0]]}, which does not hold it ({len(lost)} such): {TORN}"
        )
    return tensors


def _parse(path: Path, raw: bytes, *, data_start: int, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({str(error)[:80]})") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    entries = cast(dict[str, Any], header)
    metadata = entries.pop("__metadata__", {})
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in entries.items()}
    place = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if tensor.start != place:
            fault = "overlaps the one before it" if tensor.start < place else "leaves a gap before it"
            raise _broken(path, f"tensor {tensor.name!r} {fault}")
        place = tensor.end
    if size != place:
        what = "cut off" if size < place else "too long"
        raise _broken(path, f"{what}: {size:,} bytes where its header says {place:,}")
    return tensors, {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in [*shape, begin, end])
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"tensor {name!r} lacks dtype, shape or data_offsets") from None
    if not whole or len(shape) > 64:
        raise _broken(path, f"tensor {name!r} has shape {str(shape)[:60]} and offsets {str([begin, end])[:60]}")
    if dtype not in BITS:
        raise _broken(path, f"tensor {name!r} has dtype {dtype!r}, which is none of {', '.join(BITS)}")
    needs = math.prod(shape) * BITS[dtype]
    if (end - begin) * 8 != needs:
        given = f"its offsets give {end - begin:,}"
        raise _broken(path, f"tensor {name!r} of {dtype} {shape} needs {needs // 8:,} bytes, {given}")
    return Tensor(name, dtype, tuple(shape), path, data_start + begin, data_start + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name twice")
    return value


def _other_format(first: bytes) -> str:
    """What a file that is no safetensors file is by its first bytes; empty when unknown."""
    if first.startswith(b"version "):
        return "a Git LFS pointer, the weights were never downloaded (run `git lfs pull`)"
    if first.startswith(b"GGUF"):
        return "a GGUF file under another name"
    if first.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")):
        return "a pickle or zip archive under another name, which could run code when loaded: not opened"
    return ""


def _broken(path: Path, fault: str) -> UserError:
    return UserError(f"{path}: {fault}: copy or download it again")
