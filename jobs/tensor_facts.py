"""Statistics and a corner of one tensor, reading only its own bytes, a block at a time."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.errors import UserError

BLOCK = 1 << 24  # elements read at a time
PLAIN = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1", "BF16": "<u2"},
    **{"F8_E4M3": "u1", "F8_E5M2": "u1"},
}


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int


def statistics(place: Place, *, corner: int = 4) -> dict[str, Any]:
    """min, max, mean, std (of the whole tensor), zeros, nan, infinite, and the first `corner` x `corner` values.

    Raises UserError for a packed dtype whose values need their quantizer.
    """
    import numpy

    if place.dtype not in PLAIN:
        raise UserError(
            f"{place.file}: tensor {place.name!r} is {place.dtype}: values in packed blocks are not unpacked here; "
            f"floats and integers are ({', '.join(PLAIN)})"
        )
    stored = numpy.dtype(PLAIN[place.dtype])
    total = math.prod(place.shape)
    low, high, sums, squares = math.inf, -math.inf, 0.0, 0.0
    zeros = nan = infinite = 0
    with open(place.file, "rb") as handle:
        handle.seek(place.start)
        for begin in range(0, total, BLOCK):
            count = min(BLOCK, total - begin)
            raw = numpy.frombuffer(handle.read(count * stored.itemsize), stored)
            if len(raw) < count:
                raise UserError(f"{place.file}: cut off inside tensor {place.name!r}: copy or download it again")
            values = _values(raw, place.dtype)
            odd = ~numpy.isfinite(values)
            nan += int(numpy.isnan(values).sum())
            infinite += int(numpy.isinf(values).sum())
            values = values[~odd] if odd.any() else values
            zeros += int((values == 0).sum())
            if len(values):
                low, high = min(low, float(values.min())), max(high, float(values.max()))
                sums += float(values.sum(dtype=numpy.float64))
                squares += float(numpy.square(values, dtype=numpy.float64).sum())
        finite = total - nan - infinite
        mean = sums / finite if finite else None
        spread = None if mean is None else math.sqrt(max(0.0, squares / finite - mean * mean))
        rows = _corner(handle, place, stored, corner) if total else []
    return {
        "min": low if finite else None,
        "max": high if finite else None,
        "mean": mean,
        "std": spread,
        "zeros": zeros,
        "nan": nan,
        "infinite": infinite,
        "corner": rows,
    }


def _corner(handle: Any, place: Place, stored: Any, corner: int) -> list[list[float]]:
    import numpy

    width = place.shape[-1] if place.shape else 1
    height = place.shape[-2] if len(place.shape) > 1 else 1
    rows: list[list[float]] = []
    for row in range(min(corner, height)):
        handle.seek(place.start + row * width * stored.itemsize)
        raw = numpy.frombuffer(handle.read(min(corner, width) * stored.itemsize), stored)
        rows.append([float(v) for v in _values(raw, place.dtype)])
    return rows


def _values(raw: Any, dtype: str) -> Any:
    """Stored numbers as numpy floats: BF16 is the upper half of a float32; FP8 goes through a table of 256."""
    import numpy

    if dtype == "BF16":
        return (raw.astype(numpy.uint32) << 16).view(numpy.float32)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return numpy.array([_fp8(code, dtype) for code in range(256)], numpy.float32)[raw]
    return raw if raw.dtype == numpy.float64 else raw.astype(numpy.float64 if raw.dtype.kind in "iu" else numpy.float32)


def _fp8(code: int, dtype: str) -> float:
    """One byte as the OCP formats say: E4M3 has no infinity and one NaN per sign, E5M2 is like a short IEEE half."""
    fraction_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    fraction = code & ((1 << fraction_bits) - 1)
    exponent = (code & 0x7F) >> fraction_bits
    if dtype == "F8_E4M3" and code & 0x7F == 0x7F:
        return math.nan
    if dtype == "F8_E5M2" and exponent == 31:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction / (1 << fraction_bits) * 2.0 ** (1 - bias)
    return sign * (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias)
