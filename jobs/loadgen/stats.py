"""A level's figures from its requests: pure arithmetic, no clock and no network.

The terms and result keys are those of `vllm bench serve`, with four differences that matter: tokens are the
server's own counts, never the number of chunks; a chunk that holds several tokens counts as several; E2EL ends at
the last token and starts when the request was due, not when a busy client got round to sending it; and the peak
number of concurrent requests is the true one, not the number that touched a second.
"""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAG_LIMIT_MS = 5.0
"""Above this P99 of the event loop's lag the client, not the server, may be what was measured."""

TIMED = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (90, 99)
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Record:
    """One request as the client saw it. Times are seconds on one clock; None: it never came to that.

    `times` and `chars` have one entry per chunk that carried a token: when it came, and how long its text was.
    `failure` is the kind (`connect`, `timeout`, `http 503`, `error event`, `cut off`, `empty`, ...) or None.
    """

    index: int
    prompt_len: int  # tokens asked for
    output_len: int
    scheduled: float = 0.0
    sent: float = 0.0
    first_byte: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    end: float = 0.0
    prompt_tokens: int | None = None  # the server's count
    completion_tokens: int | None = None
    estimated: bool = False  # the server sent no usage: counts are the tokenizer's
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None
    detail: str = ""
    text: str = ""  # kept only where the tokens have to be counted here
    times: "array[float]" = field(default_factory=lambda: array("d"))
    chars: "array[int]" = field(default_factory=lambda: array("i"))


def tokens_per_chunk(chars: Sequence[int], total: int | None) -> list[int]:
    """How many of `total` tokens each chunk held: one each where that adds up, else shared by length of text.

    Chunks without text are tokens that have no printable form yet; they get none when the counts do not match.
    """
    if total is None or total == len(chars):
        return [1] * len(chars)
    with_text = [i for i, c in enumerate(chars) if c > 0]
    share = [0] * len(chars)
    if not with_text:
        return share
    for i in with_text:
        share[i] = 1
    spare = total - len(with_text)
    if spare <= 0:  # fewer tokens than chunks: the server split a token's text; each chunk still is one arrival
        return share
    weight = sum(chars[i] for i in with_text)
    ideal = {i: total * chars[i] / weight for i in with_text}
    over = {i: max(0.0, ideal[i] - 1) for i in with_text}
    scale = spare / (sum(over.values()) or 1.0)
    for i in with_text:
        share[i] += math.floor(over[i] * scale)
    left = total - sum(share)
    for i in sorted(with_text, key=lambda i: over[i] * scale % 1.0, reverse=True)[:left]:
        share[i] += 1
    return share


def token_gaps(record: Record) -> list[float]:
    """Seconds between tokens after the first chunk; the gap before a chunk of m tokens counts as m equal gaps."""
    share = tokens_per_chunk(record.chars, record.completion_tokens)
    arrivals = [(t, m) for t, m in zip(record.times, share, strict=True) if m]
    gaps: list[float] = []
    for (before, _), (now, m) in zip(arrivals, arrivals[1:], strict=False):
        gaps.extend([(now - before) / m] * m)
    return gaps


