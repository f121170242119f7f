"""Merging: each element against exact arithmetic and PEFT, the files beside the weights, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from jobs import adapters, artifacts, merge, merging, safetensors_header
from jobs import config as config_module
from jobs.errors import UserError
from tests.lora import bf16_step, peft_merge, save_adapter, save_base

ROOT = Path(__file__).parent.parent
QWEN = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
UNTIED = {**QWEN, "model_type": "qwen3", "tie_word_embeddings": False}
BIASED = {**QWEN, "model_type": "qwen2", "tie_word_embeddings": True}  # q, k and v have biases
CONV1D = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LINEAR = ["q_proj", "v_proj", "down_proj"]


def merged_weights(base: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    """Only the weights of a merge, without reloading."""
    out.mkdir()
    tensors = safetensors_header.read_model(base)
    plan = merging.plan(adapters.read(adapter), tensors)
    merging.write(plan, out, limit=10**9, wrote=lambda _: None)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    ("base", "lora"),
    [
        (UNTIED, {"target_modules": LINEAR}),
        (UNTIED, {"target_modules": LINEAR, "use_rslora": True, "r": 4}),
        (UNTIED, {"target_modules": LINEAR, "use_dora": True}),
        (UNTIED, {"target_modules": LINEAR, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {r".*\.1\..*": 32}}),
        (UNTIED, {"target_modules": [*LINEAR, "embed_tokens", "lm_head"]}),
        (UNTIED, {"target_modules": LINEAR, "modules_to_save": ["norm", "lm_head"]}),
        (BIASED, {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
        (BIASED, {"target_modules": ["q_proj", "k_proj"], "bias": "all"}),
        (BIASED, {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}),
        (CONV1D, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        (CONV1D, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    ],
    ids=[
        "plain",
        "rslora",
        "dora",
        "patterns",
        "embeddings",
        "saved",
        "lora-bias",
        "bias",
        "own-bias",
        "conv",
        "conv-dora",
    ],
)
def test_agrees_with_peft_within_two_steps_of_the_larger_operand(tmp_path, monkeypatch, base, lora):
    monkeypatch.setattr(merging, "BLOCK", 500)  # several blocks in each of these small matrices
    source = save_base(tmp_path / "base", **base)
    adapter = save_adapter(source, tmp_path / "adapter", **{"r": 4, "lora_alpha": 16, **lora})
    ours = merged_weights(source, adapter, tmp_path / "out")
    theirs = peft_merge(source, adapter)
    before = load_file(source / "model.safetensors")
    changed = 0
    assert set(before) == set(ours)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        larger = torch.maximum(before[name].abs(), (theirs[name].float() - before[name].float()).abs().bfloat16())
        steps = (tensor.double() - theirs[name].double()).abs() / bf16_step(torch.maximum(larger, theirs[name].abs()))
        assert steps.max() <= 2, (name, steps.max())
        changed += not torch.equal(tensor, before[name])
    assert changed >= 2 * len(lora["target_modules"]) - 2


def test_each_element_is_the_exact_sum_rounded_once(tmp_path):
    source = save_base(tmp_path / "base", **UNTIED)
    adapter = save_adapter(source, tmp_path / "adapter", r=4, lora_alpha=12, target_modules=LINEAR)
    ours = merged_weights(source, adapter, tmp_path / "out")
    before, update = load_file(source / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in (n for n in before if any(f"{m}.weight" in n for m in LINEAR)):
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        exact = before[name].double() + 3.0 * update[key.format("B")].double() @ update[key.format("A")].double()
        off = (ours[name].double() - exact).abs() / bf16_step(exact)
        assert off.max() <= 0.5001  # float32 sums may break a tie the other way
        assert (ours[name] == exact.to(torch.bfloat16)).float().mean() > 0.999
    others = [n for n in before if not any(f"{m}.weight" in n for m in LINEAR)]
    assert others
    assert all(torch.equal(ours[n], before[n]) for n in others)


@pytest.mark.parametrize("case", ["c09_patterns", "c12_good", "c12_default"])
def test_the_merged_model_has_the_reference_logits(cases, tmp_path, case):
    expected = json.loads((cases / "b/expected.json").read_text())
    reference = expected["cases"].get(case, expected["cases"]["c12_good"])
    out = merge.by_hand(cases / "b/base_tied", cases / "b" / case, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([expected["input_ids"]])).logits[0, -1]
    off = float((logits - torch.tensor(reference["last_logits"])).abs().max())
    assert off <= 1.5 * reference["bf16_merge_error"]  # 0.02 for c09; a wrong scale is 0.15 or more off
    assert json.loads((out / "manifest.json").read_text())["numbers"]["base_check"] == "unverified"


def test_a_resized_vocabulary_unties_the_head_and_takes_the_adapters_tokenizer(cases, tmp_path):
    out = merge.by_hand(cases / "b/base_tied", cases / "b/c13_resized", tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (model.config.vocab_size, model.config.tie_word_embeddings) == (50, False)
    trained = load_file(cases / "b/c13_resized/adapter_model.safetensors")
    assert torch.equal(model.lm_head.weight, trained["base_model.model.lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, trained["base_model.model.model.embed_tokens.weight"])
    assert len(AutoTokenizer.from_pretrained(out)) == 50
    bare = shutil.copytree(cases / "b/c13_resized", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UserError, match="50 rows, but .* has no tokenizer"):
        merge.by_hand(cases / "b/base_tied", bare, tmp_path / "out2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare", "out"]


def test_a_quantization_config_over_plain_weights_is_left_out(cases, tmp_path):
    out = merge.by_hand(cases / "b/c14_base_quantcfg", cases / "b/c12_good", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118


def test_quantized_weights_are_refused(cases, tmp_path):
    base = shutil.copytree(cases / "b/c14_base_quantcfg", tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(192, 1, dtype=torch.uint8)
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(UserError, match=r"up_proj\.weight is U8: this base is quantized \(bitsandbytes\)"):
        merge.by_hand(base, cases / "b/c12_good", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_shards_have_an_index_and_the_directory_is_a_model_for_transformers(cases, tmp_path):
    out = merge.by_hand(cases / "b/base_tied", cases / "b/c12_good", tmp_path / "out", max_shard_size_gb=4e-6)
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(shards) == 3
    assert sorted(set(index["weight_map"].values())) == shards
    assert all((out / name).stat().st_size < 4000 + 3000 for name in shards)  # tensors and header
    whole = merge.by_hand(cases / "b/base_tied", cases / "b/c12_good", tmp_path / "whole")
    one, two = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.bfloat16).state_dict() for p in (out, whole))
    assert all(torch.equal(one[name], two[name]) for name in two)
    card = (out / "README.md").read_text()
    assert artifacts.sha256_file(cases / "b/base_tied/model.safetensors") in card
    assert artifacts.sha256_file(cases / "b/c12_good/adapter_model.safetensors") in card
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (cases / "b/base_tied" / name).read_bytes()


def test_sampling_flags_do_not_stop_the_generation_config_from_being_saved(cases, tmp_path):
    base = shutil.copytree(cases / "b/base_tied", tmp_path / "base")
    greedy = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3], "pad_token_id": 0}
    (base / "generation_config.json").write_text(json.dumps(greedy))
    out = merge.by_hand(base, cases / "b/c12_good", tmp_path / "out")
    made = GenerationConfig.from_pretrained(out)
    made.save_pretrained(tmp_path)  # raises for flags that contradict do_sample
    assert made.eos_token_id == [2, 3]
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(sampled))
    out = merge.by_hand(base, cases / "b/c12_good", tmp_path / "out2")
    assert GenerationConfig.from_pretrained(out).temperature == 0.6


def test_a_training_template_loses_its_marks_and_renders_the_same(cases, tmp_path):
    marked = (
        "{% for m in messages %}{{ m.role }}: {%- if m.role == 'assistant' %}  {%- generation %} {{ m.content }} "
        "{%- endgeneration -%}  {% else %} {{ m.content }}{% endif %}\n{% endfor %}"
    )
    adapter = shutil.copytree(cases / "b/c12_good", tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(cases / "b/base_tied" / name, adapter)
    (adapter / "chat_template.jinja").write_text(marked)
    out = merge.by_hand(cases / "b/base_tied", adapter, tmp_path / "out")
    assert "generation" not in (out / "chat_template.jinja").read_text()
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = [AutoTokenizer.from_pretrained(p).apply_chat_template(talk, tokenize=False) for p in (adapter, out)]
    assert rendered[0] == rendered[1]


def test_another_base_than_the_locks_is_refused(cases, tmp_path):
    shutil.copytree(cases / "b/c12_good", tmp_path / "train/adapter")
    lock = {"source": "example/tiny-qwen3", "revision": "abc", "files": {"model.safetensors": "0" * 64}}
    (tmp_path / "train/base.lock.json").write_text(json.dumps(lock))
    with pytest.raises(
        UserError, match=r"model\.safetensors: its SHA-256 is .* trained on example/tiny-qwen3 \(revision abc\)"
    ):
        merge.by_hand(cases / "b/base_tied", tmp_path / "train/adapter", tmp_path / "out")
    lock["files"] = {"model.safetensors": artifacts.sha256_file(cases / "b/base_tied/model.safetensors")}
    (tmp_path / "train/base.lock.json").write_text(json.dumps(lock))
    out = merge.by_hand(cases / "b/base_tied", tmp_path / "train/adapter", tmp_path / "out")
    assert "verified" in json.loads((out / "manifest.json").read_text())["numbers"]["base_check"]


def test_a_target_that_holds_anything_is_refused_and_kept(cases, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        merge.by_hand(cases / "b/base_tied", cases / "b/c12_good", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("case", ["c12_onelayer_off", "c14_no_tensors", "c14_shape0", "c14_one_nan", "c14_missing_B"])
def test_a_refused_adapter_leaves_no_target(cases, tmp_path, case):
    with pytest.raises(UserError, match=case):
        merge.by_hand(cases / "b/base_tied", cases / "b" / case, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def trained(cases: Path, root: Path) -> config_module.Config:
    """A run whose train stage is done: its artifact holds the good adapter and the lock of the tied base."""
    overrides = [f"run.root={root}", "run.name=t", f"model.source={cases / 'b/base_tied'}", f"model.cache={root}"]
    config = config_module.load(None, overrides)
    with artifacts.create(config, "train", {}, {"prepare": "0" * 64}) as draft:
        shutil.copytree(cases / "b/c12_good", draft.path / "adapter")
        digest = artifacts.sha256_file(cases / "b/base_tied/model.safetensors")
        lock = {"source": "tiny", "revision": "1", "files": {"model.safetensors": digest}}
        (draft.path / "base.lock.json").write_text(json.dumps(lock))
    return config


def test_the_stage_merges_the_train_runs_adapter_once(cases, tmp_path, capsys):
    config = trained(cases, tmp_path)
    made = merge.run(config)
    assert made.numbers["tensors_merged"] == 6
    assert made.numbers["base_check"].startswith("verified")
    assert made.numbers["reply"]
    assert (made.path / "model/config.json").is_file()
    again = merge.run(config)
    assert again.sha256 == made.sha256
    assert "up to date" in capsys.readouterr().out


def test_the_sweeps_winner_is_merged_when_there_is_a_sweep(cases, tmp_path):
    config = config_module.load(
        None,
        [f"run.root={tmp_path}", f"model.source={cases / 'b/base_tied'}", f"model.cache={tmp_path}", "sweep.ranks=[4]"],
    )
    with artifacts.create(config, "sweep", {}, {}) as draft:
        shutil.copytree(cases / "b/c12_good", draft.path / "trials/rank-4/adapter")
        draft.numbers["winner"] = {"name": "rank-4", "adapter": "trials/rank-4/adapter", "why": "only one"}
    source = merge.find_adapter(config)
    assert (source.origin, source.path.name, source.lock) == ("sweep", "adapter", None)
    assert "trials/rank-4" in str(source.path)


def test_a_kill_while_it_writes_leaves_nothing_that_looks_complete(tmp_path, base_model):
    adapter = save_adapter(base_model, tmp_path / "adapter", r=4, lora_alpha=8, target_modules=LINEAR)
    out = tmp_path / "models/out"
    command = [sys.executable, "-m", "jobs.merge", "--model", base_model, "--adapter", adapter, "--output", out]
    for sent, status, left in ((signal.SIGTERM, 130, 0), (signal.SIGKILL, -9, 1)):
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("models/.out.partial-*/model*.safetensors")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, sent)
        assert process.wait(timeout=60) == status
        assert not out.exists()
        assert len(list(tmp_path.glob("models/.out.partial-*"))) == left
    assert not list(tmp_path.glob("models/*/manifest.json"))


def test_memory_does_not_grow_with_the_model(tmp_path, base_model, monkeypatch):
    monkeypatch.setattr(merging, "BLOCK", 1 << 18)
    adapter = save_adapter(base_model, tmp_path / "adapter", r=4, lora_alpha=8, target_modules=LINEAR)
    plan = merging.plan(adapters.read(adapter), safetensors_header.read_model(base_model))
    (tmp_path / "out").mkdir()
    before, most = _anonymous_bytes(), 0

    def wrote(_: int) -> None:
        nonlocal most
        most = max(most, _anonymous_bytes())

    figures = merging.write(plan, tmp_path / "out", limit=10**8, wrote=wrote)
    assert figures["shards"] == 3
    assert figures["bytes"] > 260e6
    assert most - before < 40e6  # the embedding alone has 57 MB, the model 269 MB


def _anonymous_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
