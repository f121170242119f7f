"""Bare vLLM and ours side by side, driven in turn (A B, B A, …) by equal clients: what does our line cost?

    python tests/bench/serve_parity.py --model DIR [--levels 1,4,16] [--input-len 64] [--output-len 32] [--rounds 3]

On one GPU both live at the same time, each with --utilization of its memory, started one after the other:

    python3 tests/bench/serve_parity.py --model DIR --load-format dummy --max-model-len 4096 --max-num-seqs 256 \
        --utilization 0.42 --levels 1,4,16,64,256 --input-len 512 --output-len 128 --clients 4 --rounds 2 --out FILE

Prompts are random token ids, fresh in every round, with ignore_eos; tokens are counted from `usage`. The ratio is
of one round's two neighbours, so that a machine that drifts does so for both.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

NAME = "model"


async def drive(url: str, asked: dict[str, Any], concurrency: int, requests: int, seed: int) -> list[list[float]]:
    """Closed loop. Per request: start, first token, end (wall-clock seconds) and output tokens."""
    import aiohttp

    slots = asyncio.Semaphore(concurrency)
    done: list[list[float]] = []

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(seed * 100_003 + number)
        body = {
            "model": NAME, "prompt": [draw.randrange(1000, 40000) for _ in range(asked["input_len"])],
            "max_tokens": asked["output_len"], "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with slots:
            start, first, tokens = time.time(), 0.0, 0
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        first = first or time.time()
                        if b'"usage":{' in line:
                            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            done.append([start, first, time.time(), tokens])

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(one(session, number) for number in range(requests)))
    return done


def client(url: str, asked: dict[str, Any], concurrency: int, requests: int, seed: int) -> list[list[float]]:
    return asyncio.run(drive(url, asked, concurrency, requests, seed))


def measure(pool: ProcessPoolExecutor, url: str, asked: dict[str, Any], level: int, seed: int) -> dict[str, float]:
    """One level against one server: output tokens/s, mean and median first token and mean time per token in ms."""
    clients = min(asked["clients"], level)
    requests = max(asked["least"], asked["waves"] * level)
    parts = [
        pool.submit(client, url, asked, level // clients + (i < level % clients), requests // clients, seed * 64 + i)
        for i in range(clients)
    ]
    rows = [row for part in parts for row in part.result()]
    assert all(row[3] == asked["output_len"] for row in rows)
    seconds = max(row[2] for row in rows) - min(row[0] for row in rows)
    first = [1000 * (row[1] - row[0]) for row in rows]
    later = [1000 * (row[2] - row[1]) / (row[3] - 1) for row in rows]
    return {
        "tokens_per_s": sum(row[3] for row in rows) / seconds,
        "ttft_mean_ms": statistics.mean(first),
        "ttft_median_ms": statistics.median(first),
        "tpot_mean_ms": statistics.mean(later),
    }


@contextlib.contextmanager
def bare(asked: argparse.Namespace, cache: str) -> Iterator[str]:
    """`vllm serve` with the flags that ours gets."""
    from cluster import processes
    from jobs import config as config_module
    from jobs import serve_spec

    port = processes.free_port()
    flags = serve_spec.engine_flags(config_module.load(None, overrides(asked)), asked.model, on_gpus=asked.gpu)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            argv += [flag, json.dumps(value) if isinstance(value, list) else str(value)]
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CACHE_ROOT": cache, "VLLM_NO_USAGE_STATS": "1"}
    log = tempfile.NamedTemporaryFile("w", prefix="bare-vllm-", suffix=".log", delete=False)  # noqa: SIM115
    process = subprocess.Popen([*argv, "--disable-uvicorn-access-log"], env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until_healthy(url, process, log.name)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def ours(asked: argparse.Namespace) -> Iterator[str]:
    """The service as jobs.serve deploys it, on a Ray of its own."""
    from cluster import processes

    words = [str(asked.model), *overrides(asked), f"serve.port={processes.free_port()}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server_process", *words],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  ours: {line.rstrip()}", flush=True)
            if line.startswith("{"):
                yield json.loads(line)["url"]
                break
        else:
            sys.exit("ours did not start")
    finally:
        process.communicate(timeout=90)


def until_healthy(url: str, process: subprocess.Popen[bytes], log: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        if process.poll() is not None:
            sys.exit(f"bare vLLM ended with status {process.returncode}:\n" + Path(log).read_text()[-3000:])
        with contextlib.suppress(OSError), opener.open(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)


def overrides(asked: argparse.Namespace) -> list[str]:
    """Our config for both sides."""
    return [
        f"serve.served_model_name={NAME}", f"serve.max_model_len={asked.max_model_len}",
        f"serve.max_num_seqs={asked.max_num_seqs}", f"serve.load_format={asked.load_format}",
        f"serve.gpu_memory_utilization={asked.utilization}", f"serve.enforce_eager={str(asked.eager).lower()}",
        "load.input_len=8", "load.output_len=8",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--levels", default="1,4,16")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--waves", type=int, default=4, help="requests per level are this times the level")
    parser.add_argument("--least", type=int, default=16, help="and at least this many")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--utilization", type=float, default=0.42)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--eager", action="store_true", help="no compilation; always so without a GPU")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end both servers also when a time limit ends us
    asked.model = asked.model.resolve()
    asked.gpu = Path("/dev/nvidiactl").exists()
    asked.eager = asked.eager or not asked.gpu
    os.chdir(ROOT)
    cache = str(ROOT / "models" / ".vllm")
    plain = {k: v for k, v in vars(asked).items() if k in ("input_len", "output_len", "clients", "waves", "least")}
    rows: list[dict[str, Any]] = []
    pool = ProcessPoolExecutor(asked.clients, mp_context=multiprocessing.get_context("spawn"))
    began = time.monotonic()
    with pool, bare(asked, cache) as a:
        print(f"bare vLLM is up after {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        with ours(asked) as b:
            print(f"ours is up after {time.monotonic() - began:.0f} s", flush=True)
            sides = {"bare": a, "ours": b}
            for side in sides.values():
                measure(pool, side, {**plain, "least": 8, "waves": 1}, 4, seed=1)
            for turn in range(asked.rounds):
                for level in map(int, asked.levels.split(",")):
                    for name in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
                        seed = 1000 * turn + 2 * level + (name == "ours")
                        found = measure(pool, sides[name], plain, level, seed)
                        rows.append({"side": name, "round": turn, "level": level} | found)
                    print(json.dumps(rows[-2:]), flush=True)
    report(rows)
    if asked.out:
        asked.out.write_text(
            json.dumps({"asked": vars(asked) | {"model": str(asked.model), "out": None}, "rows": rows})
        )


def report(rows: list[dict[str, Any]]) -> None:
    """One line a level: both sides' means, and the ratio's mean with its smallest and largest round."""
    print("level   bare tok/s   ours tok/s   ours/bare (range)        TTFT bare   ours  (ms, mean)   TPOT bare   ours")
    for level in dict.fromkeys(row["level"] for row in rows):
        side = {n: [r for r in rows if r["level"] == level and r["side"] == n] for n in ("bare", "ours")}
        mean = {n: {k: statistics.mean(r[k] for r in side[n]) for k in side[n][0] if k != "side"} for n in side}
        turns = sorted({r["round"] for r in side["ours"]})
        speed = {n: {r["round"]: r["tokens_per_s"] for r in side[n]} for n in side}
        ratios = [speed["ours"][t] / speed["bare"][t] for t in turns]
        print(
            f"{level:5}   {mean['bare']['tokens_per_s']:10.1f}   {mean['ours']['tokens_per_s']:10.1f}   "
            f"{statistics.mean(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})       "
            f"{mean['bare']['ttft_mean_ms']:8.1f} {mean['ours']['ttft_mean_ms']:8.1f}           "
            f"{mean['bare']['tpot_mean_ms']:8.2f} {mean['ours']['tpot_mean_ms']:8.2f}"
        )


if __name__ == "__main__":
    main()