def tpot(record: Record) -> float | None:
    """Seconds per token after the first, (last token - first token) / (tokens - 1); None under two tokens."""
    n = record.completion_tokens
    if n is None or n < 2 or record.first_token is None or record.last_token is None:
        return None
    return (record.last_token - record.first_token) / (n - 1)


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests between sent and end at one moment (one that ends as another starts does not overlap it)."""
    edges = sorted([(r.sent, 1) for r in records] + [(max(r.end, r.sent), -1) for r in records])
    held = peak = 0
    for _, step in edges:
        held += step
        peak = max(peak, held)
    return peak


def peak_per_second(records: Sequence[Record]) -> float:
    """Most output tokens in one second, in whole seconds counted from the first request that succeeded."""
    good = [r for r in records if r.failure is None]
    if not good:
        return 0.0
    start = min(r.sent for r in good)
    seconds: Counter[int] = Counter()
    for r in good:
        for when, tokens in zip(r.times, tokens_per_chunk(r.chars, r.completion_tokens), strict=True):
            seconds[int(when - start)] += tokens
    return float(max(seconds.values(), default=0))


def samples(records: Sequence[Record]) -> dict[str, list[Floats]]:
    """Milliseconds per finished request: one array per request for each of `TIMED` (ITL has one value a token)."""
    good = [r for r in records if r.failure is None and r.first_token is not None and r.last_token is not None]
    per_token = [tpot(r) for r in good]
    return {
        "ttft": [_ms((r.first_token or 0.0) - r.scheduled) for r in good],
        "tpot": [_ms(t) for t in per_token if t is not None],
        "itl": [np.asarray(token_gaps(r), float) * 1000 for r in good if r.completion_tokens is not None],
        "e2el": [_ms((r.last_token or 0.0) - r.scheduled) for r in good],
    }


def by_request(records: Sequence[Record]) -> dict[str, list[float | None]]:
    """Milliseconds of each finished request: TTFT, TPOT (None under two tokens), mean ITL and E2EL."""
    good = [r for r in records if r.failure is None and r.first_token is not None and r.last_token is not None]
    rows: dict[str, list[float | None]] = {name: [] for name in TIMED}
    for r in good:
        pace, gaps = tpot(r), token_gaps(r)
        rows["ttft"].append(((r.first_token or 0.0) - r.scheduled) * 1000)
        rows["tpot"].append(None if pace is None else pace * 1000)
        rows["itl"].append(sum(gaps) / len(gaps) * 1000 if gaps else None)
        rows["e2el"].append(((r.last_token or 0.0) - r.scheduled) * 1000)
    return rows


def summarize(records: Sequence[Record], *, lag_ms: Sequence[float] = (), cpu: float | None = None) -> dict[str, Any]:
    """The figures of one level: counts, tokens/s, and mean, median, P90 and P99 in milliseconds.

    `lag_ms`: the event loop's lag as the clients sampled it; `cpu`: the busiest client's share of one core.
    Times and token totals are over the requests that succeeded; failures are counted by kind beside them. A value
    that was not measured is None. Every count that is not the server's own is marked `*_estimated`.
    """
    good = [r for r in records if r.failure is None]
    start = min((r.scheduled for r in records), default=0.0)
    duration = max((r.end for r in records), default=0.0) - start
    rate = 1 / duration if duration > 0 else 0.0
    input_tokens = _total([r.prompt_tokens for r in good])
    output_tokens = _total([r.completion_tokens for r in good])
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    lag = float(np.percentile(lag_ms, 99)) if len(lag_ms) else None
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "failures": dict(Counter(r.failure for r in records if r.failure is not None).most_common()),
        "duration": duration,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "tokens_estimated": any(r.estimated for r in good),
        "request_throughput": len(good) * rate,
        "output_throughput": None if output_tokens is None else output_tokens * rate,
        "total_token_throughput": None
        if output_tokens is None or input_tokens is None
        else (input_tokens + output_tokens) * rate,
        "max_output_tokens_per_s": None if output_tokens is None else peak_per_second(records),
        "max_concurrent_requests": peak_concurrency(records),
        "stopped_early": sum(r.completion_tokens is not None and r.completion_tokens < r.output_len for r in good),
        "input_len_differs": sum(_other_length(r) for r in good),
        "cached_input_tokens": sum(cached) if cached else None,
        "client_lag_p99_ms": lag,
        "client_cpu": cpu,
        "client_saturated": lag is not None and lag > LAG_LIMIT_MS,
    }
    for name, values in samples(records).items():
        figures |= spread(name, np.concatenate(values) if values else np.empty(0))
    second = [(r.times[1] - r.times[0]) * 1000 for r in good if len(r.times) > 1]
    return figures | spread("ttst", np.asarray(second, float))


def spread(name: str, ms: Floats) -> dict[str, float | None]:
    """mean, median, P90 and P99 (linear interpolation, as numpy.percentile) of values in milliseconds."""
    keys = (f"mean_{name}_ms", f"median_{name}_ms", *(f"p{p}_{name}_ms" for p in PERCENTILES))
    if not len(ms):
        return dict.fromkeys(keys)
    ranks: list[float] = np.percentile(ms, [50, *PERCENTILES]).tolist()
    return dict(zip(keys, [float(ms.mean()), *ranks], strict=True))


def warnings(figures: dict[str, Any]) -> list[str]:
    """What a reader of a level's row must know, one plain sentence each."""
    n = figures["completed"]
    notes: list[str] = []
    if figures["failed"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in figures["failures"].items())
        notes.append(f"{figures['failed']} of {n + figures['failed']} requests failed ({kinds}): times are of the rest")
    if figures["stopped_early"]:
        notes.append(f"{figures['stopped_early']} of {n} answers stopped early, before the tokens asked for")
    if figures["input_len_differs"]:
        notes.append(
            f"prompt length differs from the one asked for in {figures['input_len_differs']} of {n} requests "
            "(by the server's count)"
        )
    if figures["total_output_tokens"] is None and n:
        notes.append("the server sent no usage: output tokens, TPOT and ITL are not known (n/a)")
    elif figures["tokens_estimated"]:
        notes.append("the server sent no usage: token counts are estimated (~) with the tokenizer")
    if figures["client_saturated"]:
        notes.append(
            f"client saturated (event-loop lag P99 {figures['client_lag_p99_ms']:.1f} ms): the server may do better; "
            "raise load.num_clients"
        )
    return notes


def _other_length(r: Record) -> bool:
    asked = r.prompt_len > 0  # 0: no length was asked for
    return asked and not r.estimated and r.prompt_tokens is not None and r.prompt_tokens != r.prompt_len


def _ms(seconds: float) -> Floats:
    return np.array([seconds * 1000.0])


def _total(counts: list[int | None]) -> int | None:
    known = [c for c in counts if c is not None]
    return sum(known) if known and len(known) == len(counts) else None
