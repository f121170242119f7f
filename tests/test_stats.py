"""The load test's arithmetic, against values worked out by hand and against numpy."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.loadgen import stats
from jobs.loadgen.stats import Record


def record(
    *,
    sent: float = 0.0,
    times: tuple[float, ...] = (),
    chars: tuple[int, ...] | None = None,
    tokens: int | None = None,
    scheduled: float | None = None,
    prompt_tokens: int | None = 10,
    failure: str | None = None,
    end: float | None = None,
    output_len: int = 4,
) -> Record:
    return Record(
        index=0,
        prompt_len=10,
        output_len=output_len,
        scheduled=sent if scheduled is None else scheduled,
        sent=sent,
        first_token=times[0] if times else None,
        last_token=times[-1] if times else None,
        end=end if end is not None else (times[-1] if times else sent),
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        failure=failure,
        times=array("d", times),
        chars=array("i", chars if chars is not None else (3,) * len(times)),
    )


def test_two_requests_worked_out_by_hand() -> None:
    # a: sent 0, tokens at 0.1 0.2 0.3 0.4; b: sent 0, tokens at 0.2 0.5 0.8 1.1. All ends at 1.1 s.
    a = record(times=(0.1, 0.2, 0.3, 0.4), tokens=4)
    b = record(times=(0.2, 0.5, 0.8, 1.1), tokens=4)
    f = stats.summarize([a, b])
    assert f["completed"] == 2
    assert f["failed"] == 0
    assert f["duration"] == pytest.approx(1.1)
    assert f["total_input_tokens"] == 20
    assert f["total_output_tokens"] == 8
    assert f["request_throughput"] == pytest.approx(2 / 1.1)
    assert f["output_throughput"] == pytest.approx(8 / 1.1)
    assert f["total_token_throughput"] == pytest.approx(28 / 1.1)
    assert f["max_output_tokens_per_s"] == 7  # tokens in [0, 1) of both; the eighth comes at 1.1
    assert f["max_concurrent_requests"] == 2
    assert f["mean_ttft_ms"] == pytest.approx(150)
    assert f["median_ttft_ms"] == pytest.approx(150)
    assert f["p90_ttft_ms"] == pytest.approx(190)
    assert f["p99_ttft_ms"] == pytest.approx(199)
    assert f["mean_tpot_ms"] == pytest.approx(200)  # 100 and 300
    assert f["mean_itl_ms"] == pytest.approx(200)  # three of 100, three of 300
    assert f["mean_e2el_ms"] == pytest.approx(750)
    assert f["mean_ttst_ms"] == pytest.approx(200)
    assert stats.warnings(f) == []


def test_a_chunk_of_several_tokens_counts_as_several() -> None:
    # The stream of case C21: five chunks of one token, then three of four; 17 tokens from 30 to 190 ms.
    times = (0.03, 0.04, 0.05, 0.06, 0.07, 0.11, 0.15, 0.19)
    texts = ("Let", " me", " think", " a", " bit", "Red comes from dyes", " made late in the", " season, not before")
    r = record(times=times, chars=tuple(map(len, texts)), tokens=17)
    assert stats.tokens_per_chunk(r.chars, 17) == [1, 1, 1, 1, 1, 4, 4, 4]
    assert np.allclose(stats.token_gaps(r), [0.01] * 16)
    assert stats.tpot(r) == pytest.approx(0.01)
    f = stats.summarize([r])
    assert f["mean_ttft_ms"] == pytest.approx(30)
    assert f["max_output_tokens_per_s"] == 17


def test_chunks_without_text_are_tokens_only_if_the_count_comes_out() -> None:
    assert stats.tokens_per_chunk([4, 0, 3], 3) == [1, 1, 1]  # half a character: no text yet
    assert stats.tokens_per_chunk([4, 0, 3], 2) == [1, 0, 1]
    assert stats.tokens_per_chunk([4, 4, 4], 2) == [1, 1, 1]  # fewer tokens than chunks: arrivals stay arrivals
    assert stats.tokens_per_chunk([], 5) == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 200))
def test_tokens_of_chunks_add_up(chars: list[int], more: int) -> None:
    share = stats.tokens_per_chunk(chars, len(chars) + more)
    assert sum(share) == len(chars) + more
    assert min(share) >= 1


def test_latency_counts_from_when_the_request_was_due() -> None:
    # Due at 1 s, sent at 2.5 s since the client was at its cap, first token 0.5 s later: the user waited 2 s.
    f = stats.summarize([record(scheduled=1.0, sent=2.5, times=(3.0, 3.1), tokens=2)])
    assert f["mean_ttft_ms"] == pytest.approx(2000)
    assert f["mean_e2el_ms"] == pytest.approx(2100)


def test_failures_are_counted_by_kind_and_kept_out_of_the_times() -> None:
    good = record(times=(0.1, 0.2), tokens=2, output_len=2)
    bad = [record(failure="timeout", end=60.0), record(failure="http 503", end=0.01), record(failure="http 503")]
    f = stats.summarize([good, *bad])
    assert f["failed"] == 3
    assert f["failures"] == {"http 503": 2, "timeout": 1}
    assert f["mean_ttft_ms"] == pytest.approx(100)
    assert f["duration"] == pytest.approx(60)
    assert f["total_output_tokens"] == 2
    assert stats.warnings(f) == ["3 of 4 requests failed (2 http 503, 1 timeout): times are of the rest"]


def test_nothing_succeeded_gives_none_not_zero() -> None:
    f = stats.summarize([record(failure="connect")])
    assert f["mean_ttft_ms"] is None
    assert f["p99_itl_ms"] is None
    assert f["total_output_tokens"] is None


def test_without_usage_tokens_are_unknown_never_the_number_of_chunks() -> None:
    f = stats.summarize([record(times=(0.1, 0.2), tokens=None, prompt_tokens=None)])
    assert f["total_output_tokens"] is None
    assert f["output_throughput"] is None
    assert f["mean_tpot_ms"] is None
    assert f["mean_itl_ms"] is None
    assert f["mean_ttft_ms"] == pytest.approx(100)
    assert "n/a" in stats.warnings(f)[0]


def test_short_answers_and_other_prompt_lengths_are_said() -> None:
    short = record(times=(0.1, 0.2), tokens=2)
    other = record(times=(0.1, 0.2), tokens=4, prompt_tokens=9)
    notes = stats.warnings(stats.summarize([short, other]))
    assert "1 of 2 answers stopped early" in notes[0]
    assert "prompt length differs from the one asked for in 1 of 2" in notes[1]


def test_a_lagging_client_is_marked() -> None:
    r = record(times=(0.1, 0.2), tokens=2, output_len=2)
    assert not stats.summarize([r], lag_ms=[1.0] * 100)["client_saturated"]
    f = stats.summarize([r], lag_ms=[1.0] * 90 + [40.0] * 10)
    assert f["client_saturated"]
    assert "load.num_clients" in stats.warnings(f)[0]


def test_peak_concurrency_is_the_true_one() -> None:
    # Three one after another within one second: never two at once.
    rows = [record(sent=t, times=(t + 0.05, t + 0.1), tokens=2) for t in (0.0, 0.1, 0.2)]
    assert stats.peak_concurrency(rows) == 1
    rows.append(record(sent=0.05, times=(0.06, 0.25), tokens=2))
    assert stats.peak_concurrency(rows) == 2


def test_peak_tokens_per_second_is_that_of_vllm_where_chunks_are_tokens() -> None:
    # vLLM counts in whole seconds from the first start: 2 in second 0, 3 in second 1.
    a = record(sent=100.0, times=(100.5, 101.2), tokens=2)
    b = record(sent=100.2, times=(100.9, 101.0, 101.9), tokens=3)
    assert stats.peak_per_second([a, b]) == 3.0


@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=300))
def test_spread_is_numpys(values: list[float]) -> None:
    got = stats.spread("x", np.asarray(values))
    assert got["mean_x_ms"] == pytest.approx(np.mean(values))
    assert got["median_x_ms"] == pytest.approx(np.median(values))
    assert got["p90_x_ms"] == pytest.approx(np.percentile(values, 90))
    assert got["p99_x_ms"] == pytest.approx(np.percentile(values, 99))
