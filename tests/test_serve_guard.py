"""The guard in front of vLLM's application, run as a server runs it, around small applications of known behaviour."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from serve_app import auth
from serve_app.guard import ERROR_EVENT, PATHS, Guard, with_salt

CHAT = "/v1/chat/completions"
CHUNKS = [b'data: {"choices": [1]}\n\n', b'data: {"choices": [2]}\n\n', b"data: [DONE]\n\n"]


class Engine:
    """A load as the guard sees it."""

    def __init__(self, *, dead: bool = False, unfinished: int = 0) -> None:
        self.dead = dead
        self.requests = unfinished

    def unfinished(self) -> int:
        return self.requests


class Call:
    """One request through the guard, and all that came back."""

    def __init__(
        self, guard: Any, path: str = CHAT, body: Any = b"{}", *, method: str = "POST", **headers: str
    ) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        parts = body if isinstance(body, list) else [body]
        messages = [{"type": "http.request", "body": p, "more_body": i + 1 < len(parts)} for i, p in enumerate(parts)]
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs}

        async def receive() -> MutableMapping[str, Any]:
            return messages.pop(0) if messages else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message)

        asyncio.run(guard(scope, receive, send))

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent[1:])


def guard(app: Any, *, engine: Engine | None = None, **options: Any) -> Guard:
    defaults: dict[str, Any] = {
        "keys": auth.Keyring([]), "require_key": False,
        "max_requests": 4, "max_body_bytes": 1000, "body_timeout_s": 0.2,
    }  # fmt: skip
    return Guard(app, load=engine or Engine(), **(defaults | options))


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body and headers that reached it."""
    body = (await receive())["body"] if scope["method"] == "POST" else b""
    names = sorted(k.decode() for k, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps({"body": body.decode(), "headers": names}).encode()})


