"""Service-level targets like `ttft_p99<500ms,tpot_p99<50ms`: parse, judge, and search for the most load within them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")
AT = ("mean", "median", "p90", "p99")
FINE_ENOUGH = 1.1
MAX_STEPS = 14


@dataclass(frozen=True)
class Target:
    """One limit: `metric` at mean, median, p90 or p99 of a level stays under `limit_ms`."""

    metric: str
    at: str
    limit_ms: float

    @property
    def key(self) -> str:
        """The figure's name in results.json."""
        return f"{self.at}_{self.metric}_ms"

    def __str__(self) -> str:
        return f"{self.metric}_{self.at}<{self.limit_ms:g}ms"


def parse(text: str) -> list[Target]:
    """Targets of a comma-separated list; ValueError says which part is wrong."""
    targets: list[Target] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([a-z0-9]+)_([a-z0-9]+)\s*<=?\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
        if found is None or found[1] not in METRICS or found[2] not in AT:
            raise ValueError(
                f"{part.strip()!r} is no target: write METRIC_AT<LIMIT with one of {', '.join(METRICS)}, one of "
                f"{', '.join(AT)} and a limit in ms or s, like ttft_p99<500ms,tpot_p99<50ms"
            )
        targets.append(Target(found[1], found[2], float(found[3]) * (1000 if found[4] == "s" else 1)))
    return targets


def broken(figures: Mapping[str, Any], targets: Sequence[Target]) -> list[str]:
    """Which targets a level misses, in words. A failed request, or a figure that is not known, is a miss too."""
    missed = ["some requests failed"] if figures["failed"] else []
    for target in targets:
        value = figures[target.key]
        if value is None:
            missed.append(f"{target.key} is not known")
        elif value >= target.limit_ms:
            missed.append(f"{target.metric} {target.at} is {value:,.0f} ms, over {target.limit_ms:,.0f}")
    return missed


def goodput(times: Mapping[str, Sequence[float | None]], targets: Sequence[Target], *, duration: float) -> float:
    """Requests per second that met every limit by themselves; `times` has one value a request, ms, per metric.

    A request without a value for a metric (TPOT of a one-token answer) meets that metric's limit.
    """
    count = len(times["ttft"])
    good = sum(all((value := times[t.metric][i]) is None or value < t.limit_ms for t in targets) for i in range(count))
    return good / duration if duration > 0 else 0.0


def search(meets: Callable[[float], bool], *, start: float, whole: bool = False) -> float | None:
    """The highest load that meets the targets, to within 10 %; None when even the smallest tried does not.

    Doubles from `start` until a load misses (halves, when `start` itself does), then bisects in proportion. `whole`
    tries whole numbers only. `meets` is called at most MAX_STEPS times.
    """
    low, high = None, None
    at = start
    for _ in range(MAX_STEPS):
        if meets(at):
            low = at
        else:
            high = at
        if low is None:
            at = at / 2
            if whole and at < 1:
                return None
        elif high is None:
            at = at * 2
        else:
            if high / low <= FINE_ENOUGH or (whole and high - low <= 1):
                return low
            at = (low * high) ** 0.5
        if whole:
            at = max(1.0, float(round(at)))
            if low is not None and high is not None:
                at = min(max(at, low + 1), high - 1)
    return low
