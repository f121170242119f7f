"""95 % intervals of a level's figures, by the bootstrap over its requests.

They say how far the figure would move if the same level were run again, as far as its own requests can tell; what
changes between runs of a whole machine they do not know. Requests that shared a batch are not quite independent.
"""

from collections.abc import Sequence

import numpy as np

from jobs.loadgen.stats import Floats, Record, samples

RESAMPLES = 1000
MOST_DRAWS = 4_000_000
FEWEST = 8
P99_NEEDS = 368
"""Requests from which the largest bounds the P99 from above in 97.5 % of runs: 0.99^368 = 0.025."""


def bootstrap(records: Sequence[Record], *, seed: Sequence[int], closed: bool) -> dict[str, list[float]]:
    """{figure: [low, high]} for mean, median, P90 and P99 of TTFT, TPOT and E2EL in ms, and, closed loop, tokens/s.

    Throughput follows Little's law: at a fixed concurrency it is tokens per request over time per request. Empty
    under FEWEST requests.
    """
    good = [r for r in records if r.failure is None and r.first_token is not None and r.last_token is not None]
    if len(good) < FEWEST:
        return {}
    rng = np.random.default_rng(list(seed))
    found: dict[str, list[float]] = {}
    values = samples(good)
    for name in ("ttft", "tpot", "e2el"):
        flat = np.concatenate(values[name]) if values[name] else np.empty(0)
        if len(flat) >= FEWEST:
            drawn = flat[_draws(rng, len(flat))]
            found[f"mean_{name}_ms"] = _middle(drawn.mean(axis=1))
            ranks = np.percentile(drawn, [50, 90, 99], axis=1)
            for key, row in zip(("median", "p90", "p99"), ranks, strict=True):
                found[f"{key}_{name}_ms"] = _middle(row)
    if closed and all(r.completion_tokens is not None for r in good):
        tokens = np.array([r.completion_tokens for r in good], float)
        spent = np.array([r.end - r.scheduled for r in good], float)
        duration = max(r.end for r in records) - min(r.scheduled for r in records)
        draw = _draws(rng, len(good))
        ratio = (tokens[draw].sum(axis=1) / spent[draw].sum(axis=1)) / (tokens.sum() / spent.sum())
        found["output_throughput"] = _middle(ratio * tokens.sum() / duration)
    return found


def too_short_for_p99(completed: int) -> bool:
    """Whether the level's P99 rests on its one or two slowest requests."""
    return 0 < completed < P99_NEEDS


def _draws(rng: np.random.Generator, size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    return rng.integers(0, size, size=(max(200, min(RESAMPLES, MOST_DRAWS // size)), size))


def _middle(drawn: Floats) -> list[float]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return [float(low), float(high)]
