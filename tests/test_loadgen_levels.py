"""Arrivals, targets and intervals: pure parts of the load generator, against theory and simulation."""

import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from jobs import config
from jobs.errors import UserError
from jobs.loadgen import arrivals, intervals, limits, prompts, slo, stats
from jobs.loadgen.stats import Record

# --- arrivals


@pytest.mark.parametrize("kind", arrivals.KINDS)
def test_due_times_rise_from_zero_and_come_again(kind: str) -> None:
    made = arrivals.offsets(kind, count=200, rate=20, seed=[1], burstiness=0.5)
    assert made[0] == 0
    assert all(a <= b for a, b in zip(made, made[1:], strict=False))
    assert made == arrivals.offsets(kind, count=200, rate=20, seed=[1], burstiness=0.5)


def test_constant_is_evenly_spaced() -> None:
    assert arrivals.offsets("constant", count=4, rate=2, seed=[0]) == [0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(("kind", "shape"), [("poisson", 1.0), ("gamma", 0.25), ("gamma", 4.0)])
def test_gaps_have_the_mean_and_spread_of_their_distribution(kind: str, shape: float) -> None:
    gaps = np.diff(arrivals.offsets(kind, count=40_000, rate=10, seed=[7], burstiness=shape))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)  # 1 for exponential gaps


def test_the_ramp_grows_in_a_straight_line_to_twice_the_mean() -> None:
    due = np.array(arrivals.offsets("ramp", count=1000, rate=10, seed=[0]))
    assert due[-1] == pytest.approx(100, rel=0.01)
    first, second = np.sum(due < 50), np.sum(due >= 50)
    assert second / first == pytest.approx(3, rel=0.02)  # areas under a line from 0: 1 to 3


# --- targets


def test_targets_are_read() -> None:
    assert slo.parse("ttft_p99<500ms, tpot_median<=0.05s") == [
        slo.Target("ttft", "p99", 500.0),
        slo.Target("tpot", "median", 50.0),
    ]


@pytest.mark.parametrize("text", ["ttft<500ms", "ttft_p95<5ms", "wait_p99<5ms", "ttft_p99<5", "ttft_p99>5ms", ""])
def test_a_wrong_target_is_named(text: str) -> None:
    with pytest.raises(UserError, match="ttft_p99<500ms"):
        config.load(None, [f"load.slo={text}"])


def test_a_search_needs_targets() -> None:
    with pytest.raises(UserError, match=r"load.search needs load.slo"):
        config.load(None, ["load.search=rate"])


def test_what_a_level_misses() -> None:
    figures = {"failed": 0, "p99_ttft_ms": 620.0, "p99_tpot_ms": 30.0, "mean_itl_ms": None}
    assert slo.broken(figures, slo.parse("ttft_p99<500ms,tpot_p99<50ms")) == ["ttft p99 is 620 ms, over 500"]
    assert slo.broken(figures, slo.parse("itl_mean<5ms")) == ["mean_itl_ms is not known"]
    assert slo.broken({**figures, "failed": 1}, slo.parse("tpot_p99<50ms")) == ["some requests failed"]


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    times = {"ttft": [100.0, 600.0, 100.0, 100.0], "tpot": [10.0, 10.0, 90.0, None]}
    targets = slo.parse("ttft_p99<500ms,tpot_p99<50ms")
    assert slo.goodput(times, targets, duration=2.0) == 1.0  # the first and the last, in two seconds


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.7, 40.0, 999.0])
def test_the_search_finds_the_limit_within_ten_percent(limit: float) -> None:
    tried: list[float] = []

    def meets(at: float) -> bool:
        tried.append(at)
        return at <= limit

    best = slo.search(meets, start=1.0)
    assert best is not None
    assert best <= limit < best * 1.11
    assert len(tried) <= slo.MAX_STEPS


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 12, 16])
def test_the_search_over_users_finds_the_whole_number(limit: int) -> None:
    assert slo.search(lambda at: at <= limit, start=4.0, whole=True) == limit


def test_nothing_meets_the_targets() -> None:
    assert slo.search(lambda _: False, start=4.0, whole=True) is None
    assert slo.search(lambda _: False, start=4.0) is None


# --- intervals


