"""One variant's levels, from prompts to rows of figures."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import artifacts
from jobs.config import Config
from jobs.errors import UserError
from jobs.loadgen import arrivals, intervals, keep, slo, stats, tables
from jobs.loadgen.client import Request, Server, body, wire
from jobs.loadgen.observe import Observer, summary
from jobs.loadgen.prompts import Lexicon, Prompt, chat_file, chats, held_out, level_seed, random_prompts
from jobs.loadgen.runner import Hand, Plan, Status, drive, here, on_ray
from jobs.progress import Progress, say

STAGE = "loadtest"


def clients(config: Config, server: Server) -> list[Hand]:
    """The clients: Ray actors; a single one against a foreign server needs no cluster and stays in this process."""
    load = config.load
    closed = load.search is None and not load.rates
    count = min(load.num_clients, max(load.levels)) if closed else load.num_clients
    if config.load.endpoint is not None and count == 1:
        return [here(server, keep_text=True)]
    from cluster import local

    local.connect(config)
    return [on_ray(server, keep_text=True) for _ in range(count)]


@dataclass(frozen=True)
class Level:
    """One load: `concurrency` requests at a time (closed loop), or `rate` requests a second (open loop)."""

    concurrency: int | None = None
    rate: float | None = None


def levels(
    config: Config, server: Server, source: Lexicon, hands: Sequence[Hand], *, variant: Mapping[str, Any], place: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure each level of one variant: (a row of figures per level, a row per request).

    With load.search the levels are those that the bisection tries, in rising order. `place` is the variant's number:
    with run.seed and run.name it seeds the prompts, which no two levels share. Raises UserError where a level gets no
    answer at all.
    """
    load = config.load
    rows: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []

    def one(level: Level) -> dict[str, Any]:
        seed = level_seed(config.run.seed, config.run.name, place, len(rows))
        row, requests = _level(config, server, source, hands, variant=variant, level=level, seed=seed)
        rows.append(row)
        kept.extend(requests)
        return row

    if load.search is None:
        for level in [Level(rate=r) for r in load.rates] or [Level(concurrency=c) for c in load.levels]:
            one(level)
        return rows, kept
    by_rate = load.search == "rate"

    def meets(at: float) -> bool:
        row = one(Level(rate=at) if by_rate else Level(concurrency=int(at)))
        verdict = "within" if not row["slo_broken"] else "; ".join(row["slo_broken"])
        say(STAGE, f"{tables.variant_name(variant)}, load {tables.load_name(row)}: {verdict}")
        return not row["slo_broken"]

    start = float(load.rates[0]) if by_rate and load.rates else float(load.levels[0])
    best = slo.search(meets, start=start, whole=not by_rate)
    rows.sort(key=lambda r: r["rate"] or r["concurrency"])
    for row in rows:
        row["slo_best"] = (row["rate"] or row["concurrency"]) == best
    return rows, kept


def _level(
    config: Config,
    server: Server,
    source: Lexicon,
    hands: Sequence[Hand],
    *,
    variant: Mapping[str, Any],
    level: Level,
    seed: Sequence[int],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    load = config.load
    made = _prompts(config, source, load.num_prompts + load.num_warmups, seed)
    requests = _requests(config, server, made)
    measured, warm = requests[: load.num_prompts], requests[load.num_prompts :]
    used = hands[: min(len(hands), level.concurrency or len(hands), len(measured))]
    plans = _plans(config, level, measured, warm, clients=len(used), seed=seed)
    name = tables.load_name({"rate": level.rate, "concurrency": level.concurrency})
    with Progress(STAGE, load.num_prompts) as bar, Observer(server) as seen:
        outcomes = drive(used, plans, _watcher(bar, f"{tables.variant_name(variant)}, load {name}"))
    records = [r for o in outcomes for r in o.records]
    _count_tokens_here(records, source)
    if all(r.failure for r in records):
        raise UserError(f"{server.url}: every request at load {name} failed, the first with {_why(records[0])}")
    figures = stats.summarize(records, lag_ms=[v for o in outcomes for v in o.lag_ms], cpu=max(o.cpu for o in outcomes))
    row: dict[str, Any] = {"variant": dict(variant), "concurrency": level.concurrency, "rate": level.rate, **figures}
    row["warnings"] = stats.warnings(figures)
    row["intervals"] = intervals.bootstrap(records, seed=seed, closed=level.rate is None)
    row["p99_unsure"] = intervals.too_short_for_p99(figures["completed"])
    end = max(r.end for r in records)
    row["server"] = summary(seen.readings, start=min(o.start for o in outcomes), end=end)
    row["timeline"] = [asdict(r) for r in seen.readings]
    row["warnings"] += _cache_notes(
        row, shared=source.count([""])[0] / load.input_len if load.prompts == "random" else 1.0
    )
    row["failure_details"] = {r.failure: _why(r) for r in reversed(records) if r.failure}
    targets = slo.parse(load.slo) if load.slo else []
    row["goodput"] = slo.goodput(stats.by_request(records), targets, duration=figures["duration"]) if targets else None
    row["slo_broken"] = slo.broken(figures, targets) if targets else None
    return row, [keep.flat(r, variant=variant, concurrency=level.concurrency, rate=level.rate) for r in records]


def _cache_notes(row: Mapping[str, Any], *, shared: float) -> list[str]:
    """Random prompts should share no more than the chat template, `shared` of their tokens, with earlier ones."""
    total = row["total_input_tokens"] or 0
    rate = (row["server"] or {}).get("prefix_cache_hit_rate")
    if rate is None and row["cached_input_tokens"] is not None and total:
        rate = row["cached_input_tokens"] / total
    if rate is None or rate <= shared + 0.1:
        return []
    return [f"{rate:.0%} of the prompt tokens came from the server's prefix cache: prompts that are new take longer"]


def _prompts(config: Config, source: Lexicon, count: int, seed: Sequence[int]) -> list[Prompt]:
    load = config.load
    if load.prompts == "random":
        return random_prompts(source, count=count, input_len=load.input_len, output_len=load.output_len, seed=seed)
    if load.prompts == "heldout":
        rows = held_out(artifacts.read(artifacts.location(config, "prepare")).path)
    else:
        rows = chat_file(Path(load.prompts))
    return chats(rows, count=count, output_len=load.output_len, seed=seed)


def _plans(
    config: Config,
    level: Level,
    measured: Sequence[Request],
    warm: Sequence[Request],
    *,
    clients: int,
    seed: Sequence[int],
) -> list[Plan]:
    """The level dealt out to the clients in turn."""
    load = config.load
    cap, due = level.concurrency, None
    if level.rate is not None:
        cap = load.max_concurrency
        due = arrivals.offsets(
            load.arrivals, count=len(measured), rate=level.rate, seed=[*seed, 1], burstiness=load.burstiness
        )
    return [
        Plan(
            measured[i::clients],
            concurrency=None if cap is None else max(1, len(range(i, cap, clients))),
            offsets=None if due is None else due[i::clients],
            warmups=warm[i::clients],
        )
        for i in range(clients)
    ]


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
