"""Prompts for a load test, each of an exact length in the served model's tokens.

Length means what the server will count: the rendered chat template with the message in it. (`vllm bench serve`
makes a text of the length asked for, and the template comes on top.) Words are drawn at random with a seed of the
level's own, so no two prompts share a prefix beyond the template's, and a rerun sends the same ones.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.errors import UserError

_PLAIN = """
the of and to in is was for on that with as it by at from his an are which be this or had not have one but her were
they all their has been who more no out so if up what about when there can some time into only do new now over such
first then any its like our man me even most made after also did many off before must through years where much way
well down should because each just those people too how little state good very make world still see own work long get
here between both life being under never day same another know while last might great old year come since against go
came right used take three red water light air sun tree bird stone sea snow wind
"""
PLAIN_WORDS = tuple(_PLAIN.split())
"""Words that are one token each to nearly every tokenizer: used where the server's own tokenizer is not at hand."""

Count = Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True)
class Prompt:
    """One request's content: a user message's text, or whole chat messages; lengths in tokens as the server counts."""

    content: str | list[dict[str, Any]]
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Chat:
    """A conversation up to its next answer. `prompt_len`: its tokens with the chat template; 0 is not known."""

    messages: list[dict[str, Any]]
    prompt_len: int


@dataclass(frozen=True)
class Lexicon:
    """What random prompts are made of: words of about one token, and how to count a message as the server does.

    `exact` is False where no tokenizer is at hand and a word is taken for a token.
    """

    words: tuple[str, ...]
    count: Count
    exact: bool = True
    count_answer: Callable[[str], int] | None = None


def level_seed(seed: int, name: str, *place: int) -> list[int]:
    """A seed that no other level, variant or run name shares: entropy for numpy's SeedSequence."""
    return [seed, zlib.crc32(name.encode()), *place]


def plain_lexicon() -> Lexicon:
    """For a server whose tokenizer is unknown: one word is taken for one token."""
    return Lexicon(PLAIN_WORDS, lambda texts: [len(t.split()) for t in texts], exact=False)


def lexicon(directory: str, *, chat: bool = True, enable_thinking: bool | None = None) -> Lexicon:
    """Words and counts of the tokenizer (and, with `chat`, the chat template) of a model directory or hub id.

    Raises UserError where there is no usable tokenizer, or no chat template for chat requests.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{directory}: no usable tokenizer for the load test's prompts: {reason}") from None
    before, after = "", ""
    if chat:
        mark = "\ue000"
        extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            rendered: str = tokenizer.apply_chat_template(
                [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True, **extra
            )
        except ValueError:
            raise UserError(f"{directory}: the tokenizer has no chat template; use load.api=completions") from None
        before, found, after = rendered.partition(mark)
        if not found:
            raise UserError(f"{directory}: the chat template leaves out the user's message")

    def count(texts: Sequence[str]) -> list[int]:
        whole = [before + text + after for text in texts]
        return [len(ids) for ids in tokenizer(whole, add_special_tokens=not chat)["input_ids"]]

    def count_answer(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return Lexicon(_words(tokenizer), count, count_answer=count_answer)


def random_prompts(
    source: Lexicon, *, count: int, input_len: int, output_len: int, seed: Sequence[int]
) -> list[Prompt]:
    """`count` different prompts of exactly `input_len` tokens, the same for the same seed.

    Raises UserError where `input_len` leaves no room for a word beside the chat template.
    """
    rng = np.random.default_rng(list(seed))
    frame = source.count([""])[0]
    room = input_len - frame
    if room < 1:
        raise UserError(
            f"load.input_len is {input_len}, but the chat template alone takes {frame} tokens: "
            f"give at least {frame + 8}"
        )
    texts: list[list[str]] = [_pick(source.words, rng, room) for _ in range(count)]
    open_ones = list(range(count))
    for _ in range(12):  # a word may be two tokens at the start of the text, or merge with the template's end
        lengths = source.count([" ".join(texts[i]) for i in open_ones])
        short = {i: input_len - n for i, n in zip(open_ones, lengths, strict=True) if n != input_len}
        open_ones = list(short)
        if not short:
            break
        for i, lack in short.items():
            kept = texts[i] if lack > 0 else texts[i][: max(0, len(texts[i]) + lack - 1)]
            texts[i] = kept + _pick(source.words, rng, lack if lack > 0 else 1)
    return [Prompt(" ".join(words), input_len, output_len) for words in texts]


def chats(rows: Sequence[Chat], *, count: int, output_len: int, seed: Sequence[int]) -> list[Prompt]:
    """`count` conversations in random order, each as often as the others (or once more): real prompts with history.

    More prompts than rows means repeats, which a server's prefix cache answers sooner than real users' prompts.
    """
    rng = np.random.default_rng(list(seed))
    order = [int(i) for _ in range(-(-count // len(rows))) for i in rng.permutation(len(rows))][:count]
    return [Prompt(rows[i].messages, rows[i].prompt_len, output_len) for i in order]


def held_out(prepared: Path) -> list[Chat]:
    """The held-out rows of a prepare artifact: the messages before the answer, with the tokens they make."""
    from data import snapshot

    table = snapshot.read(prepared, "eval").select(["messages", "prompt_length"])
    rows = [Chat(json.loads(row["messages"]), int(row["prompt_length"])) for row in table.to_pylist()]
    if not rows:
        raise UserError(f"{prepared}: no held-out rows, which load.prompts=heldout sends")
    return rows


def chat_file(path: Path) -> list[Chat]:
    """Conversations of a JSONL file, one object with `messages` a line; a last assistant turn is the answer, not sent.

    Raises UserError naming the line. Their length in tokens is not asked for, so the server's count is not compared.
    """
    rows: list[Chat] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(
            f"load.prompts={path}: {error.strerror}; it should be random, heldout or a JSONL file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start})") from None
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            while messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if not messages or not all(isinstance(m["role"], str) and m["content"] is not None for m in messages):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{at}: expected an object with `messages`, each with role and content") from None
        rows.append(Chat(messages, 0))
    if not rows:
        raise UserError(f"{path}: no conversation in it")
    return rows


def _pick(words: Sequence[str], rng: np.random.Generator, count: int) -> list[str]:
    return [words[int(i)] for i in rng.integers(0, len(words), size=count)]


def _words(tokenizer: Any) -> tuple[str, ...]:
    """Lower-case words that the tokenizer keeps whole after a space, in the order of their ids."""
    marks = ("Ġ", "▁")
    named = sorted((index, token[1:]) for token, index in tokenizer.get_vocab().items() if token.startswith(marks))
    candidates = [w for _, w in named if 2 <= len(w) <= 12 and w.isascii() and w.isalpha() and w.islower()][:20000]
    if not candidates:
        return PLAIN_WORDS
    base = len(tokenizer("the the", add_special_tokens=False)["input_ids"])
    ids = tokenizer([f"the the {w}" for w in candidates], add_special_tokens=False)["input_ids"]
    whole = tuple(w for w, found in zip(candidates, ids, strict=True) if len(found) == base + 1)
    return whole if len(whole) >= 100 else PLAIN_WORDS
