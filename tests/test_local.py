"""The local head: loopback only, behind a token, joined from anywhere here, and ended with all that it started."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from cluster import environment, local, processes
from jobs import config
from jobs.errors import UserError
from tests.conftest import ROOT, Head

LOCAL = [sys.executable, "-m", "cluster.local"]


def run(head: Head, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=head.environment | more, capture_output=True, text=True, timeout=120
    )


def state(root: Path) -> dict[str, object]:
    return json.loads((root / ".rankline" / "head.json").read_text())


def carrying(cluster_id: str) -> list[int]:
    """PIDs whose environment holds the id: read from /proc here, not through the code under test."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RANKLINE_CLUSTER_ID={cluster_id}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_starting_again_keeps_the_head_that_runs(head: Head) -> None:
    before = state(head.root)
    again = run(head, "-m", "cluster.local", "start", *head.overrides)
    assert again.returncode == 0
    assert "already running" in again.stdout
    assert state(head.root) == before


def test_every_process_of_the_head_listens_on_loopback_alone_while_serving(head: Head) -> None:
    import grpc
    from ray.serve.generated.serve_pb2 import ASGIRequest
    from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

    port = processes.free_port()
    code = f"""
from cluster import local
from jobs import config
local.connect(config.load(None), private=False)
from ray import serve
from ray.serve.config import HTTPOptions
serve.start(http_options=HTTPOptions(host="127.0.0.1", port={port}))
@serve.deployment(ray_actor_options={{"num_cpus": 0}})
class Hello:
    def __call__(self, request): return "hello"
serve.run(Hello.bind(), name="hello")
print("serving")
"""
    done = run(head, "-c", code)
    try:
        assert "serving" in done.stdout, done.stderr
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert direct.open(f"http://127.0.0.1:{port}/", timeout=30).read() == b"hello"
        ours = set(carrying(str(state(head.root)["cluster_id"])))
        listening = [c for c in psutil.net_connections("tcp") if c.pid in ours and c.status == psutil.CONN_LISTEN]
        names = {psutil.Process(c.pid).name() for c in listening}
        assert {"haproxy", "raylet", "gcs_server"} <= names
        beyond = [c for c in listening if str(c.laddr.ip).removeprefix("::ffff:") != "127.0.0.1"]
        # Ray gives a replica's internal server no setting for its address: there the token has to hold.
        assert all(psutil.Process(c.pid).name().startswith("ray::ServeRepli") for c in beyond)
        for connection in beyond:
            with grpc.insecure_channel(f"127.0.0.1:{connection.laddr.port}") as channel:
                with pytest.raises(grpc.RpcError) as refused:
                    ASGIServiceStub(channel).HandleRequest(ASGIRequest(pickled_request_metadata=b""), timeout=10)
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    finally:
        run(head, "-c", "from cluster import local; from jobs import config; local.connect(config.load(None))\n"
                        "from ray import serve; serve.shutdown()")  # fmt: skip


def test_the_token_and_its_folder_are_the_users_alone(head: Head) -> None:
    folder = head.root / ".rankline"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert len((folder / "token").read_text()) == 64


def test_the_jobs_api_answers_nobody_without_the_token(head: Head) -> None:
    url = f"{state(head.root)['dashboard']}/api/jobs/"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as refused:
        direct.open(url, timeout=10)
    assert refused.value.code == 401
    token = (head.root / ".rankline" / "token").read_text()
    with direct.open(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10) as answer:
        assert answer.status == 200


def test_status_prints_what_a_shell_needs_to_reach_the_head(head: Head) -> None:
    said = run(head, "-m", "cluster.local", "status", *head.overrides).stdout
    lines = [line.strip() for line in said.splitlines() if line.strip().startswith("export ")]
    script = "\n".join([*lines, shlex.join([sys.executable, "-m", "ray.scripts.scripts", "status"])])
    clean = {name: value for name, value in head.environment.items() if name not in ("RANKLINE_ROOT", "TMPDIR")}
    done = subprocess.run(["sh", "-c", script], env=clean, capture_output=True, text=True, timeout=60)
    assert "CPU" in done.stdout, done.stderr
    assert "0.0/6.0 CPU" in done.stdout or f"0.0/{os.cpu_count()}.0 CPU" in done.stdout


def test_another_process_joins_the_head_and_its_workers_import_the_project_and_know_the_root(head: Head) -> None:
    code = """
import os, ray
from cluster import local
from jobs import config
local.connect(config.load(None), private=False)
@ray.remote(num_cpus=0)
def look():
    import jobs.config
    return jobs.config.resolve_storage("runs"), os.environ["RAY_SERVE_ENABLE_HA_PROXY"]
print("workers say", ray.get(look.remote()), ray.util.get_node_ip_address())
"""
    done = run(head, "-c", code)
    assert f"workers say ('{head.root}/runs', '1') 127.0.0.1" in done.stdout, done.stderr


