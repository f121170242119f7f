"""Norms, gated activations and rotary embeddings as single functions, so that torch.compile can fuse each on a GPU.

transformers runs them as a dozen kernels that each read and write the whole activation. The arithmetic here is the
same, operation for operation; compiled, a forward and a backward pass are one kernel each, and what the backward pass
needs is computed again instead of kept.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, times `weight` in x's dtype."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of q and k (1, heads, T, d) by cos and sin (1, T, d)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = q.shape[-1] // 2

    def turn(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    return turn(q), turn(k)


def fuse(model: torch.nn.Module, *, compiled: bool) -> list[str]:
    """Replace these parts of a transformers model by the functions above; returns the class names that were changed.

    A part that does not look as expected (another activation, biases in the norm) is left alone. Rotary embedding is
    a function of the modelling module, so that module is changed for the whole process.
    """
    if compiled:
        # Lengths change from batch to batch. What cannot be compiled (no C compiler, say) runs as it is.
        torch._dynamo.config.suppress_errors = True  # type: ignore[attr-defined]

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=True) if compiled else function

    norm, gate, turn = made(rms_norm), made(gated), made(rotary)
    changed: set[str] = set()
    for module in model.modules():
        name, part = type(module).__name__, module  # `part` only for the checker: attributes are the model's own
        if name.endswith("RMSNorm") and set(dict(module.named_parameters(recurse=False))) == {"weight"}:
            if not isinstance(getattr(part, "variance_epsilon", None), float) or "Gemma" in name:
                continue
            module.forward = _norm_forward(module, norm)
        elif name.endswith("MLP") and isinstance(getattr(part, "act_fn", None), torch.nn.SiLU | _silu_class()):
            if not all(hasattr(module, n) for n in ("gate_proj", "up_proj", "down_proj")):
                continue
            module.forward = _mlp_forward(module, gate)
        elif name.endswith("Attention") and hasattr(module, "q_proj"):
            home: Any = sys.modules[type(module).__module__]
            if not hasattr(home, "apply_rotary_pos_emb"):
                continue
            home.apply_rotary_pos_emb = turn
        else:
            continue
        changed.add(name)
    return sorted(changed)


def _silu_class() -> type:
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


def _norm_forward(module: Any, norm: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda hidden_states: norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, gate: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: module.down_proj(gate(module.gate_proj(x), module.up_proj(x)))
