"""What runs on a GPU only - variable-length attention, compiled pointwise parts - held to the same tests as the CPU.

The reference is plain transformers + PEFT on the CPU in float32; on the GPU bfloat16 keeps 8 bits, so agreement is to
about a percent, and by direction for gradients.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import kernels, lora, packing
from tests import tiny

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two-layer model of head width 16 is too narrow for flash attention: this one has heads of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            dtype="float32",
        )
    ).save_pretrained(str(where))
    return where


def load(small: Path, root: Path, device: torch.device, *overrides: str) -> lora.Tuned:
    config = tiny.settings(root, small, *overrides)
    tuned = lora.load(small, config, seed=0, device=device, revision=None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(tuned.model.named_parameters()):
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return tuned


def loss_and_gradients(tuned: lora.Tuned, rows: Any) -> tuple[float, torch.Tensor]:
    tuned.model.train()
    tuned.model.zero_grad()
    loss = lora.loss_sum(tuned, packing.pack(rows))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float().cpu() for p in tuned.parameters()])


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_loss_and_gradients_on_the_gpu_are_those_of_the_cpu(
    small: Path, tmp_path: Path, compiled: str, checkpointing: str
) -> None:
    rows = tiny.rows(6)
    want_loss, want = loss_and_gradients(load(small, tmp_path, torch.device("cpu")), rows)
    options = (f"train.compile={compiled}", f"train.gradient_checkpointing={checkpointing}", "model.dtype=bfloat16")
    got_loss, got = loss_and_gradients(load(small, tmp_path, GPU, *options), rows)
    assert got_loss == pytest.approx(want_loss, rel=1e-2)
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.995
    assert float(got.norm()) == pytest.approx(float(want.norm()), rel=3e-2)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_changing_a_packed_row_changes_no_bit_of_its_neighbours(small: Path, tmp_path: Path, quantization: str) -> None:
    tuned = load(small, tmp_path, GPU, "model.dtype=bfloat16", f"train.quantization={quantization}")
    rows = tiny.rows(4)
    other = ([(i + 7) % 512 for i in rows[1][0]], rows[1][1])

    def hidden(rows: Any) -> torch.Tensor:
        batch = packing.pack(rows)
        with torch.no_grad():
            return tuned.backbone(
                input_ids=torch.from_numpy(batch.input_ids)[None].to(GPU),
                position_ids=torch.from_numpy(batch.position_ids)[None].to(GPU),
                use_cache=False,
                boundaries=batch.boundaries.tolist(),
                cu_seqlens=torch.from_numpy(batch.boundaries).to(GPU, torch.int32),
            ).last_hidden_state[0]

    before, after = hidden(rows), hidden([rows[0], other, rows[2], rows[3]])
    start, end = len(rows[0][0]), len(rows[0][0]) + len(rows[1][0])
    assert torch.equal(before[:start], after[:start])
    assert torch.equal(before[end:], after[end:])
    assert not torch.equal(before[start:end], after[start:end])


@pytest.mark.parametrize("window", [None, 7])
def test_variable_length_attention_is_the_cpus(window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 90, 64) for heads in (6, 2, 2))
    layer, boundaries = torch.nn.Module(), [0, 50, 90]
    options: dict[str, Any] = {"scaling": 0.125, "boundaries": boundaries, "sliding_window": window}
    want, _ = kernels.attend(layer, query, key, value, None, **options)
    on_gpu = [x.to(GPU, torch.bfloat16) for x in (query, key, value)]
    starts = torch.tensor(boundaries, dtype=torch.int32, device=GPU)
    got, _ = kernels.attend(layer, *on_gpu, None, cu_seqlens=starts, **options)
    assert torch.allclose(got.float().cpu(), want, atol=3e-2)


def test_out_of_memory_ends_in_advice_and_not_in_a_traceback(small: Path, tmp_path: Path) -> None:
    import numpy as np

    from jobs.errors import UserError
    from jobs.loop import Loop, Rows

    config = tiny.settings(
        tmp_path, small, "model.dtype=bfloat16", "train.batch_size=512", "train.micro_batch_tokens=4194304"
    )
    tuned = lora.load(small, config, seed=0, device=GPU, revision=None)
    rows = Rows([(np.arange(4096) % 500, np.ones(4096, dtype=np.int8))] * 512)
    run = Loop(config=config, tuned=tuned, train=rows, held_out=rows, snapshot_hash="x")
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(UserError, match=r"out of memory at step 1, in a pass of \d+ tokens on a card of"):
            run.step(0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
