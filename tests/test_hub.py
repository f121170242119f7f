"""Fetching from a model hub: a local server with the hub's API cuts off, lies about lengths and corrupts bytes."""

import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ROOT

REVISION = "1" * 40


@dataclass
class Hub:
    """A hub with one model. `fault` is what it does to the weights; `served` counts bytes of them that it sent."""

    files: dict[str, bytes]
    fault: str = ""
    served: list[tuple[int, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    url: str = ""


def about(hub: Hub, *, tree: bool) -> object:
    """What the hub's API says of the model, or of its files."""
    entries: list[dict[str, object]] = []
    for name, raw in hub.files.items():
        entry: dict[str, object] = {"size": len(raw)}
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(raw).hexdigest()
            entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(raw), "pointerSize": 134}
        blob = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
        names = {"type": "file", "path": name, "oid": blob} if tree else {"rfilename": name, "blobId": blob}
        entries.append(entry | names)
    if tree:
        return entries
    return {"id": "org/tiny", "modelId": "org/tiny", "sha": REVISION, "siblings": entries, "tags": []}


def answer(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.reply(body=False)

        def do_GET(self) -> None:
            self.reply(body=True)

        def reply(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            if path.startswith("/api/models/org/tiny"):
                return self.send(json.dumps(about(hub, tree="/tree/" in path)).encode(), body=body)
            name = path.removeprefix(f"/org/tiny/resolve/{REVISION}/")
            if name not in hub.files:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound" if "tiny" not in path else "EntryNotFound")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            return self.send(hub.files[name], body=body, name=name)

        def send(self, raw: bytes, *, body: bool, name: str = "") -> None:
            weights = name.endswith(".safetensors")
            whole, start = raw, 0
            if body and (asked := self.headers.get("Range")):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                raw = raw[start:]
            if weights and hub.fault == "corrupt":
                raw = raw[:-1] + bytes([raw[-1] ^ 1])
            if weights and hub.fault == "short":  # says less than there is, and sends that: a truncating proxy
                raw = raw[: len(raw) // 2]
            self.send_response(206 if start else 200)
            self.send_header("Content-Type", "application/octet-stream" if name else "application/json")
            self.send_header("Content-Length", str(len(raw)))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{hashlib.sha256(whole).hexdigest()}"')
            self.end_headers()
            if not body:
                return
            if weights and hub.fault == "cut":
                self.wfile.write(raw[: len(raw) // 2])
                hub.served.append((start, len(raw) // 2))
                self.close_connection = True
                return
            if weights and hub.fault == "slow":
                hub.served.append((start, 0))
                for offset in range(0, len(raw), 4096):
                    self.wfile.write(raw[offset : offset + 4096])
                    time.sleep(0.05)
                return
            if weights:
                hub.served.append((start, len(raw)))
            self.wfile.write(raw)

    return Handler


@pytest.fixture
def hub(cases: Path) -> Iterator[Hub]:
    made = Hub(files={file.name: file.read_bytes() for file in (cases / "b" / "base_tied").iterdir()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer(made))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield made
    server.shutdown()
    server.server_close()


def start(hub: Hub, tmp_path: Path, source: str = "org/tiny", **more: str) -> "subprocess.Popen[str]":
    words = [f"model.source={source}", f"model.revision={REVISION}", f"model.cache={tmp_path / 'cache'}"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")} | more
    command = [sys.executable, "-m", "cluster.models", "--config", os.devnull, *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def fetch(hub: Hub, tmp_path: Path, source: str = "org/tiny", **more: str) -> tuple[int, str, str]:
    process = start(hub, tmp_path, source, **more)
    out, wrong = process.communicate(timeout=120)
    assert "Traceback" not in wrong, wrong
    return process.returncode, out, wrong


def complete(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("[!.]*/base.lock.json"))


def test_a_pinned_revision_is_fetched_and_locked_by_what_the_hub_has(hub: Hub, tmp_path: Path) -> None:
    code, _, wrong = fetch(hub, tmp_path)
    assert code == 0, wrong
    [lock] = complete(tmp_path)
    expected = {"model.safetensors": hashlib.sha256(hub.files["model.safetensors"]).hexdigest()}
    assert json.loads(lock.read_text()) == {"source": "org/tiny", "revision": REVISION, "files": expected}
    assert {file.name for file in lock.parent.iterdir()} == set(hub.files) | {"base.lock.json"}
    hub.asked.clear()
    assert fetch(hub, tmp_path, HF_HUB_OFFLINE="1")[0] == 0
    assert hub.asked == []


def test_corrupted_weights_are_refused_named_and_removed_so_that_another_run_succeeds(hub: Hub, tmp_path: Path) -> None:
    hub.fault = "corrupt"
    code, _, wrong = fetch(hub, tmp_path)
    assert code == 1
    assert "model.safetensors does not have the hub's SHA-256" in wrong
    assert complete(tmp_path) == []
    hub.fault = ""
    assert fetch(hub, tmp_path)[0] == 0


@pytest.mark.parametrize("fault", ["short", "cut"])
def test_a_download_that_ends_early_is_an_error_and_another_run_finishes_it(
    hub: Hub, tmp_path: Path, fault: str
) -> None:
    hub.fault = fault
    code, _, wrong = fetch(hub, tmp_path)
    assert code == 1, wrong
    assert "org/tiny" in wrong
    assert "run again" in wrong
    assert complete(tmp_path) == []
    hub.fault = ""
    assert fetch(hub, tmp_path)[0] == 0


def test_a_kill_in_the_middle_leaves_nothing_that_looks_like_a_model(hub: Hub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] += b"\0" * (1 << 20)  # long enough to be caught at it; wrong, but never complete
    hub.fault = "slow"
    process = start(hub, tmp_path)
    deadline = time.monotonic() + 60
    while not hub.served:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert complete(tmp_path) == []
    hub.files["model.safetensors"] = hub.files["model.safetensors"][: -(1 << 20)]
    hub.fault = ""
    code, _, wrong = fetch(hub, tmp_path)
    assert code == 0, wrong


def test_a_name_that_the_hub_does_not_know_is_said_with_the_endpoint(hub: Hub, tmp_path: Path) -> None:
    code, _, wrong = fetch(hub, tmp_path, "org/nothing")
    assert code == 1
    assert "org/nothing" in wrong
    assert "HF_ENDPOINT" in wrong


def test_a_hub_that_cannot_be_reached_is_said_and_offline_too(hub: Hub, tmp_path: Path) -> None:
    code, _, wrong = fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert (code, "could not download" in wrong) == (1, True)
    code, _, wrong = fetch(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert (code, "HF_HUB_OFFLINE" in wrong) == (1, True)


def test_two_processes_download_the_weights_once(hub: Hub, tmp_path: Path) -> None:
    both = [start(hub, tmp_path) for _ in range(2)]
    ended = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert hub.served == [(0, len(hub.files["model.safetensors"]))]
