"""Submitting: the job gets the words as they were typed, its status comes back, and Ctrl-C stops it."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import submit
from jobs import config
from jobs.errors import UserError
from tests.conftest import ROOT, Head

HELLO = '''"""A stage for the test: writes the config that it was given."""
import json
import sys
import time
from pathlib import Path

from jobs import cli, config
from jobs.config import Config
from jobs.errors import UserError


def run(config_: Config) -> None:
    root = Path(config.resolve_storage(config_.run.root))
    root.mkdir(parents=True, exist_ok=True)
    (root / f"{config_.run.name}.json").write_text(config_.model_dump_json())
    print("python is", sys.executable)
    if config_.run.name == "bad":
        raise UserError("rows.jsonl:3: not good")
    if config_.run.name == "long":
        print("[hello] working", flush=True)
        time.sleep(300)


cli.main("hello", run, __doc__)
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code in a directory named as people name them, with one more stage."""
    directory = tmp_path_factory.mktemp("copy") / "my run's" / "träin $HOME; v2"
    for name in ("jobs", "cluster"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, directory / name)
    (directory / "jobs" / "hello.py").write_text(HELLO)
    (directory / "own config (1).yaml").write_text("serve:\n  served_model_name: own\n")
    return directory


def words(head: Head, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "cluster.submit", "--stage", "hello", "--config", "own config (1).yaml", *overrides]


def run(head: Head, project: Path, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    environment = head.environment | more
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)


def test_a_job_gets_the_config_that_the_same_words_give_here(head: Head, project: Path) -> None:
    overrides = [
        "data.path=own data/rows & more.jsonl",
        'lora.target_modules=["q_proj","v_proj"]',
        'data.role_prompt=it\'s $USER `touch executed` $(touch executed) "quoted" {{ x }} && echo hi; #1 \\ é',
        "run.root=hello out",
    ]
    done = run(head, project, words(head, *overrides, "run.name=job"))
    assert done.returncode == 0, done.stdout + done.stderr
    local = [sys.executable, "-m", "jobs.hello", "--config", "own config (1).yaml", *overrides, "run.name=local"]
    assert run(head, project, local).returncode == 0
    job, here = (json.loads((head.root / "hello out" / f"{name}.json").read_text()) for name in ("job", "local"))
    assert job.pop("run")["name"] == "job"
    assert here.pop("run")["name"] == "local"
    assert job == here
    assert not list(head.root.rglob("executed")) + list(project.rglob("executed"))
    assert f"python is {sys.executable}" in done.stdout


def test_a_users_mistake_in_a_job_ends_the_submitter_with_its_message_and_status(head: Head, project: Path) -> None:
    done = run(head, project, words(head, "run.name=bad"))
    assert done.returncode == 1
    assert "error: rows.jsonl:3: not good" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_ctrl_c_stops_the_job_and_exits_with_130(head: Head, project: Path) -> None:
    command = words(head, "run.name=long")
    process = subprocess.Popen(
        command, cwd=project, env=head.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "[hello] working" in line:
            process.send_signal(signal.SIGINT)
            break
    rest, wrong = process.communicate(timeout=60)
    assert process.returncode == 130, said + rest + wrong
    job = said.split("[submit] job ")[1].split()[0]
    status = run(head, project, [sys.executable, "-c", _STATUS, job])
    assert status.stdout.strip() == "STOPPED", status.stderr


_STATUS = """
import sys
from cluster import submit
from jobs import config
c = config.load(None)
print(submit._client(submit._address(c)).get_job_status(sys.argv[1]))
"""


def test_rays_own_submit_command_works_with_what_status_prints(head: Head, project: Path) -> None:
    said = run(head, project, [sys.executable, "-m", "cluster.local", "status"]).stdout
    exports = [line.strip() for line in said.splitlines() if line.strip().startswith("export ")]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", ".", "--"]
    stage = ["python", "-m", "jobs.hello", "--config", "own config (1).yaml", "run.name=cli", "run.root=hello out"]
    done = run(head, project, ["sh", "-c", "\n".join([*exports, shlex.join([*ray, *stage])])])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (head.root / "hello out" / "cli.json").is_file()


def test_what_is_uploaded_is_under_a_megabyte_and_holds_no_models_runs_or_tests(tmp_path: Path) -> None:
    import zipfile

    from ray._private.runtime_env import packaging

    # A checkout as it looks after a demo.
    for name in ("models/m.safetensors", "runs/demo/x", ".rankline/token", ".venv/lib/x", ".git/x", "tests/x"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(os.urandom(2 << 20))
    for name in ("jobs", "cluster", "serve_app", "data", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in (".gitignore", ".rayignore", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    package = tmp_path.parent / "package.zip"
    excludes = [".git", ".venv", "venv", "__pycache__"]  # Ray's defaults, which its SDK passes on
    packaging.create_package(str(tmp_path), package, include_gitignore=True, excludes=excludes)
    names = {Path(name).parts[0] for name in zipfile.ZipFile(package).namelist() if not name.endswith("/")}
    assert {"jobs", "cluster", "serve_app", "data"} <= names
    assert not names & {"models", "runs", ".rankline", ".venv", ".git", "tests"}
    assert package.stat().st_size < 1_000_000


def test_an_error_that_can_be_seen_here_needs_no_cluster(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.submit", "run.nmae=x"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "did you mean 'name'" in done.stderr


def test_without_a_cluster_it_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKLINE_ROOT", str(tmp_path))
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"python -m cluster\.local start"):
        submit.submit(config.load(None), ["true"], working_dir=tmp_path)


def test_a_jobs_api_that_is_not_there_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no Jobs API at http://127\.0\.0\.1:9"):
        submit.submit(config.load(None), ["true"], working_dir=tmp_path)
    assert time.monotonic() - started < 20


def test_help_answers_within_a_second() -> None:
    for module in ("cluster.submit", "cluster.local", "cluster.models"):
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0
        assert time.monotonic() - started < 3  # a second on a free machine
        heavy = "import sys, runpy; sys.argv = ['x', '--help']\ntry: runpy.run_module('%s', run_name='__main__')\n"
        heavy += "except SystemExit: pass\nprint({'ray', 'torch', 'transformers'} & set(sys.modules))"
        loaded = subprocess.run([sys.executable, "-c", heavy % module], cwd=ROOT, capture_output=True, text=True)
        assert loaded.stdout.splitlines()[-1] == "set()"