def streaming(chunks: list[bytes], status: int = 200) -> Any:
    """Streams as Starlette does: start, then a message per chunk, then an empty last one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


@pytest.fixture
def keys(tmp_path: Any) -> tuple[auth.Keyring, str]:
    secret = auth.add(tmp_path / "keys.json", "one")
    return auth.Keyring(auth.read(tmp_path / "keys.json")), secret


@pytest.mark.parametrize(
    "path", ["/invocations", "/docs", "/scale_elastic_ep", "/", "/v1/chat/completions/", "//health"]
)
def test_a_path_that_is_not_listed_is_404_with_and_without_a_key(path: str, keys: tuple[auth.Keyring, str]) -> None:
    ring, secret = keys
    for headers in ({}, {"authorization": f"Bearer {secret}"}):
        call = Call(guard(echo, keys=ring, require_key=True), path, **headers)
        assert (call.status, json.loads(call.body)["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_path_but_health_needs_a_key(path: str, keys: tuple[auth.Keyring, str]) -> None:
    ring, secret = keys
    locked = guard(echo, keys=ring, require_key=True)
    assert Call(locked, path).status == (200 if path == "/health" else 401)
    assert Call(locked, path, authorization=f"Bearer {secret}").status == 200
    assert Call(locked, path, authorization=f"Basic {secret}").status == (200 if path == "/health" else 401)


def test_a_required_key_is_asked_for_before_the_keys_have_arrived() -> None:
    assert Call(guard(echo, require_key=True)).status == 401


def test_a_revoked_key_is_refused_at_once(keys: tuple[auth.Keyring, str]) -> None:
    ring, secret = keys
    locked = guard(echo, keys=ring, require_key=True)
    assert Call(locked, authorization=f"Bearer {secret}").status == 200
    locked.keys = auth.Keyring([])
    call = Call(locked, authorization=f"Bearer {secret}")
    assert (call.status, call.headers["www-authenticate"]) == (401, "Bearer")
    assert secret.encode() not in call.body


def test_each_key_brings_its_own_cache_salt_which_a_client_cannot_replace(tmp_path: Any) -> None:
    secrets = [auth.add(tmp_path / "keys.json", name) for name in ("one", "two")]
    locked = guard(echo, keys=auth.Keyring(auth.read(tmp_path / "keys.json")), require_key=True)
    body = b'{"model": "m", "cache_salt": "mine"}  '
    salts = [
        json.loads(json.loads(Call(locked, CHAT, body, authorization=f"Bearer {s}").body)["body"])["cache_salt"]
        for s in secrets
    ]
    assert len({*salts, "mine"}) == 3


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"a": {"b": 1}}\n', b'{"a":"}"}', b'{"a":[1]}'])
def test_salting_changes_nothing_else(body: bytes) -> None:
    assert json.loads(with_salt(body, 'x"y')) == json.loads(body) | {"cache_salt": 'x"y'}


@pytest.mark.parametrize("body", [b"", b"[1]", b'"text"', b"{", b"\xff"])
def test_what_is_no_object_is_left_for_the_application_to_refuse(body: bytes) -> None:
    assert with_salt(body, "salt") == body


def test_a_body_over_the_limit_is_413_whether_declared_or_chunked() -> None:
    assert Call(guard(echo), CHAT, b"x" * 1000).status == 200
    assert Call(guard(echo), CHAT, b"", content_length="1001").status == 413
    assert Call(guard(echo), CHAT, [b"x" * 400] * 3).status == 413


def test_a_body_that_does_not_arrive_is_408() -> None:
    waiting = guard(echo)

    async def stalled() -> list[Any]:
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await waiting({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)
        return sent

    assert asyncio.run(stalled())[0]["status"] == 408
    assert waiting.active == 0


def test_headers_that_steer_the_server_do_not_reach_the_application() -> None:
    call = Call(guard(echo), x_request_disconnect_disabled="1", x_request_timeout_seconds="0", x_other="1")
    assert json.loads(call.body)["headers"] == ["x-other"]


def test_past_the_limit_the_answer_is_429_with_retry_after() -> None:
    engine = Engine(unfinished=3)
    gate = guard(echo, engine=engine)
    assert Call(gate).status == 200
    engine.requests = 4
    call = Call(gate)
    assert (call.status, call.headers["retry-after"]) == (429, "1")
    assert json.loads(call.body)["error"]["type"] == "rate_limit_error"
    assert Call(gate, "/v1/models", method="GET").status == 200  # what runs no model is let through


def test_a_request_holds_its_place_until_it_ends() -> None:
    gate = guard(streaming(CHUNKS))
    assert Call(gate).body == b"".join(CHUNKS)
    assert gate.active == 0


def test_the_start_of_a_response_waits_for_its_first_content() -> None:
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        order.append("made")
        await send({"type": "http.response.body", "body": CHUNKS[0], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    class Watching(list[Any]):
        def append(self, message: Any) -> None:
            order.append(message["type"])
            super().append(message)

    call = Call.__new__(Call)
    call.sent = Watching()
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        return messages.pop()

    async def send(message: Any) -> None:
        call.sent.append(message)

    asyncio.run(guard(app)({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send))
    assert order[:2] == ["made", "http.response.start"]


def test_an_engine_that_died_before_the_first_token_is_503_so_that_a_proxy_tries_elsewhere() -> None:
    error = ERROR_EVENT + b': {"message": "EngineCore", "code": 500}}\n\n'
    for app in (streaming([error, CHUNKS[-1]]), streaming([b'{"error": {}}'], status=500)):
        engine = Engine()

        async def dies(scope: Any, receive: Any, send: Any, app: Any = app, engine: Engine = engine) -> None:
            engine.dead = True
            await app(scope, receive, send)

        call = Call(guard(dies, engine=engine))
        assert (call.status, call.headers["retry-after"], len(call.sent)) == (503, "1", 2)


def test_an_error_before_the_first_token_has_its_own_status() -> None:
    error = ERROR_EVENT + b': {"message": "no", "type": "BadRequestError", "code": 400}}\n\n'
    call = Call(guard(streaming([error, CHUNKS[-1]])))
    assert (call.status, json.loads(call.body)["error"]["message"]) == (400, "no")


def test_no_done_follows_an_error_in_a_stream() -> None:
    error = ERROR_EVENT + b': {"message": "EngineCore", "code": 500}}\n\n'
    call = Call(guard(streaming([CHUNKS[0], error, CHUNKS[-1]])))
    assert call.body == CHUNKS[0] + error
    assert call.sent[-1]["more_body"] is False


def test_a_closing_replica_takes_no_new_request() -> None:
    gate = guard(echo)
    gate.closing = True
    assert Call(gate).status == 503


def test_a_key_file_keeps_no_secret_and_is_for_its_owner_only(tmp_path: Any) -> None:
    path = tmp_path / "keys.json"
    secret = auth.add(path, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text()
    with pytest.raises(ValueError, match="'one' already"):
        auth.add(path, "one")
    auth.revoke(path, "one")
    assert auth.read(path) == []
    with pytest.raises(ValueError, match="there are: none"):
        auth.revoke(path, "one")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        auth.read(path)


# vLLM's routes as of 0.29, by what becomes of them here. One that an upgrade adds is in neither list, and fails.
CLOSED = {
    "/generative_scoring", "/inference/v1/generate", "/invocations", "/is_scaling_elastic_ep", "/load", "/ping",
    "/scale_elastic_ep", "/v1/chat/completions/batch", "/v1/chat/completions/derender",
    "/v1/chat/completions/render", "/v1/completions/derender", "/v1/completions/render", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel", "/version",
}  # fmt: skip


def test_every_route_of_vllm_is_listed_as_open_or_closed() -> None:
    from vllm.entrypoints.launchers.app import build_app

    from serve_app import engine

    app = build_app(engine.parse({"model": "any", "disable_fastapi_docs": True}), ("generate",), None)
    routes = {path for route in app.routes for path in paths(route)}
    assert routes - set(PATHS) == CLOSED
    closed = guard(app)
    for path in CLOSED:
        assert {Call(closed, path, method=m).status for m in ("GET", "POST")} == {404}


def paths(route: Any) -> list[str]:
    if hasattr(route, "path"):
        return [route.path]
    inner = getattr(route, "original_router", None) or getattr(route, "router", None)
    return [path for one in inner.routes for path in paths(one)]
