"""From messages and an answer to token ids, exactly as the server will see them.

The prompt is what the model's own chat template renders with the generation prompt: the text that vLLM tokenizes
for a request. The answer is what the template adds when the answer is the last turn, up to the end-of-turn token.
Stock templates carry no generation marks, so the two are told apart here by rendering and comparing, and a template
that leaves out or alters a turn is found out instead of trusted. Where the template puts something before a plain
answer (Qwen3 with thinking on: an empty think block), the model has to write that itself, so it is supervised too.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from data.schema import Message, Problem
from jobs.errors import UserError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Classes whose tokenizer.json transformers uses as it stands (equal ids are tested); others are loaded through it.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")
# SHA-256 of templates that copy a turn's content without looking into it, as long as it holds no "<" and no white
# space at its ends. For these the text around the turns depends on the roles alone, so it is rendered once per
# sequence of roles; tests compare it with the template itself. Any other template is rendered row by row.
COPYING_TEMPLATES = {
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788": "SmolLM2-Instruct",
    "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5": "Qwen3",
}
PROBE = "Probe"
FIRST_TURNS = 4096


class Text(NamedTuple):
    """One row as text: what the server tokenizes, what the model should write (with its end-of-turn token), and
    what to tell the user about it (empty, or for example that the template trimmed the answer)."""

    prompt: str
    answer: str
    note: str = ""


@dataclass(frozen=True)
class Assets:
    """What rendering needs from a model directory; plain data, so that it travels to any worker.

    `fingerprint` is a hash of it all, and alone decides whether two are equal.
    """

    tokenizer: bytes = field(compare=False)
    template: str = field(compare=False)
    special: Mapping[str, str] = field(compare=False)
    enable_thinking: bool | None = field(compare=False)
    where: str = field(compare=False)
    fingerprint: str


def load_assets(directory: Path, *, enable_thinking: bool | None) -> Assets:
    """Read tokenizer and chat template of a model directory. Raises UserError naming the file that is missing."""
    settings = _json(directory / "tokenizer_config.json")
    template = _template(directory, settings)
    special: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = settings.get(name)
        text = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    if (directory / "tokenizer.json").is_file() and settings.get("tokenizer_class") in PLAIN_CLASSES:
        tokenizer = (directory / "tokenizer.json").read_bytes()
    else:
        from transformers import AutoTokenizer

        try:
            loaded: Any = AutoTokenizer.from_pretrained(str(directory))
            tokenizer = loaded.backend_tokenizer.to_str().encode()
        except Exception as error:  # transformers raises whatever the broken file makes its parsers raise
            raise UserError(f"{directory}: its tokenizer does not load: {type(error).__name__}: {error}") from None
        special = {name: str(value) for name, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    thinking = json.dumps(enable_thinking)
    parts = (tokenizer, template.encode(), json.dumps(special, sort_keys=True).encode(), thinking.encode())
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return Assets(tokenizer, template, special, enable_thinking, str(directory), digest)


class Renderer:
    """Holds the compiled template and tokenizer of one model."""

    def __init__(self, assets: Assets) -> None:
        from tokenizers import Tokenizer

        from jobs.chat_template import Template

        self.where = assets.where
        self.template = Template(assets.template, where=assets.where, special=assets.special)
        try:
            self.tokenizer = Tokenizer.from_buffer(assets.tokenizer)
        except Exception as error:  # the tokenizers library raises bare Exception on a malformed file
            raise UserError(f"{assets.where}/tokenizer.json: not a tokenizer: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.thinking = {} if assets.enable_thinking is None else {"enable_thinking": assets.enable_thinking}
        added = [token for token in self.tokenizer.get_added_tokens_decoder().values() if token.special]
        special = sorted((token.content for token in added), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.special_starts = sorted({token[0] for token in special})
        self.lead, self.end_of_turn, self.end_id = self._end_of_turn()
        self.copies = hashlib.sha256(assets.template.encode()).hexdigest() in COPYING_TEMPLATES
        self._shapes: dict[tuple[str, ...], tuple[list[str], str]] = {}
        self._firsts: dict[str, list[int]] = {}
        self.splits = self._splits()

    def text(self, messages: Sequence[Message], answer: str) -> Text | Problem:
        """The row as text, or the problem that the model's template has with it."""
        contents = [message["content"] for message in messages]
        if self.copies and all("<" not in c and c == c.strip() for c in (*contents, answer)):
            shape = tuple(message["role"] for message in messages)
            pieces, lead = self._shapes.get(shape) or self._shape(shape)
            prompt = "".join([part for pair in zip(pieces, contents, strict=False) for part in pair]) + pieces[-1]
            return Text(prompt, f"{lead}{answer}{self.end_of_turn}")
        return self.rendered(messages, answer)

    def rendered(self, messages: Sequence[Message], answer: str) -> Text | Problem:
        """The same through the template itself, comparing what it wrote with what went in."""
        try:
            prompt = self.prompt(messages)
            full = self.template.render([*messages, {"role": "assistant", "content": answer}], **self.thinking)
        except UserError as error:
            return Problem("", "template", str(error).removeprefix(f"{self.where}: "))
        if not full.startswith(prompt):
            if "<think>" in answer and self.thinking.get("enable_thinking") is False:
                return Problem("answer", "reasoning", "holds reasoning, but model.enable_thinking is false")
            return Problem(
                "", "template", "the chat template renders this row differently from the prompt of a request"
            )
        note, at = "", 0
        for i, message in enumerate(messages):
            content = message["content"].strip()
            found = prompt.find(content, at)
            if found < 0 and message["role"] == "assistant" and "</think>" in content:
                content = content.rpartition("</think>")[2].strip()
                found = prompt.find(content, at)
                note = "the chat template leaves out the reasoning of earlier turns"
            if found < 0:
                return Problem(f"messages[{i}]", "template", "the chat template leaves out or alters this turn")
            at = found + len(content)
        tail = full[len(prompt) :]
        for wanted, remark in (
            (answer, note),
            (answer.strip(), "the chat template trims white space around the answer"),
        ):
            for lead in ("", self.lead):
                if tail.startswith(lead + wanted + self.end_of_turn):
                    return Text(prompt, lead + wanted + self.end_of_turn, remark)
        return Problem("answer", "template", "the chat template alters the answer")

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the server tokenizes for these messages."""
        return self.template.render(messages, add_generation_prompt=True, **self.thinking)

    def special_in(self, text: str) -> str | None:
        """The first special token that a text spells out, if any: it would be read as the token itself."""
        if not any(start in text for start in self.special_starts):
            return None
        found = self.special.search(text)
        return found[0] if found else None

    def encode(self, texts: Sequence[Text]) -> list[tuple[list[int], list[int]] | None]:
        """Token ids of prompt and answer of every row.

        None where the tokenizer joins the end of the prompt with the start of the answer, so that no mask is right.
        """
        if self.splits:
            prompts = self._prompt_ids([text.prompt for text in texts])
            return list(zip(prompts, self._ids([text.answer for text in texts]), strict=True))
        prompts = self._ids([text.prompt for text in texts])
        whole = self._ids([text.prompt + text.answer for text in texts])
        return [
            (head, ids[len(head) :]) if ids[: len(head)] == head else None
            for head, ids in zip(prompts, whole, strict=True)
        ]

    def _prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Encodes the first turn, which is the same system message in many rows, once for all of them."""
        turns = [prompt.partition(self.end_of_turn) for prompt in prompts]
        firsts = [first + end for first, end, _ in turns]
        if new := list({first for first in firsts if first not in self._firsts}):
            if len(self._firsts) > FIRST_TURNS:
                self._firsts.clear()
                new = list(set(firsts))
            self._firsts |= dict(zip(new, self._ids(new), strict=True))
        rests = self._ids([rest for _, _, rest in turns])
        return [self._firsts[first] + rest for first, rest in zip(firsts, rests, strict=True)]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _end_of_turn(self) -> tuple[str, str, int]:
        """What the template writes before a plain answer, the end-of-turn token after it, and that token's id."""
        question: list[Message] = [{"role": "user", "content": "Question"}]
        prompt = self.prompt(question)
        full = self.template.render([*question, {"role": "assistant", "content": PROBE}], **self.thinking)
        if not full.startswith(prompt) or full.count(PROBE) != 1:
            raise UserError(
                f"{self.where}: its chat template renders an answer differently from the prompt of a request, so no "
                "loss mask can be built: use a template whose generation prompt starts the assistant's turn"
            )
        lead, _, tail = full[len(prompt) :].partition(PROBE)
        found = self.special.match(tail.lstrip())
        if found is None:
            raise UserError(
                f"{self.where}: its chat template puts no end-of-turn token after the answer (found {tail!r}), so the "
                "model would never learn to stop"
            )
        end = tail[: tail.index(found[0]) + len(found[0])]
        return lead, end, cast(int, self.tokenizer.token_to_id(found[0]))

    def _shape(self, roles: tuple[str, ...]) -> tuple[list[str], str]:
        """The text around the turns of rows with these roles, and before the answer."""
        marks = [f"\ue000{i}\ue001" for i in range(len(roles))]
        text = self.rendered([{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)], PROBE)
        if isinstance(text, Problem):
            raise RuntimeError(f"{self.where}: a template listed as copying does not copy: {text}")
        pieces = re.split("|".join(marks), text.prompt)
        if len(pieces) != len(marks) + 1:
            raise RuntimeError(f"{self.where}: a template listed as copying writes a turn twice")
        self._shapes[roles] = pieces, text.answer.partition(PROBE)[0]
        return self._shapes[roles]

    def _splits(self) -> bool:
        """Whether text tokenized apart, before the answer and after the first turn, gives the ids of the whole. Then
        each piece is encoded once, and the prompt's ids are the server's whatever the answer starts with."""
        prompt = self.prompt([{"role": "user", "content": "Question"}]) + self.lead
        answers = ["A", "a b", "1", "é", "你好", "ア", "-", "(", '"', "👍"]
        apart = self._ids(answers)
        whole = self._ids([prompt, *(prompt + answer for answer in answers)])
        return self._prompt_ids([prompt]) == whole[:1] and all(
            both == whole[0] + one for both, one in zip(whole[1:], apart, strict=True)
        )


@lru_cache(maxsize=2)
def renderer(assets: Assets) -> Renderer:
    """The Renderer of these assets, one per process."""
    return Renderer(assets)


def _template(directory: Path, settings: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template: Any = settings.get("chat_template")
    if isinstance(template, list):  # several named ones: a plain chat takes "default"
        template = {t.get("name"): t.get("template") for t in cast(list[dict[str, Any]], template)}.get("default")
    if not isinstance(template, str):
        raise UserError(f"{directory}: no chat template (chat_template.jinja): chat rows need an instruct model")
    return template


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: missing: copy the whole model directory") from None
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}): copy the model directory again") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected an object: copy the model directory again")
    return cast(dict[str, Any], value)
