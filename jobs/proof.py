"""Is the merged model the adapter? Checked on the weights themselves, with PEFT's own arithmetic, not with ours.

For every adapted module PEFT gives the exact float32 sum T = W + s·BA (or its DoRA). The merged weight M must be
bf16(T): anything else (another scale, a skipped layer, the wrong base) shows in far more elements than float32's own
rounding explains. All other tensors must be the base's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs import columns, safetensors_header, safetensors_io
from jobs.adapters import Adapter
from jobs.columns import Column, Row
from jobs.errors import UserError
from jobs.safetensors_header import Tensor

# float32 sums in another order differ by about 2^-24; near one in 2^15 elements that crosses a BF16 rounding border.
MAX_OTHER_SHARE = 1e-3
MAX_STEPS = 1.0


@dataclass(frozen=True)
class Check:
    """One adapted module: elements, how many are not bf16(T), the farthest in BF16 steps, and the scale found.

    `scale`: how much of the update M holds, as a factor on what bf16(T) holds: 1 when right, 0 when skipped.
    `kept`: how much of the exact update bf16(T) itself holds; the rest is smaller than BF16 can add.
    """

    module: str
    elements: int
    other: int
    steps: float
    scale: float
    kept: float

    @property
    def right(self) -> bool:
        return self.other <= MAX_OTHER_SHARE * self.elements and self.steps <= MAX_STEPS


def check_weights(
    tuned: Any, adapter: Adapter, base: Path, merged: Path, *, tick: Callable[[int, int], None]
) -> dict[str, Any]:
    """Check every tensor of `merged` against `tuned` (base and adapter in one PEFT model) and the base's files.

    Returns {modules, tensors_equal, elements, other_elements, max_steps, update_kept, how}. Raises UserError that
    names the worst module and the scale it seems to have been merged with, or the tensor that is not the base's.
    """
    ours, theirs = safetensors_header.read_model(merged), safetensors_header.read_model(base)
    layers = {
        name: layer for name, layer in tuned.get_base_model().named_modules() if hasattr(layer, "get_delta_weight")
    }
    checks: list[Check] = []
    for done, update in enumerate(adapter.updates.values(), 1):
        checks.append(_check(update.module, layers[update.module], ours, theirs))
        tick(done, len(adapter.updates))
    wrong = [check for check in checks if not check.right]
    if wrong:
        worst = max(wrong, key=lambda check: check.other / check.elements)
        scales = sorted(check.scale for check in wrong)
        raise UserError(
            f"{merged}: {len(wrong)} of {len(checks)} adapted modules are not base + adapter rounded to BF16. Worst: "
            f"{worst.module}: {worst.other / worst.elements:.1%} of its elements differ, by up to {worst.steps:.1f} "
            f"BF16 steps. The wrong ones hold {scales[0]:.2f} to {scales[-1]:.2f} of the update (1 is right, 0 is "
            "skipped): delete the merge and run it again"
        )
    equal = _check_others(adapter, ours, theirs, merged)
    return {
        "modules": len(checks),
        "tensors_equal": equal,
        "elements": sum(check.elements for check in checks),
        "other_elements": sum(check.other for check in checks),
        "max_steps": round(max(check.steps for check in checks), 4),
        "update_kept": round(sum(check.kept for check in checks) / len(checks), 4),
        "how": f"merged weight against PEFT's float32 sum: at most {MAX_STEPS:g} BF16 step, and at most "
        f"{MAX_OTHER_SHARE:.1%} of a module's elements not its nearest BF16 number",
    }


def check_logits(
    tuned: Column, merged: Column, rows: Sequence[Row], *, modules: set[str], factor: float, seed: int
) -> dict[str, Any]:
    """Differences of the logits of adapter and merged model on the rows' answers, against `factor` times a yardstick.

    The yardstick is measured, not assumed: the merged model against itself with one more BF16 rounding of the adapted
    weights (columns.rounding_noise). Raises UserError when mean or maximum is beyond it.
    """
    differs, noise = _Spread(), _Spread()
    for number, row in enumerate(rows):
        ours = columns.answer_logits(merged, row)
        differs.add(columns.answer_logits(tuned, row) - ours)
        with columns.rounding_noise(merged.model, modules, seed=seed + number):
            noise.add(columns.answer_logits(merged, row) - ours)
    found = {
        "mean_abs_logit_difference": differs.mean,
        "max_abs_logit_difference": differs.most,
        "tolerance_mean": factor * noise.mean,
        "tolerance_max": factor * noise.most,
    }
    for kind in ("mean", "max"):
        difference, allowed = found[f"{kind}_abs_logit_difference"], found[f"tolerance_{kind}"]
        if not difference <= allowed:
            raise UserError(
                f"the merged model is not the adapter: their logits differ by {difference:.4f} ({kind}), over the "
                f"{allowed:.4f} that BF16 rounding explains ({factor:g} times one rounding of the adapted weights): "
                "delete the merge and run it again"
            )
    rounded = {key: round(value, 6) for key, value in found.items()}
    return {**rounded, "tolerance_how": f"{factor:g} times what one BF16 rounding of the adapted weights does to them"}


class _Spread:
    """Running mean and maximum of absolute values."""

    def __init__(self) -> None:
        self.total, self.count, self.most = 0.0, 0, 0.0

    def add(self, values: torch.Tensor) -> None:
        values = values.abs()
        self.total += float(values.double().sum())
        self.count += values.numel()
        self.most = max(self.most, float(values.max()))

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


def _check(module: str, layer: Any, merged: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Check:
    name = f"{module}.weight"
    if name not in merged:
        raise UserError(f"the merged model has no tensor {name}: delete the merge and run it again")
    with torch.inference_mode():
        weight = safetensors_io.load(base[name]).float()
        exact = _exact(layer, weight)
        found = safetensors_io.load(merged[name])
        if found.shape != exact.shape:
            raise UserError(f"{merged[name].file}: {name} is {list(found.shape)}, not {list(exact.shape)}: merge again")
        right = exact.to(torch.bfloat16)
        other = found != right
        steps = 0.5  # an element that is bf16(T) is off by half a step at most
        if bool(other.any()):
            # Where W and its update cancel, float32 itself is only as good as 2^-24 of W.
            step = torch.maximum(columns.bf16_step(right[other]), weight[other].abs() * 2.0**-16)
            off = (found[other].float() - exact[other]).abs_() / step.clamp_min_(2.0**-133)
            steps = float(off.max())
        update = exact.sub_(weight).flatten()
        size = float(update.dot(update))
        holds = float((right.float().sub_(weight)).flatten().dot(update))
        held = float((found.float().sub_(weight)).flatten().dot(update)) if bool(other.any()) else holds
    return Check(
        module=module,
        elements=found.numel(),
        other=int(other.sum()),
        steps=steps,
        scale=held / holds if holds else 1.0,
        kept=holds / size if size else 1.0,
    )


def _exact(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """W + s·BA in float32 with PEFT's update, and for DoRA each output's row scaled to its magnitude."""
    total = weight + layer.get_delta_weight("default").float().cpu()
    if "default" not in layer.lora_magnitude_vector:
        return total
    magnitude = layer.lora_magnitude_vector["default"].weight.float().cpu()
    inputs = 0 if layer.fan_in_fan_out else 1
    factor = magnitude / torch.linalg.norm(total, dim=inputs)
    return total * factor.unsqueeze(inputs)


def _check_others(adapter: Adapter, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], merged: Path) -> int:
    adapted = {f"{u.module}.weight" for u in adapter.updates.values()}
    adapted |= {f"{u.module}.bias" for u in adapter.updates.values() if u.bias}
    missing = sorted((theirs.keys() | adapter.replaced.keys()) - ours.keys())
    if missing:
        raise UserError(
            f"{merged}: lacks {missing[0]} ({len(missing)} tensors in all): delete the merge and run it again"
        )
    equal = 0
    for name, tensor in ours.items():
        if name in adapted:
            continue
        source = adapter.tensors[adapter.replaced[name]] if name in adapter.replaced else theirs.get(name)
        if source is None:
            raise UserError(f"{tensor.file}: {name} is neither the base's nor the adapter's: merge again")
        found, wanted = safetensors_io.load(tensor), safetensors_io.load(source)
        if found.shape != wanted.shape or not torch.equal(found, wanted.to(found.dtype)):
            origin = "adapter" if name in adapter.replaced else "base"
            raise UserError(
                f"{tensor.file}: {name} is not the {origin}'s: was it merged into another base? Merge again"
            )
        equal += 1
    return equal
