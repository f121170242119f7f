"""The models that compare puts side by side, and what each says: greedy answers, and logits on given answers.

Base and adapter are one model (PEFT, adapter off and on, never merged); the merged model is loaded from its own
directory. All run in BF16 on the same device, row by row without padding where logits are compared.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs import adapters, reload, safetensors_header
from jobs.errors import UserError

ANSWER_BATCH = 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """A held-out row: token ids of prompt and answer, where the answer starts, and what it says."""

    id: str
    ids: list[int]
    prompt_length: int
    messages: list[dict[str, Any]]
    reference: str


@dataclass(frozen=True)
class Column:
    """One model of the comparison; `using()` is held while it runs."""

    name: str
    model: Any
    using: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Answer:
    """Generated token ids (without the prompt, up to the end of turn), the text, and whether the turn was ended."""

    ids: list[int]
    text: str
    ended: bool


def pick_device(base: Path) -> torch.device:
    """The GPU with the most free memory, if it holds three copies of the base's weights (base, merged, working room).

    Else the CPU: a GPU that serves meanwhile must not be pushed over its memory.
    """
    free = (
        [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    need = 3 * sum(tensor.bytes for tensor in safetensors_header.read_model(base).values()) + 2**31
    if free and max(free) >= need:
        return torch.device("cuda", free.index(max(free)))
    return torch.device("cpu")


def load_pair(
    base: Path, adapter: Path, *, device: torch.device = CPU, rows: int | None = None, **options: Any
) -> tuple[Column, Column, Any]:
    """(base, adapter, tokenizer): one model, with the adapter off and on. `rows`: of a resized vocabulary.

    `options` go to from_pretrained (quantization_config for NF4). The adapter keeps the precision it was saved in.
    """
    with reload.quiet():
        from peft import PeftModel

        model, tokenizer = reload.load(base, device_map={"": device}, **options)
        if rows is not None and rows != model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows, mean_resizing=False)
        tuned: Any = PeftModel.from_pretrained(model, str(adapter))
    tuned.eval()
    return Column("base", tuned, tuned.disable_adapter), Column("adapter", tuned), tokenizer


def load_nf4(base: Path, adapter: Path, *, device: torch.device = CPU, rows: int | None = None) -> Column:
    """The adapter on the NF4 base, as QLoRA trains it."""
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = load_pair(base, adapter, device=device, rows=rows, quantization_config=quantization)
    return Column("nf4", loaded[1].model)


def load_merged(path: Path, *, device: torch.device = CPU) -> tuple[Column, Any]:
    """(merged model, its tokenizer)."""
    model, tokenizer = reload.load(path, device_map={"": device})
    return Column("merged", model), tokenizer


def answer_logits(column: Column, row: Row) -> torch.Tensor:
    """Float32 logits [answer tokens, vocabulary] for each token of the row's own answer (teacher forcing)."""
    ids = torch.tensor([row.ids], device=column.model.device)
    keep = torch.arange(row.prompt_length - 1, len(row.ids) - 1, device=ids.device)
    with torch.inference_mode(), column.using():
        return column.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0].float()


def losses(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """Cross-entropy of each token of the row's answer, float32 [answer tokens]."""
    targets = torch.tensor(row.ids[row.prompt_length :], device=logits.device)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def answers(
    column: Column, tokenizer: Any, rows: Sequence[Row], *, max_new_tokens: int, tick: Callable[[int], None]
) -> list[Answer]:
    """The greedy answer to each row's prompt, in batches with a KV cache. `tick` hears how many are done."""
    found: list[Answer] = []
    ends = end_of_turn(column.model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    for start in range(0, len(rows), ANSWER_BATCH):
        prompts = [row.ids[: row.prompt_length] for row in rows[start : start + ANSWER_BATCH]]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=column.model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=column.model.device)
        with torch.inference_mode(), column.using():
            made = column.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_new_tokens,
                eos_token_id=ends,
                pad_token_id=pad,
            )
        found += [cut(new, ends, tokenizer) for new in made[:, width:].tolist()]
        tick(len(found))
    return found


def cut(new: list[int], ends: Sequence[int], tokenizer: Any) -> Answer:
    """Generated ids up to the first end-of-turn token."""
    at = next((i for i, token in enumerate(new) if token in ends), None)
    kept = new if at is None else new[:at]
    return Answer(kept, tokenizer.decode(kept, skip_special_tokens=True).strip(), at is not None)


def end_of_turn(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end a turn: those of the model's generation config, and the tokenizer's own."""
    found = model.generation_config.eos_token_id
    ends = list(found) if isinstance(found, list | tuple) else [found]
    ends = [int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None]
    if not ends:
        raise UserError(
            f"{model.config.name_or_path}: neither generation_config.json nor the tokenizer names an end of turn"
        )
    return sorted(set(ends))


@contextlib.contextmanager
def rounding_noise(model: Any, modules: set[str], *, seed: int) -> Generator[None]:
    """While held, the outputs of `modules` are off by what rounding their weights to BF16 once more would add.

    A weight rounded to a step u is off by about a uniform ±u/2, so output i has the variance sum_j u_ij²/12 · x_j².
    What this does to the logits is the yardstick for a right merge, whose weights were rounded just once.
    """
    generator = torch.Generator(device=model.device).manual_seed(seed)

    def hook(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        weight = module.weight.detach()
        variance = bf16_step(weight).square_() / 12
        if type(module).__name__ == "Conv1D":  # transformers' GPT-2 layer keeps its weight as [in, out]
            variance = variance.T
        spread = torch.nn.functional.linear(args[0].float().square(), variance).sqrt_()
        noise = torch.randn(spread.shape, generator=generator, device=spread.device)
        return (output.float() + noise * spread).to(output.dtype)

    handles = [
        m.register_forward_hook(hook) for name, m in model.named_modules() if name in modules and m.weight.dim() == 2
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def bf16_step(weight: torch.Tensor) -> torch.Tensor:
    """Distance between neighbouring BF16 numbers at each |weight|, float32: 2^(exponent - 7), and 0 at 0."""
    powers = (weight.to(torch.bfloat16).view(torch.int16) & 0x7F80).view(torch.bfloat16)  # only the exponent's bits
    return powers.float() * 2.0**-7


def adapted_modules(adapter: Path) -> set[str]:
    """Names of the linear modules that an adapter changes (embeddings are looked up, not multiplied)."""
    return {update.module for update in adapters.read(adapter).updates.values() if not update.embedding}
