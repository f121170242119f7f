"""Reading a server's own metrics: vLLM's text, Ray's names for it, several replicas behind one address."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from jobs.loadgen import observe
from jobs.loadgen.client import Server
from jobs.loadgen.observe import Reading

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.25e+02
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
process_start_time_seconds 1.764e+09
"""


def test_vllms_text_is_read() -> None:
    reading = observe.parse(TEXT, at=7.0)
    assert reading == Reading(7.0, "1.764e+09", running=3, waiting=5, kv_cache=0.25, queries=1000, hits=125)
    rays = observe.parse(TEXT.replace("vllm:", "ray_vllm_"), at=7.0)
    assert rays == reading


def test_text_of_another_server_is_none() -> None:
    assert observe.parse("process_start_time_seconds 1\npython_gc 3\nnum_requests_running 9\n", at=0) is None


def test_hits_are_counted_per_replica() -> None:
    rows = [
        Reading(0, "a", queries=1000, hits=500),
        Reading(0.5, "b", queries=10, hits=0),
        Reading(1, "a", waiting=4, running=2, kv_cache=0.5, queries=1100, hits=510),
        Reading(2, "b", waiting=2, queries=110, hits=20),
    ]
    got = observe.summary(rows, start=0.6, end=1.9)
    assert got is not None
    assert got["prefix_cache_hit_rate"] == pytest.approx(30 / 200)  # a: 10 of 100, b: 20 of 100
    assert got["replicas_seen"] == 2
    assert got["queue_depth_max"] == 4
    assert got["running_max"] == 2
    assert observe.summary([], start=0, end=1) is None


@pytest.fixture
def metrics_server() -> Iterator[tuple[str, list[int]]]:
    """A server of TEXT at /metrics only, and how often it was asked."""
    asked: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(1)
            known = self.path == "/metrics" and self.headers["Authorization"] == "Bearer k"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(TEXT.encode() if known else b"")

        def log_message(self, *_: object) -> None: ...

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}", asked
    listening.shutdown()


def test_the_observer_reads_at_the_start_and_the_end(
    metrics_server: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    url, asked = metrics_server
    with observe.Observer(Server(f"{url}/v1", "m", api_key="k")) as seen:
        pass
    assert [r.waiting for r in seen.readings] == [5, 5]
    with observe.Observer(Server(url, "m")) as none:
        pass
    assert none.readings == []
    assert len(asked) == 3  # a server without metrics is asked once
