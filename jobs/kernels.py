"""The three places where a plain transformers + PEFT step wastes most, rewritten: attention, LoRA layers, the loss.

- Attention over packed rows computes each row alone: no mask of T x T, and nothing to leak by construction.
- A LoRA layer is one autograd function: the two products are added in place, nothing but x and x·Aᵀ is kept for the
  backward pass, and a 4-bit weight is dequantized where it is used.
- The loss is taken at supervised positions only and in chunks, with its gradient made in the forward pass (the head
  is frozen), so the wide logits never exist at once.

Each holds to the plain computation within rounding (tests/test_qlora.py), on any device.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION = "rankline_packed"
LONG_ROW = 1024  # tokens
HEAD_CHUNK = 1024  # positions whose logits exist at once: 1024 x 152k x 4 bytes = 0.6 GB at most


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of handing it back after every operation (Linux, CPU training only).

    Activations of a few megabytes are mapped and unmapped otherwise, and each comes back as page faults: a third more
    tokens/s. One arena, since the training loop runs in a thread, whose own arena would map all the same.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # no glibc, no gain
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((-8, 1), (-3, 32 << 20), (-1, 2047 << 20), (-2, 64 << 20)):
            libc.mallopt(option, value)  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD


def register_attention() -> str:
    """Make `attend` known to transformers; returns the name to pass as attn_implementation.

    transformers builds no mask for a name that is not in its mask table, which is what we want here.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    boundaries: list[int],
    cu_seqlens: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed row. query (1, heads, T, d), key and value (1, kv heads, T, d).

    `boundaries` and `cu_seqlens` hold where rows start, as numbers and as int32 on the GPU. Returns (1, T, heads, d).
    """
    if cu_seqlens is not None:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(b - a for a, b in zip(boundaries, boundaries[1:], strict=False))
        back = -1 if sliding_window is None else sliding_window - 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scaling, window_size=(back, 0), enable_gqa=True
        )
        assert isinstance(out, Tensor)
        return out[None], None
    rows = [
        _attend_row(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scaling, sliding_window)
        for a, b in zip(boundaries, boundaries[1:], strict=False)
    ]
    return torch.cat(rows, dim=2).transpose(1, 2), None


def _attend_row(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """One row on the CPU: (1, heads, T, d) -> the same.

    torch's flash attention takes 17 ms forward and backward for 350 bfloat16 tokens on one core, products written
    out take 8, at the price of T x T weights; rows too long for that price go to torch.
    """
    _, heads, length, width = query.shape
    if window is not None and window >= length:
        window = None
    if length > LONG_ROW:
        mask = None if window is None else _causal(length, 1, query.dtype, window)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
    groups = key.shape[1]
    grouped = query.reshape(groups, heads // groups * length, width)
    mask = _causal(length, heads // groups, query.dtype, window).expand(groups, -1, -1)
    weights = torch.baddbmm(mask, grouped, key[0].transpose(1, 2), alpha=scaling).softmax(-1)
    return torch.bmm(weights, value[0]).view(1, heads, length, width)


@functools.lru_cache(maxsize=64)
def _causal(length: int, repeats: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """0 where a token looks (itself and before, at most `window` in all), -inf elsewhere; once per query head."""
    place = torch.arange(length)
    back = place[:, None] - place
    hidden = (back < 0) | (back >= (length if window is None else window))
    return torch.zeros(length, length, dtype=dtype).masked_fill_(hidden, float("-inf")).repeat(repeats, 1)


class LoraLinear(torch.autograd.Function):
    """y = x·Wᵀ + bias + scale·(x·Aᵀ)·Bᵀ with W frozen, A and B float32 masters used in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        quant_state: Any,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        a_cast, b_cast = a.to(x.dtype), b.to(x.dtype)
        y = F.linear(flat, _plain(weight, quant_state, x.dtype), bias)
        inner = flat @ a_cast.t()
        y.addmm_(inner, b_cast.t(), alpha=scale)
        ctx.save_for_backward(flat, inner, weight, a, b)
        ctx.quant_state, ctx.scale, ctx.shape = quant_state, scale, x.shape
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat, inner, weight, a, b = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        through = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        grad_a = (through.t() @ flat).to(a.dtype)
        grad_b = (grad.t() @ inner).to(b.dtype).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _plain(weight, ctx.quant_state, grad.dtype)
            grad_x = grad_x.addmm_(through, a.to(grad.dtype)).view(ctx.shape)
        return grad_x, None, None, None, grad_a, grad_b, None


class HeadLoss(torch.autograd.Function):
    """Sum of the cross-entropy of targets (S) given hidden (S, d) and the frozen head (vocabulary, d), float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grads: list[Tensor] = []
        for start in range(0, hidden.shape[0], HEAD_CHUNK):
            part, wanted = hidden[start : start + HEAD_CHUNK], targets[start : start + HEAD_CHUNK, None]
            logits = F.linear(part, head).float()
            norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += (norm - logits.gather(1, wanted)).sum()
            if ctx.needs_input_grad[0]:
                probabilities = logits.sub_(norm).exp_()
                probabilities.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
                grads.append(probabilities.to(head.dtype) @ head)
        if grads:
            ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (hidden_grad,) = ctx.saved_tensors
        return hidden_grad * grads[0].to(hidden_grad.dtype), None, None


def fuse_lora(model: torch.nn.Module) -> int:
    """Give every plain LoRA layer of a PEFT model the fused forward; returns how many there are.

    A layer with dropout or DoRA keeps PEFT's own forward.
    """
    from peft.tuners.lora import LoraLayer

    fused = 0
    for module in model.modules():
        if not isinstance(module, LoraLayer) or module.lora_variant or not module.lora_A:
            continue
        (name,) = module.lora_A.keys()
        if isinstance(module.lora_dropout[name], torch.nn.Identity):
            module.forward = _fused_forward(module, name)
            fused += 1
    return fused


def _fused_forward(layer: Any, name: str) -> Callable[[Tensor], Tensor]:
    base, a, b, scale = layer.base_layer, layer.lora_A[name], layer.lora_B[name], float(layer.scaling[name])

    def forward(x: Tensor) -> Tensor:
        state = getattr(base.weight, "quant_state", None)
        if layer.disable_adapters:
            return F.linear(x, _plain(base.weight, state, x.dtype), base.bias)
        return LoraLinear.apply(x, base.weight, state, base.bias, a.weight, b.weight, scale)  # type: ignore[no-any-return]

    return forward


def _plain(weight: Tensor, quant_state: Any, dtype: torch.dtype) -> Tensor:
    if quant_state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight, quant_state).to(dtype)
