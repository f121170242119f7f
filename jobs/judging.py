"""What is said about answers and losses, as plain arithmetic: intervals, agreement, loops and leaks."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

RESAMPLES = 2000
MIN_LOOP_WORDS = 12
THINK = re.compile(r"</?think(?:ing)?>", re.IGNORECASE)


def loops(text: str) -> bool:
    """Whether a text ends in a loop: its last words repeat some phrase three times or more, over 12 words or more."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    for period in range(1, len(words) // 3 + 1):
        length = max(3 * period, MIN_LOOP_WORDS)
        if length > len(words):
            continue
        tail = words[-length:]
        if all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False


def leaks_thinking(text: str, *, enable_thinking: bool | None) -> bool:
    """Whether an answer shows <think> marks although thinking was not asked for."""
    return enable_thinking is not True and THINK.search(text) is not None


def faults(texts: Sequence[str], ended: Sequence[bool], *, enable_thinking: bool | None) -> dict[str, int]:
    """How many answers loop, lack the end of their turn, or leak thinking."""
    return {
        "loops": sum(map(loops, texts)),
        "no_end_of_turn": sum(not e for e in ended),
        "think_leaks": sum(leaks_thinking(t, enable_thinking=enable_thinking) for t in texts),
    }


def common_prefix(one: Sequence[int] | Sequence[str], two: Sequence[int] | Sequence[str]) -> int:
    """How many tokens (or words) two answers share from their start."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def bootstrap(
    sums: Mapping[str, Sequence[float]], tokens: Sequence[int], *, seed: int, against: str = "base"
) -> dict[str, dict[str, Any]]:
    """Loss per token and perplexity of each column with 95 % intervals, and its paired difference to `against`.

    `sums`: column -> summed loss of each row; `tokens`: supervised tokens of each row. Rows are drawn with
    replacement, the same for all columns, so that hard rows cancel in the difference (paired percentile bootstrap).
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    weights = np.asarray(tokens, dtype=np.float64)
    drawn = generator.integers(0, len(weights), size=(RESAMPLES, len(weights)))
    totals = weights[drawn].sum(axis=1)
    found: dict[str, dict[str, Any]] = {}
    samples = {name: np.asarray(values, dtype=np.float64)[drawn].sum(axis=1) / totals for name, values in sums.items()}
    for name, values in sums.items():
        loss = float(sum(values) / weights.sum())
        low, high = (float(x) for x in np.percentile(samples[name], [2.5, 97.5]))
        found[name] = {"loss": round(loss, 5), "loss_95": [round(low, 5), round(high, 5)]}
        found[name] |= {"perplexity": _exp(loss), "perplexity_95": [_exp(low), _exp(high)]}
        if name != against:
            mean = float((np.asarray(values) - np.asarray(sums[against])).sum() / weights.sum())
            low, high = (float(x) for x in np.percentile(samples[name] - samples[against], [2.5, 97.5]))
            found[name][f"minus_{against}"] = round(mean, 5)
            found[name][f"minus_{against}_95"] = [round(low, 5), round(high, 5)]
    return found


def _exp(loss: float) -> float:
    return round(math.exp(min(loss, 700.0)), 4)
