"""How many replicas: from what each engine says about its queue to a target. Pure, so it runs on recorded series.

The set point is the number of waiting requests per replica. Up goes by the queue alone and at once; down needs every
replica to have reported, an empty queue, and that the running requests would fit into one replica less, for the
whole delay. So a square wave moves the target once up and once down per period, and a replica that has not
reported yet (it starts, or its metrics are late) counts as unknown, never as idle.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Policy:
    """Limits and set points. `slots` is an engine's max_num_seqs."""

    min_replicas: int
    max_replicas: int
    waiting_per_replica: float
    slots: int
    scale_down_delay_s: float


@dataclass(frozen=True)
class Seen:
    """What one replica reported last."""

    running: float
    waiting: float


def target(
    policy: Policy, *, current: int, seen: Sequence[Seen], queued: float, quiet_since: float | None, now: float
) -> tuple[int, float | None]:
    """The number of replicas to have, and since when fewer would do (None: they would not).

    `current` replicas are wanted already, of which those in `seen` have reported; `queued` requests wait in front of
    all replicas (Serve's own count, which matters at zero). Times are seconds of any one clock.
    """
    waiting = sum(s.waiting for s in seen) + queued
    running = sum(s.running for s in seen)
    if waiting > policy.waiting_per_replica * current:
        return _bounded(policy, math.ceil(waiting / policy.waiting_per_replica)), None
    fewer = max(policy.min_replicas, math.ceil(running / policy.slots))
    if len(seen) < current or waiting > 0 or fewer >= current:
        return _bounded(policy, current), None
    since = now if quiet_since is None else quiet_since
    if now - since < policy.scale_down_delay_s:
        return current, since
    return _bounded(policy, fewer), None


class QueueDepth:
    """`target` as Ray Serve calls a policy: with the deployment's metrics, in the controller."""

    def __init__(self, **settings: float) -> None:
        self._policy = Policy(
            min_replicas=int(settings["min_replicas"]),
            max_replicas=int(settings["max_replicas"]),
            waiting_per_replica=settings["waiting_per_replica"],
            slots=int(settings["slots"]),
            scale_down_delay_s=settings["scale_down_delay_s"],
        )

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        metrics = ctx.raw_metrics or {}
        newest = {
            name: {replica: series[-1].value for replica, series in (metrics.get(name) or {}).items() if series}
            for name in ("waiting", "running")
        }
        live = set(ctx.running_replicas)
        reported = newest["waiting"].keys() & newest["running"].keys() & live
        replicas, quiet_since = target(
            self._policy,
            current=ctx.target_num_replicas,
            seen=[Seen(running=newest["running"][r], waiting=newest["waiting"][r]) for r in reported],
            queued=float(ctx.total_queued_requests or 0),
            quiet_since=(ctx.policy_state or {}).get("quiet_since"),
            now=time.time(),  # the state outlives a controller, and with it any monotonic clock
        )
        return replicas, {"quiet_since": quiet_since}


def _bounded(policy: Policy, replicas: int) -> int:
    return min(policy.max_replicas, max(policy.min_replicas, replicas))
