"""One row of any supported format -> messages, answer and the keys that decide its split, or what is wrong with it.

    rankline   {id, fact_ids, grade_band, language, history, user, answer} with fact cards beside it
    openai     {messages: [{role, content}, ...]}
    sharegpt   {conversations: [{from, value}, ...]}; from: human or user, gpt or assistant, system
    alpaca     {instruction, input, output} and an optional system; null, missing or blank input is no input

`id` is optional except in our own format. Tools are refused by name; their empty fields mean nothing. A closed
<think> block may start an answer and is then part of it.
"""

import difflib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from data.prompts import build_messages
from data.schema import Card, Message, Problem, check_example, check_messages, check_text, listed, shown

MAIN_KEY = {"rankline": "fact_ids", "openai": "messages", "sharegpt": "conversations", "alpaca": "instruction"}
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}
REFUSED = ("tools", "functions", "function_call", "tool_calls", "images", "audios", "videos")
# Words that do not tell one question from another.
FILLERS = frozenset(
    re.findall(r"\w+", "a an the is are was were be do does did of please so well ok okay hey hi hello s")
)
THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


class Row(NamedTuple):
    """A valid row. Rows that share one of `keys` go to the same split; `question` finds near duplicates."""

    id: str | None
    messages: list[Message]
    answer: str
    keys: list[str]
    question: str


@dataclass(frozen=True)
class Rules:
    """What rows are read by: the format, our cards and role prompt, and what is kept together in a split."""

    format: str
    split_by: str = "facts"
    group_key: str | None = None
    role_prompt: str | None = None
    facts: Mapping[str, Card] = field(default_factory=dict[str, Card])

    @property
    def together(self) -> str:
        """What keeps rows in one split: facts, group or question."""
        if self.split_by == "group":
            return "group"
        return "facts" if self.split_by == "facts" and self.format == "rankline" else "question"


def detect(values: Sequence[Any]) -> str | None:
    """The format that most of these rows look like; None when none looks like any."""
    votes = [name for value in values for name in looks_like(value)]
    return max(MAIN_KEY, key=votes.count) if votes else None


def looks_like(value: Any) -> list[str]:
    """The formats whose main key a row has."""
    if not isinstance(value, dict):
        return []
    return [name for name, key in MAIN_KEY.items() if key in value]


def convert(value: Any, rules: Rules, note: Callable[[str], None]) -> Row | list[Problem]:
    """The row that a decoded value holds, or its problems. `note` takes what is said once about a dataset."""
    if not isinstance(value, dict):
        return [Problem("", "type", f"expected an object with {MAIN_KEY[rules.format]!r}, found {shown(value)}")]
    value = cast(dict[str, Any], value)
    problems = _refused(value, rules.format)
    if rules.format == "rankline":
        problems += check_example(value, rules.facts)
        if not problems:
            messages, answer = build_messages(rules.facts, value, rules.role_prompt), cast(str, value["answer"])
            return _row(value, messages, answer, rules)
        return problems
    read = {"openai": _openai, "sharegpt": _sharegpt, "alpaca": _alpaca}[rules.format]
    chat = read(value, problems, note)
    if (identity := value.get("id")) is not None and not (isinstance(identity, int) and not isinstance(identity, bool)):
        problem = check_text(identity, "id")
        problems += [problem] if problem else []
    if problems:
        return problems
    return _row(value, chat[:-1], chat[-1]["content"], rules)


def question_key(messages: Sequence[Message]) -> str:
    """What the user asked, without case, punctuation, spacing and filler words: equal for near duplicates."""
    text = " ".join(message["content"] for message in messages if message["role"] == "user")
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    words = re.findall(r"\w+", text.casefold())
    return " ".join([word for word in words if word not in FILLERS] or words) or text


def _row(value: dict[str, Any], messages: list[Message], answer: str, rules: Rules) -> Row | list[Problem]:
    if problems := _thoughts(messages, answer):
        return problems
    question = question_key(messages)
    keys = [f"question:{question}"]
    if rules.together == "group":
        group = value.get(rules.group_key or "")
        if isinstance(group, bool) or not isinstance(group, str | int) or group == "":
            return [
                Problem(str(rules.group_key), "group", f"expected the group's name or number, found {shown(group)}")
            ]
        keys = [f"group:{group}"]
    elif rules.together == "facts":
        keys = [f"fact:{fact}" for fact in value["fact_ids"]]
    identity = value.get("id")
    return Row(None if identity is None else str(identity), messages, answer, keys, question)


