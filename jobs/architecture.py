"""A decoder's shape and what follows from it by arithmetic: parameters by part, bytes of KV cache per token.

Pure: it takes the contents of a config.json, reads no file and imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.errors import UserError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
DENSE = ("llama", "mistral", "qwen2", "qwen3")  # families whose parameter formula below is checked against their models
QK_NORM = ("qwen3",)
QKV_BIAS = ("qwen2",)


@dataclass(frozen=True)
class Architecture:
    """The numbers of one decoder. Lengths in tokens, sizes in elements."""

    name: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool
    dtype: str
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    latent: int = 0  # multi-head latent attention keeps this many numbers per token and layer instead of K and V

    @property
    def kv_elements(self) -> int:
        """Numbers kept per token over all layers."""
        return self.layers * (self.latent or 2 * self.kv_heads * self.head_dim)


def from_config(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that a config.json states; `where` is named in the UserError for a missing or odd value."""
    inner = config.get("text_config")
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else config  # of a multimodal model

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = text.get(name)
            if value is not None:
                if type(value) is not int or value < 1:
                    raise UserError(f"{where}: {name} is {value!r}, expected a whole number above 0")
                return value
        if default is None:
            raise UserError(f"{where}: no {names[0]}: not the config of a decoder, or an incomplete one")
        return default

    heads, hidden = number("num_attention_heads", "n_head"), number("hidden_size", "n_embd", "d_model")
    names = text.get("architectures") or config.get("architectures") or []
    latent = number("kv_lora_rank", default=1) + number("qk_rope_head_dim", default=1) if "kv_lora_rank" in text else 0
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    return Architecture(
        name=str(names[0]) if names else str(text.get("model_type", "unknown")),
        model_type=str(text.get("model_type", "unknown")),
        layers=number("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=number("intermediate_size", "n_inner", default=4 * hidden),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=max(1, hidden // heads)),
        vocab=number("vocab_size"),
        context=number("max_position_embeddings", "n_positions", default=2048),
        tied=bool(text.get("tie_word_embeddings", False)),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "float32"),
        sliding_window=window if type(window) is int else None,
        attention_bias=bool(text.get("attention_bias", False)),
        mlp_bias=bool(text.get("mlp_bias", False)),
        experts=number("num_local_experts", "num_experts", "n_routed_experts", default=0),
        latent=latent,
    )


def linear_shapes(arch: Architecture) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the seven linear modules of one dense layer."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    return {
        "q_proj": (arch.hidden, q),
        "k_proj": (arch.hidden, kv),
        "v_proj": (arch.hidden, kv),
        "o_proj": (q, arch.hidden),
        "gate_proj": (arch.hidden, arch.intermediate),
        "up_proj": (arch.hidden, arch.intermediate),
        "down_proj": (arch.intermediate, arch.hidden),
    }


def parameters(arch: Architecture) -> dict[str, int]:
    """Parameters by part: embeddings, attention, mlp, norms, head (0 when tied).

    Raises UserError for families whose formula is not known here: their counts come from the weights' headers.
    """
    if arch.model_type not in DENSE or arch.experts:
        raise UserError(
            f"{arch.name}: parameters by formula are known for {', '.join(DENSE)} only: point model.source at a "
            "directory with the weights, whose headers are counted"
        )
    shapes = linear_shapes(arch)
    attention = sum(a * b for name, (a, b) in shapes.items() if name[0] in "qkvo")
    mlp = sum(a * b for name, (a, b) in shapes.items() if name[0] in "gud")
    if arch.attention_bias or arch.model_type in QKV_BIAS:
        biased = "qkv" if arch.model_type in QKV_BIAS else "qkvo"
        attention += sum(b for name, (_, b) in shapes.items() if name[0] in biased)
    if arch.mlp_bias:
        mlp += sum(b for name, (_, b) in shapes.items() if name[0] in "gud")
    norms = 2 * arch.hidden + (2 * arch.head_dim if arch.model_type in QK_NORM else 0)
    return {
        "embeddings": arch.vocab * arch.hidden,
        "attention": arch.layers * attention,
        "mlp": arch.layers * mlp,
        "norms": arch.layers * norms + arch.hidden,
        "head": 0 if arch.tied else arch.vocab * arch.hidden,
    }


def part_of(tensor: str) -> str:
    """Which part a checkpoint's tensor belongs to, by its name: the same parts as `parameters`."""
    name = tensor.lower()
    if "norm" in name or ".ln_" in name:
        return "norms"
    if "lm_head" in name or name.startswith("output."):
        return "head"
    if any(word in name for word in ("embed", "wte", "wpe", "token_embd")):
        return "embeddings"
    if any(word in name for word in ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")):
        return "attention"
    if any(word in name for word in ("mlp", "ffn", "expert", "gate_proj", "up_proj", "down_proj")):
        return "mlp"
    return "other"


def kv_bytes_per_token(arch: Architecture, dtype: str) -> int:
    """Bytes of KV cache that one token takes, all layers."""
    return arch.kv_elements * BYTES.get(dtype, 2)


def kv_arithmetic(arch: Architecture, dtype: str) -> str:
    """The same, written out."""
    width, total = BYTES.get(dtype, 2), kv_bytes_per_token(arch, dtype)
    if arch.latent:
        return f"{arch.layers} layers x {arch.latent} latent numbers x {width} bytes = {total:,} bytes per token"
    shape = f"{arch.layers} layers x {arch.kv_heads} KV heads x {arch.head_dim}"
    return f"2 (K and V) x {shape} x {width} bytes = {total:,} bytes per token"


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool) -> Architecture:
    return Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        context=40960,
        tied=tied,
        dtype="bfloat16",
    )


# What a plan can answer for before anything is downloaded.
KNOWN = {
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12288, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 17408, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25600, 64, tied=False),
    "smollm2-135m-instruct": Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        layers=30,
        hidden=576,
        intermediate=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=49152,
        context=8192,
        tied=True,
        dtype="bfloat16",
    ),
}
