"""Comparing: the proof catches wrong merges, the arithmetic is that of other libraries, the page and reviews hold."""

import csv
import json
import math
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs import (
    adapter_fit,
    adapters,
    artifacts,
    columns,
    compare,
    judging,
    merge,
    merging,
    modelfiles,
    proof,
    review,
    safetensors_header,
    served,
)
from jobs import config as config_module
from jobs.columns import Row
from jobs.errors import UserError
from tests.lora import bf16_step, peft_merge, save_adapter, save_base

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
TINY = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


def rows(count: int, *, vocabulary: int = 49000, length: int = 24, prompt: int = 12) -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(100, vocabulary, (count, length), generator=generator).tolist()
    return [Row(f"r{i}", ids[i], prompt, [{"role": "user", "content": f"q{i}"}], f"a{i}") for i in range(count)]


@pytest.fixture(scope="module")
def small(tmp_path_factory, base_model):
    """The small real model with an adapter of a trained one's size (0.8 % of the weights), and its right merge."""
    root = tmp_path_factory.mktemp("compare")
    adapter = save_adapter(base_model, root / "adapter", **LORA, use_rslora=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {k: t * (0.1 if "lora_B" in k else 1.0) for k, t in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    return base_model, adapter, write_merge(base_model, adapter, root / "merged")


def write_merge(base: Path, adapter: Path, out: Path) -> Path:
    out.mkdir()
    read = adapters.read(adapter)
    plan = merging.plan(read, safetensors_header.read_model(base))
    modelfiles.write(base, read, out, rows=None)
    merging.write(plan, out, limit=10**9, wrote=lambda _: None)
    return out


def wrong_merge(base: Path, adapter: Path, out: Path, wrong: str) -> Path:
    """A merge made with an adapter that was altered as `wrong` says."""
    altered = shutil.copytree(adapter, out.with_suffix(".adapter"))
    file, config = altered / "adapter_model.safetensors", altered / "adapter_config.json"
    tensors, fields = load_file(file), json.loads(config.read_text())
    if wrong == "no rsLoRA":
        fields["use_rslora"] = False
    factor = {"0.9": 0.9, "1.1": 1.1}.get(wrong, 1.0)
    for key in tensors:
        if "lora_B" in key and wrong != "no rsLoRA":
            skipped = wrong == "one layer" and ".layers.1." in key
            tensors[key] = tensors[key] * (0.0 if skipped else factor)
    save_file(tensors, file)
    config.write_text(json.dumps(fields))
    return write_merge(base, altered, out)


def test_a_right_merge_is_proven_and_within_rounding(small):
    base, adapter, merged = small
    plain, tuned, _ = columns.load_pair(base, adapter)
    result, _ = columns.load_merged(merged)
    fitted = adapter_fit.validate(adapter, base)
    found = proof.check_weights(tuned.model, fitted, base, merged, tick=lambda *_: None)
    assert (found["modules"], found["tensors_equal"]) == (90, 182)
    assert found["other_elements"] <= 1e-4 * found["elements"]
    logits = proof.check_logits(tuned, result, rows(2), modules=columns.adapted_modules(adapter), factor=2.0, seed=0)
    assert 0 < logits["mean_abs_logit_difference"] <= logits["tolerance_mean"]
    # base and merged are far apart, so what the check allows is no licence
    far = (columns.answer_logits(plain, rows(1)[0]) - columns.answer_logits(result, rows(1)[0])).abs().mean()
    assert far > 2 * logits["tolerance_mean"]


@pytest.mark.parametrize("wrong", ["0.9", "1.1", "one layer", "no rsLoRA"])
def test_a_wrong_merge_is_caught_with_the_scale_it_has(small, tmp_path, wrong):
    base, adapter, _ = small
    merged = wrong_merge(base, adapter, tmp_path / "wrong", wrong)
    _, tuned, _ = columns.load_pair(base, adapter)
    with pytest.raises(UserError) as error:
        proof.check_weights(tuned.model, adapter_fit.validate(adapter, base), base, merged, tick=lambda *_: None)
    scale = {"0.9": "0.90 to", "1.1": "1.10", "one layer": "hold 0.00 to 0.00", "no rsLoRA": "0.50"}[wrong]
    assert scale in str(error.value)
    count = {"one layer": "3 of 90"}.get(wrong, "90 of 90")
    assert count in str(error.value)


@pytest.mark.parametrize("wrong", ["one layer", "no rsLoRA"])
def test_the_logits_alone_catch_a_wrong_merge(small, tmp_path, wrong):
    base, adapter, _ = small
    result, _ = columns.load_merged(wrong_merge(base, adapter, tmp_path / "wrong", wrong))
    _, tuned, _ = columns.load_pair(base, adapter)
    with pytest.raises(UserError, match=r"is not the adapter: their logits differ by"):
        proof.check_logits(tuned, result, rows(2), modules=columns.adapted_modules(adapter), factor=2.0, seed=0)


def test_a_tensor_of_another_base_is_caught(small, tmp_path):
    base, adapter, merged = small
    other = shutil.copytree(merged, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors")
    _, tuned, _ = columns.load_pair(base, adapter)
    with pytest.raises(UserError, match=r"layers\.3\.mlp\.up_proj\.weight is not the base's"):
        proof.check_weights(tuned.model, adapter_fit.validate(adapter, base), base, other, tick=lambda *_: None)


@pytest.mark.parametrize("lora", [{**LORA, "use_dora": True}, {**LORA, "rank_pattern": {"v_proj": 2}}])
def test_dora_and_patterns_are_proven_too(tmp_path, lora):
    base = save_base(tmp_path / "base", **TINY)
    adapter = save_adapter(base, tmp_path / "adapter", **lora)
    (tmp_path / "merged").mkdir()
    plan = merging.plan(adapters.read(adapter), safetensors_header.read_model(base))
    merging.write(plan, tmp_path / "merged", limit=10**9, wrote=lambda _: None)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), str(adapter))
    fitted = adapter_fit.validate(adapter, base)
    assert proof.check_weights(tuned, fitted, base, tmp_path / "merged", tick=lambda *_: None)["modules"] == 6
    # PEFT's own merge rounds DoRA once as well, so it must pass the same check
    if lora.get("use_dora"):
        save_file({k: v.clone() for k, v in peft_merge(base, adapter).items() if k != "lm_head.weight"},
                  tmp_path / "merged/model.safetensors")  # fmt: skip
        proof.check_weights(tuned, fitted, base, tmp_path / "merged", tick=lambda *_: None)


def test_step_between_bf16_numbers():
    values = torch.tensor([1.0, 1.5, -2.0, 0.1, 3e-5, 200.0], dtype=torch.bfloat16)
    assert torch.equal(columns.bf16_step(values).double(), bf16_step(values))
    assert columns.bf16_step(torch.zeros(1)) == 0


def test_losses_are_those_of_transformers(small):
    base, adapter, _ = small
    plain, tuned, _ = columns.load_pair(base, adapter)
    row = rows(1)[0]
    labels = torch.tensor([[-100] * row.prompt_length + row.ids[row.prompt_length :]])
    with torch.inference_mode():
        theirs = tuned.model(input_ids=torch.tensor([row.ids]), labels=labels).loss
    ours = columns.losses(columns.answer_logits(tuned, row), row).mean()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-3)
    assert float(columns.losses(columns.answer_logits(plain, row), row).mean()) != pytest.approx(
        float(theirs), rel=1e-3
    )


