"""Safetensors read by mapping and written block by block, so that memory does not grow with the model.

Mapped pages belong to the file, not to this process. Headers are jobs.safetensors_header's business.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from jobs.errors import UserError
from jobs.safetensors_header import INDEX, Tensor

SINGLE = "model.safetensors"
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """A tensor to be written; `dtype` as the format spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for dim in self.shape:
            size *= dim
        return size


def load(tensor: Tensor) -> torch.Tensor:
    """The values, on the CPU in their own dtype: a view of the mapped file. Do not write to it."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{tensor.file}: {tensor.name} has dtype {tensor.dtype}, which is not supported here")
    stat = tensor.file.stat()
    raw = _mapped(tensor.file, stat.st_size, stat.st_mtime_ns)[tensor.start : tensor.end]
    if tensor.start % dtype.itemsize:  # legal in the format, but a view needs alignment
        raw = raw.clone()
    return raw.view(dtype).view(tensor.shape)


def plan_shards(specs: Iterable[Spec], limit: int) -> list[list[Spec]]:
    """Fill shards of at most `limit` bytes in order; a tensor over the limit gets a shard of its own."""
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def write(
    directory: Path, specs: Iterable[Spec], *, limit: int, produce: Callable[[Spec], Iterable[torch.Tensor]]
) -> list[Path]:
    """Write shards of at most `limit` bytes, with an index when there are several; returns their paths.

    `produce(spec)` yields a tensor's blocks of rows in order, of the spec's dtype; one block is in memory at a time.
    """
    shards = plan_shards(specs, limit)
    files: list[Path] = []
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        ordered = sorted(shard, key=lambda spec: -DTYPES[spec.dtype].itemsize)  # keeps every tensor aligned
        files.append(directory / name)
        where |= {spec.name: name for spec in ordered}
        with open(files[-1], "wb") as handle:
            handle.write(_header(ordered))
            for spec in ordered:
                written = sum(handle.write(_raw(block)) for block in produce(spec))
                if written != spec.nbytes:
                    raise AssertionError(f"{spec.name}: wrote {written} of {spec.nbytes} bytes")
    if len(shards) > 1:
        total = sum(spec.nbytes for shard in shards for spec in shard)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def write_file(file: Path, named: Mapping[str, torch.Tensor]) -> None:
    """Write tensors that are in memory to one file: adapters, tests."""
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    specs = [Spec(name, spelled[tensor.dtype], tuple(tensor.shape)) for name, tensor in named.items()]
    with open(file, "wb") as handle:
        handle.write(_header(specs))
        for spec in specs:
            handle.write(_raw(named[spec.name].detach()))


def _header(specs: list[Spec]) -> bytes:
    tree: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        tree[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _raw(block: torch.Tensor) -> memoryview:
    array: Any = block.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@lru_cache(maxsize=4)
def _mapped(file: Path, size: int, _modified: int) -> torch.Tensor:
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
