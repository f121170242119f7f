"""What a report is made of. The page builds these; Markdown and HTML print the same ones, so they cannot disagree."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    text: str
    kind: str = "plain"  # plain, answer (the first thing to read), warning, or code


@dataclass(frozen=True)
class Tiles:
    """A few figures to take away: (name, value, what it is)."""

    tiles: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Answers:
    """One prompt and what each model answered to it."""

    prompt: str
    answers: Sequence[tuple[str, str]]


Block = Heading | Text | Tiles | Table | Figure | Answers
