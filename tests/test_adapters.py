"""Reading adapters: the config's meaning against PEFT's own functions, and the refusals of cases C09 to C14."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs import adapter_fit, adapters
from jobs.errors import UserError


def edited(source: Path, target: Path, **config: object) -> Path:
    """A copy of an adapter with other config values."""
    shutil.copytree(source, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


def retensored(source: Path, target: Path, change) -> Path:
    """A copy of an adapter whose tensors went through `change(dict)`."""
    shutil.copytree(source, target)
    file = target / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file)
    return target


def test_scaling_per_module_is_that_of_the_regex_patterns(cases):
    expected = json.loads((cases / "b/expected.json").read_text())["cases"]["c09_patterns"]["scaling_per_module"]
    adapter = adapters.read(cases / "b/c09_patterns")
    assert {module: update.scaling for module, update in adapter.updates.items()} == expected


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 1},
        {"layers.1.self_attn.q_proj": 1, "q_proj": 2},
        {r"model\.layers\.[0-3]\..*": 1, ".*": 2},
        {"^model.layers.1.mlp.up_proj": 1, "proj": 2},
        {"o_proj|q_proj": 1},
        {"layers": 1},
    ],
)
def test_patterns_match_as_peft_matches_them(patterns):
    from peft.utils.other import get_pattern_key

    for module in ("model.layers.1.self_attn.q_proj", "model.layers.10.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        theirs = patterns.get(get_pattern_key(patterns.keys(), module), 8)
        assert adapters.scaling({"r": 8, "lora_alpha": 16, "rank_pattern": patterns}, module)[0] == theirs


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*\.layers\.\d+\.mlp\.(up|down)_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 3]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
        {"target_modules": ["proj"]},
        {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0.*"},
        {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]},
        {"target_modules": ["model.layers.0.self_attn.q_proj"]},
    ],
)
def test_targets_are_those_of_peft(config):
    from peft.tuners.tuners_utils import check_target_module_exists

    names = [f"model.layers.{i}.{m}" for i in range(4) for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
    full = SimpleNamespace(target_parameters=None, **config)
    for name in [*names, "lm_head", "model.embed_tokens", "model.blocks.1.layers.2.q_proj"]:
        assert adapter_fit.targeted(config, name) == bool(check_target_module_exists(full, name)), name


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("c12_noprefix", ["0 of 6", "model.layers.0.mlp.down_proj.lora_A.weight"]),
        (
            "c12_language_model",
            ["0 of 6", "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight"],
        ),
        ("c12_onelayer_off", ["3 of 6", "base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"]),
        ("c14_no_tensors", ["no LoRA tensors"]),
        ("c14_shape0", ["layers.0.mlp.down_proj.lora_A.weight", "[0]"]),
        ("c14_one_nan", ["layers.1.mlp.down_proj.lora_B.weight", "1 NaN"]),
        ("c14_missing_B", ["layers.0.self_attn.q_proj.lora_A.weight", "no partner"]),
    ],
)
def test_an_adapter_that_peft_half_loads_is_refused_with_the_tensor(cases, case, words):
    with pytest.raises(UserError) as error:
        adapter_fit.validate(cases / "b" / case, cases / "b/base_tied")
    for word in [case, *words]:
        assert word in str(error.value)


def test_default_in_the_keys_reads_the_same(cases):
    plain = adapter_fit.validate(cases / "b/c12_good", cases / "b/base_tied")
    named = adapter_fit.validate(cases / "b/c12_default", cases / "b/base_tied")
    assert sorted(named.updates) == sorted(plain.updates)
    assert {u.scaling for u in named.updates.values()} == {2.0}


def test_an_adapter_of_zeros_is_said_to_change_nothing(cases):
    adapter = adapter_fit.validate(cases / "b/c14_zero_B", cases / "b/base_tied")
    assert any("changes nothing" in warning for warning in adapter.warnings)


def test_infinity_and_nan_in_half_precision_are_found(cases, tmp_path):
    def spoil(tensors):
        key = next(k for k in tensors if k.endswith("v_proj.lora_B.weight"))
        tensors[key] = tensors[key].to(torch.bfloat16)
        tensors[key][0, 0] = float("inf")
        return tensors

    path = retensored(cases / "b/c12_good", tmp_path / "a", spoil)
    with pytest.raises(UserError, match=r"v_proj\.lora_B\.weight holds 1 NaN or infinite"):
        adapter_fit.validate(path, cases / "b/base_tied")


def test_a_target_without_any_tensor_is_an_incomplete_adapter(cases, tmp_path):
    def drop(tensors):
        return {k: v for k, v in tensors.items() if "layers.1.self_attn.q_proj" not in k}

    path = retensored(cases / "b/c12_good", tmp_path / "a", drop)
    with pytest.raises(UserError, match=r"5 of 6 modules.*model\.layers\.1\.self_attn\.q_proj has none"):
        adapter_fit.validate(path, cases / "b/base_tied")


def test_a_stray_tensor_is_refused(cases, tmp_path):
    name = "base_model.model.model.norm.weight"
    path = retensored(cases / "b/c12_good", tmp_path / "a", lambda t: {**t, name: torch.ones(16)})
    with pytest.raises(UserError, match=r"model\.norm\.weight is no LoRA tensor"):
        adapter_fit.validate(path, cases / "b/base_tied")


def test_another_shape_and_another_rank_are_refused(cases, tmp_path):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    wide = retensored(cases / "b/c12_good", tmp_path / "a", lambda t: {**t, key.format("A"): torch.ones(4, 17)})
    with pytest.raises(UserError, match=r"q_proj\.weight of .*base_tied is \[16, 16\]"):
        adapter_fit.validate(wide, cases / "b/base_tied")
    rank = edited(cases / "b/c12_good", tmp_path / "b", r=8)
    with pytest.raises(UserError, match="should have rank 8"):
        adapter_fit.validate(rank, cases / "b/base_tied")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"rank_pattern": {"(": 4}}, "regular expression"),
        ({"r": 0}, "r should be a number over zero"),
    ],
)
def test_what_is_more_than_an_update_is_refused_by_its_field(cases, tmp_path, config, word):
    path = edited(cases / "b/c12_good", tmp_path / "a", **config)
    with pytest.raises(UserError, match=word.replace("(", r"\(")):
        adapters.read(path)


def test_tied_embeddings_and_head_are_not_adapted_in_part(cases, tmp_path):
    base = cases / "b/base_tied"
    half = "base_model.model.model.embed_tokens.{}"
    adapted = {half.format("lora_embedding_A"): torch.ones(4, 48), half.format("lora_embedding_B"): torch.ones(16, 4)}
    path = retensored(cases / "b/c12_good", tmp_path / "a", lambda t: {**t, **adapted})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        adapter_fit.validate(path, base)
    head = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(4, 16),
        "base_model.model.lm_head.lora_B.weight": torch.ones(48, 4),
    }
    path = retensored(cases / "b/c12_good", tmp_path / "b", lambda t: {**t, **head})
    with pytest.raises(UserError, match="lm_head"):
        adapter_fit.validate(path, base)
    path = retensored(
        cases / "b/c13_resized", tmp_path / "c", lambda t: {k: v for k, v in t.items() if "lm_head" not in k}
    )
    with pytest.raises(UserError, match=r"embed_tokens\.weight alone"):
        adapter_fit.validate(path, base)


def test_mounting_refuses_what_vllm_would_scale_wrongly(cases, tmp_path):
    adapter_fit.check_mountable(adapters.read(cases / "b/c12_good"))
    for case in ("c09_patterns", "c13_resized"):
        with pytest.raises(UserError, match=r"jobs\.merge"):
            adapter_fit.check_mountable(adapters.read(cases / "b" / case))
    # a pattern for every module that leaves one scale is still not the scale that vLLM reads from r and lora_alpha
    one = edited(cases / "b/c12_good", tmp_path / "a", alpha_pattern={".*": 32})
    with pytest.raises(UserError, match="alpha_pattern"):
        adapter_fit.check_mountable(adapters.read(one))


def test_the_largest_rank_counts_patterns(cases, tmp_path):
    assert adapters.read(cases / "b/c09_patterns").max_rank == 8

    def widen(tensors):
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        return {**tensors, key.format("A"): torch.ones(64, 16), key.format("B"): torch.ones(16, 64)}

    path = retensored(
        edited(cases / "b/c12_good", tmp_path / "a", rank_pattern={r".*\.0\..*q_proj": 64}), tmp_path / "b", widen
    )
    assert adapters.read(path).max_rank == 64


def test_reading_an_adapter_needs_no_torch(cases):
    code = (
        "import sys; from pathlib import Path; from jobs import adapter_fit, adapters, safetensors_header as h;"
        f"a = adapters.read(Path({str(cases / 'b/c12_good')!r})); base = Path({str(cases / 'b/base_tied')!r});"
        "adapter_fit.check_base(a, h.read_model(base), where=base, tied=True); adapter_fit.check_mountable(a);"
        "assert not {'torch', 'peft', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
