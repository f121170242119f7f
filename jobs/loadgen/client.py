"""One streaming client of OpenAI-compatible servers, lean enough that the server is what gets measured.

Nothing is taken from the environment, so HTTP_PROXY never comes between the client and the server.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jobs.errors import UserError
from jobs.loadgen.connection import Connection, clock
from jobs.loadgen.stats import Record

IDLE_LIMIT_S = 4.0
"""An idle connection older than this is not used again: servers close theirs after 5 s, and a request in that
moment would be lost without the server having failed."""

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Server:
    """Where to send, and as whom. `url` is the base, with or without a trailing /v1."""

    url: str
    model: str
    api_key: str | None = None
    endpoint: str = "chat"
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Request:
    """One request ready to be written: `wire` is its head and body. `prompt_len`, `output_len`: tokens asked for."""

    index: int
    wire: bytes
    prompt_len: int
    output_len: int


def split_url(url: str) -> tuple[bool, str, int, str]:
    """(TLS?, host, port, path prefix) of a base URL; UserError where it is none."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise UserError(f"{url!r} is no server URL: it should look like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return parts.scheme == "https", parts.hostname, port or (443 if parts.scheme == "https" else 80), path


def wire(server: Server, body: dict[str, Any], *, path: str | None = None) -> bytes:
    """The bytes of a POST with a JSON body to the server's endpoint."""
    tls, host, port, prefix = split_url(server.url)
    name = f"[{host}]" if ":" in host else host
    authority = name if port == (443 if tls else 80) else f"{name}:{port}"
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    key = f"Authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
    head = (
        f"POST {prefix}{path or ENDPOINTS[server.endpoint]} HTTP/1.1\r\nHost: {authority}\r\n{key}"
        f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode("latin-1") + data


def body(
    server: Server,
    prompt: str | list[dict[str, Any]] | list[int],
    *,
    output_len: int,
    ignore_eos: bool = True,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON of a streaming request that asks for usage.

    `prompt`: text, chat messages, or (completions only) token ids.
    """
    asked: dict[str, Any] = {"model": server.model}
    if server.endpoint == "chat":
        asked["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        asked["prompt"] = prompt
    asked |= {"max_tokens": output_len, "stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        asked["ignore_eos"] = True
    return asked | (extra or {})


class Client:
    """A pool of kept-alive connections to one server. `on_text` is called with each chunk that carries a token."""

    def __init__(self, server: Server, *, on_text: Callable[[], None] | None = None, keep_text: bool = False) -> None:
        self.server, self.on_text, self.keep_text = server, on_text, keep_text
        tls, self._host, self._port, _ = split_url(server.url)
        self._ssl = ssl.create_default_context() if tls else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def connect(self, count: int) -> None:
        """Open connections ahead, so that the first requests do not pay for it. Failures show when they are used."""
        fresh = [self._connect() for _ in range(count - len(self._idle))]
        for made in await asyncio.gather(*fresh, return_exceptions=True):
            if isinstance(made, Connection):
                self._idle.append(made)

    async def send(self, request: Request, *, scheduled: float | None = None) -> Record:
        """Send one request and read its answer to the end. Never raises for what the server or network does."""
        record = Record(request.index, request.prompt_len, request.output_len)
        record.sent = clock()
        record.scheduled = record.sent if scheduled is None else scheduled
        connection = self._take()
        if connection is None:
            try:
                async with asyncio.timeout(self.server.timeout_s):
                    connection = await self._connect()
            except TimeoutError:
                return _failed(record, "timeout", f"no connection within {self.server.timeout_s:g} s")
            except (OSError, ssl.SSLError) as error:
                return _failed(record, "connect", str(error))
        try:
            await connection.ask(request.wire, record, self.server.timeout_s)
        except asyncio.CancelledError:
            connection.close()
            raise
        return record

    def close(self) -> None:
        """Close every connection, also those in use."""
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    def _protocol(self) -> Connection:
        return Connection(free=self._idle.append, lost=self._forget, on_text=self.on_text, keep_text=self.keep_text)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(self._protocol, self._host, self._port, ssl=self._ssl)
        self._open.add(made)
        return made

    def _take(self) -> Connection | None:
        now = clock()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_LIMIT_S:
                return connection
            connection.close()
        return None

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


def _failed(record: Record, kind: str, detail: str) -> Record:
    record.failure, record.detail, record.end = kind, detail, clock()
    return record
