"""The one place where a question becomes messages: training, comparison, serving and load test all call it.

Standard library only, so that a client can copy or import it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from data.schema import CARD_KEYS, Card, Message

ROLE_PROMPT = (
    "You are a friendly science companion for children in primary school. Answer in the child's language, in a few "
    "short sentences, and rely only on the reference facts. Correct a wrong guess kindly. If the facts do not answer "
    "the question, say that you do not know. Ask at most one question back, and suggest nothing dangerous."
)
GRADE_LINES = {
    "en": "Primary school level: grades {band}.",
    "ja": "小学校の学年：{band}年生。",
    "zh": "小学学段：{band} 年级。",
}


def build_messages(
    facts: Mapping[str, Card] | Iterable[Card], example: Mapping[str, Any], role_prompt: str | None = None
) -> list[Message]:
    """The messages that come before the answer: system, history, question.

    `facts`: cards by id, or the cards themselves; those in `example["fact_ids"]` are used, in that order.
    `role_prompt`: first part of the system message; none takes ROLE_PROMPT.
    Raises ValueError naming a fact id that has no card, or a language without a grade line.
    """
    by_id = cast(Mapping[str, Card], facts) if isinstance(facts, Mapping) else {card["id"]: card for card in facts}
    cards: list[dict[str, str]] = []
    for fact in example["fact_ids"]:
        if fact not in by_id:
            raise ValueError(f"example {example.get('id')!r}: no fact card has the id {fact!r}")
        card = cast(dict[str, str], by_id[fact])
        cards.append({key: card[key] for key in CARD_KEYS})
    line = GRADE_LINES.get(example["language"])
    if line is None:
        raise ValueError(
            f"example {example.get('id')!r}: language {example['language']!r} is not one of {list(GRADE_LINES)}"
        )
    system = "\n".join(
        (
            ROLE_PROMPT if role_prompt is None else role_prompt,
            line.format(band=example["grade_band"]),
            "CURRENT REFERENCE FACTS:",
            json.dumps(cards, ensure_ascii=False),
        )
    )
    history: list[Message] = [{"role": turn["role"], "content": turn["content"]} for turn in example["history"]]
    return [{"role": "system", "content": system}, *history, {"role": "user", "content": example["user"]}]
