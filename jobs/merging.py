"""The arithmetic of a merge, tensor by tensor: W' = bf16(float32(W) + s·B·A), DoRA and biases included.

PEFT's own merge rounds the update to BF16 and then the sum: two roundings. Here the sum is float32 and rounded once,
to the nearest BF16, so each element is within half a BF16 step of the exact value.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs import adapter_fit, adapters, safetensors_io
from jobs.adapters import FLOATS, Adapter, Update
from jobs.errors import UserError
from jobs.safetensors_header import Tensor
from jobs.safetensors_io import Spec

BLOCK = 1 << 23  # elements worked on at a time: 32 MiB in float32, a few of them at once
PACKED = (".qweight", ".weight_packed", ".absmax", ".weight_scale", ".weight_scale_inv", ".SCB")


@dataclass(frozen=True)
class Plan:
    """What is written: tensors in file order, and the rows of a resized vocabulary (None: the base's)."""

    adapter: Adapter
    base: Mapping[str, Tensor]
    specs: list[Spec]
    rows: int | None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def check_unquantized(base: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a base whose weights are quantized (a quantization_config over BF16 tensors is only dropped)."""
    for tensor in tensors.values():
        if tensor.name.endswith(PACKED) or (tensor.name.endswith(".weight") and tensor.dtype not in FLOATS):
            method = adapters.model_config(base).get("quantization_config", {}).get("quant_method", "unknown method")
            raise UserError(
                f"{tensor.file}: {tensor.name} is {tensor.dtype}: this base is quantized ({method}). Merging would "
                "round twice: give the unquantized base that it was made from"
            )


def plan(adapter: Adapter, base: Mapping[str, Tensor]) -> Plan:
    """Names, shapes and dtypes of the merged model: the base's, all floats BF16, and a trained head of its own."""
    shapes = {name: tensor.shape for name, tensor in base.items()}
    shapes |= {name: adapter.tensors[key].shape for name, key in adapter.replaced.items()}
    in_order = sorted(base.values(), key=lambda t: (t.file.name, t.start))
    dtypes = {t.name: "BF16" if t.dtype in FLOATS else t.dtype for t in in_order}
    dtypes |= {name: "BF16" for name in adapter.replaced}
    specs = [Spec(name, dtype, shapes[name]) for name, dtype in dtypes.items()]
    return Plan(adapter, base, specs, adapter_fit.resized(adapter, base))


def write(plan: Plan, out: Path, *, limit: int, wrote: Callable[[int], None]) -> dict[str, Any]:
    """Write the weights into `out`; `wrote` hears the bytes written so far. Returns the figures of the merge.

    changed_share: elements of the adapted matrices that differ from the base after rounding; the rest of the update
    was smaller than half a BF16 step.
    """
    count = {"bytes": 0, "adapted": 0, "changed": 0}

    def produce(spec: Spec) -> Iterator[torch.Tensor]:
        for block in tensor_blocks(plan, spec.name, count):
            count["bytes"] += block.nbytes
            yield block
            wrote(count["bytes"])

    files = safetensors_io.write(out, plan.specs, limit=limit, produce=produce)
    return {
        "tensors": len(plan.specs),
        "tensors_merged": len(plan.adapter.updates),
        "tensors_replaced": len(plan.adapter.replaced),
        "bytes": count["bytes"],
        "shards": len(files),
        "changed_share": round(count["changed"] / count["adapted"], 4),
    }


def tensor_blocks(plan: Plan, name: str, count: dict[str, int] | None = None) -> Iterator[torch.Tensor]:
    """The blocks of rows of one tensor of the merged model, in order. Raises UserError where a result is not finite."""
    adapter, values = plan.adapter, plan.adapter.tensors
    module, _, leaf = name.rpartition(".")
    update = adapter.updates.get(module)
    stored = values[adapter.replaced[name]] if name in adapter.replaced else plan.base[name]
    tensor = safetensors_io.load(stored)
    if update is not None and leaf == "weight":
        before = 0
        for block in merged_blocks(tensor, update, adapter):
            if not bool(torch.isfinite(block).all()):
                raise UserError(f"{stored.file}: {name} is not finite after merging: the base or the adapter is broken")
            if count is not None:
                old = tensor[before : before + len(block)]
                count["adapted"] += block.numel()
                count["changed"] += int(torch.count_nonzero(block != old))
                before += len(block)
            yield block
    elif update is not None and leaf == "bias" and update.bias:
        added = safetensors_io.load(values[update.bias]).float() * update.scaling
        yield (tensor.float() + added).to(torch.bfloat16)
    else:
        yield from _rounded(tensor)


def merged_blocks(weight: torch.Tensor, update: Update, adapter: Adapter) -> Iterator[torch.Tensor]:
    """Blocks of rows of bf16(W + s·BA) as W is stored ([out, in], or [in, out] for embeddings and Conv1D).

    DoRA scales row o of the sum by magnitude[o] over its norm (peft/tuners/lora/dora.py), in float32 throughout.
    """
    transposed = update.embedding or bool(adapter.config.get("fan_in_fan_out"))
    a = safetensors_io.load(adapter.tensors[update.a]).float()
    b = safetensors_io.load(adapter.tensors[update.b]).float()
    left, right = (a.T, b.T) if transposed else (b, a)
    rows = max(1, BLOCK // weight.shape[1])

    def sums() -> Iterator[torch.Tensor]:
        for start in range(0, weight.shape[0], rows):
            part = slice(start, start + rows)
            yield torch.addmm(weight[part].float(), left[part], right, alpha=update.scaling)

    if update.magnitude is None:
        for block in sums():
            yield block.to(torch.bfloat16)
        return
    magnitude = safetensors_io.load(adapter.tensors[update.magnitude]).float()
    if not transposed:
        for number, block in enumerate(sums()):
            factor = magnitude[number * rows : number * rows + len(block)] / torch.linalg.norm(block, dim=1)
            yield (block * factor[:, None]).to(torch.bfloat16)
        return
    squares = torch.zeros(weight.shape[1])
    for block in sums():
        squares += block.square().sum(dim=0)
    factor = magnitude / squares.sqrt()
    for block in sums():
        yield (block * factor).to(torch.bfloat16)


def _rounded(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor as it is stored in the merged model, in blocks: floats to BF16, others as they are."""
    if not tensor.is_floating_point() or tensor.dtype == torch.bfloat16 or not tensor.dim():
        yield tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        return
    rows = max(1, BLOCK // max(1, tensor[0].numel()))
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows].to(torch.bfloat16)
