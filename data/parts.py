"""One span of a dataset -> its tokenized rows, and the few numbers per row by which rows are told apart.

The same function runs in this process for a small dataset and in Ray Data tasks for a large one. Rows are worked on
in batches, so memory does not grow with the span.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from data import reading, snapshot
from data.files import Span
from data.formats import Row, Rules, convert
from data.rendering import Renderer, Text
from data.schema import Problem
from data.splits import LARGEST_COMPONENT, hash64

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 1024
DTYPES = {
    "places": "int32",
    "ids": "uint64",
    "questions": "uint64",
    "keys": "uint64",
    "key_counts": "int64",
    "prompt_lengths": "int32",
    "lengths": "int32",
    "digests": "uint8",
}


class BadRow(NamedTuple):
    """A refused row: its place in the dataset (to sort by), its source and what is wrong with it."""

    place: tuple[int, int]
    source: str
    problems: list[Problem]


@dataclass
class Part:
    """What is known about a span. `arrays`: see DTYPES, one entry per good row; `places` are the rows' places in the
    span, `digests` [rows, 32], and `keys` holds each row's keys one after another. `long`: (prompt, whole) tokens of
    over-long rows. `names`: text of keys that many rows of the span share."""

    index: int
    rows: int = 0
    arrays: dict[str, Any] = field(default_factory=dict[str, Any])
    long: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    bad: list[BadRow] = field(default_factory=list[BadRow])
    bad_rows: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    notes: Counter[str] = field(default_factory=Counter[str])
    names: dict[int, str] = field(default_factory=dict[int, str])
    error: str | None = None


def prepare(
    span: Span,
    rules: Rules,
    renderer: Renderer,
    *,
    max_seq_len: int,
    max_errors: int,
    write: Callable[["pa.Table"], None],
) -> Part:
    """Read, check, render and tokenize a span. `write` takes the tables of good rows, in order.

    At most `max_errors` bad rows are kept; the others are only counted, by the kind of their first problem.
    """
    import numpy as np

    part = Part(span.number)
    columns: dict[str, list[Any]] = {name: [] for name in DTYPES}
    shared: Counter[str] = Counter()
    position = 0

    def refuse(place: int, source: str, problems: list[Problem]) -> None:
        part.bad_rows += 1
        part.kinds[problems[0].kind] += 1
        if len(part.bad) < max_errors:
            part.bad.append(BadRow((span.number, place), source, problems))

    rows = reading.read(span)
    while batch := list(islice(rows, BATCH)):
        good: list[tuple[int, str, Row, Text]] = []
        for raw in batch:
            position += 1
            if raw.note:
                part.notes[raw.note] += 1
            checked = _check(raw, rules, renderer, part.notes)
            if isinstance(checked, list):
                refuse(position, raw.source, checked)
            else:
                good.append((position, raw.source, *checked))
        encoded = renderer.encode([text for *_, text in good])
        kept: list[tuple[str, Row, list[int], list[int]]] = []
        places: list[int] = []
        for (place, source, row, _), tokens in zip(good, encoded, strict=True):
            if tokens is None:
                why = "the tokenizer joins the end of the prompt with the start of the answer"
                refuse(place, source, [Problem("answer", "template", why)])
                continue
            length = len(tokens[0]) + len(tokens[1])
            if length > max_seq_len:
                part.long.append((len(tokens[0]), length))
                what = f"{length} tokens, over data.max_seq_len {max_seq_len}: shorten it or raise the limit"
                refuse(place, source, [Problem("", "too_long", what)])
                continue
            kept.append((source, row, *tokens))
            places.append(place)
        if kept:
            table = _table(kept, renderer.end_id)
            write(table)
            _note(columns, kept, table)
            columns["places"].append(np.array(places, dtype=np.int32))
            part.rows += len(kept)
            shared.update(key for _, row, *_ in kept for key in row.keys)
    part.arrays = {
        name: np.concatenate(blocks) if blocks else np.zeros((0, 32) if name == "digests" else 0, DTYPES[name])
        for name, blocks in columns.items()
    }
    # A component over the limit is over it in some span too, so its name is among these.
    part.names = {hash64(key): key for key, n in shared.most_common(8) if n > LARGEST_COMPONENT * part.rows / 2}
    return part


def _check(raw: reading.Raw, rules: Rules, renderer: Renderer, notes: Counter[str]) -> tuple[Row, Text] | list[Problem]:
    if raw.problem is not None:
        return [raw.problem]

    def note(text: str) -> None:
        notes[text] += 1

    row = convert(raw.value, rules, note)
    if isinstance(row, list):
        return row
    problems = [
        Problem(where, "special_token", f"spells out the model's token {token!r}: remove it")
        for where, content in (
            *((f"messages[{i}]", m["content"]) for i, m in enumerate(row.messages)),
            ("answer", row.answer),
        )
        if (token := renderer.special_in(content))
    ]
    if problems:
        return problems
    text = renderer.text(row.messages, row.answer)
    if isinstance(text, Problem):
        return [text]
    if text.note:
        note(text.note)
    return row, text


def _table(kept: list[tuple[str, Row, list[int], list[int]]], end_id: int) -> "pa.Table":
    import numpy as np
    import pyarrow as pa

    flat: list[int] = []
    sizes = np.empty((len(kept), 2), dtype=np.int32)
    for i, (_, _, head, tail) in enumerate(kept):
        flat += head
        flat += tail
        sizes[i] = len(head), len(tail)
    lengths = sizes.sum(axis=1, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.array(flat, dtype=np.int32)
    # An answer without its end-of-turn token teaches a model never to stop; an empty one trains on nothing.
    if (sizes[:, 1] < 2).any() or (tokens[offsets[1:] - 1] != end_id).any():
        raise RuntimeError("a row's supervised part is empty or does not end with the end-of-turn token")
    mask = np.repeat(np.tile(np.array([0, 1], dtype=np.int8), len(kept)), sizes.ravel())
    columns: list[Any] = [
        pa.array([row.id if row.id is not None else source for source, row, *_ in kept], pa.string()),
        pa.array([source for source, *_ in kept], pa.string()),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(mask)),
        pa.array(lengths),
        pa.array(sizes[:, 0]),
        pa.array([json.dumps(row.messages, ensure_ascii=False) for _, row, *_ in kept], pa.string()),
        pa.array([row.answer for _, row, *_ in kept], pa.string()),
    ]
    return pa.table(columns, schema=snapshot.schema())


def _note(columns: dict[str, list[Any]], kept: list[tuple[str, Row, list[int], list[int]]], table: "pa.Table") -> None:
    import numpy as np

    def hashed(texts: Iterator[str]) -> Any:
        return np.array([hash64(text) for text in texts], dtype=np.uint64)

    columns["ids"].append(hashed(iter(table.column("id").to_pylist())))
    columns["questions"].append(hashed(row.question for _, row, *_ in kept))
    columns["keys"].append(hashed(key for _, row, *_ in kept for key in row.keys))
    columns["key_counts"].append(np.array([len(row.keys) for _, row, *_ in kept], dtype=np.int64))
    columns["prompt_lengths"].append(table.column("prompt_length").to_numpy())
    columns["lengths"].append(table.column("length").to_numpy())
    columns["digests"].append(snapshot.row_digests(table))
