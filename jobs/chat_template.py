"""Render a model's own chat template in a sandbox, and find out by trial what it does to a conversation.

A template is a program that came with the weights. It runs in Jinja's immutable sandbox with the names that
transformers gives it (`messages`, `tools`, `add_generation_prompt`, special tokens, `raise_exception`,
`strftime_now`, `{% generation %}` marks), and is stopped after TIME_LIMIT_S seconds.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from types import FrameType
from typing import Any

from jobs.errors import UserError

TIME_LIMIT_S = 5
MAX_FACTOR = 100_000
Messages = Sequence[Mapping[str, Any]]
SAMPLE: Messages = (
    {"role": "system", "content": "You answer children."},
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Air scatters blue light most."},
    {"role": "user", "content": "And at sunset?"},
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a fact card.",
        "parameters": {"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]},
    },
}


class Template:
    """A compiled chat template; `render` gives the text that the model would see."""

    def __init__(self, source: str, *, where: str, special: Mapping[str, str] | None = None) -> None:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Marks(Extension):
            """Accepts `{% generation %}` around the assistant's text and renders what is inside."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        class Bounded(ImmutableSandboxedEnvironment):
            """The sandbox limits range() but not "x" * 10**10, which would take the machine's memory."""

            intercepted_binops = frozenset(("*", "**"))

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                if any(isinstance(side, int | float) and abs(side) > MAX_FACTOR for side in (left, right)):
                    raise ValueError(f"{operator} with a number over {MAX_FACTOR:,}")
                return super().call_binop(context, operator, left, right)

        environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Marks, loopcontrols])
        environment.filters["tojson"] = _to_json
        names: dict[str, Any] = {"raise_exception": _raise, "strftime_now": time.strftime}
        environment.globals.update(names)
        self.source, self.where, self._special = source, where, dict(special or {})
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"{where}: the chat template does not compile: {error}") from None

    def render(self, messages: Messages, **variables: Any) -> str:
        """The text for `messages`. `variables`: add_generation_prompt, tools, enable_thinking, …

        Raises UserError with the template's own words when it refuses or fails.
        """
        given = {"messages": [dict(m) for m in messages], "tools": None, "add_generation_prompt": False}
        try:
            with _limited(TIME_LIMIT_S):
                return self._template.render({**self._special, **given, **variables})
        except TimeoutError:
            raise UserError(f"{self.where}: the chat template ran for over {TIME_LIMIT_S} s and was stopped") from None
        except Exception as error:  # a template can raise anything, as any program: it is the model's, not ours
            raise UserError(f"{self.where}: the chat template failed: {type(error).__name__}: {error}") from None


def behaviour(template: Template) -> dict[str, Any]:
    """What the template does, found by rendering: keys marks_assistant, thinking, tools, default_system,
    keeps_earlier_thinking, end_of_turn, stable_prefix. None where the template refused the trial."""
    user, again = {"role": "user", "content": "first question"}, {"role": "user", "content": "second question"}
    answer = {"role": "assistant", "content": "the answer"}
    thought = {"role": "assistant", "content": "<think>\nthe thought\n</think>\n\nthe answer"}
    plain = _try(template, [user, answer])
    longer = _try(template, [user, answer, again, answer])
    kept = _try(template, [user, thought, again, answer])
    alone = _try(template, [user])
    return {
        "marks_assistant": "generation" in template.source and "endgeneration" in template.source,
        "thinking": "enable_thinking" in template.source,
        "tools": "tools" in template.source,
        "default_system": None if alone is None else _before(alone, "first question"),
        "keeps_earlier_thinking": None if kept is None else "the thought" in kept,
        "end_of_turn": None if plain is None else plain.rpartition("the answer")[2],
        "stable_prefix": None if plain is None or longer is None else longer.startswith(plain),
    }


def renders(template: Template) -> dict[str, str]:
    """The sample conversation as the model sees it, by variant: plain, and where the template knows them thinking on
    and off and tools. A variant that the template refuses holds its words."""
    variants: dict[str, dict[str, Any]] = {"plain": {}}
    if "enable_thinking" in template.source:
        variants |= {f"enable_thinking={str(on).lower()}": {"enable_thinking": on} for on in (True, False)}
    if "tools" in template.source:
        variants["tools"] = {"tools": [TOOL]}
    shown: dict[str, str] = {}
    for name, extra in variants.items():
        try:
            shown[name] = template.render(SAMPLE, add_generation_prompt=True, **extra)
        except UserError as error:
            shown[name] = f"refused: {error}"
    return shown


def _try(template: Template, messages: Messages) -> str | None:
    try:
        return template.render(messages)
    except UserError:
        return None


def _before(text: str, mark: str) -> str:
    """What the template wrote before the user's first words and its own turn marks: a default system message."""
    head = text.partition(mark)[0]
    return head if "system" in head else ""


def _raise(message: str) -> None:
    raise ValueError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@contextlib.contextmanager
def _limited(seconds: int) -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
