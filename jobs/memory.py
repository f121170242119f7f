"""How much memory training and serving take on one device: pure arithmetic on a model's shape and the config.

Training follows what jobs/qlora.py keeps alive at its worst moment; serving follows vLLM 0.29's own accounting
(v1/worker/gpu_worker.py, determine_available_memory): the share of the card it may take, less weights, what the profile
run peaks at, and its estimate for CUDA graphs, is KV cache. Measured against both by tests/bench/plan_accuracy.py.
"""

from dataclasses import dataclass, field

from jobs.architecture import Architecture, kv_bytes_per_token, linear_shapes, parameters
from jobs.config import Lora, Serve, Train

GIB = 2**30
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes per weight: 4 bits, an 8-bit scale per 64, a float32 per 256 of those
HEAD_CHUNK = 1024  # positions whose logits exist at once in the loss of jobs/kernels.py
LONG_ROW = 1024  # CPU rows up to this length keep their attention weights (jobs/kernels.py)
UNMODELLED = ("quantization", "speculative_config", "enable_lora")  # engine flags whose memory is not known here
CONTEXT = 0.6 * GIB  # what a CUDA process takes before its first tensor, outside torch's counters
FRAGMENTS = 0.05  # of the activations: blocks that the allocator holds and cannot use
CPU_PROCESS = 1.3 * GIB  # a worker with torch, transformers and Ray imported
CPU_KEPT = 0.8  # of the activations: what glibc keeps after it was freed, as it is told to (jobs/kernels.py); one run
# vLLM beyond tensors we can name, fitted on one H200 (tests/bench): kernels' code and library workspaces, and per
# captured CUDA graph the driver's own memory.
ENGINE = 0.35 * GIB
PIECE_GRAPH = 0.2 * 2**20
FULL_GRAPH = 2.0 * 2**20
GRAPH_POOL = 64 * 2**20


@dataclass(frozen=True)
class Item:
    """One line of an estimate."""

    name: str
    bytes: float
    note: str = ""


@dataclass(frozen=True)
class Training:
    """Memory of one training worker. `allocated` is comparable to torch.cuda.max_memory_allocated (RSS on a CPU);
    `needed` is what the card has to have. `unmodelled` names settings that the arithmetic does not know."""

    items: tuple[Item, ...]
    allocated: float
    needed: float
    tokens: int
    unmodelled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Serving:
    """Memory of one GPU of a replica. `kv_tokens` and `max_concurrency` are what vLLM logs as "GPU KV cache size" and
    "Maximum concurrency"; below 1 request of max_model_len it refuses to start."""

    items: tuple[Item, ...]
    kv_bytes: float
    kv_tokens: int
    max_concurrency: float
    block: int
    batched_tokens: int
    unmodelled: tuple[str, ...] = field(default=())


def training(
    arch: Architecture,
    train: Train,
    lora: Lora,
    *,
    dtype: str,
    tokens: int,
    supervised: int,
    longest: int,
    cpu: bool = False,
) -> Training:
    """Memory at the worst moment of a step.

    `tokens`: of the largest packed batch of one worker; `supervised`: its predicted positions; `longest`: its longest
    row. `dtype` is that of the unquantized weights.
    """
    width = {"float32": 4}.get(dtype, 2)
    parts = parameters(arch)
    linear = parts["attention"] + parts["mlp"]
    stored = linear * (NF4 if train.quantization == "nf4" else width)
    rest = (sum(parts.values()) - linear) * width
    trained = lora_parameters(arch, lora)
    layer = _kept_per_token(arch, lora, width) * tokens
    if cpu and longest <= LONG_ROW:
        layer += arch.heads * tokens * longest * width  # softmaxed attention weights of each row
    boundary = arch.hidden * width * tokens  # a layer's input: all that checkpointing keeps
    kept = arch.layers * (boundary if train.gradient_checkpointing else layer)
    kept += 4 * arch.hidden * tokens  # the final norm's float32 input
    moment, why = _worst_moment(arch, train, tokens=tokens, supervised=supervised, layer=layer, width=width)
    kind = "NF4 with double quantization" if train.quantization == "nf4" else dtype
    held = f"{arch.layers} layer inputs, the rest is computed again" if train.gradient_checkpointing else "all layers"
    items = (
        Item("linear layers", stored, f"{linear / 1e9:.2f} billion weights, {kind}"),
        Item("embeddings, head, norms", rest, dtype),
        Item("adapter", 4 * trained, f"{trained / 1e6:.1f} million parameters of rank {lora.r}, float32"),
        Item("gradients", 4 * trained, "float32"),
        Item("optimizer", 8 * trained, "AdamW: two float32 moments"),
        Item("activations", kept, f"{tokens:,} tokens, {held}"),
        Item("worst moment", moment, why),
    )
    allocated = sum(item.bytes for item in items)
    unmodelled = ("lora.use_dora",) if lora.use_dora else ()
    if cpu:
        process = Item("the process", CPU_PROCESS, "Python with torch, transformers and Ray")
        freed = Item("kept when freed", CPU_KEPT * (kept + moment), "glibc holds on to it: faster, roughly this much")
        items, total = (*items, process, freed), allocated + process.bytes + freed.bytes
        return Training(items, total, total, tokens, unmodelled)
    outside = Item("outside torch", CONTEXT + FRAGMENTS * (kept + moment), "CUDA context, allocator fragments")
    return Training((*items, outside), allocated, allocated + outside.bytes, tokens, unmodelled)


