"""How many replicas a number of users needs, from a load test's levels: pure arithmetic.

Model: the finite-source queue (machine-repair model) with a load-dependent rate. Each of N users thinks for Z seconds
on average, sends a request and waits for its answer; R replicas behind least-connections share the n requests in
service evenly, and together finish R·X(n/R) a second, where X is the throughput measured at each concurrency. That is
a birth-death chain with births (N-n)/Z and deaths R·X(n/R); decoding shares the engine among its sequences, and for
processor sharing the chain's answer does not depend on the distribution of the work (Baskett, Chandy, Muntz, Palacios
1975). What a request meets on arrival is the same chain with N-1 users (arrival theorem: Sevcik and Mitrani 1981), and
its time is drawn from what the load test measured at that concurrency.

Checked against a discrete-event simulation in tests/test_plan.py. Beyond the highest level measured, throughput is
taken as constant and requests as waiting in line.
"""

import functools
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.errors import UserError

METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p99")
NEGLIGIBLE = 1e-9
GRID = [(i + 0.5) / 400 for i in range(396)] + [0.99 + (i + 0.5) / 4000 for i in range(40)]  # finer in the tail
WEIGHTS = [1 / 400] * 396 + [1 / 4000] * 40


@dataclass(frozen=True)
class Level:
    """One level of a load test, per replica: concurrency, requests/s, and times as {"p99_ttft_ms": …}."""

    concurrency: float
    throughput: float
    times: Mapping[str, float]


@dataclass(frozen=True)
class Objective:
    """A service level like ttft_p99<1s: statistic `statistic` of metric `metric` stays under `limit_ms`."""

    metric: str
    statistic: str
    limit_ms: float

    @property
    def key(self) -> str:
        return f"{self.statistic}_{self.metric}_ms"


@dataclass(frozen=True)
class Outcome:
    """What `replicas` give: requests/s, requests in service per replica (mean and P99), times in ms by key, and whether
    the busiest moments lie beyond what was measured."""

    replicas: int
    throughput: float
    concurrency: float
    concurrency_p99: float
    times: Mapping[str, float]
    extrapolated: bool


def objectives(text: str) -> list[Objective]:
    """Parse `ttft_p99<1s,tpot_mean<50ms`. Raises UserError that shows the form."""
    found: list[Objective] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([a-z0-9]+)_([a-z0-9]+)\s*<=?\s*([0-9.]+)\s*(ms|s)\s*", item.lower())
        named = {"p50": "median", "avg": "mean"}
        if match:
            metric, statistic = match[1], named.get(match[2], match[2])
            if metric in METRICS and statistic in STATISTICS and match[3].count(".") <= 1 and match[3] != ".":
                found.append(Objective(metric, statistic, float(match[3]) * (1000 if match[4] == "s" else 1)))
                continue
        raise UserError(
            f"--slo {item!r}: expected METRIC_STATISTIC<TIME like ttft_p99<1s; metrics are {', '.join(METRICS)}, "
            f"statistics {', '.join(STATISTICS)}, times end in ms or s"
        )
    return found


def levels(results: Sequence[Mapping[str, Any]], *, replicas: int = 1) -> list[Level]:
    """Levels of one variant of results.json, per replica. Raises UserError where a level finished nothing."""
    found: list[Level] = []
    for row in sorted(results, key=lambda r: r["concurrency"]):
        rate = row.get("request_throughput")
        if not isinstance(rate, int | float) or rate <= 0:
            raise UserError(f"the load test's level {row['concurrency']} finished no request: measure it again")
        times = {k: float(v) for k, v in row.items() if k.endswith("_ms") and isinstance(v, int | float)}
        found.append(Level(row["concurrency"] / replicas, rate / replicas, times))
    if not found:
        raise UserError("the load test has no level: run python -m jobs.loadtest first")
    return found


def rate_at(measured: Sequence[Level], n: float) -> float:
    """Requests/s of one replica with n in service: linear between levels and from zero, constant beyond the last."""
    points = [(0.0, 0.0), *((level.concurrency, level.throughput) for level in measured)]
    if n >= points[-1][0]:
        return points[-1][1]
    place = bisect_left([x for x, _ in points], n)
    (x0, y0), (x1, y1) = points[max(0, place - 1)], points[place]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (n - x0) / (x1 - x0)


def quantiles_at(measured: Sequence[Level], metric: str, n: float) -> Sequence[float]:
    """The metric's times (ms) at the points of GRID with n in service on a replica, from the levels around n.

    Between the measured quantiles the curve is straight; it starts as far under the median as P90 lies above it, at
    most halfway to zero. Beyond the last level, times to the first token and to the end grow by the wait in line.
    """
    last = measured[-1]
    if n <= measured[0].concurrency:
        return _curve(measured[0], metric)
    if n >= last.concurrency:
        curve = _curve(last, metric)
        wait = (n - last.concurrency) / last.throughput * 1000 if metric in ("ttft", "e2el") else 0.0
        return [value + wait for value in curve]
    place = bisect_left([level.concurrency for level in measured], n)
    before, after = measured[place - 1], measured[place]
    share = (n - before.concurrency) / (after.concurrency - before.concurrency)
    both = zip(_curve(before, metric), _curve(after, metric), strict=True)
    return [a + (b - a) * share for a, b in both]


