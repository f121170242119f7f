"""The snapshot that `prepare` hands on: Parquet files per split, and a hash over their rows.

The hash is taken row by row over the values themselves, in reading order, so it does not depend on how many files
the rows lie in, on pyarrow's version or on the machine. Where a row came from (`source`) is not part of it, nor an id
that was made from that.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

SPLITS: tuple[str, ...] = ("train", "eval")


def schema() -> "pa.Schema":
    """Columns of a snapshot. Tokens are of one row; `messages` is the JSON of those before `answer`."""
    import pyarrow as pa

    return pa.schema(
        [
            ("id", pa.string()),
            ("source", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("length", pa.int32()),
            ("prompt_length", pa.int32()),
            ("messages", pa.string()),
            ("answer", pa.string()),
        ]
    )


def read(path: Path, split: str) -> "pa.Table":
    """All rows of a split ("train" or "eval"), in order. Raises UserError when the directory holds no snapshot."""
    import pyarrow as pa

    return pa.concat_tables([table for _, table in tables(path, split)])


def tables(path: Path, split: str) -> Iterator[tuple[Path, "pa.Table"]]:
    """The files of a split with their rows, one at a time. Raises UserError for a missing or broken file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted((path / split).glob("part-*.parquet"))
    if not files:
        raise UserError(f"{path / split}: no part-*.parquet, so this is no snapshot: run python -m jobs.prepare")
    for file in files:
        try:
            table = pq.ParquetFile(file).read()
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{file}: cannot be read ({error}): make the snapshot again") from None
        if not table.schema.equals(schema()):
            raise UserError(f"{file}: not the columns of a snapshot: make it again with this version")
        yield file, table


def write(path: Path, split: str, index: int, table: "pa.Table") -> None:
    """Write one file of a split."""
    import pyarrow.parquet as pq

    (path / split).mkdir(exist_ok=True)
    # Token ids compress well as they are; trying a dictionary of them first costs as much as writing them.
    pq.write_table(
        table,
        path / split / f"part-{index:05}.parquet",
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
    )


def row_digests(table: "pa.Table") -> "NDArray[np.uint8]":
    """SHA-256 of every row's values, shape [rows, 32]."""
    import numpy as np

    out = bytearray()
    for batch in table.to_batches():
        columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
        tokens, mask = columns["input_ids"], columns["loss_mask"]
        token_bytes = memoryview(tokens.values.to_numpy().astype("<i4", copy=False)).cast("B")
        mask_bytes = memoryview(mask.values.to_numpy().astype("i1", copy=False)).cast("B")
        starts, mask_starts = tokens.offsets.to_pylist(), mask.offsets.to_pylist()
        ids, sources = columns["id"].to_pylist(), columns["source"].to_pylist()
        messages, answers = columns["messages"].to_pylist(), columns["answer"].to_pylist()
        sizes = np.stack([columns["length"].to_numpy(), columns["prompt_length"].to_numpy()], axis=1).astype("<i4")
        for i in range(batch.num_rows):
            identity = "" if ids[i] == sources[i] else ids[i]
            parts = (
                identity.encode(),
                messages[i].encode(),
                answers[i].encode(),
                token_bytes[4 * starts[i] : 4 * starts[i + 1]],
                mask_bytes[mask_starts[i] : mask_starts[i + 1]],
                sizes[i].tobytes(),
            )
            digest = hashlib.sha256(b"%d %d %d %d %d " % tuple(len(part) for part in parts[:5]))
            for part in parts:
                digest.update(part)
            out += digest.digest()
    return np.frombuffer(bytes(out), dtype=np.uint8).reshape(-1, 32)


def combine(header: Mapping[str, Any], digests: Mapping[str, Iterable[Any]]) -> str:
    """The snapshot's hash: what shaped it (`header`), then the digests of each split's rows in order."""
    total = hashlib.sha256(json.dumps(header, sort_keys=True, ensure_ascii=True).encode())
    for split in SPLITS:
        rows = hashlib.sha256()
        for block in digests[split]:
            rows.update(bytes(block))
        total.update(split.encode() + rows.digest())
    return total.hexdigest()


def verify(path: Path) -> str:
    """Hash a snapshot's rows again and compare; returns the hash.

    Raises UserError naming the file and row of a mask that does not fit, or that the rows are not those hashed.
    """
    try:
        numbers = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["numbers"]
        header, wanted = numbers["hash_header"], numbers["snapshot_hash"]
    except FileNotFoundError:
        raise UserError(f"{path}: no manifest.json, so this is no finished snapshot") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / 'manifest.json'}: not the manifest of a snapshot") from None
    found = combine(header, {split: _checked(path, split) for split in SPLITS})
    if found != wanted:
        raise UserError(
            f"{path}: its rows hash to {found}, its manifest says {wanted}: it was altered, prepare it again"
        )
    return found


def _checked(path: Path, split: str) -> Iterator[Any]:
    import numpy as np

    for file, table in tables(path, split):
        start = 0
        for batch in table.to_batches():
            columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
            length, prompt = columns["length"].to_numpy(), columns["prompt_length"].to_numpy()
            fits = (prompt > 0) & (prompt < length)
            for name in ("input_ids", "loss_mask"):
                fits &= np.diff(columns[name].offsets.to_numpy()) == length
            if fits.all():
                mask = columns["loss_mask"].flatten().to_numpy()
                wanted = np.repeat(np.tile([0, 1], len(length)), np.stack([prompt, length - prompt], axis=1).ravel())
                differ = np.flatnonzero(mask != wanted)
                fits[np.searchsorted(np.cumsum(length), differ, side="right")] = False
            if not fits.all():
                row = start + int(np.flatnonzero(~fits)[0])
                raise UserError(f"{file}: row {row}: its loss mask does not cover just the answer: prepare it again")
            start += batch.num_rows
        yield row_digests(table)
