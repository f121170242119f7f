"""What a dataset consists of: its files cut into spans, its row format, and its fact cards."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from data import files, formats, reading
from data.files import Source, Span
from data.prompts import ROLE_PROMPT
from data.schema import Card, check_card
from jobs.errors import UserError

if TYPE_CHECKING:
    from jobs.config import Data


def planned(named: Sequence[tuple[str, str]], *, span_bytes: int) -> tuple[list[Source], list[Span]]:
    """Hash every file and cut it into spans."""
    sources: list[Source] = []
    spans: list[Span] = []
    for uri, name in named:
        source, cut = files.plan(uri, name, index=len(spans), span_bytes=span_bytes)
        sources.append(source)
        spans += cut
    return sources, spans


def rules_for(data: "Data", spans: Sequence[Span], card_spans: Sequence[Span]) -> formats.Rules:
    """The row format, given or detected from the first rows of every file, and the fact cards.

    Raises UserError when no format fits, or naming the bad cards.
    """
    name = data.format
    if data.format == "auto":
        heads = {span.source.uri: span for span in reversed(spans)}
        first = [raw for span in heads.values() for raw in islice(reading.read(span), 20)]
        if not first:
            raise UserError(f"{data.path}: no rows: the file is empty")
        name = formats.detect([raw.value for raw in first])
        if name is None and all(raw.problem is None for raw in first):
            keys = "; ".join(f"{key!r} ({form})" for form, key in formats.MAIN_KEY.items())
            seen = formats.listed(first[0].value) if isinstance(first[0].value, dict) else formats.shown(first[0].value)
            where = f"{data.path}: {first[0].source}"
            raise UserError(f"{where}: no known format: a row needs one of {keys}; found {seen}")
        name = name or "openai"  # nothing could be read: the rows themselves are reported
    cards = read_cards(card_spans) if name == "rankline" else {}
    if name == "rankline" and not cards:
        raise UserError(f"{data.path}: no fact cards: put facts.jsonl beside the examples")
    return formats.Rules(
        format=name,
        split_by=data.split_by,
        group_key=data.group_key,
        role_prompt=ROLE_PROMPT if data.role_prompt is None else data.role_prompt,
        facts=cards,
    )


def read_cards(spans: Sequence[Span]) -> dict[str, Card]:
    """The fact cards by id. Raises UserError listing every bad card: rows cannot be judged without them."""
    cards: dict[str, Card] = {}
    seen: dict[str, str] = {}
    bad: list[str] = []
    for raw in (raw for span in spans for raw in reading.read(span)):
        problems = [raw.problem] if raw.problem else check_card(raw.value)
        if not problems and raw.value["id"] in seen:
            bad.append(f"  {raw.source}: id: {raw.value['id']!r} is also the id of {seen[raw.value['id']]}")
        elif not problems:
            cards[raw.value["id"]] = raw.value
            seen[raw.value["id"]] = raw.source
        bad += [f"  {raw.source}: {problem}" for problem in problems]
    if bad:
        raise UserError("the fact cards are bad; put them right first\n" + "\n".join(bad))
    return cards
