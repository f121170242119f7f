"""What a GGUF file holds, from its header alone (github.com/ggml-org/ggml, docs/gguf.md): nothing is loaded.

Layout: magic, version, number of tensors, number of keys; the keys with typed values; the tensors' names, shapes, types
and offsets; then the data, aligned. Counts and lengths are checked against the file before they are believed.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jobs.errors import UserError

VERSIONS = (2, 3)
MAX_KEPT = 64  # longest array kept whole: a vocabulary has 150,000 entries that nobody reads here
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# type number: (name, weights in a block, bytes of a block)
TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8)},
    **{24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)},
    **{12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292)},
    **{16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50)},
    **{20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136)},
    **{29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17)},
    **{40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18)},
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: shape in row-major order (rows first), its storage type, and bytes from `start` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Gguf:
    """A GGUF header. `keys`: metadata; an array longer than MAX_KEPT is kept as {"count", "first"}."""

    version: int
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read(path: Path) -> Gguf:
    """Read the header. Raises UserError naming the file and the fault: other format or version, cut off, nonsense."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            return _Reader(path, handle, size).read()
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}") from None


class _Reader:
    """Position in one file, so that every length can be held against what is left of it."""

    def __init__(self, path: Path, handle: BinaryIO, size: int) -> None:
        self.path, self.handle, self.size = path, handle, size

    def read(self) -> Gguf:
        magic = self.handle.read(4)
        if magic != b"GGUF":
            raise self.broken(f"starts with {magic!r} and not with GGUF: it is no GGUF file")
        version = self.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "is big-endian" if swapped in VERSIONS else f"has GGUF version {version}"
            raise UserError(
                f"{self.path}: {why}: versions {VERSIONS[0]} and {VERSIONS[1]}, little-endian, are read here; "
                "convert it anew with a current llama.cpp"
            )
        tensors, keys = self.count(self.number("Q"), "tensors", 24), self.count(self.number("Q"), "keys", 12)
        held: dict[str, Any] = {}
        for _ in range(keys):
            name = self.string()
            held[name] = self.value(self.number("I"), name)
        infos = [self.tensor_info() for _ in range(tensors)]
        alignment = held.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self.broken(f"general.alignment is {alignment!r}, expected a multiple of 8")
        data = -(-self.handle.tell() // alignment) * alignment
        placed = {n: GgufTensor(n, dtype, shape, data + offset, size) for n, dtype, shape, offset, size in infos}
        for tensor in placed.values():
            if tensor.start + tensor.bytes > self.size:
                ends = tensor.start + tensor.bytes
                raise self.broken(f"cut off: tensor {tensor.name!r} ends at byte {ends:,}, the file at {self.size:,}")
        return Gguf(version, held, placed)

    def tensor_info(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name = self.string()
        dimensions = self.number("I")
        if dimensions > 8:
            raise self.broken(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))  # the file has the fastest first
        kind, offset = self.number("I"), self.number("Q")
        if kind not in TYPES:
            raise self.broken(f"tensor {name!r} has the unknown type {kind}: made by a newer version, or damaged")
        dtype, block, width = TYPES[kind]
        return name, dtype, shape, offset, math.prod(shape) // block * width

    def value(self, kind: int, name: str, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 3:
            raise self.broken(f"key {name!r} has the unknown type {kind}: made by a newer version, or damaged")
        inner = self.number("I")
        width = struct.calcsize(SCALARS[inner]) if inner in SCALARS else 8
        count = self.count(self.number("Q"), f"entries of {name!r}", width)
        first = [self.value(inner, name, depth + 1) for _ in range(min(count, MAX_KEPT))]
        if count <= MAX_KEPT:
            return first
        if inner in SCALARS:
            self.handle.seek((count - MAX_KEPT) * width, 1)
        else:
            for _ in range(count - MAX_KEPT):
                self.value(inner, name, depth + 1)
        return {"count": count, "first": first}

    def string(self) -> str:
        length = self.count(self.number("Q"), "bytes of text", 1)
        return self.take(length).decode("utf-8", errors="replace")

    def count(self, count: int, what: str, least_bytes: int) -> int:
        if count * least_bytes > self.size - self.handle.tell():
            raise self.broken(f"says {count:,} {what}, more than its {self.size:,} bytes can hold: cut off or damaged")
        return count

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def take(self, length: int) -> bytes:
        data = self.handle.read(length)
        if len(data) < length:
            raise self.broken(f"cut off inside its header, at byte {self.size:,}")
        return data

    def broken(self, fault: str) -> UserError:
        return UserError(f"{self.path}: {fault}. Copy or download it again")
