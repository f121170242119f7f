"""Drives one client's share of a level, and says how well the client itself kept up.

A Driver runs in a thread of the load test's own process or as a Ray actor; either way another thread may ask for
its status, give the starting signal or stop it. Several start together: each warms up, says that it is ready, and
waits for the moment that `go` names.
"""

import asyncio
import gc
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from jobs.errors import UserError
from jobs.loadgen.client import Client, Request, Server
from jobs.loadgen.connection import clock
from jobs.loadgen.stats import Record

LAG_PERIOD_S = 0.01
START_DELAY_S = 0.2


@dataclass(frozen=True)
class Plan:
    """One client's share of a level.

    Closed loop: `concurrency` requests at a time. Open loop: `offsets` (seconds after the start, one per request)
    say when each is due, and `concurrency`, if given, caps how many are out; waiting for the cap counts as latency.
    """

    requests: Sequence[Request]
    concurrency: int | None = None
    offsets: Sequence[float] | None = None
    warmups: Sequence[Request] = ()
    token: str = ""  # names this run of the plan, so that an earlier run's status is not taken for this one's


@dataclass
class Outcome:
    """What a client brings back; all times are seconds since the epoch on its monotonic clock."""

    records: list[Record]
    start: float
    lag_ms: "array[float]" = field(default_factory=lambda: array("d"))
    cpu: float = 0.0  # share of one core


@dataclass(frozen=True)
class Status:
    """How far a running client is. `chunks` counts arrivals of text, about one a token."""

    ready: bool = False
    done: int = 0
    failed: int = 0
    chunks: int = 0
    ttft_ms: float | None = None  # of the latest answer
    warmup_failure: str | None = None
    token: str = ""


@dataclass
class _State:
    """What the thread that drives and the threads that ask share."""

    token: str = ""
    start: float | None = None  # seconds since the epoch, once `go` was called
    ready: bool = False
    stopped: bool = False
    done: int = 0
    failed: int = 0
    chunks: int = 0
    last: Record | None = None
    warmup_failure: str | None = None

    def count_chunk(self) -> None:
        self.chunks += 1

    def note(self, record: Record) -> None:
        self.done += 1
        self.failed += record.failure is not None
        self.last = record


class Driver:
    """One client process. `run` blocks; the other methods are for other threads.

    No method is a coroutine function: Ray would make the actor an async one and run everything in one thread.
    """

    def __init__(self, server: Server, keep_text: bool = False) -> None:
        self._server, self._keep_text = server, keep_text
        self._state = _State()

    def run(self, plan: Plan) -> Outcome:
        """Warm up, wait for `go`, send every request, and return when the last answer has ended."""
        import uvloop

        self._state = _State(plan.token)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection in the middle would show as the server's latency
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_run(self._server, plan, self._state, self._keep_text))
        finally:
            if collecting:
                gc.enable()

    def go(self, at: float) -> None:
        """Start at `at`, seconds since the epoch."""
        self._state.start = at

    def stop(self) -> None:
        """End early: what is under way is dropped."""
        self._state.stopped = True

    def status(self) -> Status:
        """How far the running plan is."""
        s = self._state
        ttft = None if s.last is None or s.last.first_token is None else (s.last.first_token - s.last.scheduled) * 1000
        return Status(s.ready, s.done, s.failed, s.chunks, ttft, s.warmup_failure, s.token)


async def _run(server: Server, plan: Plan, state: _State, keep_text: bool) -> Outcome:
    client = Client(server, on_text=state.count_chunk, keep_text=keep_text)
    work = asyncio.ensure_future(_level(client, plan, state))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=0.25)
            if state.stopped:
                work.cancel()
        return work.result() if not work.cancelled() else Outcome([], 0.0)
    finally:
        client.close()
        await asyncio.sleep(0)  # let the transports go before the loop does


async def _level(client: Client, plan: Plan, state: _State) -> Outcome:
    width = plan.concurrency or max(1, len(plan.warmups))
    warm = await _closed(client, plan.warmups, width, lambda _: None)
    state.warmup_failure = next((f"{r.failure}: {r.detail}" for r in warm if r.failure), None)
    await client.connect(min(plan.concurrency or 1, len(plan.requests)))
    state.chunks = 0
    state.ready = True
    while state.start is None:
        await asyncio.sleep(0.005)
    epoch = time.time() - clock()  # hosts differ in their monotonic clocks, not in the time of day
    await asyncio.sleep(max(0.0, state.start - epoch - clock()))
    start = max(state.start - epoch, clock())
    outcome = Outcome([], start + epoch)
    lag = asyncio.ensure_future(_sample_lag(outcome.lag_ms))
    cpu = time.process_time()
    try:
        if plan.offsets is None:
            outcome.records = await _closed(client, plan.requests, plan.concurrency or 1, state.note)
        else:
            outcome.records = await _open(client, plan, start, state.note)
    finally:
        lag.cancel()
    outcome.cpu = (time.process_time() - cpu) / max(1e-9, clock() - start)
    for record in outcome.records:
        _shift(record, epoch)
    return outcome


