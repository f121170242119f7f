"""Fixtures that several test modules share. Each starts and stops what it needs itself."""

import contextlib
import json
import lzma
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def cases() -> Path:
    """Inputs that real people brought; see the README of each group."""
    return ROOT / "tests" / "cases"


@pytest.fixture(scope="session")
def base_model() -> Path:
    """Directory of the small real model (SmolLM2-135M-Instruct, BF16), fetched and converted on first use."""
    from cluster import models
    from jobs import config

    return models.fetch(config.load(None, [f"model.cache={ROOT / 'models'}"])).path


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of Qwen3-4B without its weights: the real tokenizer, chat template and configs."""
    where = tmp_path_factory.mktemp("qwen3")
    shutil.copytree(ROOT / "tests" / "qwen3", where, dirs_exist_ok=True)
    with lzma.open(where / "tokenizer.json.xz") as packed:
        (where / "tokenizer.json").write_bytes(packed.read())
    (where / "tokenizer.json.xz").unlink()
    return where


@dataclass(frozen=True)
class Server:
    """A running service: its base URL (http://127.0.0.1:PORT), the model name that it serves, and the process that
    started all of its processes."""

    url: str
    model: str
    process: "subprocess.Popen[str]"

    def redeploy(self, *overrides: str) -> None:
        """Deploy again with further config overrides, and wait until it answers."""
        self._ask(list(overrides))

    def rollback(self) -> None:
        """Put the previous deployment back."""
        self._ask("rollback")

    def _ask(self, what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        reply = _reply(self.process)
        assert "error" not in reply, reply["error"]


@pytest.fixture(scope="session")
def server(base_model: Path) -> Iterator[Server]:
    """The small real model behind the real line: Ray Serve, HAProxy, one vLLM replica with max_num_seqs 8."""
    with start_server(base_model, "serve.max_num_seqs=8") as started:
        yield started


@contextlib.contextmanager
def start_server(model: Path, *overrides: str) -> Iterator[Server]:
    """A service of one's own, with config overrides; ends with the block, with all its processes."""
    from cluster import processes

    port = processes.free_port()
    command = [sys.executable, "-m", "tests.server_process", str(model), f"serve.port={port}", *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        reply = _reply(process)
        assert "error" not in reply, reply["error"]
        yield Server(url=reply["url"], model=reply["model"], process=process)
    finally:
        process.communicate(timeout=60)  # closes its standard input, which ends it


def _reply(process: "subprocess.Popen[str]") -> dict[str, str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
        lines.append(line)
    return {"error": "the test server ended:\n" + "".join(lines)}


@dataclass(frozen=True)
class Head:
    """A local head from `python -m cluster.local start`: its root, its overrides, and an environment to join it."""

    root: Path
    overrides: tuple[str, ...]
    environment: dict[str, str]
    said: str


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A real head on ports of its own, started as on an awkward machine: a batch system's long TMPDIR, a proxy that
    refuses loopback, and no home directory."""
    from cluster import processes

    root = tmp_path_factory.mktemp("head")
    scratch = root / ("slurm_jobdir/1234567/node0042/local-nvme-scratch/" + "t" * 40)
    scratch.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NO_PROXY"))}
    for name in ("HOME", "no_proxy"):
        environment.pop(name, None)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        environment[name] = "http://127.0.0.1:9"
    environment |= {"RANKLINE_ROOT": str(root), "TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
    overrides = (f"serve.port={processes.free_port()}", f"cluster.dashboard_port={processes.free_port()}")
    command = [sys.executable, "-m", "cluster.local"]

    def run(action: str) -> str:
        done = subprocess.run([*command, action, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        yield Head(root, overrides, environment, run("start"))
    finally:
        run("stop")
