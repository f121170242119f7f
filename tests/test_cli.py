"""The shared command line: exit statuses, one message per mistake, light `--help`."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

LINE = ["prepare", "train", "sweep", "merge", "compare", "serve", "loadtest", "report", "pipeline"]
STAGES = [*LINE, "describe", "plan"]
HEAVY = ["torch", "ray", "transformers", "vllm", "peft", "pyarrow", "matplotlib"]


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("stage", STAGES)
def test_help_is_answered_before_any_heavy_import(stage: str) -> None:
    code = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY} if m in sys.modules]))\n"
        f"sys.argv = ['{stage}', '--help']\n"
        f"runpy.run_module('jobs.{stage}', run_name='__main__')\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("HEAVY []\n")
    assert ("--config" in done.stdout) == (stage != "describe")  # that one asks about a directory, not a run


@pytest.mark.parametrize("stage", LINE)
def test_a_wrong_key_ends_with_status_1_and_one_message(stage: str) -> None:
    done = python("-m", f"jobs.{stage}", "--config", "jobs/configs/laptop.yaml", "train.batchsize=3")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "train.batch_size" in done.stderr or "did you mean 'batch_size'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_config_file_is_named() -> None:
    done = python("-m", "jobs.prepare", "--config", "no/such.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no/such.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_status_130_and_no_traceback(number: signal.Signals) -> None:
    code = "import time\nfrom jobs import cli\ndef go():\n print('up', flush=True)\n time.sleep(60)\ncli.guard(go)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    child.send_signal(number)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "stopped\n")


def test_an_error_of_ours_keeps_its_traceback() -> None:
    done = python("-c", "from jobs import cli\ncli.guard(lambda: 1 / 0)")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert Path("jobs/cli.py").name in done.stderr
