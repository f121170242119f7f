"""The client against a server that fails in every way that ours can, and against the real service."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from serve_app.client import Client, CutOff
from tests.conftest import Server

MESSAGES = [{"role": "user", "content": "Name a colour."}]
WHOLE = {
    "id": "1", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "blue"}}],
}  # fmt: skip


def chunk(text: str, finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    value = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class Stub(ThreadingHTTPServer):
    """Plays `script`, one entry a request: a status, or the parts of a streamed body; "cut" breaks it off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = []
        self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        step = self.server.script[min(self.server.requests, len(self.server.script) - 1)]
        self.server.requests += 1
        if step == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif isinstance(step, int):
            body = json.dumps(WHOLE if step == 200 else {"error": {"message": "no", "code": step}}).encode()
            self.send_response(step)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            if step == 429:
                self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in step:
                if part == "cut":
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("trouble", [429, 500, 503, "drop"])
def test_what_a_later_try_can_put_right_is_tried_again(stub: Stub, trouble: Any) -> None:
    stub.script = [trouble, trouble, 200]
    assert Client(stub.url).chat(MESSAGES, model="m").choices[0].message.content == "blue"
    assert stub.requests == 3


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422])
def test_a_mistake_in_the_request_is_sent_once(stub: Stub, status: int) -> None:
    stub.script = [status]
    with pytest.raises(openai.APIStatusError) as caught:
        Client(stub.url).chat(MESSAGES, model="m")
    assert (caught.value.status_code, stub.requests) == (status, 1)


def test_tries_are_bounded(stub: Stub) -> None:
    stub.script = [429]
    with pytest.raises(openai.RateLimitError):
        Client(stub.url, retries=2).chat(MESSAGES, model="m")
    assert stub.requests == 3


def test_a_timeout_is_not_tried_again() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(openai.APITimeoutError):
            Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3).chat(MESSAGES, model="m")


def test_a_whole_stream_is_handed_on(stub: Stub) -> None:
    stub.script = [[chunk("bl"), chunk("ue", "stop"), b"data: [DONE]\n\n"]]
    assert text(Client(stub.url)) == "blue"


@pytest.mark.parametrize(
    "parts",
    [
        [chunk("bl"), "cut"],
        [chunk("bl")],
        [chunk("bl"), b"data: [DONE]\n\n"],
        [chunk("bl", "stop"), chunk("gr", index=1), b"data: [DONE]\n\n"],
    ],
    ids=["connection lost", "ended", "done without an end", "one of two answers"],
)
def test_an_unfinished_stream_raises_with_what_had_arrived(stub: Stub, parts: list[Any]) -> None:
    stub.script = [parts]
    with pytest.raises(CutOff) as caught:
        text(Client(stub.url))
    assert caught.value.text.startswith("bl")
    assert stub.requests == 1  # a part was received: trying again is the caller's choice


def test_an_error_in_a_stream_raises(stub: Stub) -> None:
    stub.script = [[chunk("bl"), b'data: {"error": {"message": "engine died", "code": 500}}\n\n']]
    with pytest.raises(openai.APIError, match="engine died"):
        text(Client(stub.url))


def test_a_proxy_for_the_outside_does_not_see_requests_to_this_machine(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    stub.script = [200]
    assert Client(stub.url, retries=0).chat(MESSAGES, model="m").choices[0].message.content == "blue"


def test_the_real_service_answers_and_streams(server: Server) -> None:
    client = Client(server.url)
    assert client.models() == [server.model]
    whole = client.chat(MESSAGES, model=server.model, max_tokens=8, temperature=0).choices[0].message.content
    parts = client.stream(MESSAGES, model=server.model, max_tokens=8, temperature=0)
    assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == whole


def text(client: Client) -> str:
    return "".join(c.choices[0].delta.content or "" for c in client.stream(MESSAGES, model="m"))
