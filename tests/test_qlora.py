"""The loss, its gradients and the training loop, against plain transformers, PEFT, bitsandbytes and PyTorch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs import kernels, lora, packing
from jobs.config import Config
from jobs.errors import UserError
from jobs.loop import Loop, Rows
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("tiny"), tokenizer=base_model)


def load(small: Path, root: Path, *overrides: str) -> tuple[Config, lora.Tuned]:
    """A loaded model whose adapter does something: B is drawn too, since with B at zero A has no gradient."""
    config = tiny.settings(root, small, *overrides)
    tuned = lora.load(small, config, seed=0, device=CPU, revision=None)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in tuned.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    return config, tuned


def plain(path: Path, tuned: lora.Tuned) -> Any:
    """The same adapter in plain transformers + PEFT: nothing of ours, torch's own attention, full logits."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation="sdpa")
    model = get_peft_model(base, tuned.model.peft_config["default"])
    set_peft_model_state_dict(model, get_peft_model_state_dict(tuned.model))
    return model.train()


def plain_loss_sum(model: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """One row at a time, padded by nothing: transformers' own loss, which is a mean, times its tokens."""
    total = torch.zeros(())
    for ids, mask in rows:
        labels = torch.tensor([i if m else -100 for i, m in zip(ids, mask, strict=True)])
        total = total + model(input_ids=torch.tensor([ids]), labels=labels[None]).loss * sum(mask[1:])
    return total


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("options", [(), ("lora.use_rslora=true",), ("lora.use_dora=true",)])
def test_packed_loss_and_gradients_are_those_of_plain_transformers_and_peft(
    small: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    _, tuned = load(small, tmp_path, *options)
    reference = plain(small, tuned)
    rows = tiny.rows(5)
    ours = lora.loss_sum(tuned, packing.pack(rows))
    theirs = plain_loss_sum(reference, rows)
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    want = gradients(reference)
    assert want.keys() == gradients(tuned.model).keys()
    for name, gradient in gradients(tuned.model).items():
        assert relative(gradient, want[name]) < 1e-4, name


def test_four_bit_base_of_the_real_model_gives_the_plain_loss_and_gradients(base_model: Path, tmp_path: Path) -> None:
    config, tuned = load(base_model, tmp_path, "train.quantization=nf4", "model.dtype=bfloat16", "lora.r=4")
    rows = tiny.rows(3, vocab_size=40000)

    def both(loss: Callable[[], torch.Tensor]) -> tuple[float, float, torch.Tensor]:
        with torch.no_grad(), tuned.model.disable_adapter():
            bare = loss().item()
        tuned.model.zero_grad()
        total = loss()
        total.backward()
        return bare, total.item(), torch.cat([g.flatten() for g in gradients(tuned.model).values()])

    ours = both(lambda: lora.loss_sum(tuned, packing.pack(rows)))
    # The same weights again, without a line of ours: PEFT's and bitsandbytes' forwards and torch's attention.
    layers = sum(module.__dict__.pop("forward", None) is not None for module in tuned.model.modules())
    assert layers == 30 * 7
    tuned.model.get_base_model().set_attn_implementation("sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = both(lambda: plain_loss_sum(tuned.model, rows))
    # bfloat16 keeps 8 bits: thirty layers of rounding in another order differ by about a percent.
    assert ours[:2] == pytest.approx(theirs[:2], rel=1e-2)
    assert torch.nn.functional.cosine_similarity(ours[2], theirs[2], dim=0) > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changing_a_packed_row_changes_no_bit_of_its_neighbours(small: Path, tmp_path: Path, dtype: str) -> None:
    _, tuned = load(small, tmp_path, f"model.dtype={dtype}")
    rows = tiny.rows(4)
    other = ([(i + 7) % 512 for i in rows[1][0]], rows[1][1])

    def hidden(rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
        batch = packing.pack(rows)
        with torch.no_grad():
            return tuned.backbone(
                input_ids=torch.from_numpy(batch.input_ids)[None],
                position_ids=torch.from_numpy(batch.position_ids)[None],
                use_cache=False,
                boundaries=batch.boundaries.tolist(),
            ).last_hidden_state[0]

    before, after = hidden(rows), hidden([rows[0], other, rows[2], rows[3]])
    start, end = len(rows[0][0]), len(rows[0][0]) + len(rows[1][0])
    assert torch.equal(before[:start], after[:start])
    assert torch.equal(before[end:], after[end:])
    assert not torch.equal(before[start:end], after[start:end])  # the perturbation does reach the model


def test_long_rows_take_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 90, 16) for heads in (6, 2, 2))
    layer = torch.nn.Module()
    short, _ = kernels.attend(layer, query, key, value, None, scaling=0.25, boundaries=[0, 50, 90])
    monkeypatch.setattr(kernels, "LONG_ROW", 10)
    long, _ = kernels.attend(layer, query, key, value, None, scaling=0.25, boundaries=[0, 50, 90])
    assert torch.allclose(short, long, atol=1e-5)


def test_head_loss_in_chunks_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HEAD_CHUNK", 7)
    torch.manual_seed(0)
    hidden, head = torch.randn(23, 16, requires_grad=True), torch.randn(101, 16)
    targets = torch.randint(0, 101, (23,))
    expected = torch.nn.functional.cross_entropy(hidden @ head.t(), targets, reduction="sum")
    (want,) = torch.autograd.grad(expected * 0.3, hidden)
    loss = kernels.HeadLoss.apply(hidden, head, targets)
    (got,) = torch.autograd.grad(loss * 0.3, hidden)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(got, want, atol=1e-5)


def test_gradient_checkpointing_changes_no_gradient(small: Path, tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for options in ((), ("train.gradient_checkpointing=true",)):
        _, tuned = load(small, tmp_path, *options)
        tuned.model.train()
        lora.loss_sum(tuned, packing.pack(tiny.rows(4))).backward()
        found.append(gradients(tuned.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def loop(small: Path, root: Path, *overrides: str, **options: Any) -> Loop:
    config = tiny.settings(root, small, *overrides)
    torch.set_num_threads(1)
    tuned = lora.load(small, config, seed=config.run.seed, device=CPU, revision="main")
    return Loop(
        config=config,
        tuned=tuned,
        train=Rows([(np.asarray(i), np.asarray(m)) for i, m in tiny.rows(20, seed=1)]),
        held_out=Rows([(np.asarray(i), np.asarray(m)) for i, m in tiny.rows(6, seed=2)]),
        snapshot_hash="made",
        **options,
    )


def losses(run: Loop) -> list[float]:
    return [line.get("loss", line.get("eval_loss")) for line in run.state["metrics"]]


def test_two_runs_give_the_same_losses_bit_for_bit_and_learn(small: Path, tmp_path: Path) -> None:
    runs = [loop(small, tmp_path, "lora.lora_dropout=0.1", "train.eval_steps=2") for _ in range(2)]
    figures = [run.steps() for run in runs]
    assert losses(runs[0]) == losses(runs[1])
    assert figures[0]["eval_loss"] < figures[0]["eval_loss_base"]
    assert [line["step"] for line in runs[0].state["metrics"]] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(small: Path, tmp_path: Path) -> None:
    from jobs import checkpoint

    def save(state: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer) -> None:
        into = tmp_path / f"step-{state['step']}"
        into.mkdir()
        checkpoint.save(into, model=model, optimizer=optimizer, state=state)

    options = ("lora.lora_dropout=0.1", "train.warmup_ratio=0.3", "lora.loraplus_lr_ratio=4")
    whole = loop(small, tmp_path, *options, save=save)
    whole.steps()
    again = loop(small, tmp_path, *options)
    again.resume(tmp_path / "step-4")
    again.steps()
    assert losses(again) == losses(whole)
    assert again.state["metrics"][5]["learning_rate"] == whole.state["metrics"][5]["learning_rate"]
    for mine, other in zip(again.parameters, whole.parameters, strict=True):
        assert torch.equal(mine, other)


def test_a_checkpoint_that_was_cut_off_is_refused(small: Path, tmp_path: Path) -> None:
    from jobs import checkpoint

    run = loop(small, tmp_path)
    checkpoint.save(tmp_path, model=run.tuned.model, optimizer=run.optimizer, state=run.state)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: differs from state\.json"):
        run.resume(tmp_path)


def test_adapter_names_its_base_and_revision(small: Path, tmp_path: Path) -> None:
    from jobs import checkpoint

    run = loop(small, tmp_path)
    checkpoint.save(tmp_path, model=run.tuned.model, optimizer=run.optimizer, state=run.state)
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == (str(small), "main")
    targets = {name.rpartition(".")[2] for name in saved["target_modules"]}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # no head


def test_lora_plus_moves_b_faster_by_its_ratio(small: Path, tmp_path: Path) -> None:
    moved: list[float] = []
    for ratio in ("1", "8"):
        run = loop(small, tmp_path, f"lora.loraplus_lr_ratio={ratio}", "train.max_grad_norm=1e9")
        before = {n: p.detach().clone() for n, p in run.tuned.model.named_parameters() if ".lora_B." in n}
        run.step(0)
        after = dict(run.tuned.model.named_parameters())
        moved.append(sum(float((after[n].detach() - p).abs().sum()) for n, p in before.items()))
    assert moved[1] / moved[0] == pytest.approx(8, rel=1e-3)  # Adam's first step is the rate times the sign


def test_a_loss_that_is_not_finite_says_what_to_change(small: Path, tmp_path: Path) -> None:
    run = loop(small, tmp_path)
    with torch.no_grad():
        run.parameters[0].fill_(float("nan"))
    with pytest.raises(UserError, match=r"the loss is nan at step 1: lower train\.learning_rate \(now 0\.003\)"):
        run.steps()


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (
            (),
            r"gradient_checkpointing=true \(a third more work\), or lower data\.max_seq_len: one row alone has \d+",
        ),
        (("train.gradient_checkpointing=true", "train.micro_batch_tokens=512"), r"micro_batch_tokens from 512 to 256$"),
    ],
)
def test_out_of_memory_says_what_to_lower(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], advice: str
) -> None:
    def no_room(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = loop(small, tmp_path, *overrides)
    monkeypatch.setattr(lora, "loss_sum", no_room)
    with pytest.raises(UserError, match=r"out of memory at step 1, in a pass of \d+ tokens: .*" + advice):
        run.step(0)


def test_unknown_target_modules_are_refused_with_the_names_there_are(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lora\.target_modules \('query',\).*q_proj"):
        load(small, tmp_path, "lora.target_modules=[query]")


def test_workers_and_accumulation_change_neither_loss_nor_gradients(small: Path, tmp_path: Path) -> None:
    """1 x 8, 2 x 4 and 8 x 1: as many real processes over gloo, and rows of one length so that each is one pass."""
    script = Path(__file__).parent / "gloo_workers.py"
    done = subprocess.run(
        [sys.executable, str(script), str(small), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, two, eight = (json.loads((tmp_path / f"world-{world}.json").read_text()) for world in (1, 2, 8))
    reference = torch.tensor(one["gradient"])
    for other in (two, eight):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert other["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-4)
        assert relative(torch.tensor(other["gradient"]), reference) < 1e-3
