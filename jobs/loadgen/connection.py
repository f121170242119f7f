"""One HTTP/1.1 connection that reads a stream of OpenAI events, and says how it went.

httptools splits the messages, msgspec reads the events; the clock, time.perf_counter, is read once per arrival of
bytes. vLLM sends [DONE] after an error event, and a dead replica leaves a body without an end: both are failures.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec

from jobs.loadgen.stats import Record

clock = time.perf_counter


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name of the field


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None  # /v1/completions
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Connection(asyncio.Protocol):
    """One connection, one request at a time. The `on_*` methods are httptools' callbacks.

    `free` is called when the answer is complete and the connection can carry another, `lost` when it is gone.
    """

    def __init__(
        self,
        *,
        free: Callable[["Connection"], None],
        lost: Callable[["Connection"], None],
        on_text: Callable[[], None] | None = None,
        keep_text: bool = False,
    ) -> None:
        self._free, self._lost = free, lost
        self.usable = False
        self.idle_since = 0.0
        self._on_text = on_text
        self._keep_text = keep_text
        self._record: Record | None = None
        self._answered: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self.usable = True
        self.idle_since = clock()

    def ask(self, wire: bytes, record: Record, timeout_s: float) -> asyncio.Future[None]:
        """Write the request; the future is done when `record` holds the outcome."""
        self._record = record
        self._timeout_s = timeout_s
        self._answered = self._loop.create_future()
        self._timer = self._loop.call_later(timeout_s, self._timed_out)
        self._status = 0
        self._events = False
        self._content_type = b""
        self._done = False
        self._rest = b""
        self._plain = b""
        self._parts: list[str] = []
        self._ended = 0.0
        record.sent = clock()
        self._transport.write(wire)
        return self._answered

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        record = self._record
        if record is None:  # nothing was asked: the server is misbehaving
            self.close()
            return
        self._now = clock()
        if record.first_byte is None:
            record.first_byte = self._now
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("bad response", f"not HTTP/1.1: {error.__cause__ or error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value.lower()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._events = self._status == 200 and not self._content_type.startswith(b"application/json")

    def on_body(self, body: bytes) -> None:
        record = self._record
        if record is None:
            return
        if not self._events:
            self._plain += body[: 4096 - len(self._plain)]
            return
        if self._rest:
            body = self._rest + body
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = body.split(b"\n\n")
        for event in events:
            self._on_event(event, record)

    def _on_event(self, event: bytes, record: Record) -> None:
        payload = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _data_of(event)
        if payload == b"[DONE]":
            self._done = True
            self._ended = self._now
            if self._timer is not None:  # a server that holds the connection open must not hold up the answer
                self._timer.cancel()
                self._timer = self._loop.call_later(1.0, self._held_open)
            return
        if not payload:
            return
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError as error:
            record.failure = record.failure or "bad response"
            record.detail = record.detail or f"unreadable event: {error}: {payload[:200]!r}"
            return
        if chunk.choices:
            choice = chunk.choices[0]
            delta = choice.delta
            if delta is not None:
                text = delta.content or delta.reasoning or delta.reasoning_content
                silent = delta.content == "" and delta.role is None and len(record.times) > 0
            else:
                text = choice.text
                silent = text == "" and len(record.times) > 0
            if text or silent:
                record.times.append(self._now)
                record.chars.append(len(text or ""))
                if self._on_text is not None:
                    self._on_text()
                if self._keep_text and text:
                    self._parts.append(text)
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
                self._ended = self._now
        if chunk.usage is not None:
            record.prompt_tokens = chunk.usage.prompt_tokens
            record.completion_tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                record.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        if chunk.error is not None or chunk.object == "error":
            record.failure = "error event"
            record.detail = _message(chunk.error if chunk.error is not None else chunk.message)

    def on_message_complete(self) -> None:
        record = self._record
        if record is None or self._status == 100:
            return
        if self._events and self._rest.strip():
            self._on_event(self._rest.strip(), record)
        if self._status != 200:
            self._finish(f"http {self._status}", _message(self._plain))
        elif not self._events:
            self._finish("no stream", f"one {self._content_type.decode('latin-1')} body instead of events")
        else:
            self._finish()
        if self._parser.should_keep_alive() and self.usable:
            self.idle_since = clock()
            self._free(self)
        else:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._lost(self)
        if self._record is None:
            return
        why = f"the connection was lost: {exc}" if exc else "the server closed the connection"
        if self._record.first_byte is None:
            self._finish("disconnected", f"{why} before any answer")
        elif self._events:
            self._finish(detail=why)
        else:
            self._finish("cut off", f"{why} within the answer")

    def _timed_out(self) -> None:
        self._fail("timeout", f"no complete answer within {self._timeout_s:g} s")

    def _held_open(self) -> None:
        self._finish()
        self.close()

    def _fail(self, kind: str, detail: str) -> None:
        self._finish(kind, detail)
        self.close()

    def _finish(self, kind: str | None = None, detail: str = "") -> None:
        record, answered = self._record, self._answered
        self._record = None
        if self._timer is not None:
            self._timer.cancel()
        if record is None or answered is None:
            return
        record.end = clock()
        _settle(record, done=self._done, ended=self._ended or record.end, kind=kind, detail=detail)
        if record.completion_tokens is None and self._parts:
            record.text = "".join(self._parts)
        if not answered.done():
            answered.set_result(None)


def _settle(record: Record, *, done: bool, ended: float, kind: str | None, detail: str) -> None:
    """First and last token, and which failure it was, once the answer is over."""
    if record.times:
        # Chunks without text are tokens only if they make the server's count come out (an end-of-turn token does).
        every = record.completion_tokens == len(record.times)
        last = len(record.times) - 1
        while not every and last > 0 and record.chars[last] == 0:
            last -= 1
        record.first_token, record.last_token = record.times[0], record.times[last]
    elif record.completion_tokens:  # tokens without any text, as when the only one is special
        record.first_token = record.last_token = ended
    if record.failure is None:
        if kind is not None:
            record.failure, record.detail = kind, detail
        elif not done:
            record.failure, record.detail = "cut off", detail or "the stream ended without [DONE]"
        elif record.first_token is None:
            record.failure, record.detail = "empty", "a finished answer without any token"


def _data_of(event: bytes) -> bytes:
    """The data of an event of several lines, or with other fields, by the rules of server-sent events."""
    lines = [line.partition(b":") for line in event.strip(b"\n").split(b"\n")]
    return b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name == b"data").strip()


def _message(found: Any) -> str:
    """The human part of an error body or event."""
    if isinstance(found, bytes):
        try:
            found = json.loads(found)
        except ValueError:
            return found.decode("utf-8", "replace").strip()[:300]
    if isinstance(found, dict):
        tree = cast(dict[str, Any], found)
        inner = tree.get("error", tree.get("message", tree))
        return _message(inner) if inner is not tree else json.dumps(tree)[:300]
    return str(found)[:300]
