"""What stands between the network and vLLM's application, as one ASGI callable.

It lets through an allow-list of paths, asks for a key, bounds and times the body, admits up to a limit, and holds
the start of a response until its first content, so that a request which an engine's death left without output can
be tried on another replica. Per streamed token it costs one call and one comparison of a prefix.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from serve_app.auth import Keyring

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# The paths that exist. True: a request runs the model, so it counts for admission and gets the key's cache salt.
PATHS: Mapping[str, bool] = {
    "/v1/chat/completions": True,
    "/v1/completions": True,
    "/v1/embeddings": True,
    "/v1/models": False,
    "/tokenize": False,
    "/detokenize": False,
    "/metrics": False,
    "/health": False,
}
OPEN = "/health"  # needs no key
ERROR_EVENT = b'data: {"error"'
DONE_EVENT = b"data: [DONE]"
# Both would change how a server in front of the application treats the request, so no client may send them.
STRIPPED = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds")


class Load(Protocol):
    """What the guard asks about the engine, at each request."""

    @property
    def dead(self) -> bool: ...

    def unfinished(self) -> int:
        """Requests in the engine, waiting and running."""
        ...


class Guard:
    """The ASGI application of a replica. `keys` may be replaced while it serves."""

    def __init__(
        self,
        app: Application,
        *,
        load: Load,
        keys: Keyring,
        require_key: bool,
        max_requests: int,
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self.keys = keys
        self.active = 0
        self.busy_since = 0.0  # time.monotonic() when the replica last went from idle to busy
        self.closing = False
        self._app = app
        self._load = load
        self._require_key = require_key
        self._max_requests = max_requests
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path: str = scope["path"]
        runs_model = PATHS.get(path)
        if runs_model is None:
            await refuse(send, 404, f"There is no path {path[:200]} here.")
            return
        salt: str | None = None
        if self._require_key and path != OPEN:
            key = self.keys.find(header(scope, b"authorization"))
            if key is None:
                await refuse(send, 401, "Send a valid API key as `Authorization: Bearer KEY`.")
                return
            salt = key.cache_salt
        if any(name in STRIPPED for name, _ in scope["headers"]):
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in STRIPPED]
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if runs_model and not await self._admit(send):
            return
        body = await self._body(scope, receive, send)
        if body is None:
            return
        if runs_model and salt is not None:
            body = with_salt(body, salt)
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in (b"content-length",)]
            scope["headers"].append((b"content-length", str(len(body)).encode()))
        await self._run(scope, receive, send, body, counts=runs_model)

    async def _admit(self, send: Send) -> bool:
        if self.closing or self._load.dead:
            await refuse(send, 503, "The engine of this replica has stopped; try again.", retry_after_s=1)
            return False
        if max(self.active, self._load.unfinished()) >= self._max_requests:
            await refuse(
                send, 429, f"The service is at its limit of {self._max_requests} requests; try again.", retry_after_s=1
            )
            return False
        return True

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> bytes | None:
        """The whole body; None when it was too large, too slow or cut off, and the client has been told."""
        limit = self._max_body_bytes
        try:
            if int(header(scope, b"content-length") or 0) > limit:
                raise OverflowError
            async with asyncio.timeout(self._body_timeout_s):
                message = await receive()
                parts: list[bytes] = [message.get("body", b"")]
                size = len(parts[0])
                while message["type"] == "http.request" and message.get("more_body"):
                    message = await receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise OverflowError
        except OverflowError:
            await refuse(send, 413, f"The request body is over the limit of {limit} bytes.", close=True)
            return None
        except TimeoutError:
            seconds = f"{self._body_timeout_s:g}"
            await refuse(send, 408, f"The request body did not arrive within {seconds} s.", close=True)
            return None
        if message["type"] == "http.disconnect":
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _run(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, body: bytes, *, counts: bool
    ) -> None:
        delivered = False

        async def replay() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        if counts and not self.active:
            self.busy_since = time.monotonic()
        self.active += counts
        try:
            await self._app(scope, replay, self._held(send))
        finally:
            self.active -= counts

    def _held(self, send: Send) -> Send:
        """`send`, but a response starts only with its first content, and no [DONE] follows an error event."""
        start: Message | None = None
        refused = failed = False

        async def held(message: Message) -> None:
            nonlocal start, refused, failed
            if message["type"] == "http.response.start":
                start = message
                return
            chunk: bytes = message.get("body", b"")
            if start is not None:
                if not chunk and message.get("more_body"):
                    return  # nothing to say yet
                begun, start = start, None
                if chunk.startswith(ERROR_EVENT) or (begun["status"] >= 500 and self._load.dead):
                    refused = True
                    await self._instead(send, chunk)
                    return
                await send(begun)
            elif refused or (failed and chunk):
                return  # vLLM sends [DONE] after an error event, which reads as a finished answer
            failed = failed or chunk.startswith(ERROR_EVENT)
            await send(message)

        return held

    async def _instead(self, send: Send, chunk: bytes) -> None:
        """An error before any output, as an ordinary HTTP error."""
        if self._load.dead:
            await refuse(send, 503, "The engine stopped before the first token; try again.", retry_after_s=1)
            return
        error = json.loads(chunk.removeprefix(b"data: "))["error"]
        await answer(send, int(error.get("code") or 500), {"error": error}, [])


def with_salt(body: bytes, salt: str) -> bytes:
    """A JSON object with `cache_salt` as its last member, without parsing it: of equal names the last one counts."""
    text = body.rstrip()
    if not text.endswith(b"}"):
        return body  # not an object: the application refuses it
    inside = text[:-1].rstrip()
    comma = b"" if inside.endswith(b"{") else b","
    return inside + comma + b'"cache_salt":' + json.dumps(salt).encode() + b"}"


def header(scope: Mapping[str, Any], name: bytes) -> bytes | None:
    """The first value of a header (lower-case name), or None."""
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


async def refuse(
    send: Send, status: int, message: str, *, retry_after_s: int | None = None, close: bool = False
) -> None:
    """Answer with an error as OpenAI shapes it."""
    kinds = {404: "NotFoundError", 401: "authentication_error", 408: "request_timeout", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "service_unavailable"}
    headers: list[tuple[bytes, bytes]] = []
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    if close:
        headers.append((b"connection", b"close"))
    error = {"message": message, "type": kinds[status], "param": None, "code": status}
    await answer(send, status, {"error": error}, headers)


async def answer(send: Send, status: int, value: Any, headers: list[tuple[bytes, bytes]]) -> None:
    """A whole JSON response."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
