"""From a path to files and spans of them: directories, globs and URIs, what each file holds, where to cut it.

What cannot be a dataset at all (UTF-16, a zip, text that is no JSON) raises UserError here; what is wrong with one
row is found by `data.reading`.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
MAGIC = {
    b"PK\x03\x04": "a zip archive (or an Excel file)",
    b"\xfd7zXZ": "xz-compressed",
    b"BZh": "bzip2-compressed",
    b"ARROW1": "an Arrow file",
    b"SQLite": "an SQLite database",
    b"%PDF": "a PDF",
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 64 << 20


class Source(NamedTuple):
    """One file: where it is, the name rows are reported by, and what it holds."""

    uri: str
    name: str
    kind: str  # lines, array or parquet
    compression: str | None
    size: int
    sha256: str


class Span(NamedTuple):
    """What one task reads: bytes [start, stop) of lines (of which the first is `line`), or Parquet row groups."""

    number: int
    source: Source
    start: int
    stop: int
    line: int


@dataclass(frozen=True)
class Files:
    """The files of a dataset in reading order; `facts` hold cards, not rows; `ignored` names are no data files."""

    rows: list[tuple[str, str]]
    facts: list[tuple[str, str]]
    ignored: list[str]


def find(path: str) -> Files:
    """The (uri, name) pairs that a directory, file, glob or URI stands for, sorted by name.

    A file called facts.* holds cards. For a single file the cards are looked for beside it.
    Raises UserError when there is nothing to read.
    """
    from pyarrow import fs

    store, base = filesystem(path)
    try:
        info = store.get_file_info(base)
    except OSError as error:
        raise UserError(f"{path}: cannot be reached: {error}") from None
    pattern = None
    if info.type == fs.FileType.File:
        found, root = [base], base.rpartition("/")[0]
    else:
        root = base.rstrip("/")
        if info.type == fs.FileType.NotFound and re.search(r"[*?\[]", base):
            root = re.split(r"[*?\[]", base)[0].rpartition("/")[0]
            pattern = re.compile(_glob(base))
        try:
            listing = store.get_file_info(fs.FileSelector(root, recursive=True))
        except OSError:
            raise UserError(f"{path}: no such file or directory: set data.path to the dataset") from None
        found = [entry.path for entry in listing if entry.type == fs.FileType.File]
    scheme = path.partition("://")[0] + "://" if "://" in path else ""
    rows: list[tuple[str, str]] = []
    facts: list[tuple[str, str]] = []
    ignored: list[str] = []
    for file in sorted(found):
        name = file[len(root) + 1 :] if root else file
        if pattern is not None and not pattern.fullmatch(file):
            continue
        if pattern is None and info.type != fs.FileType.File and not _is_data(name):
            ignored.append(name)
        elif _is_facts(name):
            facts.append((scheme + file, name))
        else:
            rows.append((scheme + file, name))
    if not facts and info.type == fs.FileType.File:
        beside = store.get_file_info(fs.FileSelector(root or "."))
        facts = [(scheme + e.path, e.base_name) for e in beside if _is_facts(e.base_name) and _is_data(e.base_name)]
    if not rows:
        seen = f"; it holds {', '.join(ignored[:5])}" if ignored else ""
        raise UserError(f"{path}: no data files ({', '.join(SUFFIXES)}, also .gz and .zst) there{seen}")
    return Files(rows, facts, ignored)


def filesystem(path: str) -> tuple[Any, str]:
    """The pyarrow filesystem of a path or URI, and the path within it."""
    from pyarrow import fs

    if "://" not in path:
        return fs.LocalFileSystem(), path
    try:
        return fs.FileSystem.from_uri(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot open this URI: {error}") from None


def plan(uri: str, name: str, *, index: int, span_bytes: int) -> tuple[Source, list[Span]]:
    """Look through a file once: hash it, tell what it is, and cut it into spans at line ends."""
    import pyarrow as pa

    store, path = filesystem(uri)
    try:
        with store.open_input_file(path) as stream:
            head = stream.read(1 << 20)
            kind, compression = _kind(head, name)
            if kind == "lines" and compression is None:
                return _cut_lines(stream, uri, name, index, span_bytes)
            stream.seek(0)
            digest, size = hashlib.sha256(), 0
            while block := stream.read(8 << 20):
                digest.update(block)
                size += len(block)
            source = Source(uri, name, kind, compression, size, digest.hexdigest())
            if kind == "parquet":
                stream.seek(0)
                return source, _row_groups(stream, source, index, span_bytes)
            if kind == "lines":
                stream.seek(0)
                with decompressed(stream, source) as text:
                    source = source._replace(kind=_lines_or_array(text.read(1 << 20), name))
            return source, [Span(index, source, 0, -1, 1)]
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise unreadable(name, error) from None


def unreadable(name: str, error: Exception) -> UserError:
    """The error for a file that cannot be read as a whole."""
    cut = ": it is cut off, copy it again" if "runcated" in str(error) else ""
    return UserError(f"{name}: cannot be read: {error}{cut}")


def _kind(head: bytes, name: str) -> tuple[str, str | None]:
    for magic, what in MAGIC.items():
        if head.startswith(magic):
            raise UserError(f"{name}: is {what}: bring JSON lines or Parquet, plain or as .gz or .zst")
    if head.startswith(b"PAR1"):
        return "parquet", None
    for magic, compression in COMPRESSED.items():
        if head.startswith(magic):
            return "lines", compression
    if name.endswith((".gz", ".zst", ".zstd", ".parquet")) and head:
        raise UserError(f"{name}: its content is not what its name says (first bytes {head[:4].hex()})")
    return _lines_or_array(head, name), None


def _lines_or_array(head: bytes, name: str) -> str:
    """Tell JSON lines from one JSON array by the first line. Refuses what is neither."""
    if head.startswith(UTF16) or b"\x00" in head[:4]:
        raise UserError(f"{name}: is UTF-16 or UTF-32, not UTF-8: save it as UTF-8")
    text = head.removeprefix(BOM).lstrip()
    line, _, rest = text.partition(b"\n")
    start = line[:1]
    if start == b"[":
        value = _try_json(line)
        return "lines" if isinstance(value, list) and rest.strip() else "array"
    if start == b"{" and line.strip() != text.strip() and line.rstrip()[-1:] in b"{[,:" and _try_json(line) is None:
        raise UserError(
            f"{name}: the object that starts in line 1 runs over several lines: put each on one line (jq -c .)"
        )
    if start not in (b"{", b'"', b"") and _try_json(line) is None:
        shown = line[:40].decode("utf-8", "replace")
        raise UserError(
            f"{name}: neither JSON lines nor Parquet: it starts with {shown!r}. Convert it to JSON lines first"
        )
    return "lines"


def _try_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _cut_lines(stream: Any, uri: str, name: str, index: int, span_bytes: int) -> tuple[Source, list[Span]]:
    stream.seek(0)
    digest, cuts, size, lines, since = hashlib.sha256(), [(0, 1)], 0, 1, 0
    while block := stream.read(span_bytes):
        digest.update(block)
        end = block.rfind(b"\n") + 1
        if end:
            lines += block.count(b"\n")
            cuts.append((size + end, lines))
            since = len(block) - end
        else:
            since += len(block)
            if since > LONGEST_LINE:
                raise UserError(f"{name}:{lines}: this line is over {LONGEST_LINE >> 20} MiB: no row is that long")
        size += len(block)
    if cuts[-1][0] != size:  # a last line without a line feed belongs to the span before it
        cuts = [*(cuts[:-1] if len(cuts) > 1 else cuts), (size, lines + 1)]
    source = Source(uri, name, "lines", None, size, digest.hexdigest())
    pairs = zip(cuts, cuts[1:], strict=False)
    return source, [Span(index + i, source, a[0], b[0], a[1]) for i, (a, b) in enumerate(pairs)]


def _row_groups(stream: Any, source: Source, index: int, span_bytes: int) -> list[Span]:
    import pyarrow.parquet as pq

    metadata = pq.ParquetFile(stream).metadata
    spans: list[Span] = []
    start, row, held = 0, 1, 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= span_bytes or group == metadata.num_row_groups - 1:
            spans.append(Span(index + len(spans), source, start, group + 1, row))
            row += sum(metadata.row_group(g).num_rows for g in range(start, group + 1))
            start, held = group + 1, 0
    return spans


def decompressed(stream: Any, source: Source) -> Any:
    import pyarrow as pa

    return stream if source.compression is None else pa.CompressedInputStream(stream, source.compression)


def _is_data(name: str) -> bool:
    plain = re.sub(r"\.(gz|zst|zstd)$", "", name)
    return plain.endswith(SUFFIXES) and not any(part.startswith((".", "_")) for part in name.split("/"))


def _is_facts(name: str) -> bool:
    return name.rpartition("/")[2].startswith("facts.")


def _glob(pattern: str) -> str:
    """A glob as a regular expression: * and ? stay within a directory, ** does not."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", pattern)
    table = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(table.get(p, p if p.startswith("[") and p.endswith("]") else re.escape(p)) for p in parts)