def _refused(value: Mapping[str, Any], format: str) -> list[Problem]:
    problems = [
        Problem(key, "tools", f"{key!r} is not supported: leave such rows out") for key in REFUSED if value.get(key)
    ]
    main = MAIN_KEY[format]
    others = [MAIN_KEY[name] for name in looks_like(value) if name != format and value[MAIN_KEY[name]] is not None]
    if main not in value:
        near = difflib.get_close_matches(main, [str(key) for key in value], n=1, cutoff=0.7)
        hint = f"; is {near[0]!r} meant?" if near else f"; it looks like {looks_like(value)[0]}" if others else ""
        problems.append(Problem(main, "missing", f"no {main!r} here; keys: {listed(value)}{hint}"))
    elif others:
        problems.append(Problem(others[0], "ambiguous", f"both {main!r} and {others[0]!r}: which one is the row?"))
    return problems


def _openai(value: dict[str, Any], problems: list[Problem], note: Callable[[str], None]) -> list[Message]:
    if "messages" not in value:
        return []
    turns = value["messages"]
    if isinstance(turns, list):
        turns = [_one_part(turn, note) for turn in cast(list[Any], turns)]
    problems += check_messages(turns)
    return [] if problems else [{"role": t["role"], "content": t["content"]} for t in turns]


def _one_part(turn: Any, note: Callable[[str], None]) -> Any:
    """A content list of one text part is that text; more parts leave open what joins them, and are refused."""
    if not isinstance(turn, dict):
        return turn
    parts = cast(dict[str, Any], turn).get("content")
    if not isinstance(parts, list) or len(cast(list[Any], parts)) != 1:
        return cast(dict[str, Any], turn)
    part = parts[0]
    if isinstance(part, dict) and cast(dict[str, Any], part).get("type") == "text" and set(part) <= {"type", "text"}:
        note("content given as one text part is taken as that text")
        return {**turn, "content": part.get("text")}
    return cast(dict[str, Any], turn)


def _sharegpt(value: dict[str, Any], problems: list[Problem], note: Callable[[str], None]) -> list[Message]:
    if "conversations" not in value:
        return []
    turns = value["conversations"]
    first = turns[0] if isinstance(turns, list) and turns else None
    role, content = ("from", "value")
    if isinstance(first, dict) and "from" not in first and "role" in first:
        role, content = "role", "content"
    problems += check_messages(turns, field="conversations", role=role, content=content, roles=SHAREGPT_ROLES)
    system = _system(value, problems)
    if problems:
        return []
    if role == "role":
        note("'role' and 'content' are taken for 'from' and 'value'")
    if any(turn[role] in ("user", "assistant") for turn in turns):
        note("'user' and 'assistant' are taken for 'human' and 'gpt'")
    chat: list[Message] = [{"role": SHAREGPT_ROLES[t[role]], "content": t[content]} for t in turns]
    if system and chat[0]["role"] == "system":
        problems.append(Problem("system", "ambiguous", "both a 'system' field and a system turn"))
    return system + chat


def _alpaca(value: dict[str, Any], problems: list[Problem], note: Callable[[str], None]) -> list[Message]:
    texts: dict[str, str] = {}
    for key in ("instruction", "output"):
        if key not in value:
            if key == "output":
                problems.append(Problem(key, "missing", f"no {key!r} here; keys: {listed(value)}"))
        elif problem := check_text(value[key], key, blank="empty_answer" if key == "output" else "empty"):
            problems.append(problem)
        else:
            texts[key] = value[key]
    given = value.get("input")
    if given is not None and not (isinstance(given, str) and not given.strip()):
        if problem := check_text(given, "input"):
            problems.append(problem)
        else:
            texts["input"] = given
    if value.get("history"):
        problems.append(Problem("history", "unsupported", "earlier turns are not part of this format: use 'messages'"))
    system = _system(value, problems)
    if problems:
        return []
    question = "\n\n".join(texts[key] for key in ("instruction", "input") if key in texts)
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]


def _system(value: Mapping[str, Any], problems: list[Problem]) -> list[Message]:
    text = value.get("system")
    if text is None or text == "":
        return []
    if problem := check_text(text, "system"):
        problems.append(problem)
        return []
    return [{"role": "system", "content": text}]


def _thoughts(messages: Sequence[Message], answer: str) -> list[Problem]:
    problems: list[Problem] = []
    turns = [(f"messages[{i}]", m["content"]) for i, m in enumerate(messages) if m["role"] == "assistant"]
    for where, text in [*turns, ("answer", answer)]:
        if "<think>" not in text and "</think>" not in text:
            continue
        thought = THOUGHT.match(text)
        rest = text[thought.end() :] if thought else text
        if thought is None or "<think>" in rest or "</think>" in rest:
            problems.append(Problem(where, "reasoning", "<think> may only open a turn and must be closed by </think>"))
        elif not rest.strip():
            problems.append(Problem(where, "empty_answer", "nothing follows the reasoning"))
    return problems
