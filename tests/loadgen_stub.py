"""A streaming OpenAI endpoint with known delays that says when it really sent what: python loadgen_stub.py PORT.

The model's name is the plan, as JSON: {"first_ms": 50, "gap_ms": 10, "chunks": 8, "tokens_per_chunk": 1,
"fail": null}. `fail` is one of http503, error_event, cut, empty, hang, close, garbage, json, no_done.
GET /stub/log gives, per request, the milliseconds from the request's arrival to each chunk. Run under uvloop so
that its timers are within a fraction of a millisecond; a stub that is late would be blamed on the client.
"""

import asyncio
import json
import sys
import time

import uvloop

LOG: list[list[float]] = []
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: object) -> bytes:
    return framed(b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n")


def delta(text: str | None = None, **more: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, **more}]})


def plain(status: int, value: object) -> bytes:
    data = json.dumps(value).encode()
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
    return head + data


async def until(when: float) -> None:
    """Sleep, then spin the last fraction of a millisecond."""
    wait = when - time.perf_counter() - 0.0015
    if wait > 0:
        await asyncio.sleep(wait)
    while time.perf_counter() < when:
        await asyncio.sleep(0)


async def answer(writer: asyncio.StreamWriter, plan: dict, arrived: float) -> bool:
    """Play one plan; False closes the connection."""
    fail = plan.get("fail")
    if fail == "http503":
        writer.write(plain(503, {"error": {"message": "overloaded", "code": 503}}))
        return True
    if fail == "json":
        writer.write(plain(200, {"choices": [{"message": {"content": "hi"}}]}))
        return True
    if fail == "close":
        return False
    if fail == "garbage":
        writer.write(b"SSH-2.0-OpenSSH_9\r\n\r\n")
        return False
    log: list[float] = []
    LOG.append(log)
    writer.write(HEAD + event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    if fail == "hang":
        await asyncio.sleep(30)
        return False
    per = plan.get("tokens_per_chunk", 1)
    sent = 0
    if fail != "empty":
        for i in range(plan["chunks"]):
            await until(arrived + (plan["first_ms"] + i * plan["gap_ms"]) / 1000)
            log.append((time.perf_counter() - arrived) * 1000)
            writer.write(delta(" tok" * per))
            sent += per
            if i == 1 and fail == "cut":
                return False
            if i == 1 and fail == "error_event":
                writer.write(event({"error": {"message": "engine died", "code": 500}}))
                writer.write(event(b"[DONE]") + b"0\r\n\r\n")
                return True
    writer.write(delta(finish_reason="length"))
    writer.write(event({"choices": [], "usage": {"prompt_tokens": plan.get("prompt", 7), "completion_tokens": sent}}))
    writer.write((b"" if fail == "no_done" else event(b"[DONE]")) + b"0\r\n\r\n")
    return True


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-len")), 0)
            asked = await reader.readexactly(length)
            arrived = time.perf_counter()
            if head.startswith("GET"):
                writer.write(plain(200, LOG if "/stub/log" in head else {"data": [{"id": "stub"}]}))
            elif not await answer(writer, json.loads(json.loads(asked)["model"]), arrived):
                return
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