def test_a_batch_answers_as_each_prompt_alone(small):
    base, _, merged = small
    column, tokenizer = columns.load_merged(merged)
    asked = []
    for i, question in enumerate(
        ["Why is the sky blue?", "What do plants eat, and how do they get it from the ground?"]
    ):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        asked.append(Row(str(i), ids, len(ids), [], ""))
    together = columns.answers(column, tokenizer, asked, max_new_tokens=6, tick=lambda _: None)
    for row, answer in zip(asked, together, strict=True):
        alone = columns.answers(column, tokenizer, [row], max_new_tokens=6, tick=lambda _: None)[0]
        assert answer.text
        assert judging.common_prefix(answer.ids, alone.ids) >= 3


def test_an_answer_ends_at_the_end_of_turn(base_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    ids = tokenizer("Blue light.", add_special_tokens=False)["input_ids"]
    ended = columns.cut([*ids, 2, 2, 2], [2], tokenizer)
    assert (ended.text, ended.ended, ended.ids) == ("Blue light.", True, ids)
    assert not columns.cut(ids, [2], tokenizer).ended


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("The sea is blue. The sea is blue. The sea is blue.", True),
        ("So it goes on and on and on and on and on and on and on", True),
        ("no no no", False),
        ("w25 " * 12, True),
        ("Air scatters blue light more than red light, so the sky looks blue to us all day long.", False),
        ("First we mix, then we wait, then we mix, then we wait, and then we eat the cake that we made.", False),
        ("", False),
    ],
)
def test_a_loop_is_a_tail_said_three_times(text, loop):
    assert judging.loops(text) is loop


