"""One variant's levels, from prompts to rows of figures."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.config import Config
from jobs.errors import UserError
from jobs.loadgen import stats, tables
from jobs.loadgen.client import Request, Server, body, wire
from jobs.loadgen.prompts import Lexicon, Prompt, level_seed, random_prompts
from jobs.loadgen.runner import Hand, Plan, Status, drive, here, on_ray
from jobs.progress import Progress, say

STAGE = "loadtest"
KEY_NUMBERS = (
    "variant", "concurrency", "completed", "failed", "request_throughput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "p99_tpot_ms", "median_e2el_ms", "stopped_early", "client_saturated",
)  # fmt: skip


def clients(config: Config, server: Server) -> list[Hand]:
    """The clients: Ray actors; a single one against a foreign server needs no cluster and stays in this process."""
    count = min(config.load.num_clients, max(config.load.levels))
    if config.load.endpoint is not None and count == 1:
        return [here(server, keep_text=True)]
    from cluster import local

    local.connect(config)
    return [on_ray(server, keep_text=True) for _ in range(count)]


def levels(
    config: Config, server: Server, source: Lexicon, hands: Sequence[Hand], *, variant: Mapping[str, Any], place: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure each level of one variant: (a row of figures per level, a row per request).

    `place` is the variant's number: with run.seed and run.name it seeds the prompts, which no two levels share.
    Raises UserError where a level gets no answer at all.
    """
    load = config.load
    rows: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for step, level in enumerate(load.levels):
        made = random_prompts(
            source,
            count=load.num_prompts + load.num_warmups,
            input_len=load.input_len,
            output_len=load.output_len,
            seed=level_seed(config.run.seed, config.run.name, place, step),
        )
        requests = _requests(config, server, made)
        measured, warm = requests[: load.num_prompts], requests[load.num_prompts :]
        used = hands[: min(len(hands), level)]
        plans = [
            Plan(measured[i :: len(used)], concurrency=len(range(i, level, len(used))), warmups=warm[i :: len(used)])
            for i in range(len(used))
        ]
        with Progress(STAGE, load.num_prompts) as bar:
            outcomes = drive(used, plans, _watcher(bar, f"{tables.variant_name(variant)}, load {level}"))
        records = [r for o in outcomes for r in o.records]
        _count_tokens_here(records, source)
        if all(r.failure for r in records):
            raise UserError(f"{server.url}: every request at load {level} failed, the first with {_why(records[0])}")
        figures = stats.summarize(
            records, lag_ms=[v for o in outcomes for v in o.lag_ms], cpu=max(o.cpu for o in outcomes)
        )
        row = {"variant": dict(variant), "concurrency": level, **figures, "warnings": stats.warnings(figures)}
        row["failure_details"] = {r.failure: _why(r) for r in reversed(records) if r.failure}
        rows.append(row)
        kept += [_flat(r, variant, level) for r in records]
    return rows, kept


def key_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a level that its artifact's manifest holds."""
    return {key: row[key] for key in KEY_NUMBERS}


def write_requests(kept: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One row per request as Parquet; times are seconds since the epoch, `arrivals` seconds after `sent`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number, text, count = pa.float64(), pa.string(), pa.int32()
    times = ("scheduled", "sent", "first_byte", "first_token", "last_token", "end")
    columns: dict[str, Any] = {"variant": text, "concurrency": count, "index": count, **dict.fromkeys(times, number)}
    columns |= dict.fromkeys(("prompt_len", "output_len", "prompt_tokens", "completion_tokens", "cached_tokens"), count)
    columns |= {"estimated": pa.bool_(), **dict.fromkeys(("finish_reason", "failure", "detail"), text)}
    columns |= {"arrivals": pa.list_(number), "chars": pa.list_(count)}
    pq.write_table(pa.Table.from_pylist([dict(k) for k in kept], schema=pa.schema(list(columns.items()))), path)


def _requests(config: Config, server: Server, made: Sequence[Prompt]) -> list[Request]:
    thinking = config.model.enable_thinking
    own = config.load.endpoint is None and config.load.api == "chat" and thinking is not None
    extra: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinking}} if own else {}
    ready: list[Request] = []
    for index, p in enumerate(made):
        asked = body(server, p.content, output_len=p.output_len, ignore_eos=config.load.ignore_eos, extra=extra)
        ready.append(Request(index, wire(server, asked), p.prompt_len, p.output_len))
    return ready


def _count_tokens_here(records: Sequence[stats.Record], source: Lexicon) -> None:
    """Where the server sent no usage: the tokenizer's counts, marked as estimates; without one, none."""
    for record in records:
        if record.failure is None and record.completion_tokens is None and source.count_answer is not None:
            record.completion_tokens = source.count_answer(record.text)
            record.prompt_tokens = record.prompt_len
            record.estimated = True


def _why(record: stats.Record) -> str:
    return f"{record.failure}: {record.detail}" if record.detail else str(record.failure)


def _flat(record: stats.Record, variant: Mapping[str, Any], level: int) -> dict[str, Any]:
    names = (
        "index", "scheduled", "sent", "first_byte", "first_token", "last_token", "end", "prompt_len", "output_len",
        "prompt_tokens", "completion_tokens", "cached_tokens", "estimated", "finish_reason", "failure", "detail",
    )  # fmt: skip
    return {
        "variant": tables.variant_name(variant),
        "concurrency": level,
        **{name: getattr(record, name) for name in names},
        "arrivals": [t - record.sent for t in record.times],
        "chars": record.chars.tolist(),
    }


def _watcher(bar: Progress, name: str) -> Callable[[list[Status]], None]:
    seen: list[tuple[float, int]] = []
    told: list[str] = []

    def watch(states: list[Status]) -> None:
        trouble = next((s.warmup_failure for s in states if s.warmup_failure), None)
        if trouble is not None and not told:
            told.append(trouble)
            say(STAGE, f"{name}: a warm-up request failed with {trouble}")
        chunks = sum(s.chunks for s in states)
        seen.append((time.monotonic(), chunks))
        del seen[:-15]
        span = seen[-1][0] - seen[0][0]
        rate = f"{max(0, chunks - seen[0][1]) / span:,.0f} tok/s" if span > 0 else ""
        waits = [s.ttft_ms for s in states if s.ttft_ms is not None]
        wait = f"first token {waits[0]:,.0f} ms" if waits else ""
        failed = sum(s.failed for s in states)
        note = [name, rate, wait, f"{failed} failed" if failed else ""]
        bar.update(sum(s.done for s in states), "  ".join(part for part in note if part))

    return watch
