"""What the server says of itself during a level: queue depth, running requests, KV cache and prefix-cache hits.

Reads vLLM's Prometheus text at /metrics once a second, in a thread, directly (no proxy), and stops asking when the
server has none. Behind a load balancer each reading comes from one arbitrary replica; its process start time tells
them apart, so counters of two replicas are never subtracted from each other.
"""

import http.client
import re
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from jobs.loadgen.client import Server, split_url

PERIOD_S = 1.0
NAMES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_cache",
    "gpu_cache_usage_perc": "kv_cache",  # the name before vLLM 0.11
    "prefix_cache_queries_total": "queries",
    "prefix_cache_hits_total": "hits",
}
_LINE = re.compile(r"^(?:ray_)?(?:vllm[:_])?(\w+?)(?:\{(.*)\})? ([-+0-9.eE]+|NaN)(?: \d+)?$")


@dataclass(frozen=True)
class Reading:
    """One reading of one replica. `at`: seconds since the epoch; `kv_cache`: share in use; counters in tokens."""

    at: float
    replica: str
    running: float = 0.0
    waiting: float = 0.0
    kv_cache: float = 0.0
    queries: float = 0.0
    hits: float = 0.0


def parse(text: str, *, at: float) -> Reading | None:
    """A reading from Prometheus text; None where it holds none of vLLM's metrics. Labels are summed over."""
    values: dict[str, float] = {}
    replica = ""
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        if found[1] == "process_start_time_seconds":
            replica = found[3]
        elif found[1] in NAMES and ("vllm" in line.split("{")[0]):
            name = NAMES[found[1]]
            values[name] = values.get(name, 0.0) + float(found[3])
    return Reading(at, replica, **values) if values else None


class Observer:
    """Reads the server's metrics while its `with` block runs; afterwards `readings` holds what it saw."""

    def __init__(self, server: Server) -> None:
        tls, host, port, prefix = split_url(server.url)
        name = f"[{host}]" if ":" in host else host
        self._url = f"{'https' if tls else 'http'}://{name}:{port}{prefix}/metrics"
        self._headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="observer", daemon=True)
        self.readings: list[Reading] = []

    def __enter__(self) -> "Observer":
        if self._read():
            self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(5)
            if error is None:
                self._read()

    def _read_on(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._read()

    def _read(self) -> bool:
        try:
            with self._open(urllib.request.Request(self._url, headers=self._headers), timeout=3) as answer:
                reading = parse(answer.read(8_000_000).decode("utf-8", "replace"), at=time.time())
        except (OSError, http.client.HTTPException, ValueError):
            return False
        if reading is not None:
            self.readings.append(reading)
        return reading is not None


def summary(readings: Sequence[Reading], *, start: float, end: float) -> dict[str, Any] | None:
    """Queue depth, running, KV cache between `start` and `end`, and the prefix-cache hit rate over it; None: unknown.

    `prefix_cache_hit_rate`: prompt tokens found in the cache over those looked up, from the last reading before the
    start to the first after the end, summed over replicas; None where nothing was looked up.
    """
    inside = [r for r in readings if start <= r.at <= end] or list(readings)
    if not inside:
        return None
    looked = found = 0.0
    for replica in {r.replica for r in readings}:
        own = [r for r in readings if r.replica == replica]
        before = max((r for r in own if r.at <= start), key=lambda r: r.at, default=own[0])
        after = min((r for r in own if r.at >= end), key=lambda r: r.at, default=own[-1])
        looked += after.queries - before.queries
        found += after.hits - before.hits
    return {
        "replicas_seen": len({r.replica for r in readings}),
        "queue_depth_mean": sum(r.waiting for r in inside) / len(inside),
        "queue_depth_max": max(r.waiting for r in inside),
        "running_max": max(r.running for r in inside),
        "kv_cache_max": max(r.kv_cache for r in inside),
        "prefix_cache_hit_rate": found / looked if looked > 0 else None,
    }
