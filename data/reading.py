"""The rows of a span of a file, each with its line number: framing, encodings, JSON, Parquet.

Lines end at a line feed only: a row may hold U+2028 or U+0085, which str.splitlines would cut at. What is wrong with
one row comes back in its place; a file that turns out broken as a whole (a cut-off gzip or array) raises UserError.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from data.files import BOM, LONGEST_LINE, Span, decompressed, filesystem, unreadable
from data.schema import Problem
from jobs.errors import UserError

LARGEST_ARRAY = 512 << 20


class Raw(NamedTuple):
    """One row as found. `source` is "file:line"; `value` is unusable when there is a problem."""

    source: str
    value: Any
    problem: Problem | None = None
    note: str = ""


def read(span: Span) -> Iterator[Raw]:
    """The rows of a span, in order. Raises UserError when the file as a whole turns out to be broken."""
    import pyarrow as pa

    store, path = filesystem(span.source.uri)
    try:
        with store.open_input_file(path) as stream:
            if span.source.kind == "parquet":
                yield from _read_parquet(stream, span)
                return
            with decompressed(stream, span.source) as text:
                yield from _read_array(text, span) if span.source.kind == "array" else _read_lines(text, span)
    except (OSError, pa.ArrowInvalid) as error:
        raise unreadable(span.source.name, error) from None


def _read_lines(stream: Any, span: Span) -> Iterator[Raw]:
    if span.stop >= 0:
        stream.seek(span.start)
    left = span.stop - span.start if span.stop >= 0 else None
    offset, rest, line = span.start, b"", span.line
    while block := stream.read(min(4 << 20, left) if left is not None else 4 << 20):
        left = left - len(block) if left is not None else None
        *whole, rest = (rest + block).split(b"\n")
        for raw in whole:
            if raw and not raw.isspace():
                yield _line(raw, f"{span.source.name}:{line}", offset)
            offset += len(raw) + 1
            line += 1
        if len(rest) > LONGEST_LINE:
            raise UserError(
                f"{span.source.name}:{line}: this line is over {LONGEST_LINE >> 20} MiB: no row is that long"
            )
    if rest.strip():
        yield _line(rest, f"{span.source.name}:{line}", offset, unfinished=True)


def _line(raw: bytes, source: str, offset: int, *, unfinished: bool = False) -> Raw:
    note = ""
    if raw.startswith(BOM):
        raw, offset = raw[3:], offset + 3
        note = "a byte-order mark starts some lines: skipped" if offset > 3 else ""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Raw(source, None, not_utf8(raw, error, offset))
    value, problem = parse(text)
    if problem is not None and unfinished:
        problem = problem._replace(text=f"{problem.text}; the file ends in this line: is it cut off?")
    return Raw(source, value, problem, note)


def not_utf8(raw: bytes, error: UnicodeDecodeError, offset: int) -> Problem:
    """The problem with bytes that are not UTF-8."""
    at, byte = error.start, raw[error.start]
    return Problem(
        "",
        "encoding",
        f"not UTF-8: byte 0x{byte:02X} at byte {at} of the line (offset {offset + at} of the file): save it as UTF-8",
    )


class _RefusedError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _RefusedError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice in one object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is not JSON: write null or leave the field out")


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def parse(text: str) -> tuple[Any, Problem | None]:
    """One JSON value, or the problem with it."""
    try:
        return DECODER.decode(text), None
    except json.JSONDecodeError as error:
        return None, Problem("", "json", f"not valid JSON at column {error.colno}: {error.msg}")
    except RecursionError:
        return None, Problem("", "json", "nested too deeply to be a row")
    except ValueError as error:  # a key twice, NaN, or a number of thousands of digits
        return None, Problem("", "json", str(error).partition(";")[0])


def _read_array(stream: Any, span: Span) -> Iterator[Raw]:
    name = span.source.name
    raw = stream.read(LARGEST_ARRAY + 1)
    if len(raw) > LARGEST_ARRAY:
        raise UserError(
            f"{name}: a JSON array of over {LARGEST_ARRAY >> 20} MiB: turn it into JSON lines (jq -c '.[]')"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: {not_utf8(raw, error, 0).text}") from None
    space = re.compile(r"[ \t\r\n]*")
    at, line, counted = space.match(text, text.index("[") + 1).end(), 1, 0  # pyright: ignore[reportOptionalMemberAccess]
    element = 0
    while text[at : at + 1] != "]" or element:
        line += text.count("\n", counted, at)
        counted = at
        try:
            value, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error) or "nested too deeply"
            where = f"{name}:{line}: element {element} of the JSON array"
            raise UserError(f"{where} is not valid JSON ({why}): is the file cut off?") from None
        yield Raw(f"{name}:{line}[{element}]", value, note="read as a JSON array")
        element += 1
        at = space.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[at : at + 1] != ",":
            break
        at = space.match(text, at + 1).end()  # pyright: ignore[reportOptionalMemberAccess]
    if text[at : at + 1] != "]" or text[at + 1 :].strip():
        line += text.count("\n", counted, at)
        raise UserError(
            f"{name}:{line}: the JSON array is not closed after {element} rows, or text follows it: cut off?"
        )


def _read_parquet(stream: Any, span: Span) -> Iterator[Raw]:
    import pyarrow.parquet as pq

    row = span.line
    file = pq.ParquetFile(stream)
    for batch in file.iter_batches(batch_size=1024, row_groups=list(range(span.start, span.stop))):
        for i in range(batch.num_rows):
            source = f"{span.source.name}:{row}"
            try:
                value = batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield Raw(source, None, Problem("", "encoding", f"row {row}: text that is not UTF-8 ({error.reason})"))
            else:
                value = {key: v for key, v in value.items() if not key.startswith("__index_level_")}
                yield Raw(source, value)
            row += 1
