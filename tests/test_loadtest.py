"""The load test as a user runs it, against stubs of known delays and the small real server."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import config, loadtest
from jobs.config import Config
from jobs.errors import UserError
from jobs.loadgen import tables
from tests.conftest import Server

ROOT = Path(__file__).parent.parent
Start = Callable[[str], str]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture
def play(cases: Path) -> Iterator[Start]:
    """Start the public stub with a scenario of tests/cases/d, or of another path; gives its URL."""
    started: list[subprocess.Popen[bytes]] = []

    def start(scenario: str) -> str:
        port = free_port()
        args = [sys.executable, str(cases / "d/stub.py"), str(cases / "d" / f"{scenario}.json"), str(port)]
        started.append(subprocess.Popen(args))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.02)
        raise AssertionError("the stub did not start")

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


def against(url: str, root: Path, *more: str) -> Config:
    models = f"model.cache={ROOT / 'models'}"
    return config.load(None, [f"load.endpoint={url}", f"run.root={root}", models, "load.num_warmups=0", *more])


def measure(url: str, root: Path, *more: str) -> dict[str, Any]:
    made = loadtest.run(against(url, root, *more))
    (row,) = json.loads((made.path / "results.json").read_text())
    return row


def seen_by_a_plain_socket(url: str, mark: bytes, count: int = 8) -> tuple[float, float]:
    """Median ms to the chunk with `mark` and to the last chunk of text, as the simplest possible client sees them.

    The stub's timers are up to a millisecond late (asyncio rounds up), which no client can undo.
    """
    host, port = url.removeprefix("http://").split(":")
    first: list[float] = []
    last: list[float] = []
    with socket.create_connection((host, int(port))) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            start = time.perf_counter()
            link.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            got, text_at, first_at = b"", 0.0, None
            while not got.endswith(b"0\r\n\r\n"):
                piece = link.recv(65536)
                now = (time.perf_counter() - start) * 1000
                got += piece
                if first_at is None and mark in got:
                    first_at = now
                if b'ent": "' in piece or b'ing": "' in piece:
                    text_at = now
            first.append(first_at or 0.0)
            last.append(text_at)
    return statistics.median(first), statistics.median(last)


C21 = ("load.levels=[1]", "load.num_prompts=20", "load.input_len=64", "load.output_len=17")


@pytest.mark.parametrize("scenario", ["c21_reasoning", "c21_reasoning_old_field"])
def test_c21_reasoning_text_is_text_and_chunks_hold_tokens(scenario: str, play: Start, tmp_path: Path) -> None:
    url = play(scenario)

    def check(at: int) -> None:
        first, last = seen_by_a_plain_socket(url, b"Let")
        row = measure(url, tmp_path, *C21, f"run.name=try{at}")
        assert row["completed"] == 20
        assert row["total_output_tokens"] == 20 * 17
        assert row["total_input_tokens"] == 20 * 21
        assert row["median_ttft_ms"] == pytest.approx(first, abs=1)
        assert row["median_e2el_ms"] == pytest.approx(last, abs=1)
        assert row["median_ttft_ms"] == pytest.approx(30, abs=2)  # by hand; not 20 (role chunk), not 110 (content)
        assert row["median_e2el_ms"] == pytest.approx(190, abs=3)
        assert row["median_tpot_ms"] == pytest.approx(10, rel=0.01)
        assert row["mean_itl_ms"] == pytest.approx(10, rel=0.02)
        assert not row["tokens_estimated"]

    for at in range(3):  # a wrong clock is wrong every time; a busy machine only sometimes
        try:
            return check(at)
        except AssertionError:
            time.sleep(1)
    check(3)


def test_c21_without_usage_tokens_are_an_estimate_and_say_so(play: Start, tmp_path: Path, base_model: Path) -> None:
    from transformers import AutoTokenizer

    row = measure(play("c21_no_usage"), tmp_path, *C21, f"load.tokenizer={base_model}")
    text = "Let me think a bitRed comes from dyes made late in the season, not before"
    tokens = len(AutoTokenizer.from_pretrained(base_model)(text).input_ids)
    assert row["total_output_tokens"] == 20 * tokens != 20 * 8
    assert row["tokens_estimated"]
    assert row["median_ttft_ms"] == pytest.approx(30, abs=5)
    printed = (tmp_path / "demo/loadtest/tables.txt").read_text()
    assert f"~{20 * tokens}" in printed
    assert "token counts are estimated" in printed


def test_c21_without_usage_and_tokenizer_tokens_are_na(play: Start, tmp_path: Path) -> None:
    row = measure(play("c21_no_usage"), tmp_path, *C21, f"model.source={tmp_path / 'none'}")
    assert row["total_output_tokens"] is None
    assert row["median_tpot_ms"] is None
    assert row["median_ttft_ms"] == pytest.approx(30, abs=5)
    assert "n/a" in (tmp_path / "demo/loadtest/tables.txt").read_text()


def test_c23_the_servers_counts_and_two_warnings(play: Start, tmp_path: Path) -> None:
    url = play("c23_short_outputs")
    row = measure(url, tmp_path, "load.levels=[4]", "load.num_prompts=40", "load.input_len=512", "load.output_len=16")
    assert row["total_input_tokens"] == 20_200
    assert row["total_output_tokens"] == 500
    assert row["output_throughput"] == pytest.approx(500 / row["duration"])
    printed = (tmp_path / "demo/loadtest/tables.txt").read_text()
    assert "20 of 40 answers stopped early" in printed
    assert "prompt length differs from the one asked for in 20 of 40" in printed
    assert "20,200" in printed


def test_the_command_line_with_proxies_set(play: Start, tmp_path: Path) -> None:
    url = play("c23_short_outputs")
    command = [sys.executable, "-m", "jobs.loadtest", f"load.endpoint={url}", f"run.root={tmp_path}", "load.levels=[2]"]
    command += ["load.num_prompts=4", "load.input_len=512", "load.output_len=16", f"model.source={tmp_path / 'none'}"]
    proxied = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    proxied.pop("NO_PROXY", None)
    done = subprocess.run(command, cwd=ROOT, env=proxied, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "4       0" in done.stdout
    again = subprocess.run(command, cwd=ROOT, env=proxied, capture_output=True, text=True, timeout=100)
    assert "up to date" in again.stdout
    assert "20 of 40" not in again.stdout
    assert "stopped early" in again.stdout


def test_requests_are_kept_with_their_times(play: Start, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    measure(play("c21_reasoning"), tmp_path, *C21[:1], "load.num_prompts=3", "load.input_len=64", "load.output_len=17")
    rows = pq.read_table(tmp_path / "demo/loadtest/requests.parquet").to_pylist()
    assert len(rows) == 3
    for r in rows:
        assert r["scheduled"] <= r["sent"] <= r["first_byte"] <= r["first_token"] < r["last_token"] <= r["end"]
        assert len(r["arrivals"]) == 8
        assert r["completion_tokens"] == 17


def test_nobody_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no OpenAI-compatible server answers there"):
        loadtest.run(against(f"http://127.0.0.1:{free_port()}", tmp_path))
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_model_that_is_not_served_is_named(play: Start, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it serves stub"):
        loadtest.run(against(play("c21_reasoning"), tmp_path, "load.model=other"))


def test_a_server_that_refuses_everything_leaves_no_artifact(tmp_path: Path, play: Start) -> None:
    refusal = {"status": 503, "after_ms": 1, "json": {"error": {"message": "no room", "code": 503}}}
    (tmp_path / "refuses.json").write_text(json.dumps({"plans": [refusal]}))
    with pytest.raises(UserError, match="every request at load 2 failed, the first with http 503: no room"):
        loadtest.run(against(play(str(tmp_path / "refuses")), tmp_path, "load.levels=[2]", "load.num_prompts=4"))
    assert not list(tmp_path.rglob("manifest.json"))


def test_failures_are_counted_and_printed_by_kind(tmp_path: Path, play: Start, cases: Path) -> None:
    good = json.loads((cases / "d/c21_reasoning.json").read_text())["plans"][0]
    refusal = {"name": "no", "status": 429, "json": {"error": {"message": "slow down"}}}
    cut = {"name": "cut", "steps": good["steps"][:4], "then": "reset"}
    (tmp_path / "mixed.json").write_text(json.dumps({"plans": [good, refusal, cut, good]}))
    few = ("load.levels=[1]", "load.num_prompts=8", "load.output_len=17")
    row = measure(play(str(tmp_path / "mixed")), tmp_path, *few)
    assert row["completed"] == 4
    assert row["failures"] == {"http 429": 2, "cut off": 2}
    printed = (tmp_path / "demo/loadtest/tables.txt").read_text()
    assert "4 of 8 requests failed (2 http 429, 2 cut off): times are of the rest" in printed


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_leaves_nothing_that_looks_complete(tmp_path: Path, play: Start, stop: signal.Signals) -> None:
    (tmp_path / "slow.json").write_text(json.dumps({"plans": [{"steps": [[60_000, "[DONE]"]]}]}))
    url = play(str(tmp_path / "slow"))
    command = [sys.executable, "-m", "jobs.loadtest", f"load.endpoint={url}", f"run.root={tmp_path}", "load.levels=[2]"]
    command += ["load.num_prompts=4", "load.num_warmups=0", f"model.source={tmp_path / 'none'}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "load 2" not in process.stdout.readline():  # the progress line: the level is under way
        assert process.poll() is None
    process.send_signal(stop)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert errors.strip() == "stopped"
    assert not list(tmp_path.rglob("*.partial*"))
    assert not list(tmp_path.rglob("manifest.json"))


def test_open_loop_and_targets_from_the_command_line(tmp_path: Path, play: Start) -> None:
    url = play("c21_reasoning")
    few = (
        "load.rates=[20]",
        "load.arrivals=constant",
        "load.num_prompts=20",
        "load.input_len=64",
        "load.output_len=17",
    )
    row = measure(url, tmp_path, *few, "load.slo=ttft_median<20ms,tpot_p99<500ms")
    assert row["rate"] == 20
    assert row["concurrency"] is None
    assert row["duration"] == pytest.approx(19 / 20 + 0.195, abs=0.2)  # the last is due at 0.95 s
    assert row["max_concurrent_requests"] >= 3  # each takes 195 ms, one comes every 50
    assert row["slo_broken"][0].startswith("ttft median is ")
    assert row["goodput"] == 0
    printed = (tmp_path / "demo/loadtest/tables.txt").read_text()
    assert "20/s" in printed
    assert "missed: ttft median" in printed


# --- the real server


def test_the_real_server_counts_what_was_asked(server: Server, base_model: Path, tmp_path: Path) -> None:
    few = ("load.levels=[3]", "load.num_prompts=9", "load.input_len=64", "load.output_len=8", "load.num_warmups=1")
    row = measure(server.url, tmp_path, *few, f"load.tokenizer={base_model}")
    assert row["completed"] == 9
    assert row["failures"] == {}
    assert row["total_input_tokens"] == 9 * 64
    assert row["total_output_tokens"] == 9 * 8
    assert (row["stopped_early"], row["input_len_differs"]) == (0, 0)
    assert row["max_concurrent_requests"] == 3
    assert 0 < row["median_ttft_ms"] < row["median_e2el_ms"]
    assert row["server"]["running_max"] <= 3
    assert 0 <= row["server"]["prefix_cache_hit_rate"] < 1


def test_real_conversations_against_the_real_server(server: Server, base_model: Path, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters light."},
    ]
    chat = {"messages": [*turns, {"role": "user", "content": "And at sunset?"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    asked = (f"load.prompts={tmp_path / 'chats.jsonl'}", "load.levels=[1]", "load.num_prompts=2", "load.output_len=4")
    row = measure(server.url, tmp_path, *asked, f"load.tokenizer={base_model}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    ids = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, return_dict=False)
    assert row["total_input_tokens"] == 2 * len(ids)
    assert row["input_len_differs"] == 0


# --- the tables


def row(variant: dict[str, Any], concurrency: int, *, throughput: float, ttft: float, tpot: float) -> dict[str, Any]:
    from jobs.loadgen import stats

    figures = stats.summarize([stats.Record(0, 1, 1, failure="x")]) | {"output_throughput": throughput}
    figures |= {"median_ttft_ms": ttft, "median_tpot_ms": tpot}
    return {"variant": variant, "concurrency": concurrency, **figures, "warnings": []}


def test_tables_keep_to_110_columns() -> None:
    wide = [row({"max_num_seqs": 64}, n, throughput=123456.7, ttft=98765.4, tpot=12345.6) for n in (1, 4, 16, 64, 256)]
    wide[0]["warnings"] = ["word " * 60]
    other = [{**r, "variant": {"max_num_seqs": 4}} for r in wide]
    text = tables.table(wide, title="t") + "\n" + tables.trade([*wide, *other])
    assert max(map(len, text.splitlines())) <= 110
    assert "123,457" in text


def test_the_trade_is_said_in_one_sentence() -> None:
    rows = [
        row({"max_num_seqs": 4}, 16, throughput=100.0, ttft=2000.0, tpot=40.0),
        row({"max_num_seqs": 16}, 16, throughput=250.0, ttft=500.0, tpot=60.0),
    ]
    assert tables.trade_sentence(rows) == (
        "At load 16, max_num_seqs 16 makes 2.50 times the output tokens/s of max_num_seqs 4 (250.0 against 100.0); "
        "the median wait for the first token goes from 2,000 to 500 ms, and the time per token after it from 40.0 "
        "to 60.0 ms."
    )
    assert tables.trade(rows[:1]) == ""


# --- clients as Ray actors


def test_two_clients_as_ray_actors_share_a_level(play: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RANKLINE_ROOT", str(tmp_path))
    few = ("load.levels=[4,2]", "load.num_prompts=8", "load.input_len=512", "load.output_len=16", "load.num_clients=2")
    try:
        made = loadtest.run(against(play("c23_short_outputs"), tmp_path, *few))
    finally:
        ray.shutdown()
    rows = json.loads((made.path / "results.json").read_text())
    assert [row["completed"] for row in rows] == [8, 8]
    assert [row["total_output_tokens"] for row in rows] == [4 * 9 + 4 * 16] * 2
    assert [row["max_concurrent_requests"] for row in rows] == [4, 2]


def test_a_server_of_another_model_than_the_runs_is_refused(tmp_path: Path) -> None:
    """Otherwise the report would call the numbers those of the merged model."""
    import http.server
    import threading

    from jobs import artifacts

    other = tmp_path / "other"
    other.mkdir()
    listed = {"data": [{"id": "science", "root": str(other), "max_model_len": 2048}]}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(listed).encode())

        def log_message(self, *_: object) -> None: ...

    listening = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    port = f"serve.port={listening.server_port}"
    c = config.load(None, [f"run.root={tmp_path}", port, "serve.served_model_name=science"])
    with artifacts.create(c, "merge", {}, {}) as draft:
        (draft.path / "model").mkdir()
        (draft.path / "model/config.json").write_text("{}")
    with pytest.raises(UserError, match="not this run's"):
        loadtest.run(c)
    listed["data"][0] |= {"root": str(tmp_path / "demo/merge/model"), "max_model_len": 600}
    with pytest.raises(UserError, match="over the 600 tokens"):
        loadtest.run(c)
    listening.shutdown()
