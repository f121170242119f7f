"""The config tree: precedence, refusals that name the nearest key, rules across sections, light imports."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jobs import config
from jobs.errors import UserError

CONFIGS = sorted((Path(__file__).parent.parent / "jobs" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_in_the_repository_is_valid(path: Path) -> None:
    loaded = config.load(path)
    for section, fields in yaml.safe_load(path.read_text()).items():
        for key, value in fields.items():
            held = getattr(getattr(loaded, section), key)
            assert held == (tuple(value) if isinstance(value, list) else value), f"{section}.{key}"


def test_the_single_card_config_holds_the_tutorial_values() -> None:
    got = config.load(Path("jobs/configs/rtx4090.yaml"))
    assert (got.model.source, got.lora.r) == ("Qwen/Qwen3-4B", 16)
    assert (got.serve.max_model_len, got.serve.gpu_memory_utilization, got.serve.max_num_seqs) == (4096, 0.85, 4)
    assert (got.load.input_len, got.load.output_len, got.load.num_prompts) == (512, 128, 64)
    assert got.load.levels == (1, 4, 16)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lora: {r: 4, lora_alpha: 12}\n")
    got = config.load(file, ["lora.r=32"])
    assert (got.lora.r, got.lora.lora_alpha, got.lora.lora_dropout) == (32, 12, 0.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trian: {batch_size: 4}", "did you mean 'train'"),
        ("train: {batchsize: 4}", "did you mean 'batch_size'"),
        ("serve: {max_num_seq: 4}", "did you mean 'max_num_seqs'"),
        ("train: 4", "section 'train' should hold keys"),
        ("- 1", "expected sections"),
        ("a: [", "not valid YAML"),
        ("train: {batch_size: no}", "train.batch_size"),
        ("train: {batch_size: 0}", "train.batch_size"),
        ("train: {learning_rate: .nan}", "train.learning_rate"),
        ("run: {name: a/b}", "cannot name a run"),
        ("run: {name: ..}", "cannot name a run"),
        ("lora: {target_modules: [q_proj, lm_head]}", "lm_head"),
        ("load: {levels: []}", "at least one"),
        ("load: {sweep: 'serve.max_num_seqs:0,4'}", "max_num_seqs"),
        ("load: {sweep: 'lora.r:4'}", "serve.max_num_seqs:4,16"),
        ("load: {input_len: 4000, output_len: 200}", "serve.max_model_len"),
        ("train: {batch_size: 8, num_workers: 3}", "multiple of train.num_workers"),
        ("data: {split_by: group}", "data.group_key"),
    ],
)
def test_a_mistake_is_refused_with_its_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"(?s)mine.yaml.*{says}"):
        config.load(file)


@pytest.mark.parametrize("override", ["train.batchsize=4", "batch_size=4", "train.batch_size", "=3", "x.y=3"])
def test_a_wrong_override_is_refused_by_name(override: str) -> None:
    with pytest.raises(UserError, match=override.split("=")[0].split(".")[-1] or "override"):
        config.load(None, [override])


def test_text_fields_take_an_override_as_it_is() -> None:
    odd = "own data/rows & $HOME `id` #1: {x}.jsonl"
    assert config.load(None, [f"data.path={odd}"]).data.path == odd
    assert config.load(None, ["run.name=2024"]).run.name == "2024"
    assert config.load(None, ["merge.adapter=null"]).merge.adapter is None
    assert config.load(None, ["train.learning_rate=2e-4"]).train.learning_rate == 0.0002
    assert config.load(None, ['lora.target_modules=["q_proj","v_proj"]']).lora.target_modules == ("q_proj", "v_proj")
    assert config.load(None, ["serve.engine_args.swap_space=2"]).serve.engine_args == {"swap_space": 2}


def test_config_is_frozen() -> None:
    loaded = config.load(None)
    with pytest.raises(ValueError, match="frozen"):
        loaded.lora.r = 3  # type: ignore[misc]


def test_a_relative_root_is_refused_inside_a_submitted_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKLINE_ROOT", raising=False)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(UserError, match="relative path inside a submitted job"):
        config.resolve_storage("runs")
    monkeypatch.setenv("RANKLINE_ROOT", "/srv/rankline")
    assert config.resolve_storage("runs") == "/srv/rankline/runs"
    assert config.resolve_storage("s3://bucket/runs") == "s3://bucket/runs"


def test_importing_the_config_loads_no_heavy_library() -> None:
    heavy = ["torch", "ray", "transformers", "vllm", "peft", "pyarrow", "numpy", "yaml"]
    code = f"import sys, jobs.config, jobs.cli; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