def records(waits: np.ndarray, tokens: int = 8, *, concurrency: int = 4) -> list[Record]:
    """Requests of a closed loop whose lengths are these; the first token comes at half of each."""
    free = [0.0] * concurrency
    made: list[Record] = []
    for i, wait in enumerate(waits):
        slot = int(np.argmin(free))
        start = free[slot]
        free[slot] = start + float(wait)
        r = Record(i, 1, tokens, scheduled=start, sent=start, first_token=start + wait / 2, last_token=free[slot])
        r.end, r.completion_tokens, r.prompt_tokens = free[slot], tokens, 1
        r.times = array("d", np.linspace(start + wait / 2, free[slot], tokens))
        r.chars = array("i", [1] * tokens)
        made.append(r)
    return made


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = {"mean_e2el_ms": 0, "median_ttft_ms": 0, "output_throughput": 0}
    # gamma(4) of mean 1 s: the median of half of it is 0.459 s; 4 users x 8 tokens / 1 s = 32 tokens/s
    truth = {"mean_e2el_ms": 1000.0, "median_ttft_ms": 458.9, "output_throughput": 32.0}
    for i in range(150):
        found = intervals.bootstrap(records(rng.gamma(4, 0.25, size=120)), seed=[i], closed=True)
        for key, value in truth.items():
            hits[key] += found[key][0] <= value <= found[key][1]
    assert hits["mean_e2el_ms"] / 150 > 0.88
    assert hits["median_ttft_ms"] / 150 > 0.88
    assert hits["output_throughput"] / 150 > 0.80  # the last answers leave seats empty, which lowers it a little


def test_intervals_hold_the_figure_itself_and_come_again() -> None:
    rows = records(np.random.default_rng(1).gamma(4, 0.25, size=60))
    figures = stats.summarize(rows)
    found = intervals.bootstrap(rows, seed=[1], closed=True)
    for key, (low, high) in found.items():
        assert low <= figures[key] <= high
    assert found == intervals.bootstrap(rows, seed=[1], closed=True)
    assert "output_throughput" not in intervals.bootstrap(rows, seed=[1], closed=False)


def test_a_handful_of_requests_gives_no_interval_and_no_p99() -> None:
    assert intervals.bootstrap(records(np.ones(5)), seed=[0], closed=True) == {}
    assert intervals.too_short_for_p99(64)
    assert not intervals.too_short_for_p99(1024)


# --- prompts that are real conversations


def test_conversations_come_equally_often_and_without_their_answer(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, *turns[1:], *turns]} for i in range(3)]
    file.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    chats = prompts.chat_file(file)
    assert [c.messages[-1]["role"] for c in chats] == ["user"] * 3
    assert [len(c.messages) for c in chats] == [3, 3, 3]
    made = prompts.chats(chats, count=7, output_len=9, seed=[0])
    firsts = [p.content[0]["content"] for p in made]  # type: ignore[index,call-overload]
    assert sorted(firsts.count(f"q{i}") for i in range(3)) == [2, 2, 3]
    assert made == prompts.chats(chats, count=7, output_len=9, seed=[0])


def test_a_bad_conversation_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n\n{"messages": []}\n')
    with pytest.raises(UserError, match=r"c.jsonl:3: expected"):
        prompts.chat_file(file)
    with pytest.raises(UserError, match="random, heldout or a JSONL file"):
        prompts.chat_file(tmp_path / "none.jsonl")


# --- where it saturates


def test_the_knee_is_where_more_load_stops_paying() -> None:
    def row(load: int, tokens: float, **more: object) -> dict[str, object]:
        base = {"variant": {"max_num_seqs": 4}, "concurrency": load, "output_throughput": tokens}
        return {**base, "median_tpot_ms": load * 10.0, "client_saturated": False, **more}

    rows = [row(1, 50.0), row(4, 160.0), row(16, 170.0, server={"running_max": 4.0, "queue_depth_mean": 11.0})]
    assert limits.knee(rows) == 1
    assert "beyond load 4" in limits.sentence(rows)
    assert "requests wait while 4 run" in limits.sentence(rows)
    full = {**rows[2], "server": {"running_max": 4.0, "queue_depth_mean": 11.0, "kv_cache_max": 0.99}}
    assert "the KV cache is full" in limits.sentence([*rows[:2], full])
    assert "computation is the limit" in limits.sentence([*rows[:2], {**rows[2], "server": None}])
    assert "load client" in limits.sentence([*rows[:2], {**rows[2], "client_saturated": True}])
    assert "not saturated up to load 4" in limits.sentence(rows[:2])