async def _closed(
    client: Client, requests: Sequence[Request], concurrency: int, note: Callable[[Record], None]
) -> list[Record]:
    queue = iter(requests)
    records: list[Record] = []

    async def work() -> None:
        for request in queue:
            record = await client.send(request)
            records.append(record)
            note(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
    return records


async def _open(client: Client, plan: Plan, start: float, note: Callable[[Record], None]) -> list[Record]:
    slots = asyncio.Semaphore(plan.concurrency) if plan.concurrency else None
    records: list[Record] = []

    async def one(request: Request, due: float) -> None:
        if slots is None:
            record = await client.send(request, scheduled=due)
        else:
            async with slots:
                record = await client.send(request, scheduled=due)
        records.append(record)
        note(record)

    async with asyncio.TaskGroup() as group:
        for request, offset in zip(plan.requests, plan.offsets or (), strict=True):
            due = start + offset
            wait = due - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(one(request, due))
    return records


async def _sample_lag(lag_ms: "array[float]") -> None:
    """How much later than asked the loop wakes: what a busy client adds to every time it takes."""
    while True:
        before = clock()
        await asyncio.sleep(LAG_PERIOD_S)
        lag_ms.append(max(0.0, clock() - before - LAG_PERIOD_S) * 1000)


def _shift(record: Record, by: float) -> None:
    for name in ("scheduled", "sent", "first_byte", "first_token", "last_token", "end"):
        value: float | None = getattr(record, name)
        if value is not None:
            setattr(record, name, value + by)
    record.times = array("d", [t + by for t in record.times])


@dataclass(frozen=True)
class Hand:
    """A Driver at work, wherever it runs."""

    run: Callable[[Plan], "Future[Outcome]"]
    status: Callable[[], Status]
    go: Callable[[float], None]
    stop: Callable[[], None]


def here(server: Server, *, keep_text: bool = False) -> Hand:
    """A driver in a thread of this process."""
    driver = Driver(server, keep_text)
    pool = ThreadPoolExecutor(1, thread_name_prefix="load")
    return Hand(lambda plan: pool.submit(driver.run, plan), driver.status, driver.go, driver.stop)


def on_ray(server: Server, *, keep_text: bool = False, num_cpus: float = 0.0) -> Hand:
    """A driver in an actor of its own, spread over the cluster's nodes. Ray must be initialized."""
    import ray

    remote: Any = ray.remote(Driver)
    actor = remote.options(
        num_cpus=num_cpus, max_concurrency=4, scheduling_strategy="SPREAD", name=None, max_restarts=0
    ).remote(server, keep_text)

    def stop() -> None:
        ray.kill(actor)

    return Hand(
        lambda plan: actor.run.remote(plan).future(),
        lambda: ray.get(actor.status.remote()),
        lambda at: ray.get(actor.go.remote(at)),
        stop,
    )


def drive(hands: Sequence[Hand], plans: Sequence[Plan], watch: Callable[[list[Status]], None]) -> list[Outcome]:
    """Run one level: every hand its plan, started at one moment. `watch` sees the states about twice a second."""
    token = uuid.uuid4().hex
    futures = [hand.run(replace(plan, token=token)) for hand, plan in zip(hands, plans, strict=True)]
    started = False
    while not all(f.done() for f in futures):
        states = [hand.status() for hand, f in zip(hands, futures, strict=True) if not f.done()]
        states = [s for s in states if s.token == token]  # one that has yet to begin still tells of its last level
        if not started and len(states) == len(hands) and all(s.ready for s in states):
            for hand in hands:
                hand.go(time.time() + START_DELAY_S)
            started = True
        for future in futures:
            if future.done() and future.exception() is not None:
                raise _plain(future.exception())
        watch(states)
        time.sleep(0.2 if started else 0.02)
    return [f.result() for f in futures]


def _plain(error: BaseException | None) -> BaseException:
    """A client process that ended under the load test is no bug of ours: say so in one line."""
    name = type(error).__name__
    if name in ("ActorDiedError", "ActorUnavailableError", "RayActorError", "OutOfMemoryError"):
        return UserError(f"a load client ended before its level did ({name}): is its machine out of memory?")
    return error or RuntimeError("a load client failed without saying why")
