"""Distributions and the course of the highest load, from the load test's request and server records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs import plots
from jobs.plots import Axis, Series
from jobs.report_blocks import Block, Figure

POINTS = 60
MAX_SECONDS = 600


def curves(load: Path) -> dict[str, Any]:
    """For each variant's highest load: quantiles of TTFT and ITL, tokens per second, and the server's queue over time.

    {variant: {"load", "ttft", "itl": [ms at even ranks], "tokens": [per second], "queue": [[s, waiting, running]]}}
    """
    import pyarrow.parquet as pq

    found: dict[str, Any] = {}
    table = pq.read_table(load / "requests.parquet")
    loads = [r or c for r, c in zip(table["rate"].to_pylist(), table["concurrency"].to_pylist(), strict=True)]
    rows: list[dict[str, Any]] = [{**row, "load": at} for row, at in zip(table.to_pylist(), loads, strict=True)]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        top = max(row["load"] for row in rows if row["variant"] == variant)
        of = [
            r for r in rows if r["variant"] == variant and r["load"] == top and r["failure"] is None and r["arrivals"]
        ]
        if not of:
            continue
        start = min(r["scheduled"] for r in of)
        came = np.concatenate([np.asarray(r["arrivals"]) + r["sent"] - start for r in of])
        gaps = np.concatenate([np.diff(r["arrivals"]) for r in of]) * 1000
        found[variant] = {
            "load": f"{top:g}/s" if of[0]["rate"] is not None else f"{top:g}",
            "ttft": _quantiles(np.array([r["first_token"] - r["scheduled"] for r in of]) * 1000),
            "itl": _quantiles(gaps),
            "tokens": np.bincount(came.astype(int))[:MAX_SECONDS].tolist(),
            "queue": _queue(load / "server.parquet", variant, start),
        }
    return found


def figures(found: Mapping[str, Any]) -> list[Block]:
    """The plots of `curves`; those without data are left out."""
    blocks: list[Block] = []
    ranks = (np.arange(POINTS) / (POINTS - 1) * 100).tolist()
    for key, name, log in (("ttft", "Time to first token", False), ("itl", "Time between chunks of text", True)):
        lines = [
            Series(f"{v}, load {c['load']}", c[key], ranks, marks=False, style=i)
            for i, (v, c) in enumerate(found.items())
            if c[key]
        ]
        title = f"{name}: share of {'requests' if key == 'ttft' else 'chunks'} that waited at most this long"
        _add(blocks, f"{key}-distribution", lines, Axis("ms", log=log), Axis("%", ticks=(0, 25, 50, 75, 100)), title)
    lines = [
        Series(f"{v}, load {c['load']}", list(range(len(c["tokens"]))), c["tokens"], marks=False, style=i)
        for i, (v, c) in enumerate(found.items())
    ]
    _add(blocks, "tokens-time", lines, Axis("seconds"), Axis("chunks of text a second"), "The highest load over time")
    lines = [
        Series(f"{v}, {name}", [q[0] for q in c["queue"]], [q[at] for q in c["queue"]], style=i, thin=at == 2)
        for i, (v, c) in enumerate(found.items())
        for at, name in ((1, "waiting"), (2, "running"))
        if c["queue"]
    ]
    title = "Requests waiting and running in the server at the highest load"
    _add(blocks, "queue-time", lines, Axis("seconds"), Axis("requests"), title)
    return blocks


def _add(blocks: list[Block], name: str, lines: Sequence[Series], x: Axis, y: Axis, title: str) -> None:
    svg = plots.line_chart(lines, x=x, y=y, title=title) if lines else ""
    if svg:
        blocks.append(Figure(name, svg, title))


def _quantiles(values: "np.ndarray[Any, np.dtype[np.float64]]") -> list[float]:
    if not len(values):
        return []
    found: list[float] = np.percentile(values, np.linspace(0, 100, POINTS)).tolist()
    return found


def _queue(path: Path, variant: str, start: float) -> list[list[float]]:
    if not path.is_file():
        return []
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [r for r in pq.read_table(path).to_pylist() if r["variant"] == variant]
    last = [r for r in rows if r["load"] == rows[-1]["load"]]
    return [[round(r["at"] - start, 2), r["waiting"], r["running"]] for r in last if r["at"] >= start]