def chain(measured: Sequence[Level], *, replicas: int, users: int, think_s: float) -> list[float]:
    """Probabilities of 0, 1, … `users` requests in service."""
    if think_s <= 0:
        return [0.0] * users + [1.0]
    logs = [0.0]
    for n in range(1, users + 1):
        birth, death = (users - n + 1) / think_s, replicas * rate_at(measured, n / replicas)
        logs.append(logs[-1] + math.log(birth) - math.log(death))
    top = max(logs)
    weights = [math.exp(value - top) for value in logs]
    total = sum(weights)
    return [weight / total for weight in weights]


def outcome(measured: Sequence[Level], *, replicas: int, users: int, think_s: float) -> Outcome:
    """What `users` meet on `replicas`."""
    now = chain(measured, replicas=replicas, users=users, think_s=think_s)
    met = chain(measured, replicas=replicas, users=users - 1, think_s=think_s) if users > 1 else [1.0]
    rate = sum(p * replicas * rate_at(measured, n / replicas) for n, p in enumerate(now))
    mean = sum(p * n for n, p in enumerate(now)) / replicas
    seen, busy = 0.0, len(now) - 1
    for n, p in enumerate(now):
        seen += p
        if seen >= 0.99:
            busy = n
            break
    times: dict[str, float] = {}
    for metric in METRICS:
        if f"median_{metric}_ms" in measured[0].times:
            times |= _mixture(measured, metric, met, replicas)
    beyond = busy / replicas > measured[-1].concurrency
    return Outcome(replicas, rate, mean, busy / replicas, times, beyond)


def smallest(
    measured: Sequence[Level], wanted: Sequence[Objective], *, users: int, think_s: float
) -> tuple[Outcome | None, list[Outcome]]:
    """The fewest replicas that meet every objective (None: no number does) and it with its neighbours, for the table.

    More replicas only ever help, so the number is found by doubling and halving.
    """

    def of(replicas: int) -> Outcome:
        return outcome(measured, replicas=replicas, users=users, think_s=think_s)

    if not meets(of(users), wanted):
        return None, [of(users)]
    low, high = 0, 1
    while not meets(of(high), wanted):
        low, high = high, min(users, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(of(middle), wanted) else (middle, high)
    return of(high), [of(n) for n in (high - 1, high, high + 1) if n > 0]


def meets(found: Outcome, wanted: Sequence[Objective]) -> bool:
    """Whether every objective holds. Raises UserError for one that the load test did not measure."""
    for objective in wanted:
        if objective.key not in found.times:
            raise UserError(f"--slo: the load test has no {objective.key}; it has {', '.join(sorted(found.times))}")
    return all(found.times[objective.key] < objective.limit_ms for objective in wanted)


def _curve(level: Level, metric: str) -> tuple[float, ...]:
    try:
        return _through(*(level.times[f"{name}_{metric}_ms"] for name in ("median", "p90", "p99")))
    except KeyError as error:
        lacks = f"the load test's level {level.concurrency:g} has no {error.args[0]}"
        raise UserError(f"{lacks}: measure it again") from None


@functools.lru_cache(maxsize=1024)
def _through(middle: float, p90: float, p99: float) -> tuple[float, ...]:
    """The quantile function through three quantiles, at the points of GRID."""
    points = [(0.0, max(middle / 2, 2 * middle - p90)), (0.5, middle), (0.9, p90), (0.99, p99)]
    points.append((1.0, p99 + (p99 - p90) / 9))
    values: list[float] = []
    for u in GRID:
        place = bisect_left([x for x, _ in points], u)
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        values.append(y0 + (y1 - y0) * (u - x0) / (x1 - x0))
    return tuple(values)


def _mixture(measured: Sequence[Level], metric: str, met: Sequence[float], replicas: int) -> dict[str, float]:
    """Statistics over what a request may meet: n others in service, and the spread measured at that concurrency."""
    pairs: list[tuple[float, float]] = []
    for n, p in enumerate(met):
        if p > NEGLIGIBLE:
            curve = quantiles_at(measured, metric, max(1.0, (n + 1) / replicas))
            pairs += [(value, p * w) for value, w in zip(curve, WEIGHTS, strict=True)]
    pairs.sort()
    total = sum(w for _, w in pairs)
    found = {f"mean_{metric}_ms": sum(v * w for v, w in pairs) / total}
    for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        seen = 0.0
        for value, w in pairs:
            seen += w
            if seen >= share * total:
                found[f"{name}_{metric}_ms"] = value
                break
    return found
