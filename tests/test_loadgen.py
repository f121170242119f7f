"""The load generator against a stub server that says when it really sent what."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from jobs.errors import UserError
from jobs.loadgen import client as http
from jobs.loadgen import prompts, runner, stats
from jobs.loadgen.client import Client, Request, Server
from jobs.loadgen.stats import Record

STUB = Path(__file__).parent / "loadgen_stub.py"
PLAN = {"first_ms": 40, "gap_ms": 10, "chunks": 8}


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    """Base URL of the stub."""
    process = subprocess.Popen([sys.executable, str(STUB), "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.terminate()
    process.wait(10)


def server_for(url: str, **plan: Any) -> Server:
    return Server(url, json.dumps({**PLAN, **plan}), timeout_s=plan.pop("timeout_s", 20.0))


def requests_for(server: Server, count: int, *, output_len: int = 8) -> list[Request]:
    body = http.body(server, "hello", output_len=output_len)
    return [Request(i, http.wire(server, body), 7, output_len) for i in range(count)]


def ask(server: Server, count: int = 1) -> list[Record]:
    async def run() -> list[Record]:
        client = Client(server)
        try:
            return [await client.send(r) for r in requests_for(server, count)]
        finally:
            client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(run())


def in_quiet(check: Callable[[], None], tries: int = 6) -> None:
    """A wrong clock is wrong every time; a busy machine only sometimes. So a timed check may be repeated."""
    for _ in range(tries - 1):
        try:
            return check()
        except AssertionError:
            time.sleep(1)
    return check()


def sent_by(url: str) -> list[list[float]]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/stub/log") as answer:
        return json.load(answer)


def test_times_are_the_stubs_own_within_a_millisecond(stub: str) -> None:
    def check() -> None:
        before = len(sent_by(stub))
        got = ask(server_for(stub), 20)
        real = sent_by(stub)[before:]
        assert [r.failure for r in got] == [None] * 20
        ours = stats.samples(got)  # per request, against what the stub logged for the same request
        late_first = np.concatenate(ours["ttft"]) - [log[0] for log in real]
        late_last = np.concatenate(ours["e2el"]) - [log[-1] for log in real]
        off = np.concatenate(ours["tpot"]) / [(log[-1] - log[0]) / 7 for log in real] - 1
        for late in (late_first, late_last):  # another process can only add lateness, so the quicker half counts
            assert 0 <= np.percentile(late, 25) < 1
        assert np.median(np.abs(off)) < 0.01
        figures = stats.summarize(got)
        assert figures["mean_itl_ms"] == pytest.approx(np.mean([np.diff(log) for log in real]), abs=0.2)
        assert figures["median_ttst_ms"] == pytest.approx(np.median([log[1] - log[0] for log in real]), abs=1)
        assert figures["total_output_tokens"] == 160

    in_quiet(check)


def test_several_tokens_in_a_chunk(stub: str) -> None:
    def check() -> None:
        figures = stats.summarize(ask(server_for(stub, tokens_per_chunk=4, gap_ms=40), 3))
        assert figures["total_output_tokens"] == 96
        # 32 tokens from 40 to 320 ms: 280 / 31 each
        assert figures["median_tpot_ms"] == pytest.approx(280 / 31, rel=0.02)
        assert figures["median_itl_ms"] == pytest.approx(10, rel=0.05)

    in_quiet(check)


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        ("http503", "http 503"),
        ("error_event", "error event"),
        ("cut", "cut off"),
        ("no_done", "cut off"),
        ("empty", "empty"),
        ("close", "disconnected"),
        ("garbage", "bad response"),
        ("json", "no stream"),
    ],
)
def test_every_failure_has_its_kind(stub: str, fail: str, kind: str) -> None:
    (record,) = ask(server_for(stub, fail=fail))
    assert record.failure == kind
    assert record.detail
    assert record.end >= record.sent


def test_a_server_that_hangs_is_a_timeout(stub: str) -> None:
    server = Server(stub, json.dumps({**PLAN, "fail": "hang"}), timeout_s=0.3)
    (record,) = ask(server)
    assert record.failure == "timeout"
    assert record.end - record.sent == pytest.approx(0.3, abs=0.1)


def test_nobody_listening_is_a_connect_failure() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    (record,) = ask(Server(f"http://127.0.0.1:{port}", "x"))
    assert record.failure == "connect"


def test_a_failure_does_not_spoil_the_next_request(stub: str) -> None:
    async def run() -> list[Record]:
        bad, good = server_for(stub, fail="cut"), server_for(stub)
        client = Client(good)
        one = await client.send(requests_for(bad, 1)[0])
        two = await client.send(requests_for(good, 1)[0])
        client.close()
        return [one, two]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        assert [r.failure for r in loop.run(run())] == ["cut off", None]


def test_proxy_variables_are_not_heard(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert ask(server_for(stub))[0].failure is None


def feed(*pieces: bytes) -> Record:
    """A record of a raw HTTP answer that arrives in these pieces."""

    async def run() -> Record:
        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)
            writer.close()

        listening = await asyncio.start_server(play, "127.0.0.1", 0)
        server = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "x", timeout_s=5)
        client = Client(server, keep_text=True)
        record = await client.send(requests_for(server, 1)[0])
        client.close()
        listening.close()
        return record

    return asyncio.run(run())


CLOSE_DELIMITED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


def content(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":%s}}]}\n\n' % json.dumps(text, ensure_ascii=False).encode()


def test_events_cut_anywhere_are_put_together() -> None:
    whole = ROLE + content("h\u00e9llo \u6c34") + content(" there") + b"data: [DONE]\n\n"
    for size in (1, 7, 33):
        record = feed(CLOSE_DELIMITED, *[whole[i : i + size] for i in range(0, len(whole), size)])
        assert record.failure is None, record.detail
        assert record.text == "h\u00e9llo \u6c34 there"
        assert record.chars.tolist() == [7, 6]


def test_events_with_other_line_ends_fields_and_comments() -> None:
    sent = (
        b": ping\r\n\r\n"
        b'event: message\r\nid: 7\r\ndata:{"choices":[{"delta":{"content":"a"}}]}\r\n\r\n'
        b'data: {"choices":[\r\ndata: {"delta":{"content":"b"}}]}\r\n\r\n'
        b"data: [DONE]\r\n"  # without the blank line that the standard wants
    )
    record = feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(sent), sent)
    assert record.failure is None, record.detail
    assert record.text == "ab"


def test_the_stream_just_stops() -> None:
    record = feed(CLOSE_DELIMITED, content("a"))
    assert record.failure == "cut off"


def test_an_unreadable_event_is_a_failure() -> None:
    record = feed(CLOSE_DELIMITED, b"data: {nope\n\n", b"data: [DONE]\n\n")
    assert record.failure == "bad response"
    assert "nope" in record.detail


def test_an_answer_of_one_special_token_is_not_empty() -> None:
    record = feed(
        CLOSE_DELIMITED,
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n',
        b"data: [DONE]\n\n",
    )
    assert record.failure is None
    assert record.first_token is not None


def test_completions_endpoint_texts_are_tokens_too() -> None:
    record = feed(
        CLOSE_DELIMITED,
        b'data: {"choices":[{"index":0,"text":"one"}]}\n\n',
        b'data: {"choices":[{"index":0,"text":" two","finish_reason":"length"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    )
    assert record.text == ""
    assert record.completion_tokens == len(record.times) == 2


def test_urls() -> None:
    assert http.split_url("http://127.0.0.1:8000/v1") == (False, "127.0.0.1", 8000, "")
    assert http.split_url("https://host/api/v1/") == (True, "host", 443, "/api")
    assert http.split_url("localhost:9") == (False, "localhost", 9, "")
    with pytest.raises(UserError, match="no server URL"):
        http.split_url("ftp://x")


# --- the runner


def level(stub: str, plan: runner.Plan, **stub_plan: Any) -> runner.Outcome:
    hand = runner.here(server_for(stub, **stub_plan))
    try:
        return runner.drive([hand], [plan], lambda _: None)[0]
    finally:
        hand.stop()


def test_closed_loop_keeps_the_concurrency(stub: str) -> None:
    requests = requests_for(server_for(stub), 12)
    outcome = level(stub, runner.Plan(requests, concurrency=4, warmups=requests[:2]))
    assert sorted(r.index for r in outcome.records) == list(range(12))
    assert stats.peak_concurrency(outcome.records) == 4
    assert abs(outcome.records[0].sent - time.time()) < 60  # on the wall clock, so that hosts can be compared
    assert len(outcome.lag_ms) > 5


def test_open_loop_counts_from_the_schedule(stub: str) -> None:
    # Each answer takes 110 ms; four due at once behind a cap of one wait 0, 110, 220 and 330 ms before their own 40.
    requests = requests_for(server_for(stub), 4)

    def check() -> None:
        outcome = level(stub, runner.Plan(requests, concurrency=1, offsets=[0.0] * 4))
        waits = sorted((r.first_token or 0) - r.scheduled for r in outcome.records)
        assert np.allclose(np.diff(waits), 0.110, atol=0.01)
        assert waits[0] == pytest.approx(0.040, abs=0.01)

    in_quiet(check)


def test_one_client_runs_level_after_level(stub: str) -> None:
    # An earlier level's "ready" must not be taken for the next one's, or the starting signal gets lost.
    hand = runner.here(server_for(stub, first_ms=1, gap_ms=1, chunks=2))
    requests = requests_for(server_for(stub, first_ms=1, gap_ms=1, chunks=2), 2)
    for _ in range(8):
        (outcome,) = runner.drive([hand], [runner.Plan(requests, concurrency=2, warmups=requests[:1])], lambda _: None)
        assert len(outcome.records) == 2
    hand.stop()


def test_two_clients_start_together_and_share_the_load(stub: str) -> None:
    requests = requests_for(server_for(stub), 8)
    hands = [runner.here(server_for(stub)) for _ in range(2)]
    outcomes = runner.drive(
        hands, [runner.Plan(requests[i::2], concurrency=2, warmups=requests[:i]) for i in range(2)], lambda _: None
    )
    starts = [min(r.sent for r in o.records) for o in outcomes]
    assert abs(starts[0] - starts[1]) < 0.05
    assert stats.peak_concurrency([r for o in outcomes for r in o.records]) == 4


def test_stop_ends_a_level_early(stub: str) -> None:
    hand = runner.here(server_for(stub, fail="hang"))
    future = hand.run(runner.Plan(requests_for(server_for(stub, fail="hang"), 2), concurrency=2))
    while not hand.status().ready:
        time.sleep(0.01)
    hand.go(time.time())
    hand.stop()
    assert future.result(5).records == []


# --- prompts


@pytest.fixture(scope="module")
def lexicon(base_model: Path) -> prompts.Lexicon:
    return prompts.lexicon(str(base_model))


def test_random_prompts_have_the_exact_length_that_a_server_counts(lexicon: prompts.Lexicon, base_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    for length in (48, 512):
        made = prompts.random_prompts(lexicon, count=16, input_len=length, output_len=4, seed=[1])
        for prompt in made:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.content}], add_generation_prompt=True, return_dict=False
            )
            assert len(ids) == length
        assert len({str(p.content) for p in made}) == 16


def test_exact_lengths_with_qwen3s_tokenizer_and_no_thinking(qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    source = prompts.lexicon(str(qwen3), enable_thinking=False)
    for prompt in prompts.random_prompts(source, count=8, input_len=512, output_len=4, seed=[1]):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.content}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=False,
        )
        assert len(ids) == 512
    plain = prompts.lexicon(str(qwen3), chat=False)  # /v1/completions: no template, the tokenizer's own special tokens
    for prompt in prompts.random_prompts(plain, count=8, input_len=33, output_len=4, seed=[1]):
        assert len(tokenizer(prompt.content)["input_ids"]) == 33


def test_prompts_come_again_with_the_seed_and_never_across_levels(lexicon: prompts.Lexicon) -> None:
    def made(*seed: int, name: str = "a") -> list[prompts.Prompt]:
        return prompts.random_prompts(
            lexicon, count=4, input_len=64, output_len=4, seed=prompts.level_seed(0, name, *seed)
        )

    assert made(0, 0) == made(0, 0)
    seen = [str(p.content) for m in (made(0, 0), made(0, 1), made(1, 0), made(0, 0, name="b")) for p in m]
    assert len(set(seen)) == 16


def test_a_prompt_shorter_than_the_template_is_refused(lexicon: prompts.Lexicon) -> None:
    with pytest.raises(UserError, match="the chat template alone takes"):
        prompts.random_prompts(lexicon, count=1, input_len=5, output_len=4, seed=[0])


def test_without_a_tokenizer_a_word_is_a_token() -> None:
    (prompt,) = prompts.random_prompts(prompts.plain_lexicon(), count=1, input_len=20, output_len=4, seed=[0])
    assert len(str(prompt.content).split()) == 20


def test_no_tokenizer_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable tokenizer"):
        prompts.lexicon(str(tmp_path))
