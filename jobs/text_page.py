"""Plain text for a terminal: sections, fields, tables, at most WIDTH columns, wide characters counted as two.

What came with a model (names, templates) is shown with control characters escaped: a tensor's name must not be able
to move the cursor.
"""

import os
import sys
import textwrap
import unicodedata
from collections.abc import Sequence

WIDTH = 110
HIDDEN = ("Cc", "Cf", "Cs")


class Page:
    """Lines to be printed together."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def text(self) -> str:
        return "\n".join(self._lines)

    def line(self, text: str) -> None:
        self._lines.append(fit(clean(text)))

    def section(self, title: str) -> None:
        """A blank line and a title."""
        if self._lines:
            self._lines.append("")
        self.line(title)

    def field(self, name: str, value: str) -> None:
        """A name in a column of its own and its value, wrapped beside it."""
        rows = textwrap.wrap(clean(value), WIDTH - 18, break_long_words=True) or [""]
        for number, row in enumerate(rows):
            self._lines.append(fit(f"  {clean(name) if number == 0 else '':<15} {row}"))

    def wrapped(self, text: str) -> None:
        """A paragraph."""
        self._lines += [fit(f"  {row}") for row in textwrap.wrap(clean(text), WIDTH - 2)]

    def quoted(self, text: str) -> None:
        """Text line by line behind a bar; long lines are cut."""
        self._lines += [fit(f"    | {clean(row)}") for row in text.split("\n")]

    def table(self, rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), head: Sequence[str] = ()) -> None:
        """Columns as wide as their content; `right` are the columns that are aligned to the right."""
        cells = [[clean(cell) for cell in row] for row in ([head, *rows] if head else rows)]
        if not cells:
            return
        widths = [max(columns(row[i]) for row in cells) for i in range(len(cells[0]))]
        spare = WIDTH - 2 - 2 * (len(widths) - 1) - sum(widths)
        if spare < 0:  # the widest column gives way
            widest = widths.index(max(widths))
            widths[widest] = max(8, widths[widest] + spare)
        for row in cells:
            placed = enumerate(zip(row, widths, strict=True))
            padded = [_padded(fit(cell, width), width, i in right) for i, (cell, width) in placed]
            self._lines.append(f"  {'  '.join(padded)}".rstrip())


def emit(text: str) -> None:
    """Print, and take it quietly when the reader (`| head`) has had enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit's own flush would fail again


def columns(text: str) -> int:
    """How many columns a terminal takes for `text`."""
    wide = sum(1 for c in text if unicodedata.east_asian_width(c) in "WF")
    return len(text) + wide - sum(1 for c in text if unicodedata.combining(c) or c in "\u200d\ufe0f")


def fit(text: str, width: int = WIDTH) -> str:
    """`text` cut to `width` columns, with a mark where something was left off."""
    if columns(text) <= width:
        return text
    while columns(text) > width - 1:
        text = text[: -max(1, columns(text) - width)]
    return text + "…"


def clean(text: str) -> str:
    """Control characters and direction marks as escapes; a newline or tab as a space."""
    shown = text.replace("\n", " ").replace("\t", " ")
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in HIDDEN and c != "\u200d" else c for c in shown)


def size(count: float) -> str:
    """Bytes for people: binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * max(0, width - columns(text))
    return space + text if right else text + space
