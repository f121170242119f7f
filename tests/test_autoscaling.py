"""The autoscaling policy on series whose right answers are plain."""

import math

import pytest

from serve_app.autoscaling import Policy, Seen, target

POLICY = Policy(min_replicas=1, max_replicas=4, waiting_per_replica=4, slots=2, scale_down_delay_s=10)


def decide(
    current: int, seen: list[Seen], *, queued: float = 0, quiet: float | None = None, now: float = 0, **limits: int
) -> int:
    policy = Policy(**{**POLICY.__dict__, **limits})
    return target(policy, current=current, seen=seen, queued=queued, quiet_since=quiet, now=now)[0]


@pytest.mark.parametrize(("waiting", "replicas"), [(0, 1), (4, 1), (5, 2), (8, 2), (9, 3), (100, 4)])
def test_the_queue_over_the_set_point_rounded_up_within_the_limits(waiting: int, replicas: int) -> None:
    assert decide(1, [Seen(running=2, waiting=waiting)]) == replicas


def test_at_zero_one_waiting_request_wakes_one_replica() -> None:
    assert decide(0, [], min_replicas=0) == 0
    assert decide(0, [], queued=1, min_replicas=0) == 1


def test_a_replica_that_has_not_reported_is_unknown_and_keeps_the_others_up() -> None:
    idle = Seen(running=0, waiting=0)
    assert decide(3, [idle, idle], quiet=0, now=100) == 3
    assert decide(3, [idle, idle, idle], quiet=0, now=100) == 1


def test_running_requests_keep_the_replicas_that_they_need() -> None:
    assert decide(3, [Seen(2, 0), Seen(1, 0), Seen(0, 0)], quiet=0, now=100) == 2


def test_idle_to_zero_only_after_the_whole_delay() -> None:
    assert decide(1, [Seen(0, 0)], quiet=0, now=9.9, min_replicas=0) == 1
    assert decide(1, [Seen(0, 0)], quiet=0, now=10, min_replicas=0) == 0


@pytest.mark.parametrize("period", [8.0, 60.0])
def test_a_square_wave_turns_the_target_around_at_most_once_a_period(period: float) -> None:
    targets: list[int] = []
    current, quiet = 1, None
    for tick in range(int(6 * period)):
        waiting = 12.0 if (tick % period) < period / 2 else 0.0
        seen = [Seen(running=2 if waiting else 0, waiting=waiting / current) for _ in range(current)]
        current, quiet = target(POLICY, current=current, seen=seen, queued=0, quiet_since=quiet, now=float(tick))
        assert current <= max(targets[-1] if targets else 1, math.ceil(waiting / POLICY.waiting_per_replica))
        targets.append(current)
    moves = [b - a for a, b in zip(targets, targets[1:], strict=False) if a != b]
    downs = sum(move < 0 for move in moves)
    assert downs <= 6
    assert max(targets) == 3
    if period < POLICY.scale_down_delay_s:
        assert downs == 0  # shorter than the delay: it stays up