def test_faults_are_counted():
    texts = ["fine.", "<think>\nhm\n</think> fine.", "so so so so so so so so so so so so", "fine"]
    assert judging.faults(texts, [True, True, False, False], enable_thinking=None) == {
        "loops": 1,
        "no_end_of_turn": 2,
        "think_leaks": 1,
    }
    assert judging.faults(texts, [True] * 4, enable_thinking=True)["think_leaks"] == 0


def test_the_paired_interval_is_that_of_the_ratio_estimator():
    """Reference: the normal interval of a ratio of sums, with the linearized standard error (Cochran, 6.4)."""
    import numpy as np

    generator = np.random.default_rng(5)
    tokens = generator.integers(20, 60, size=200)
    hard = generator.normal(2.5, 0.6, size=200)
    base, tuned = hard * tokens, (hard - 0.2 + generator.normal(0, 0.05, size=200)) * tokens
    found = judging.bootstrap({"base": base.tolist(), "merged": tuned.tolist()}, tokens.tolist(), seed=0)
    for got, middle, values in (
        (found["merged"]["minus_base_95"], found["merged"]["minus_base"], tuned - base),
        (found["base"]["loss_95"], found["base"]["loss"], base),
    ):
        ratio = values.sum() / tokens.sum()
        half = 1.96 * np.sqrt(np.square(values - ratio * tokens).sum()) / tokens.sum()
        assert middle == pytest.approx(ratio, abs=1e-5)
        assert got[0] == pytest.approx(ratio - half, abs=0.15 * half)
        assert got[1] == pytest.approx(ratio + half, abs=0.15 * half)
    assert found["base"]["perplexity"] == pytest.approx(math.exp(base.sum() / tokens.sum()), abs=1e-3)


@pytest.fixture(scope="module")
def done(tmp_path_factory, cases):
    """A finished run on the tiny base: snapshot, train, merge and compare artifacts."""
    import pyarrow as pa

    from data import snapshot

    root = tmp_path_factory.mktemp("run")
    config = config_module.load(
        None,
        [f"run.root={root}", f"model.source={cases / 'b/base_tied'}", f"model.cache={root}"]
        + ["compare.max_new_tokens=8", "compare.num_prompts=2", "compare.loss_rows=5", "train.quantization=none"],
    )
    with artifacts.create(config, "prepare", {}, {}) as draft:
        held_out = rows(6, vocabulary=101, length=20, prompt=8)
        lines = [
            {
                "id": row.id, "source": f"x:{i}", "input_ids": [t % 48 for t in row.ids], "length": 20,
                "prompt_length": 8, "loss_mask": [0] * 8 + [1] * 12, "messages": json.dumps(row.messages),
                "answer": row.reference,
            }
            for i, row in enumerate(held_out)
        ]  # fmt: skip
        for split in ("train", "eval"):
            snapshot.write(draft.path, split, 0, pa.Table.from_pylist(lines, schema=snapshot.schema()))
        draft.numbers["snapshot_hash"] = "f" * 64
    with artifacts.create(config, "train", {}, {}) as draft:
        shutil.copytree(cases / "b/c09_patterns", draft.path / "adapter")
    merge.run(config)
    return config, compare.run(config)