def lora_parameters(arch: Architecture, lora: Lora) -> int:
    """Trainable parameters: r x (inputs + outputs) per targeted linear module and layer."""
    shapes = linear_shapes(arch)
    targets = shapes if lora.target_modules == "all-linear" else [n for n in shapes if n in lora.target_modules]
    return arch.layers * sum(lora.r * sum(shapes[name]) for name in targets)


def _kept_per_token(arch: Architecture, lora: Lora, width: int) -> float:
    """Bytes per token that one layer keeps for its backward pass, with the fused LoRA layers of jobs/kernels.py.

    Norms keep their float32 input; q, k and v projections share one normed input, gate and up another; attention keeps
    q, k, v, its output (shared with o_proj) and one float32 per head; the gated MLP keeps gate, act(gate), up and
    their product.
    """
    h, m = arch.hidden, arch.intermediate
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    norms = 4 * (2 * h + 2)
    if arch.model_type == "qwen3":
        norms += 4 * (q + kv + arch.heads + arch.kv_heads)
    inputs = 2 * h * width
    attention = (2 * q + 2 * kv) * width + 4 * arch.heads
    shapes = linear_shapes(arch)
    targets = list(shapes) if lora.target_modules == "all-linear" else [n for n in shapes if n in lora.target_modules]
    inner = len(targets) * lora.r * width
    dropped = sum((1 + width) * shapes[name][0] for name in targets) if lora.lora_dropout > 0 else 0  # mask and result
    return norms + inputs + attention + 4 * m * width + inner + dropped


def _worst_moment(
    arch: Architecture, train: Train, *, tokens: int, supervised: int, layer: float, width: int
) -> tuple[float, str]:
    """Bytes on top of what is kept, at the loss or in a layer's backward pass, whichever is more."""
    chunk = min(supervised, HEAD_CHUNK)
    copies = 2 if supervised <= HEAD_CHUNK else 3  # float32 logits, their exponentials, the chunk before
    loss = 4 * copies * chunk * arch.vocab + width * arch.hidden * (tokens + 2 * supervised)  # hidden states, gradients
    weight = width * arch.hidden * arch.intermediate if train.quantization == "nf4" else 0  # dequantized for use
    backward = (2 * width * arch.intermediate + 8 * arch.hidden) * tokens + weight
    if train.gradient_checkpointing:
        backward += layer
    if loss > backward:
        return loss, f"logits of {chunk:,} positions x {arch.vocab:,}"
    again = "a layer computed again and " if train.gradient_checkpointing else ""
    return backward, f"{again}its gradients" if again else "a layer's gradients"