def test_loopback_is_added_to_no_proxy_and_what_was_listed_stays() -> None:
    variables = {"NO_PROXY": "example.org"}
    environment.bypass_proxies(variables)
    assert variables["NO_PROXY"] == variables["no_proxy"] == "example.org,127.0.0.1,localhost,::1"


@pytest.mark.parametrize("home", [None, "/", "/nonexistent", "relative"])
def test_without_a_usable_home_caches_and_token_go_to_the_root_and_never_to_a_directory_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.setenv("RANKLINE_ROOT", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    made = environment.variables(tmp_path, environment.token())
    assert made["HOME"] == str(tmp_path / ".rankline" / "home")
    assert made["USER"]
    code = "import os, pathlib; print(pathlib.Path.home(), os.path.expanduser('~/.cache'))"
    done = subprocess.run([sys.executable, "-c", code], env=made, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [made["HOME"], made["HOME"] + "/.cache"]
    assert (tmp_path / ".rankline" / "token").is_file()


def test_a_usable_home_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKLINE_ROOT", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "HOME" not in environment.variables(tmp_path, tmp_path / "token")


def test_a_port_in_use_names_the_port_and_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKLINE_ROOT", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"serve\.port={port}: the port is held by PID {os.getpid()} "):
            local.start(config.load(None, [f"serve.port={port}"]))
    assert not (tmp_path / ".rankline" / "head.json").exists()


def test_without_a_cluster_serving_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKLINE_ROOT", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"python -m cluster\.local start"):
        local.connect(config.load(None), private=False)


def test_stopping_where_nothing_runs_is_no_error(tmp_path: Path) -> None:
    for _ in range(2):
        done = subprocess.run(
            [*LOCAL, "stop"],
            cwd=ROOT,
            env=os.environ | {"RANKLINE_ROOT": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "[cluster] nothing was running")


def test_no_directory_short_enough_for_sockets_is_said_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "LONGEST_TEMP_DIR", 12)
    with pytest.raises(UserError, match="over 12 characters.*Set TMPDIR"):
        environment.temp_dir()


def test_a_run_leaves_nothing_after_its_head_was_killed_and_a_child_broke_away(tmp_path: Path) -> None:
    # The command kills Ray's two main processes as a crash would, after an actor has started a process in a session of
    # its own, as vLLM's engines and HAProxy are. What must not happen: that any of them is left, or a port taken.
    code = f"""
import json, os, signal, subprocess, sys, time
import ray
sys.path.insert(0, {str(ROOT)!r})
from cluster import local, processes
from jobs import config
local.connect(config.load(None), private=False)
@ray.remote(num_cpus=0)
class Engine:
    def start(self):
        return subprocess.Popen(["sleep", "1234"], start_new_session=True).pid
engine = Engine.remote()
pid = ray.get(engine.start.remote())
head = local.running()
found = [p.pid for p in processes.marked(head.cluster_id)]
assert pid in found
json.dump({{"id": head.cluster_id, "pids": found}}, open("seen.json", "w"))
for process in processes.marked(head.cluster_id):
    if process.name() in ("raylet", "gcs_server"):
        process.send_signal(signal.SIGKILL)
os._exit(7)
"""
    ports = [processes.free_port(), processes.free_port()]
    keys = [f"serve.port={ports[0]}", f"cluster.dashboard_port={ports[1]}"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [*LOCAL, "run", *keys, "--", sys.executable, "-c", code],
        cwd=tmp_path, env=variables | {"RANKLINE_ROOT": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 7, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert len(seen["pids"]) > 5
    assert carrying(seen["id"]) == []
    assert [pid for pid in seen["pids"] if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
    assert all(refuses(port) for port in ports)
    assert not (tmp_path / ".rankline" / "head.json").exists()


@pytest.mark.slow
def test_a_ctrl_c_while_ray_starts_leaves_nothing(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [*LOCAL, "start", f"serve.port={processes.free_port()}", f"cluster.dashboard_port={processes.free_port()}"],
        cwd=ROOT, env=variables | {"RANKLINE_ROOT": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (cluster_id := _id(tmp_path)) or len(carrying(cluster_id)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert carrying(cluster_id) == []
    assert not (tmp_path / ".rankline" / "head.json").exists()


def _id(root: Path) -> str | None:
    try:
        return str(state(root)["cluster_id"])
    except (OSError, ValueError):
        return None
