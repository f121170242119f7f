"""The load test's part of the report: what to expect at each load, the curves, and every figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from jobs import plots, report_curves
from jobs.loadgen import limits, tables
from jobs.loadgen.tables import number
from jobs.plots import Axis, Series
from jobs.report_blocks import Block, Figure, Heading, Table, Text


def short_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per variant and level: what a user of the service would feel."""
    head = ["Variant", "Load", "Output tok/s", "Requests/s"]
    head += ["TTFT median, ms", "TTFT P99, ms", "TPOT median, ms", "E2EL P99, ms", "Failed"]
    body = [
        [
            tables.variant_name(r["variant"]),
            tables.load_name(r),
            number(r["output_throughput"], estimated=r["tokens_estimated"]) + _within(r, "output_throughput", 0),
            number(r["request_throughput"], 2),
            number(r["median_ttft_ms"], 0) + _within(r, "median_ttft_ms", 0),
            number(r["p99_ttft_ms"], 0),
            number(r["median_tpot_ms"], 1) + _within(r, "median_tpot_ms", 1),
            number(r["p99_e2el_ms"], 0),
            str(r["failed"]),
        ]
        for r in rows
    ]
    return Table(head, body, "What to expect at each load, with 95 % intervals in brackets")


def load_blocks(facts: Mapping[str, Any]) -> list[Block]:
    """Curves, full tables and warnings of the load test; nothing where it has not run."""
    rows = facts["load"]
    if not rows:
        return []
    asked = facts["load_config"]
    kind = f"{asked['input_len']} tokens in, {asked['output_len']} out, {asked['num_prompts']} requests a level"
    blocks: list[Block] = [Heading("Load test"), Text(f"Random prompts, {kind}; each level starts after a warm-up.")]
    groups = {name: [r for r in rows if tables.variant_name(r["variant"]) == name] for name in _names(rows)}
    levels = sorted({float(r.get("rate") or r["concurrency"]) for r in rows})
    unit = "requests/s" if any(r.get("rate") for r in rows) else "requests at a time"
    load = Axis(unit, log=True, ticks=levels)
    lines: list[Series] = []
    for place, (name, of) in enumerate(groups.items()):
        at = [float(r.get("rate") or r["concurrency"]) for r in of]
        lines.append(Series(name, at, [r["output_throughput"] or 0 for r in of], style=place))
    svg = plots.line_chart(lines, x=load, y=Axis("output tokens/s"), title="Output tokens per second by load")
    blocks.append(Figure("throughput", svg, "Output tokens per second"))
    waits: list[Series] = []
    for place, (name, of) in enumerate(groups.items()):
        at = [float(r.get("rate") or r["concurrency"]) for r in of]
        waits.append(Series(name, at, [r["median_ttft_ms"] or 0 for r in of], style=place))
        tail = [r["p99_ttft_ms"] or 0 for r in of]
        waits.append(Series("P99", at, tail, style=place, thin=True, marks=False))
    svg = plots.line_chart(waits, x=load, y=Axis("ms", log=True), title="Time to first token by load")
    blocks.append(Figure("ttft", svg, "Time to first token (TTFT): thick median, thin P99"))
    trade: list[Series] = []
    for place, (name, of) in enumerate(groups.items()):
        bend = limits.knee(of)
        notes = [tables.load_name(r) + (" (knee)" if i == bend else "") for i, r in enumerate(of)]
        speed, pace = [r["output_throughput"] or 0 for r in of], [r["median_tpot_ms"] or 0 for r in of]
        trade.append(Series(name, speed, pace, notes=notes, style=place))
    svg = plots.line_chart(
        trade, x=Axis("output tokens/s"), y=Axis("median TPOT, ms"), title="Time per output token against throughput"
    )
    blocks.append(Figure("tpot", svg, "Time per output token (TPOT) against throughput; the numbers are loads"))
    blocks += [Text(limits.sentence(of)) for of in groups.values() if len(of) > 1]
    blocks += report_curves.figures(facts["curves"])
    for name, of in groups.items():
        blocks += [Text(f"{name}, {where}: {note}", "warning") for where, note in tables.all_notes(of)]
    if any(r.get("server") for r in rows):
        blocks.append(_server_table(rows))
    together = [rows] if len(rows) <= 9 else list(groups.values())
    return [*blocks, *[_long_table(some) for some in together]]


def _server_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    head = ["Variant", "Load", "Queue mean", "Queue max", "Running max", "KV cache max", "Prefix-cache hits"]
    body: list[list[str]] = []
    for r in rows:
        said = r.get("server") or {}
        hits, cache = said.get("prefix_cache_hit_rate"), said.get("kv_cache_max")
        body.append(
            [
                tables.variant_name(r["variant"]),
                tables.load_name(r),
                number(said.get("queue_depth_mean")),
                number(said.get("queue_depth_max"), 0),
                number(said.get("running_max"), 0),
                "n/a" if cache is None else f"{cache:.0%}",
                "n/a" if hits is None else f"{hits:.0%}",
            ]
        )
    return Table(head, body, "What the server said of itself")


def _long_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One column per variant and level, one line per figure of `vllm bench serve`."""
    counts = (
        ("Successful requests", "completed", 0),
        ("Failed requests", "failed", 0),
        ("Duration, s", "duration", 1),
        ("Input tokens", "total_input_tokens", 0),
        ("Output tokens", "total_output_tokens", 0),
        ("Requests/s", "request_throughput", 2),
        ("Output tokens/s", "output_throughput", 1),
        ("Peak output tokens/s", "max_output_tokens_per_s", 0),
        ("Total tokens/s", "total_token_throughput", 1),
        ("Peak concurrent requests", "max_concurrent_requests", 0),
        ("Client lag P99, ms", "client_lag_p99_ms", 1),
    )
    body = [[head, *[number(r[key], digits) for r in rows]] for head, key, digits in counts]
    for short, full in tables.NAMES.items():
        for at, key in (("mean", "mean"), ("median", "median"), ("P90", "p90"), ("P99", "p99")):
            body.append([f"{full} {at}, ms", *[number(r[f"{key}_{short}_ms"]) for r in rows]])
    heads = [f"{tables.variant_name(r['variant'])}, load {tables.load_name(r)}" for r in rows]
    return Table(["Figure", *heads], body, "All figures")


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(tables.variant_name(r["variant"]) for r in rows))


def _within(row: Mapping[str, Any], key: str, digits: int) -> str:
    found = (row.get("intervals") or {}).get(key)
    return "" if found is None else f" ({number(found[0], digits)}-{number(found[1], digits)})"
