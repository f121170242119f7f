"""How many replicas a number of users needs, from a load test's directory, as a page for a terminal."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import capacity
from jobs.capacity import Level, Objective, Outcome
from jobs.errors import UserError
from jobs.text_page import Page


def answer(
    page: Page, where: Path, *, users: int | None, think: str, slo: str, measured: Path | None
) -> dict[str, Any]:
    """Fill `page` and return the same as plain values. `where`, `measured`: run or loadtest directories.

    Raises UserError for a load test that is missing or unfit, and for times and objectives that cannot be read.
    """
    variants, replicas, gpus = read(where)
    facts: dict[str, Any] = {"loadtest": str(where), "model": "finite-source queue, load-dependent rate"}
    page.line(f"Capacity from {where}: measured on {_count(replicas, 'replica')} of {_count(gpus, 'GPU')}")
    page.wrapped(
        "Model: finite-source queue (machine repair) with the measured, load-dependent rate of each replica, least "
        "connections between replicas, arrivals by the arrival theorem."
    )
    if users is not None:
        if users < 1:
            raise UserError(f"--users {users}: expected at least 1")
        wanted, think_s = capacity.objectives(slo), seconds(think)
        facts["answers"] = [
            _replicas(page, name, levels, wanted, users=users, think_s=think_s, gpus=gpus)
            for name, levels in variants.items()
        ]
    if measured is not None:
        facts["check"] = _check(page, variants, measured)
    if users is None and measured is None:
        raise UserError("--loadtest alone asks nothing: add --users N, or --measured RUN_DIR")
    return facts


def read(where: Path) -> tuple[dict[str, list[Level]], int, int]:
    """(levels per replica by variant, replicas, GPUs a replica) of a run, a loadtest directory or its results.json."""
    inside = [where, where / "results.json", where / "loadtest" / "results.json"]
    file = next((path for path in inside if path.is_file()), None)
    if file is None:
        raise UserError(f"{where}: no loadtest/results.json: run python -m jobs.loadtest first, or name another run")
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            name = ", ".join(f"{key} {value}" for key, value in row["variant"].items()) or "as measured"
            by_name.setdefault(name, []).append(row)
        manifest = file.parent / "manifest.json"
        serve: Mapping[str, Any] = {}
        if manifest.is_file():
            serve = json.loads(manifest.read_text(encoding="utf-8"))["config"].get("serve", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: not the results of a load test of ours: run python -m jobs.loadtest again") from None
    replicas = int(serve.get("num_replicas", 1))
    levels = {name: capacity.levels(found, replicas=replicas) for name, found in by_name.items()}
    return levels, replicas, int(serve.get("tensor_parallel_size", 1))


def seconds(text: str) -> float:
    """`20s`, `500ms`, `2m` or `20` as seconds. Raises UserError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|)\s*", text)
    if not match:
        raise UserError(f"--think-time {text!r}: expected a time like 20s, 500ms or 2m")
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "": 1}[match[2]]


def _replicas(
    page: Page,
    name: str,
    levels: Sequence[Level],
    wanted: Sequence[Objective],
    *,
    users: int,
    think_s: float,
    gpus: int,
) -> dict[str, Any]:
    best, shown = capacity.smallest(levels, wanted, users=users, think_s=think_s)
    slo = ", ".join(f"{o.metric} {o.statistic} under {o.limit_ms:g} ms" for o in wanted)
    page.section(f"{users:,} USERS, {think_s:g} s BETWEEN QUESTIONS, {slo} ({name})")
    if best is None:
        page.line("  no number of replicas meets this: a request alone on a replica already takes longer")
    else:
        page.field("replicas", f"{best.replicas}, {_count(best.replicas * gpus, 'GPU')}")
        if best.extrapolated:
            top = levels[-1].concurrency
            page.field("beware", f"its busiest moments lie beyond the {top:g} requests at once that were measured")
    keys = list(dict.fromkeys([*(o.key for o in wanted), "p99_ttft_ms", "median_e2el_ms"]))
    keys = [key for key in keys if all(key in found.times for found in shown)]
    rows = [_row(found, keys, wanted, gpus) for found in shown]
    named = [key.replace("_", " ") for key in keys]
    head = ["replicas", "GPUs", "requests/s", "at once each", "P99", *named, "objectives"]
    page.table(rows, head=head, right=tuple(range(5 + len(keys))))
    page.line("  at once each: requests in service on a replica, mean and P99; when one fails, the row above holds")
    if any(found.extrapolated for found in shown):
        page.line("  *: busier than anything that was measured")
    return {
        "variant": name,
        "users": users,
        "think_time_s": think_s,
        "objectives": [asdict(o) for o in wanted],
        "replicas": best.replicas if best else None,
        "gpus": best.replicas * gpus if best else None,
        "outcomes": [asdict(found) for found in shown],
    }


def _row(found: Outcome, keys: Sequence[str], wanted: Sequence[Objective], gpus: int) -> list[str]:
    times = [f"{found.times[key]:,.0f}" for key in keys]
    held = "met" if capacity.meets(found, wanted) else "missed"
    numbers = [f"{found.throughput:.2f}", f"{found.concurrency:.1f}", f"{found.concurrency_p99:.1f}"]
    mark = " *" if found.extrapolated else ""
    return [str(found.replicas), str(found.replicas * gpus), *numbers, *times, held + mark]


def _check(page: Page, variants: Mapping[str, Sequence[Level]], measured: Path) -> list[dict[str, Any]]:
    """Predicted from one run's levels beside another run's, closed loop: think time zero."""
    others, replicas, _ = read(measured)
    found: list[dict[str, Any]] = []
    for name, levels in variants.items():
        if name not in others:
            continue
        rows: list[list[str]] = []
        for level in others[name]:
            users = round(level.concurrency * replicas)
            guess = capacity.outcome(levels, replicas=replicas, users=users, think_s=0)
            actual = level.throughput * replicas
            row = {"concurrency": users, "predicted_rps": guess.throughput, "actual_rps": actual}
            for key in ("median_ttft_ms", "p99_ttft_ms", "median_e2el_ms"):
                row |= {f"predicted_{key}": guess.times.get(key), f"actual_{key}": level.times.get(key)}
            found.append({"variant": name, "replicas": replicas, **row})
            error = f"{100 * (guess.throughput / actual - 1):+.1f} %"
            pair = (row["predicted_median_e2el_ms"], row["actual_median_e2el_ms"])
            ends = [f"{value:,.0f}" if value is not None else "" for value in pair]
            rows.append([str(users), f"{guess.throughput:.2f}", f"{actual:.2f}", error, *ends])
        page.section(f"PREDICTED FOR {replicas} REPLICAS AND MEASURED ({name})")
        head = ["at once", "requests/s predicted", "measured", "error", "median E2EL ms predicted", "measured"]
        page.table(rows, head=head, right=(0, 1, 2, 3, 4, 5))
    if not found:
        raise UserError(f"{measured}: no variant in common with the first load test ({', '.join(variants)})")
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
