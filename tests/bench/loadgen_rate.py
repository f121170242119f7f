"""How many streamed chunks a second one load-generator client sustains, against a stub that streams at a set rate.

    python tests/bench/loadgen_rate.py [--rates 20000,40000,60000,80000] [--clients 1] [--seconds 4] [--streams 64]
                                         [--peer]

The stub (its own processes) sends every stream's chunks on a clock of its own, one write per chunk, in events as
vLLM writes them. A rate counts as sustained when the stub kept its clock (it says how far behind it fell), the
client got every chunk, and the stream took within 1 % of the time that the stub's clock gave it.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import uvloop

from jobs.loadgen import client as http
from jobs.loadgen import runner
from jobs.loadgen.client import Request, Server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"chatcmpl-8b5d3c1f9a7e4d2b","object":"chat.completion.chunk","created":1764400000,"model":"science",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Stub(asyncio.Protocol):
    """Streams `chunks` chunks, one every `gap` seconds, after each request. All streams share one clock."""

    streams: set["Stub"] = set()  # noqa: RUF012

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if b"\r\n\r\n" in data:
            self.left = self.chunks
            self.transport.write(HEAD)  # type: ignore[attr-defined]
            Stub.streams.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        Stub.streams.discard(self)


async def stub(pipe: Pipe, *, rate: float, chunks: int) -> None:
    """Serve until told to stop. Sends in slices of 2 ms, so that timers cost nothing; reports how late it ran."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(chunks), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    one = framed(CHUNK)
    usage = framed(
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":%d}}\n\n'
        % (chunks, chunks + 9)
    )
    end = usage + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    sent, late = 0, 0.0
    started: float | None = None
    while not pipe.poll():
        if not Stub.streams:
            await asyncio.sleep(0.001)
            if started is not None and sent and not Stub.streams:
                pipe.send((sent, late, time.perf_counter() - started))
                started, sent, late = None, 0, 0.0
            continue
        if started is None:
            await asyncio.sleep(0.1)  # let every stream arrive
            started = time.perf_counter()
        due = int((time.perf_counter() - started) * rate) - sent
        for stream in list(Stub.streams):
            for _ in range(max(1, due // max(1, len(Stub.streams)))) if due > 0 else ():
                if stream.left == 0:
                    break
                stream.transport.write(one)
                stream.left -= 1
                sent += 1
            if stream.left == 0:
                stream.transport.write(end)
                Stub.streams.discard(stream)
        late = max(late, (time.perf_counter() - started) - sent / rate)
        await asyncio.sleep(0.001)


def run_stub(pipe: Pipe, rate: float, chunks: int) -> None:
    uvloop.run(stub(pipe, rate=rate, chunks=chunks))


def run_client(pipe: Pipe, port: int, streams: int) -> None:
    server = Server(f"http://127.0.0.1:{port}", "science")
    body = http.wire(server, http.body(server, "hello", output_len=1))
    hand = runner.here(server)
    plan = runner.Plan([Request(i, body, 9, 1) for i in range(streams)], concurrency=streams)
    (outcome,) = runner.drive([hand], [plan], lambda _: None)
    got = sum(len(r.times) for r in outcome.records)
    first = min(r.first_token or 0 for r in outcome.records)
    last = max(r.last_token or 0 for r in outcome.records)
    lag = sorted(outcome.lag_ms)[int(len(outcome.lag_ms) * 0.99)]
    failed = sum(r.failure is not None for r in outcome.records)
    pipe.send((got, last - first, outcome.cpu, lag, failed))
    hand.stop()


def run_vllm_client(pipe: Pipe, port: int, streams: int) -> None:
    """The same with the request function of `vllm bench serve`, in the same kind of loop."""
    import aiohttp
    from vllm.benchmarks.lib import endpoint_request_func as peer

    one = peer.RequestFuncInput(
        prompt="hello",
        api_url=f"http://127.0.0.1:{port}/v1/chat/completions",
        prompt_len=9,
        output_len=1,
        model="science",
    )

    async def load() -> None:
        connector = aiohttp.TCPConnector(limit=streams)
        lag: list[float] = []

        async def sample() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.01)
                lag.append((time.perf_counter() - before - 0.01) * 1000)

        async with aiohttp.ClientSession(connector=connector) as session:
            watch = asyncio.ensure_future(sample())
            cpu, began = time.process_time(), time.perf_counter()
            answers = await asyncio.gather(
                *[peer.async_request_openai_chat_completions(one, session) for _ in range(streams)]
            )
            spent = time.perf_counter() - began
            watch.cancel()
        first = min(a.start_time + a.ttft for a in answers)
        last = max(a.start_time + a.ttft + sum(a.itl) for a in answers)
        got = sum(len(a.itl) + 1 for a in answers)
        failed = sum(not a.success for a in answers)
        share = (time.process_time() - cpu) / spent
        pipe.send((got, last - first, share, sorted(lag)[int(len(lag) * 0.99)], failed))

    uvloop.run(load())


def measure(rate: float, *, clients: int, seconds: float, streams: int, peer: bool = False) -> dict[str, float]:
    """One client per stub, started together: what all of them got, and the worst lag and CPU."""
    chunks = max(1, int(rate / clients * seconds / streams))
    fork = multiprocessing.get_context("spawn")
    pairs = []
    for _ in range(clients):
        ours, theirs = fork.Pipe()
        serving = fork.Process(target=run_stub, args=(theirs, rate / clients, chunks), daemon=True)
        serving.start()
        pairs.append((ours, serving, ours.recv()))
    # A stub starts its clock when the first stream asks, so a client may take its time to import.
    callers = []
    for _, _, port in pairs:
        ours, theirs = fork.Pipe()
        calling = fork.Process(
            target=run_vllm_client if peer else run_client, args=(theirs, port, streams), daemon=True
        )
        calling.start()
        callers.append((ours, calling))
    got = [ours.recv() for ours, _ in callers]
    stubs = [ours.recv() for ours, _, _ in pairs]
    for ours, serving, _ in pairs:
        ours.send("stop")
        serving.join(5)
    for _, calling in callers:
        calling.join(5)
    took = max(g[1] for g in got)
    by_stub = max(s[2] for s in stubs)
    return {
        "asked": rate,
        "sent_per_s": sum(s[0] for s in stubs) / by_stub,
        "got_per_s": sum(g[0] for g in got) / took,
        "missing": sum(s[0] for s in stubs) - sum(g[0] for g in got),
        "time_off_percent": (took / by_stub - 1) * 100,
        "stub_late_ms": max(s[1] for s in stubs) * 1000,
        "client_cpu": max(g[2] for g in got),
        "client_lag_p99_ms": max(g[3] for g in got),
        "failed": sum(g[4] for g in got),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="20000,40000,60000,80000")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--peer", action="store_true", help="the client of `vllm bench serve` instead of ours")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [
        measure(float(rate), clients=asked.clients, seconds=asked.seconds, streams=asked.streams, peer=asked.peer)
        for rate in asked.rates.split(",")
    ]
    if asked.json:
        print(json.dumps(rows))
        return
    heads = list(rows[0])
    print("  ".join(h.rjust(max(len(h), 10)) for h in heads))
    for row in rows:
        print("  ".join(f"{row[h]:,.2f}".rjust(max(len(h), 10)) for h in heads))


if __name__ == "__main__":
    main()
