"""The load test's tables as text, at most 110 columns wide, legible without colour."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
WIDTH = 110
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def number(value: float | None, digits: int = 1, *, estimated: bool = False) -> str:
    """A figure for people: n/a where there is none, ~ where it is an estimate, fewer digits as it grows."""
    if value is None:
        return "n/a"
    places = digits if abs(value) < 1000 else 0
    return f"{'~' if estimated else ''}{value:,.{places}f}"


def load_name(row: Row) -> str:
    """What was asked of the server in this row: its concurrency, or its rate."""
    return f"{row['rate']:.4g}/s" if row.get("rate") is not None else str(row["concurrency"])


def variant_name(variant: Mapping[str, Any]) -> str:
    """`max_num_seqs 4`, or `as configured`."""
    return ", ".join(f"{k} {v}" for k, v in variant.items()) or "as configured"


def table(rows: Sequence[Row], *, title: str) -> str:
    """One variant's levels: counts and throughput, then the four latencies, then what the reader must know."""

    def lag(row: Row) -> str:
        return number(row["client_lag_p99_ms"]) + (" SATURATED" if row["client_saturated"] else "")

    def est(row: Row) -> bool:
        return row["tokens_estimated"]

    load = ["load", *[load_name(r) for r in rows]]
    blocks = [
        _block(
            [
                load,
                ["ok", *[str(r["completed"]) for r in rows]],
                ["failed", *[str(r["failed"]) for r in rows]],
                ["time s", *[number(r["duration"]) for r in rows]],
                ["in tokens", *[number(r["total_input_tokens"], 0, estimated=est(r)) for r in rows]],
                ["out tokens", *[number(r["total_output_tokens"], 0, estimated=est(r)) for r in rows]],
                ["req/s", *[number(r["request_throughput"], 2) for r in rows]],
                ["out tok/s", *[number(r["output_throughput"], estimated=est(r)) for r in rows]],
                ["peak", *[number(r["max_output_tokens_per_s"], 0, estimated=est(r)) for r in rows]],
                ["all tok/s", *[number(r["total_token_throughput"], estimated=est(r)) for r in rows]],
                ["at once", *[str(r["max_concurrent_requests"]) for r in rows]],
                ["lag ms", *[lag(r) for r in rows]],
            ]
        )
    ]
    for pair in (("ttft", "tpot"), ("itl", "e2el")):
        columns = [load]
        for name in pair:
            for at, key in (("mean", "mean"), ("median", "median"), ("P90", "p90"), ("P99", "p99")):
                head = f"{NAMES[name]} ms {at}" if at == "mean" else at
                known = name in ("tpot", "itl")
                columns.append([head, *[number(r[f"{key}_{name}_ms"], estimated=known and est(r)) for r in rows]])
        blocks.append(_block(columns))
    keys = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_e2el_ms")
    if any(r.get("intervals") for r in rows):
        heads = ("95 % interval of: out tok/s", "TTFT ms median", "TTFT P99", "TPOT median", "E2EL P99")
        columns = [[h, *[interval(r, k) for r in rows]] for h, k in zip(heads, keys, strict=True)]
        blocks.append(_block([load, *columns]))
    if any(r.get("slo_broken") is not None for r in rows):
        verdicts = ["targets", *[_verdict(r) for r in rows]]
        blocks.append(_block([load, ["goodput req/s", *[number(r["goodput"], 2) for r in rows]], verdicts]))
    notes = [_wrapped(f"! {where}: {note}") for where, note in all_notes(rows)]
    return "\n".join([title, *("\n" + b for b in blocks), *([""] if notes else []), *notes])


def interval(row: Row, key: str) -> str:
    """`82.1-85.3`, or nothing where the level was too short to say."""
    found = row.get("intervals", {}).get(key)
    return "" if found is None else f"{number(found[0])}-{number(found[1])}"


def all_notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(which loads, what to know): a note that holds for several loads is said once."""
    by_note: dict[str, list[str]] = {}
    for r in rows:
        unsure = [f"P99 rests on the one or two slowest of {r['completed']} requests"] if r.get("p99_unsure") else []
        for note in [*r["warnings"], *unsure]:
            by_note.setdefault(note, []).append(load_name(r))
    return [(f"load {', '.join(loads)}", note) for note, loads in by_note.items()]


def _verdict(row: Row) -> str:
    if row["slo_broken"]:
        return "missed: " + "; ".join(row["slo_broken"])
    return "met, the most found" if row.get("slo_best") else "met"


def trade(rows: Sequence[Row]) -> str:
    """The variants side by side, level by level; empty when there is only one."""
    variants = list(dict.fromkeys(variant_name(r["variant"]) for r in rows))
    if len(variants) < 2:
        return ""
    of = {(variant_name(r["variant"]), load_name(r)): r for r in rows}
    loads = list(dict.fromkeys(load_name(r) for r in rows))
    columns = [["load", *loads]]
    for head, key, digits in (
        ("out tok/s", "output_throughput", 1),
        ("TTFT ms median", "median_ttft_ms", 0),
        ("TPOT ms median", "median_tpot_ms", 1),
    ):
        for i, variant in enumerate(variants):
            cells = [number(of[variant, n][key], digits) if (variant, n) in of else "" for n in loads]
            columns.append([f"{head}: [{i + 1}]" if i == 0 else f"[{i + 1}]", *cells])
    legend = "   ".join(f"[{i + 1}] {v}" for i, v in enumerate(variants))
    return f"Side by side: {legend}\n\n{_block(columns)}\n\n{_wrapped(trade_sentence(rows))}"


def trade_sentence(rows: Sequence[Row]) -> str:
    """One sentence on what the last variant gives and costs against the first, at the highest load of both."""
    first, last = rows[0]["variant"], rows[-1]["variant"]
    loads = [load_name(r) for r in rows if r["variant"] == last]
    if first == last or not loads:
        return ""
    old = [r for r in rows if r["variant"] == first and load_name(r) == loads[-1]]
    new = [r for r in rows if r["variant"] == last and load_name(r) == loads[-1]]
    keys = ("output_throughput", "median_ttft_ms", "median_tpot_ms")
    if not old or any(not r[k] for r in (old[0], new[0]) for k in keys):
        return ""
    a, b = old[0], new[0]
    return (
        f"At load {loads[-1]}, {variant_name(last)} makes {b[keys[0]] / a[keys[0]]:.2f} times the output tokens/s of "
        f"{variant_name(first)} ({number(b[keys[0]])} against {number(a[keys[0]])}); the median wait for the first "
        f"token goes from {number(a[keys[1]], 0)} to {number(b[keys[1]], 0)} ms, and the time per token after it "
        f"from {number(a[keys[2]])} to {number(b[keys[2]])} ms."
    )


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="  " if text.startswith("!") else ""))


def _block(columns: Sequence[Sequence[str]]) -> str:
    """Columns of text (the header first), right-aligned; broken into several blocks where wider than WIDTH."""
    widths = [max(len(cell) for cell in column) for column in columns]
    groups: list[list[int]] = [[]]
    used = 0
    for i, width in enumerate(widths):
        if i and used + width + 2 > WIDTH:
            groups.append([0])
            used = widths[0]
        groups[-1].append(i)
        used += width + (2 if len(groups[-1]) > 1 else 0)
    lines: list[str] = []
    for group in groups:
        for row in range(len(columns[0])):
            lines.append("  ".join(columns[i][row].rjust(widths[i]) for i in group).rstrip())
            if row == 0:
                lines.append("  ".join("-" * widths[i] for i in group))
        lines.append("")
    return "\n".join(lines[:-1])
