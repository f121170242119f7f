"""What clients see when an engine dies, a client leaves, or adapters change. Real replicas, so slow ones are marked."""

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from serve_app.client import Client, CutOff
from tests.conftest import Server, start_server

STORY: Any = [{"role": "user", "content": "Tell a long story about the sea."}]


def engines(server: Server) -> list[psutil.Process]:
    """EngineCore processes of this server: what its replicas' fork servers have forked."""
    found: list[psutil.Process] = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline()):
                found.append(process)
    return found


def running(server: Server) -> float:
    """Requests that the engine runs now, from its own metrics."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running"))


@pytest.mark.parametrize("header", [{}, {"x-request-disconnect-disabled": "?1"}])
def test_a_client_that_leaves_frees_its_slot_within_a_second(server: Server, header: dict[str, str]) -> None:
    stream = Client(server.url).openai.chat.completions.create(
        model=server.model, messages=STORY, max_tokens=900, stream=True, extra_body={"ignore_eos": True},
        extra_headers=header,
    )  # fmt: skip
    for _, _chunk in zip(range(4), stream, strict=False):
        pass
    assert running(server) == 1
    stream.close()
    left = time.monotonic()
    while running(server) and time.monotonic() - left < 5:
        time.sleep(0.05)
    assert time.monotonic() - left < 1


@pytest.mark.slow
def test_an_engine_killed_under_load_costs_no_answer_that_looks_whole(base_model: Path) -> None:
    """Two replicas, one engine killed: streams under way on it raise, everything else is answered, both come back."""
    words = ("serve.num_replicas=2", "serve.max_num_seqs=4", "serve.cpu_threads=1", "serve.max_model_len=1024")
    with start_server(base_model, *words) as server:
        wait_for(lambda: len(engines(server)) == 2, 60)
        victims = engines(server)
        outcomes: list[str] = []

        def ask() -> None:
            client = Client(server.url, retries=8)
            try:
                for _ in client.stream(STORY, model=server.model, max_tokens=64, extra_body={"ignore_eos": True}):
                    pass
                outcomes.append("whole")
            except CutOff:
                outcomes.append("cut")
            except openai.APIStatusError as error:
                outcomes.append(f"status {error.status_code}")
            except openai.APIError:
                outcomes.append("error event")

        with ThreadPoolExecutor(24) as pool:
            # Eight fill both engines' slots; what comes after waits without a token, on both replicas.
            tasks = [pool.submit(ask) for _ in range(24)]
            time.sleep(3)
            os.kill(victims[0].pid, signal.SIGKILL)
            killed = time.monotonic()
            for task in tasks:
                task.result()
        print(json.dumps({o: outcomes.count(o) for o in set(outcomes)}))
        assert len(outcomes) == 24
        assert not [o for o in outcomes if o.startswith("status")]  # nothing without output was refused
        assert outcomes.count("whole") >= 20  # at most the four running streams of the dead engine are lost
        wait_for(lambda: len(engines(server)) == 2 and victims[0].pid not in [e.pid for e in engines(server)], 120)
        print(f"whole again after {time.monotonic() - killed:.0f} s")


@pytest.mark.slow
def test_adapters_are_added_and_replaced_under_load_without_one_wrong_answer(base_model: Path, tmp_path: Path) -> None:
    """Clients of all names hammer with one shared prompt, prefix caching on, while versions change under one name."""
    from tests.lora import save_adapter

    paths = [
        save_adapter(base_model, tmp_path / n, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) for n in "ab"
    ]
    zero_first_layer_of(paths[1])
    prompt: Any = [{"role": "user", "content": "Say where the tide comes from. " * 8}]
    words = ("serve.max_num_seqs=8", "serve.served_model_name=base")
    with start_server(base_model, *words, f"serve.adapters={{pet: {paths[0]}}}") as server:

        def say(model: str) -> str:
            answer = Client(server.url).chat(prompt, model=model, max_tokens=12, temperature=0, logprobs=False)
            assert answer.model == model
            return answer.choices[0].message.content or ""

        before = [engine.pid for engine in engines(server)]
        assert len(before) == 1
        base, first = say("base"), say("pet")
        assert base != first
        stop, seen = threading.Event(), {"base": set[str](), "pet": set[str]()}

        def hammer(model: str) -> None:
            while not stop.is_set():
                seen[model].add(say(model))

        with ThreadPoolExecutor(6) as pool:
            tasks = [pool.submit(hammer, model) for model in ("base", "pet") * 3]
            try:
                time.sleep(2)
                server.redeploy(f"serve.adapters={{pet: {paths[1]}, second: {paths[0]}}}")
                changed = say("pet")
                time.sleep(2)
                assert say("second") == first
                assert Client(server.url).models() == ["base", "pet", "second"]
            finally:
                stop.set()
            for task in tasks:
                task.result()
        assert changed not in (first, base)
        assert seen == {"base": {base}, "pet": {first, changed}}
        assert say("pet") == changed  # and no cached prefix of the first version
        assert [engine.pid for engine in engines(server)] == before  # no restart


@pytest.mark.slow
def test_a_redeployment_can_be_rolled_back_and_a_failed_one_names_its_cause(base_model: Path) -> None:
    with start_server(base_model, "serve.max_model_len=512") as server:
        client = Client(server.url)
        limit = lambda: client.openai.models.list().data[0].model_dump()["max_model_len"]  # noqa: E731
        assert limit() == 512
        began = time.monotonic()
        server.redeploy("serve.max_model_len=768")
        print(f"redeployed in {time.monotonic() - began:.0f} s")
        assert limit() == 768
        server.rollback()
        assert limit() == 512
        with pytest.raises(AssertionError, match=r"config file for awq.*former deployment goes on"):
            server.redeploy("serve.engine_args={quantization: awq}")
        assert limit() == 512
        with pytest.raises(AssertionError, match=r"serve\.kv_cache_gib"):
            server.redeploy("serve.kv_cache_gib=4000")
        assert limit() == 512  # the former replica went on
        server.rollback()  # to what answered last: nothing changes
        assert limit() == 512


def zero_first_layer_of(adapter: Path) -> None:
    """Make an adapter differ from its twin."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({k: t * (".layers.0." not in k) for k, t in tensors.items()}, adapter / "adapter_model.safetensors")


def wait_for(true: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "did not come true in time"
        time.sleep(0.2)
