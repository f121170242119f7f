"""What changed between two measured runs, and whether it is more than the runs' own uncertainty."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import artifacts
from jobs.errors import UserError
from jobs.loadgen import tables

COMPARED = (
    ("output_throughput", "out tok/s", True),
    ("median_ttft_ms", "TTFT median", False),
    ("p99_ttft_ms", "TTFT P99", False),
    ("median_tpot_ms", "TPOT median", False),
    ("p99_e2el_ms", "E2EL P99", False),
)
Row = Mapping[str, Any]


def compare(old: Path, new: Path) -> str:
    """Both runs' load tests, level by level, as text. `old`, `new`: run directories or their loadtest directories.

    A figure is called better or worse only where the two 95 % intervals do not touch. Raises UserError where one was
    not measured, or they share no level.
    """
    before, after = _rows(old), _rows(new)
    shared = [key for key in before if key in after]
    if not shared:
        raise UserError(f"{old} and {new} have no variant and load in common: {_names(before)} against {_names(after)}")
    lines: list[list[str]] = [["variant", "load", "figure", "old", "new", "change", ""]]
    for key in shared:
        for figure, name, more_is_better in COMPARED:
            a, b = before[key][figure], after[key][figure]
            if not a or b is None:
                continue
            verdict = _verdict(before[key], after[key], figure, more_is_better=more_is_better)
            change = f"{(b / a - 1) * 100:+.1f} %"
            lines.append([*key, name, tables.number(a), tables.number(b), change, verdict])
    left_out = [*(k for k in before if k not in after), *(k for k in after if k not in before)]
    notes = [f"only in one of the two: {', '.join(' at load '.join(k) for k in left_out)}"] if left_out else []
    widths = [max(len(line[i]) for line in lines) for i in range(7)]
    text = [_line(line, widths) for line in lines]
    return "\n".join([text[0], "  ".join("-" * w for w in widths), *text[1:], *notes])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    placed = [c.rjust(w) if 2 < i < 6 else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(placed).rstrip()


def _verdict(old: Row, new: Row, figure: str, *, more_is_better: bool) -> str:
    a, b = (row.get("intervals", {}).get(figure) for row in (old, new))
    if a is None or b is None:
        return "no interval"
    if a[0] <= b[1] and b[0] <= a[1]:
        return "within the intervals"
    return "BETTER" if (b[0] > a[1]) == more_is_better else "WORSE"


def _rows(where: Path) -> dict[tuple[str, str], Row]:
    path = where if (where / "results.json").is_file() and where.name != "report" else where / "loadtest"
    made = artifacts.read(path)
    rows: Sequence[Row] = json.loads((made.path / "results.json").read_text(encoding="utf-8"))
    return {(tables.variant_name(r["variant"]), tables.load_name(r)): r for r in rows}


def _names(rows: Mapping[tuple[str, str], Row]) -> str:
    return ", ".join(" at load ".join(key) for key in rows)