def test_the_stage_says_which_split_and_rows_its_figures_come_from(done, capsys):
    config, made = done
    numbers = made.numbers
    assert (numbers["split"], numbers["prompts"], numbers["loss_rows"], numbers["loss_tokens"]) == ("eval", 2, 5, 60)
    assert sorted(numbers["loss"]) == ["adapter", "base", "merged"]
    assert numbers["loss"]["merged"]["loss"] == pytest.approx(numbers["loss"]["adapter"]["loss"], abs=0.02)
    assert numbers["mean_abs_logit_difference"] <= numbers["tolerance_mean"]
    lines = [json.loads(line) for line in (made.path / "answers.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["r0", "r3"]  # spread over the split
    assert set(lines[0]["answers"]) == {"base", "adapter", "merged"}
    page = (made.path / "compare.html").read_text()
    assert "base + adapter" in page
    assert "held-out" in page
    assert "http" not in page
    assert compare.run(config).sha256 == made.sha256
    assert "up to date" in capsys.readouterr().out


def test_a_merge_of_another_adapter_is_not_compared(done, cases):
    config, _ = done
    other = config_module.validate({**config.model_dump(), "merge": {"adapter": str(cases / "b/c12_good")}}, "test")
    with pytest.raises(UserError, match="merged from another adapter"):
        compare.run(other)


def test_the_review_sheet_has_a_line_per_answer_and_runs_no_formula(tmp_path):
    answers = [{"id": "1", "split": "eval", "messages": [{"role": "user", "content": "=1+1"}], "reference": "two",
                "answers": {"base": "=HYPERLINK(1)", "merged": "Zwei, nämlich 2"}}]  # fmt: skip
    numbers = {
        "prompts": 1,
        "split": "eval",
        "loss": {},
        "loss_rows": 0,
        "loss_tokens": 0,
        "faults": {},
        "max_new_tokens": 8,
    }
    review.write(tmp_path, answers, numbers, lines=[])
    with open(tmp_path / "review.csv", newline="", encoding="utf-8-sig") as handle:
        lines = list(csv.DictReader(handle))
    assert [line["model"] for line in lines] == ["base", "merged"]
    assert lines[0]["question"] == "'=1+1"
    assert lines[0]["answer"] == "'=HYPERLINK(1)"
    assert lines[1]["answer"] == "Zwei, nämlich 2"
    assert lines[0]["facts_right"] == lines[0]["reviewer"] == ""


def test_a_blind_review_hides_names_shuffles_and_goes_on(tmp_path):
    answers = [
        {"id": str(i), "split": "eval", "messages": [{"role": "user", "content": f"q{i}"}],
         "answers": {"base": f"old {i}", "merged": f"new {i}"}}
        for i in range(20)
    ]  # fmt: skip
    shown: list[str] = []
    asked = iter(["x", *["a"] * 12, "q"])
    file = tmp_path / "reviews/kim.jsonl"
    options = {"reviewer": "kim", "pair": ("base", "merged"), "show": shown.append}
    wins = review.blind(answers, file, ask=lambda _: next(asked), **options)
    assert sum(wins.values()) == 12
    assert wins["base"] >= 2  # "a" is not always the same model
    assert wins["merged"] >= 2
    assert not any("merged" in text or "base" in text for text in shown)
    first = [json.loads(line) for line in file.read_text().splitlines()]
    for line, text in zip(first, shown[1::2], strict=False):
        assert line["better"] == ("base" if text.startswith(f"  a: old {line['id']}") else "merged")
    wins = review.blind(answers, file, ask=lambda _: "s", **options)
    assert wins["same"] == 8
    assert len(file.read_text().splitlines()) == 20


class Endpoint(BaseHTTPRequestHandler):
    """Answers chat requests as an OpenAI server does, with `says` by question."""

    says: dict[str, str] = {}
    prompt_tokens = 8

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": "rankline", "object": "model", "created": 0, "owned_by": "t"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0
        text = self.says[body["messages"][-1]["content"]]
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 8, "total_tokens": 16}
        self.reply(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        )

    def reply(self, tree: dict[str, object]) -> None:
        data = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(Endpoint, "prompt_tokens", 8)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_served_model_is_the_compared_one_or_the_command_says_so(done, endpoint, monkeypatch):
    config, made = done
    lines = [json.loads(line) for line in (made.path / "answers.jsonl").read_text().splitlines()]

    def serves(column: str) -> None:
        monkeypatch.setattr(Endpoint, "says", {r["messages"][-1]["content"]: r["answers"][column] for r in lines})

    serves("merged")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # loopback goes direct
    found = json.loads(served.run(config, endpoint).read_text())
    assert found["identical"]["merged"] == 2
    assert found["nearest"] in ("merged", "adapter")
    assert found["faults"]["no_end_of_turn"] == 2
    serves("base")
    with pytest.raises(UserError, match="it serves the base"):
        served.run(config, endpoint)
    serves("merged")
    monkeypatch.setattr(Endpoint, "prompt_tokens", 9)
    with pytest.raises(UserError, match="another tokenizer or chat template"):
        served.run(config, endpoint)
    artifacts.read(made.path, verify=True)  # what was asked later left the artifact as it was
