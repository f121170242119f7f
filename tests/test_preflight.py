"""Preflight: what would go wrong later is said now, with the key to change."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import preflight
from jobs import config
from tests.conftest import ROOT


def failed(*overrides: str) -> dict[str, str]:
    cache = f"model.cache={ROOT / 'models'}"
    return {f.what: f.text for f in preflight.check(config.load(None, [cache, *overrides])) if not f.ok}


@pytest.fixture(autouse=True)
def _own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKLINE_ROOT", str(tmp_path))


def free_ports() -> list[str]:
    from cluster import processes

    return [f"serve.port={processes.free_port()}", f"cluster.dashboard_port={processes.free_port()}"]


def test_nothing_fails_on_a_machine_that_can_run_the_demo() -> None:
    assert failed(*free_ports()) == {}


def test_it_answers_at_once_without_torch_or_ray_behind_a_proxy(tmp_path: Path) -> None:
    code = "import sys, runpy\nsys.argv = ['x', *sys.argv[1:]]\n"
    code += "try: runpy.run_module('cluster.preflight', run_name='__main__')\nexcept SystemExit as e: print(e.code)\n"
    code += "print({'ray', 'torch', 'transformers', 'vllm'} & set(sys.modules))"
    proxy = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "example.org", "no_proxy": ""}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *free_ports()],
        cwd=ROOT, env=os.environ | proxy, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - started < 10
    assert done.stdout.splitlines()[-2:] == ["0", "set()"], done.stderr
    assert "NO_PROXY=127.0.0.1" in done.stdout


def test_a_port_in_use_is_named_with_its_holder_and_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = failed(f"serve.port={port}", free_ports()[1])
    assert set(said) == {"serve.port"}
    assert f"{port} is held by PID {os.getpid()} " in said["serve.port"]


def test_storage_that_is_a_file_or_out_of_reach_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = failed(*free_ports(), f"run.root={tmp_path / 'file'}", "model.cache=/proc/models")
    assert set(said) == {"run.root", "model.cache"}
    assert str(tmp_path / "file") in said["run.root"]


def test_a_model_with_a_missing_shard_is_said_before_anything_starts(tmp_path: Path, cases: Path) -> None:
    shutil.copytree(cases / "b" / "base_tied", tmp_path / "model")
    assert failed(*free_ports(), f"model.source={tmp_path / 'model'}") == {}
    (tmp_path / "model" / "model.safetensors").unlink()
    said = failed(*free_ports(), f"model.source={tmp_path / 'model'}")
    assert set(said) == {"model"}
    assert "model.safetensors: missing" in said["model"]


def test_a_hub_that_cannot_be_reached_is_said_with_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    said = failed(*free_ports(), "model.source=org/model", "model.revision=" + "1" * 40, "run.name=x")
    assert "HF_ENDPOINT" in said["model"]


def test_a_machine_with_too_little_memory_is_refused_in_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_available_bytes", lambda: 2 << 30)
    assert "2.0 GiB available, about" in failed(*free_ports())["memory"]


def test_a_failed_check_is_exit_status_1_and_no_traceback() -> None:
    command = [sys.executable, "-m", "cluster.preflight", "model.source=/no/such/model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "FAIL  model" in done.stdout
    assert "Traceback" not in done.stderr
