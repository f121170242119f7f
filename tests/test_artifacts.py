"""Artifacts: complete or absent, traceable, and never silently reused with other settings."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import artifacts, config
from jobs.errors import UserError


def settings(root: Path, *more: str) -> config.Config:
    return config.load(None, [f"run.root={root}", "run.name=t", *more])


def make(cfg: config.Config, text: str = "hello") -> artifacts.Artifact:
    with artifacts.create(cfg, "stage", artifacts.sections_of(cfg, "lora"), {"data": "abc"}) as draft:
        (draft.path / "sub").mkdir()
        (draft.path / "sub" / "out.txt").write_text(text)
        draft.numbers["loss"] = 1.5
    return artifacts.read(artifacts.location(cfg, "stage"))


def test_a_finished_artifact_holds_config_inputs_numbers_and_the_hash_of_every_file(tmp_path: Path) -> None:
    cfg = settings(tmp_path, "lora.r=4")
    made = make(cfg)
    entry = made.manifest["files"]["sub/out.txt"]
    assert entry == {"size": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}
    assert made.manifest["config"]["lora"]["r"] == 4
    assert (made.manifest["inputs"], made.numbers["loss"], made.manifest["seed"]) == ({"data": "abc"}, 1.5, 0)
    assert made.sha256 == hashlib.sha256((made.path / "manifest.json").read_bytes()).hexdigest()
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == ["stage"]


def test_an_error_in_the_body_leaves_nothing(tmp_path: Path) -> None:
    cfg = settings(tmp_path)

    def fail_half_way() -> None:
        with artifacts.create(cfg, "stage", {}, {}) as draft:
            (draft.path / "half").write_text("x")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_half_way()
    assert list((tmp_path / "t").iterdir()) == []


def test_sigkill_in_the_body_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    code = f"""
import time
from jobs import artifacts, config
cfg = config.load(None, ["run.root={tmp_path}", "run.name=t"])
with artifacts.create(cfg, "stage", {{}}, {{}}) as draft:
    (draft.path / "half").write_text("x")
    print("in the middle", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "in the middle\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    cfg = settings(tmp_path)
    assert artifacts.existing(cfg, "stage", {}, {}) is None
    with pytest.raises(UserError, match="missing or unfinished"):
        artifacts.read(artifacts.location(cfg, "stage"))
    make(cfg)  # and the stage can run again


def test_the_same_settings_are_reused_and_other_ones_refused_by_field(tmp_path: Path) -> None:
    cfg = settings(tmp_path, "lora.r=4")
    made = make(cfg)
    again = artifacts.existing(cfg, "stage", artifacts.sections_of(cfg, "lora"), {"data": "abc"})
    assert again is not None
    assert again.sha256 == made.sha256
    other = settings(tmp_path, "lora.r=8")
    with pytest.raises(UserError, match=r"lora\.r = 4, now 8"):
        artifacts.existing(other, "stage", artifacts.sections_of(other, "lora"), {"data": "abc"})
    with pytest.raises(UserError, match=r'input\.data = "abc", now "xyz"'):
        artifacts.existing(cfg, "stage", artifacts.sections_of(cfg, "lora"), {"data": "xyz"})


def test_a_target_with_files_in_it_is_never_overwritten(tmp_path: Path) -> None:
    cfg = settings(tmp_path)
    (tmp_path / "t" / "stage").mkdir(parents=True)
    (tmp_path / "t" / "stage" / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="is not empty"):
        make(cfg)
    assert (tmp_path / "t" / "stage" / "mine.txt").read_text() == "precious"


@pytest.mark.parametrize("damage", ["missing", "shorter", "same size", "manifest"])
def test_a_damaged_artifact_is_refused_by_file(tmp_path: Path, damage: str) -> None:
    cfg = settings(tmp_path)
    file = make(cfg).path / "sub" / "out.txt"
    if damage == "missing":
        file.unlink()
    elif damage == "manifest":
        (file.parent.parent / "manifest.json").write_text("{")
    else:
        file.write_text("hell" if damage == "shorter" else "hallo")
    with pytest.raises(UserError, match="manifest.json" if damage == "manifest" else "out.txt"):
        artifacts.read(artifacts.location(cfg, "stage"), verify=True)


def test_an_artifact_lives_in_an_object_store_as_well(tmp_path: Path) -> None:
    cfg = settings(tmp_path)
    cfg = config.load(None, [f"run.root=file://{tmp_path}/store", "run.name=t"])
    made = make(cfg)
    assert (tmp_path / "store" / "t" / "stage" / "manifest.json").exists()
    assert (made.path / "sub" / "out.txt").read_text() == "hello"
    assert artifacts.existing(cfg, "stage", artifacts.sections_of(cfg, "lora"), {"data": "abc"}) is not None


def test_the_manifest_time_is_the_bodys_time(tmp_path: Path) -> None:
    cfg = settings(tmp_path)
    with artifacts.create(cfg, "stage", {}, {}):
        time.sleep(0.3)
    spent = json.loads((tmp_path / "t" / "stage" / "manifest.json").read_text())["seconds"]
    assert 0.3 <= spent < 5