def serving(
    arch: Architecture, serve: Serve, *, total: float, parameter_count: int, name: str = "", dtype: str = "bfloat16"
) -> Serving:
    """What vLLM leaves for KV cache on a GPU of `total` bytes (as torch.cuda.mem_get_info reports), in tokens.

    `parameter_count` counts the whole model; `name` of the GPU decides vLLM's default batch, as it does there.
    """
    tp, args = serve.tensor_parallel_size, serve.engine_args
    width = {"float32": 4}.get(str(args.get("dtype", dtype)), 2)
    batched = batched_tokens(serve, total=total, name=name)
    weights = parameter_count * width / tp
    seqs, m, h, vocab = serve.max_num_seqs, arch.intermediate / tp, arch.hidden, arch.vocab
    heads = (arch.heads + 2 * max(tp, arch.kv_heads)) * arch.head_dim / tp
    forward = batched * width * (2 * h + max(3 * m + h, 2 * heads + h))  # gate, up and their product, or q, k, v twice
    sampler = min(seqs, batched) * vocab * width + batched * h * width
    states = seqs * (vocab * 4.25 + serve.max_model_len / 16 * 8)  # penalties' counts and masks, block tables
    rope = arch.context * arch.head_dim * width
    graphs = 0.0 if serve.enforce_eager else _graphs(arch, seqs=seqs, batched=batched, width=width)
    allowed = total * serve.gpu_memory_utilization
    shared = f" / {tp} GPUs" if tp > 1 else ""
    captured = "none: enforce_eager" if serve.enforce_eager else f"{len(capture_sizes(seqs, batched))} batch sizes"
    items = (
        Item("vLLM may take", allowed, f"{serve.gpu_memory_utilization:g} of {total / GIB:.2f} GiB"),
        Item("weights", weights, f"{parameter_count / 1e9:.2f} billion x {width} bytes{shared}"),
        Item("activations", max(forward, sampler), f"profile run of {batched:,} tokens, {seqs} sequences"),
        Item("CUDA graphs", graphs, captured),
        Item("sampler states", states + rope, f"{seqs} sequences x {vocab:,}"),
        Item("kernels, workspaces", ENGINE, "outside torch's tensors"),
    )
    left = allowed - sum(item.bytes for item in items[1:])
    cache = str(args.get("kv_cache_dtype", "auto"))
    per_token: float = kv_bytes_per_token(arch, str(args.get("dtype", dtype)) if cache == "auto" else cache)
    if not arch.latent:
        per_token *= max(1, arch.kv_heads // tp) / arch.kv_heads
    block = int(args.get("block_size", 16))
    unmodelled = [f"serve.engine_args.{key}" for key in UNMODELLED if args.get(key)]
    tokens, concurrency = cache_capacity(left, per_token=per_token, block=block, max_model_len=serve.max_model_len)
    return Serving(items, left, tokens, concurrency, block, batched, tuple(unmodelled))


def serving_on_cpu(arch: Architecture, serve: Serve, *, parameter_count: int, dtype: str) -> Serving:
    """A replica without a GPU: serve.kv_cache_gib is the cache, whatever else it takes."""
    width = {"float32": 4}.get(str(serve.engine_args.get("dtype", dtype)), 2)
    kept = serve.kv_cache_gib * GIB
    block = int(serve.engine_args.get("block_size", 128))
    per_token = kv_bytes_per_token(arch, str(serve.engine_args.get("dtype", dtype)))
    tokens, concurrency = cache_capacity(kept, per_token=per_token, block=block, max_model_len=serve.max_model_len)
    items = (
        Item("weights", parameter_count * width, f"{parameter_count / 1e9:.2f} billion x {width} bytes"),
        Item("KV cache", kept, "serve.kv_cache_gib"),
        Item("the process", 1.5 * GIB, "Python with vLLM, buffers"),
    )
    return Serving(items, kept, tokens, concurrency, block, serve.max_num_batched_tokens or 2048)


def cache_capacity(bytes_left: float, *, per_token: float, block: int, max_model_len: int) -> tuple[int, float]:
    """(tokens, concurrency) as vLLM logs them: whole blocks, and requests of max_model_len in whole blocks."""
    blocks = max(0, int(bytes_left // (per_token * block)))
    concurrency = blocks / -(-max_model_len // block)
    return int(concurrency * max_model_len), concurrency


def requests_that_fit(serving: Serving, length: int) -> int:
    """Requests of `length` tokens that the KV cache holds at once, each in whole blocks."""
    return serving.kv_tokens // (-(-length // serving.block) * serving.block)


def batched_tokens(serve: Serve, *, total: float, name: str) -> int:
    """Tokens of one engine step: the config's, or vLLM's default for a server on such a card (engine/arg_utils.py)."""
    if serve.max_num_batched_tokens is not None:
        return serve.max_num_batched_tokens
    large = total >= 70 * GIB and "a100" not in name.lower()
    default = 16384 if total >= 160 * GIB else 8192 if large else 2048
    return min(default, serve.max_num_seqs * serve.max_model_len)


def capture_sizes(seqs: int, batched: int) -> list[int]:
    """Batch sizes that vLLM captures CUDA graphs for (config/vllm.py, _set_cudagraph_sizes)."""
    top = min(seqs * 2, 512, batched)
    sizes = [n for n in (1, 2, 4) if n <= top]
    return sizes + list(range(8, min(top + 1, 256), 8)) + list(range(256, top + 1, 16))


def _graphs(arch: Architecture, *, seqs: int, batched: int, width: int) -> float:
    """Piecewise graphs (one between attention layers, each size) and full decode graphs (sizes up to max_num_seqs)."""
    sizes = capture_sizes(seqs, batched)
    full = sum(1 for size in sizes if size <= seqs)
    pool = max(sizes, default=0) * width * (3 * arch.intermediate + 4 * arch.hidden)
    return GRAPH_POOL + pool + len(sizes) * (arch.layers + 1) * PIECE_GRAPH + full * FULL_GRAPH
