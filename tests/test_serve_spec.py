"""From config to deployment, without an engine: flags, keys, adapters, and what is refused before anything starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import config as config_module
from jobs import serve_spec
from jobs.config import Config
from jobs.errors import UserError


def load(*overrides: str) -> Config:
    return config_module.load(None, list(overrides))


def test_flags_are_those_of_vllm_serve_and_all_are_known_to_it() -> None:
    flags = serve_spec.engine_flags(load("serve.max_num_seqs=4", "serve.max_model_len=999"), Path("/m"), on_gpus=True)
    assert (flags["max_num_seqs"], flags["max_model_len"], flags["gpu_memory_utilization"]) == (4, 999, 0.85)
    assert flags["generation_config"] == "vllm"
    assert set(flags) - {"model"} <= serve_spec.vllm_flags() | {"model"}


def test_without_a_gpu_the_kv_cache_is_sized_in_bytes() -> None:
    flags = serve_spec.engine_flags(load("serve.kv_cache_gib=1.5"), Path("/m"), on_gpus=False)
    assert flags["kv_cache_memory_bytes"] == 3 * 2**29
    assert "gpu_memory_utilization" not in flags


def test_any_further_engine_flag_is_passed_on() -> None:
    flags = serve_spec.engine_flags(load("serve.engine_args={block_size: 32}"), Path("/m"), on_gpus=True)
    assert flags["block_size"] == 32


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("max_num_batchd_tokens", "did you mean 'max_num_batched_tokens'"),
        ("block_sise", "did you mean 'block_size'"),
        ("max_num_seqs", "serve.max_num_seqs"),
        ("port", "serve.port"),
        ("ssl_keyfile", "Ray Serve replaces"),
        ("api_key", "Ray Serve replaces"),
    ],
)
def test_an_engine_flag_that_cannot_be_passed_on_is_refused(given: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        serve_spec.check_flags([given])


def test_the_names_read_from_vllms_source_are_the_fields_that_it_has() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert {*AsyncEngineArgs.__dataclass_fields__} <= serve_spec.vllm_flags()


@pytest.mark.parametrize(
    ("host", "asked", "needed"),
    [
        ("127.0.0.1", "null", False),
        ("localhost", "null", False),
        ("0.0.0.0", "null", True),
        ("127.0.0.1", "true", True),
    ],
)
def test_a_key_is_needed_beyond_loopback_or_when_asked_for(host: str, asked: str, needed: bool) -> None:
    assert serve_spec.needs_key(load(f"serve.host={host}", f"serve.require_api_key={asked}")) is needed


def test_beyond_loopback_keys_cannot_be_switched_off() -> None:
    with pytest.raises(UserError, match="beyond loopback"):
        load("serve.host=0.0.0.0", "serve.require_api_key=false")


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model directory"):
        serve_spec.check_model(tmp_path / "none")
    with pytest.raises(UserError, match=r"no config\.json"):
        serve_spec.check_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        serve_spec.check_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer"):
        serve_spec.check_model(tmp_path)


def test_a_fitting_adapter_is_mounted_under_a_version_of_its_content(cases: Path) -> None:
    config = load(f"serve.adapters={{good: {cases / 'b' / 'c12_good'}}}")
    (adapter,) = serve_spec.mounted(config, cases / "b" / "base_tied")
    assert (adapter["name"], adapter["path"]) == ("good", str(cases / "b" / "c12_good"))
    assert len(adapter["version"]) == 12
    flags = serve_spec.engine_flags(config, cases / "b" / "base_tied", on_gpus=True)
    assert (flags["enable_lora"], flags["max_loras"]) == (True, 2)
    assert flags["max_lora_rank"] in (1, 8, 16)


@pytest.mark.parametrize("case", ["c09_patterns", "c12_noprefix", "c12_language_model", "c12_onelayer_off"])
def test_an_adapter_that_vllm_would_serve_wrongly_is_refused(cases: Path, case: str) -> None:
    config: Any = load(f"serve.adapters={{it: {cases / 'b' / case}}}")
    with pytest.raises(UserError, match=case):
        serve_spec.mounted(config, cases / "b" / "base_tied")


def test_an_adapter_cannot_take_the_bases_name(cases: Path) -> None:
    config = load(f"serve.adapters={{rankline: {cases / 'b' / 'c12_good'}}}")
    with pytest.raises(UserError, match=r"serve\.served_model_name"):
        serve_spec.mounted(config, cases / "b" / "base_tied")


def test_help_comes_without_loading_a_heavy_library() -> None:
    code = "import sys, jobs.serve; print([m for m in ('ray', 'torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
