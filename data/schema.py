"""What a row must be: fact cards, examples and chat messages, checked field by field. Standard library only.

Checks return problems instead of raising, so that a reader can list every bad row of a dataset. A problem says
which field it is about (`messages[2].role`), of which kind it is (to be counted), what was found and what to do.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

LANGUAGES = ("en", "ja", "zh")
CARD_KEYS = ("id", "text", "kind", "scope")
EXAMPLE_KEYS = ("id", "fact_ids", "grade_band", "language", "history", "user", "answer")
GRADE_BAND = re.compile(r"([1-6])(?:-([1-6]))?")
# Tab, line feed and CR LF are text; every other C0 and C1 control, U+0085 too, and half a surrogate pair are not.
FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]|\r(?!\n)")
ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
CALLS = ("tool_calls", "function_call")
CALL_ROLES = ("tool", "function", "observation", "function_call", "ipython")
REASONING = ("reasoning_content", "reasoning", "thinking")


class Message(TypedDict):
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str


class Card(TypedDict):
    """A reference fact that answers may rely on."""

    id: str
    text: str
    kind: str
    scope: str


class Example(TypedDict):
    """One training row: a question about some facts, what was said before it, and the right answer."""

    id: str
    fact_ids: list[str]
    grade_band: str
    language: str
    history: list[Message]
    user: str
    answer: NotRequired[str]


class Problem(NamedTuple):
    """What is wrong with one field of one row; `kind` is what refused and dropped rows are counted by."""

    field: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}" if self.field else self.text


def check_text(value: object, field: str, *, blank: str = "empty") -> Problem | None:
    """The problem with a text field, if any: type, blank, control characters, lone surrogates."""
    if not isinstance(value, str):
        return Problem(field, blank if value is None else "type", f"expected text, found {shown(value)}")
    if not value.strip():
        return Problem(field, blank, f"expected text, found {'an empty string' if not value else 'only white space'}")
    bad = FORBIDDEN.search(value)
    if bad is None:
        return None
    code = f"U+{ord(bad[0]):04X} at character {bad.start()}"
    if "\ud800" <= bad[0] <= "\udfff":
        return Problem(field, "surrogate", f"half of a surrogate pair ({code}): the text was cut inside a character")
    return Problem(field, "control", f"control character {code}: remove it (tab and line breaks are fine)")


def check_card(value: object) -> list[Problem]:
    """The problems of one fact card."""
    if not isinstance(value, dict):
        return [Problem("", "type", f"expected a fact card with {', '.join(CARD_KEYS)}, found {shown(value)}")]
    card = cast(dict[str, Any], value)
    return _missing(card, CARD_KEYS) or [p for key in CARD_KEYS if (p := check_text(card[key], key))]


def check_example(value: object, facts: Collection[str]) -> list[Problem]:
    """The problems of one row of our own format; `facts` are the known card ids."""
    if not isinstance(value, dict):
        return [Problem("", "type", f"expected an example with {', '.join(EXAMPLE_KEYS)}, found {shown(value)}")]
    row = cast(dict[str, Any], value)
    if problems := _missing(row, EXAMPLE_KEYS):
        return problems
    problems = [p for key in ("id", "user") if (p := check_text(row[key], key))]
    if problem := check_text(row["answer"], "answer", blank="empty_answer"):
        problems.append(problem)
    problems += _check_fact_ids(row["fact_ids"], facts)
    band = GRADE_BAND.fullmatch(row["grade_band"]) if isinstance(row["grade_band"], str) else None
    if band is None or (band[2] is not None and band[2] < band[1]):
        problems.append(Problem("grade_band", "value", f'expected grades like "1-2", found {shown(row["grade_band"])}'))
    if row["language"] not in LANGUAGES:
        problems.append(
            Problem("language", "value", f"expected {' or '.join(LANGUAGES)}, found {shown(row['language'])}")
        )
    history = row["history"]
    if not isinstance(history, list):
        problems.append(Problem("history", "type", f"expected a list of turns, found {shown(history)}"))
    elif history:
        problems += check_messages(cast(list[object], history), field="history", system=False)
    return problems


def check_messages(
    value: object,
    *,
    field: str = "messages",
    role: str = "role",
    content: str = "content",
    roles: Mapping[str, str] = ROLES,
    system: bool = True,
) -> list[Problem]:
    """The problems of a chat that must end with the assistant's answer.

    Order: at most one system message, first; then user and assistant in turn. `field`, `role` and `content` are the
    names that the user's file has for them, `roles` its names of the three roles.
    """
    if not isinstance(value, list):
        hint = ": JSON inside a text, parse it first" if isinstance(value, str) and value[:1] in "[{" else ""
        return [Problem(field, "type", f"expected a list of turns, found {shown(value)}{hint}")]
    turns = cast(list[object], value)
    if not turns:
        return [Problem(field, "empty", "no turns: a question and an answer are needed")]
    problems: list[Problem] = []
    named: list[str] = []
    for i, turn in enumerate(turns):
        where = f"{field}[{i}]"
        if not isinstance(turn, dict):
            problems.append(Problem(where, "type", f"expected an object, found {shown(turn)}"))
            continue
        turn = cast(dict[str, Any], turn)
        refused = _refused_keys(turn, where) if len(turn) != 2 else []
        for key in (role, content):
            if key not in turn:
                problems.append(Problem(f"{where}.{key}", "missing", f"no {key!r} here; keys: {listed(turn)}"))
        if role in turn:
            if problem := _check_role(turn[role], f"{where}.{role}", roles):
                refused.append(problem)
            else:
                named.append(turn[role])
        problems += refused
        if content in turn and not any(problem.kind == "tools" for problem in refused):
            blank = "empty_answer" if i == len(turns) - 1 else "empty"
            if problem := check_text(turn[content], f"{where}.{content}", blank=blank):
                problems.append(problem)
    if len(named) == len(turns):
        problems += _check_order(named, field, role, roles, system)
    return problems


def _check_order(named: Sequence[str], field: str, role: str, roles: Mapping[str, str], system: bool) -> list[Problem]:
    """The first turn that is out of order; what follows it would only repeat the complaint."""
    expected = "user"
    for i, name in enumerate(named):
        where, found = f"{field}[{i}].{role}", roles[name]
        if found == "system":
            if i == 0 and system:
                continue
            hint = "a system message may only come first" if system else "history holds user and assistant turns only"
            return [Problem(where, "order", f"{hint}; found {name!r}")]
        if found != expected:
            place = f"after {named[i - 1]!r}" if i else "as the first turn"
            return [Problem(where, "order", f"expected the {expected} {place}, found {name!r}: the two alternate")]
        expected = "assistant" if found == "user" else "user"
    if roles[named[-1]] != "assistant":
        where = f"{field}[{len(named) - 1}].{role}"
        return [Problem(where, "order", f"the last turn must be the assistant's answer, found {named[-1]!r}")]
    return []


def _check_role(value: object, where: str, roles: Mapping[str, str]) -> Problem | None:
    if isinstance(value, str):
        if value in roles:
            return None
        if value in CALL_ROLES:
            return Problem(where, "tools", f"role {value!r}: tool calls are not supported, leave such rows out")
    plain = value.strip().lower() if isinstance(value, str) else ""
    hint = f": write it as {plain!r}" if plain in roles else ": rename it to 'system'" if plain == "developer" else ""
    return Problem(where, "role", f"expected {', '.join(roles)}, found {shown(value)}{hint}")


def _refused_keys(turn: Mapping[str, Any], where: str) -> list[Problem]:
    """Keys that change what a turn means; empty ones, which every export writes, mean nothing."""
    found = [
        Problem(f"{where}.{key}", "tools", f"{key!r}: tool calls are not supported, leave such rows out")
        for key in CALLS
        if turn.get(key)
    ]
    found += [
        Problem(f"{where}.{key}", "reasoning", f"{key!r} would be lost: put it into the answer or remove it")
        for key in REASONING
        if turn.get(key)
    ]
    if turn.get("weight") is not None and turn["weight"] != 1:
        found.append(
            Problem(f"{where}.weight", "value", f"weight {shown(turn['weight'])}: only the last answer is trained on")
        )
    return found


def _check_fact_ids(value: object, facts: Collection[str]) -> list[Problem]:
    if not isinstance(value, list):
        return [Problem("fact_ids", "type", f"expected a list of fact ids, found {shown(value)}")]
    ids = cast(list[object], value)
    if not ids:
        return [Problem("fact_ids", "empty", "no fact ids: name at least one card")]
    problems: list[Problem] = []
    for i, fact in enumerate(ids):
        if not isinstance(fact, str):
            problems.append(Problem(f"fact_ids[{i}]", "type", f"expected text, found {shown(fact)}"))
        elif fact not in facts:
            problems.append(Problem(f"fact_ids[{i}]", "unknown_fact", f"no fact card has the id {fact!r}"))
        elif fact in ids[:i]:
            problems.append(Problem(f"fact_ids[{i}]", "value", f"{fact!r} is named twice"))
    return problems


def _missing(row: Mapping[str, Any], keys: Sequence[str]) -> list[Problem]:
    return [Problem(key, "missing", f"no {key!r} here; keys: {listed(row)}") for key in keys if key not in row]


def listed(row: Mapping[str, Any]) -> str:
    """A row's keys for a message."""
    keys = [str(key) for key in row]
    return (", ".join(keys[:8]) + (", …" if len(keys) > 8 else "")) or "none"


def shown(value: object) -> str:
    """A value for a message: its JSON type, and itself when short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value!r}" if abs(value) < 1e18 else "a huge number"
    if isinstance(value, str):
        text = value if len(value) <= 40 else value[:39] + "…"
        return f"the text {text!r}"
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else type(value).__name__
