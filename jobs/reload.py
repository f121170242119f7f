"""Load a model directory as a user would, and let it answer: the proof that what was written is a model."""

import contextlib
import logging
import os
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jobs.errors import UserError

PROMPT = "Why is the sky blue?"
MAX_NEW_TOKENS = 24


def share_cores() -> None:
    """Call before torch is imported: its threads then sleep while they wait for each other instead of spinning.

    On two cores that other processes use too, spinning cost six times the CPU time of the same answers.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def load(path: Path, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a directory in BF16 on the CPU, its weights mapped, not copied.

    Raises UserError when a tensor is missing, left over or of another shape: transformers only logs that.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        try:
            made: Any = AutoModelForCausalLM.from_pretrained(
                path, **{"dtype": torch.bfloat16, "output_loading_info": True, **options}
            )
            model, info = made
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"{path}: transformers cannot load this model: {error}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info[kind]))
        if names:
            raise UserError(f"{path}: {kind.replace('_', ' ')}: {', '.join(names[:3])} ({len(names)} in all)")
    model.eval()
    return model, tokenizer


def render(tokenizer: Any, question: str, *, enable_thinking: bool | None) -> list[int]:
    """Token ids of a one-turn conversation up to the answer; the bare text where there is no chat template."""
    if not tokenizer.chat_template:
        return tokenizer(question)["input_ids"]
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, **extra
    )["input_ids"]


def answer(path: Path, *, enable_thinking: bool | None) -> tuple[str, str]:
    """(prompt, greedy answer) of a model directory. Raises UserError when it cannot be loaded or its logits are NaN."""
    import torch

    model, tokenizer = load(path)
    ids = torch.tensor([render(tokenizer, PROMPT, enable_thinking=enable_thinking)])
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
    if not bool(torch.isfinite(made.logits[0]).all()):
        raise UserError(f"{path}: the merged model's logits are not finite: the adapter or the base is broken")
    return PROMPT, tokenizer.decode(made.sequences[0, ids.shape[1] :], skip_special_tokens=True).strip()


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Without transformers' own bar, which would cut through ours, and what is only for its developers to know."""
    from transformers.utils import logging as theirs

    logger = logging.getLogger("bitsandbytes")  # says on import that an optional faster kernel is not installed
    level = logger.level
    theirs.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
        theirs.enable_progress_bar()
