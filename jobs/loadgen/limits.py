"""Where a variant stops gaining from more load, and what stops it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.loadgen import tables

GAIN = 0.2
"""Below this share of the proportional gain in tokens/s from one load to the next, the first is called the knee."""
FULL = 0.95


def knee(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Index of the level after which tokens/s hardly rise, of one variant's levels in rising order; None: none."""
    for i in range(len(rows) - 1):
        here, there = rows[i], rows[i + 1]
        if not here["output_throughput"] or there["output_throughput"] is None:
            continue
        more = (there.get("rate") or there["concurrency"]) / (here.get("rate") or here["concurrency"]) - 1
        gained = there["output_throughput"] / here["output_throughput"] - 1
        if more > 0 and gained < GAIN * more:
            return i
    return None


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where one variant saturates and why, as far as its own figures and the server's tell."""
    name = tables.variant_name(rows[0]["variant"])
    at = knee(rows)
    if at is None:
        return f"{name}: not saturated up to load {tables.load_name(rows[-1])}; it was still gaining tokens/s there."
    here, there = rows[at], rows[at + 1]
    said = there.get("server") or {}
    ran, waited = said.get("running_max"), said.get("queue_depth_mean")
    if there["client_saturated"]:
        why = "the load client was too slow there, so this may not be the server's limit"
    elif said.get("kv_cache_max") is not None and said["kv_cache_max"] >= FULL:
        why = "the KV cache is full"
    elif ran and waited and waited >= 0.5:
        why = f"requests wait while {ran:.0f} run, so seats (max_num_seqs) are the limit"
    elif here["median_tpot_ms"] and there["median_tpot_ms"]:
        why = (
            f"each token takes longer ({tables.number(here['median_tpot_ms'])} to "
            f"{tables.number(there['median_tpot_ms'])} ms), so computation is the limit"
        )
    else:
        why = "what limits it was not measured"
    return f"{name}: tokens/s hardly rise beyond load {tables.load_name(here)}; {why}."
