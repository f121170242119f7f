"""What becomes of every row once all spans are known: duplicates, split, leaks, and the words for what is refused."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data import splits
from data.parts import BadRow, Part
from data.schema import Problem
from jobs.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

PADDED_ROWS = 8
SOME_ROWS = 6


@dataclass
class Decision:
    """`keep` and `held_out`: one flag per tokenized row, in reading order. `bad`: refused rows, as far as listed;
    `kinds` counts all `bad_rows` of them by kind."""

    keep: "NDArray[np.bool_]"
    held_out: "NDArray[np.bool_]"
    components: splits.Components
    bad: list[BadRow]
    bad_rows: int
    kinds: Counter[str]


def decide(
    parts: Sequence[Part],
    load: Callable[[int], "pa.Table"],
    *,
    seed: int,
    eval_fraction: float,
    max_errors: int,
) -> Decision:
    """Find duplicate ids, split by component, and find questions that would be in both splits.

    Of two rows with one id, and of two near-duplicate questions in different splits, the later one is bad.
    `load(i)` gives the table of parts[i]; it is called only to name rows.
    """
    import numpy as np

    whole = {name: np.concatenate([part.arrays[name] for part in parts]) for name in ("ids", "questions", "key_counts")}
    keys = np.concatenate([part.arrays["keys"] for part in parts])
    keep = np.ones(len(whole["ids"]), dtype=np.bool_)
    bad = [row for part in parts for row in part.bad]
    kinds: Counter[str] = sum((part.kinds for part in parts), Counter())
    where = _Rows(parts, load)
    twice = splits.repeated(whole["ids"])
    for row, first in twice[:max_errors]:
        text = f"{where.text(row, 'id')!r} is also the id of {where.text(first, 'source')}"
        bad.append(where.bad(row, Problem("id", "duplicate_id", text)))
    keep[[row for row, _ in twice]] = False
    components = splits.components(keys, whole["key_counts"], seed=seed)
    held_out = splits.assign(components, keep, eval_fraction=eval_fraction)
    leaks = splits.leaking(whole["questions"], held_out, keep)
    for row, first in leaks[:max_errors]:
        text = (
            f"the question is that of {where.text(first, 'source')} but for case, punctuation or small words, and the "
            "two are in different splits: remove one, or give them a fact or group in common"
        )
        bad.append(where.bad(row, Problem("question", "near_duplicate", text)))
    keep[[row for row, _ in leaks]] = False
    if twice:
        kinds["duplicate_id"] += len(twice)
    if leaks:
        kinds["near_duplicate"] += len(leaks)
    bad_rows = sum(part.bad_rows for part in parts) + len(twice) + len(leaks)
    return Decision(keep, held_out, components, sorted(bad, key=lambda row: row.place), bad_rows, kinds)


def refuse_rows(decision: Decision, path: str, *, max_errors: int) -> UserError:
    """The message for a dataset with bad rows: each with file, line and field, then how many of which kind."""
    total = decision.bad_rows + int(decision.keep.sum())
    lines = [f"  {_shown(row.source)}: {problem}" for row in decision.bad[:max_errors] for problem in row.problems[:4]]
    if decision.bad_rows > max_errors:
        lines.append(f"  … and {decision.bad_rows - max_errors:,} more bad rows (data.max_errors={max_errors})")
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in decision.kinds.most_common())
    return UserError(
        f"{path}: {decision.bad_rows:,} of {total:,} rows are bad ({kinds})\n"
        + "\n".join(lines)
        + "\nPut them right, or drop them with --drop-invalid (data.drop_invalid=true)"
    )


def check_split(
    decision: Decision, parts: Sequence[Part], load: Callable[[int], "pa.Table"], path: str, *, by_question: bool
) -> None:
    """Refuse an empty split, or a component too large to be put on one side. Raises UserError naming it."""
    import numpy as np

    rows = int(decision.keep.sum())
    if not rows:
        raise UserError(f"{path}: no rows are left: nothing to train on")
    where = _Rows(parts, load)
    # Rows without facts or groups stay with those of the same question: in a handful of rows that means nothing.
    at_least = SOME_ROWS if by_question else 2
    for first, share in splits.too_large(decision.components, decision.keep, at_least=at_least):
        names = _names(decision, parts, first)
        what = (
            f"the rows of {', '.join(names)}" if names else f"the rows that belong with {where.text(first, 'source')}"
        )
        raise UserError(
            f"{path}: {what} stay together and are {share:.0%} of all rows; over {splits.LARGEST_COMPONENT:.0%} the "
            "evaluation split would be far off its size or cover one subject only. Add rows on other subjects, cut the "
            f"links between these, or split otherwise (data.split_by={'group' if by_question else 'hash'})"
        )
    for name, flags in (("train", ~decision.held_out), ("eval", decision.held_out)):
        if not np.any(flags & decision.keep):
            raise UserError(
                f"{path}: the {name} split would be empty: its {rows} row(s) all belong together. Rows on at least two "
                "subjects are needed"
            )


def lengths(parts: Sequence[Part], *, max_seq_len: int) -> dict[str, Any]:
    """Token lengths of all rows, over-long ones too: p50, p90, p99 and max of prompt, answer and both; and the share
    of tokens that padding would add to batches of PADDED_ROWS rows, which packing saves."""
    import numpy as np

    over = np.array([pair for part in parts for pair in part.long], dtype=np.int64).reshape(-1, 2)
    kept = np.concatenate([part.arrays["lengths"] for part in parts]).astype(np.int64)
    prompt = np.concatenate([*(part.arrays["prompt_lengths"] for part in parts), over[:, 0]]).astype(np.int64)
    whole = np.concatenate([kept, over[:, 1]])
    report: dict[str, Any] = {"rows": len(whole), "max_seq_len": max_seq_len, "rows_over": len(over)}
    for name, values in (("prompt", prompt), ("answer", whole - prompt), ("row", whole)):
        p50, p90, p99 = np.percentile(values, (50, 90, 99), method="higher").tolist() if len(values) else (0, 0, 0)
        report[name] = {"p50": p50, "p90": p90, "p99": p99, "max": int(values.max(initial=0))}
    filled = np.concatenate([kept, np.zeros(-len(kept) % PADDED_ROWS, dtype=np.int64)]).reshape(-1, PADDED_ROWS)
    padded = int((filled.max(axis=1, initial=0) * (filled > 0).sum(axis=1)).sum())
    report["tokens"] = int(kept.sum())
    report["padding_saved_by_packing"] = round(1 - int(kept.sum()) / padded, 4) if padded else 0.0
    return report


def lengths_text(report: dict[str, Any]) -> list[str]:
    """The length report as lines to print."""
    lines = [f"{'tokens':8}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}"]
    for name in ("prompt", "answer", "row"):
        lines.append(f"{name:8}" + "".join(f"{report[name][p]:>8,}" for p in ("p50", "p90", "p99", "max")))
    lines.append(
        f"{report['rows_over']:,} of {report['rows']:,} rows over data.max_seq_len {report['max_seq_len']:,}; packing "
        f"saves {report['padding_saved_by_packing']:.0%} of padded batches of {PADDED_ROWS} rows"
    )
    return lines


def _shown(source: str) -> str:
    """Parquet has rows, not lines."""
    name, _, number = source.rpartition(":")
    return f"{name}: row {number}" if name.endswith(".parquet") else source


class _Rows:
    """Names rows by their number over all parts; holds the last table that it looked into."""

    def __init__(self, parts: Sequence[Part], load: Callable[[int], "pa.Table"]) -> None:
        import numpy as np

        self.parts, self.load = parts, load
        self.ends = np.cumsum([part.rows for part in parts])
        self.held: tuple[int, Any] = (-1, None)

    def find(self, row: int) -> tuple[int, int]:
        import numpy as np

        part = int(np.searchsorted(self.ends, row, side="right"))
        return part, row - int(self.ends[part]) + self.parts[part].rows

    def text(self, row: int, column: str) -> str:
        part, place = self.find(row)
        if self.held[0] != part:
            self.held = part, self.load(part)
        return self.held[1].column(column)[place].as_py()

    def bad(self, row: int, problem: Problem) -> BadRow:
        part, place = self.find(row)
        return BadRow(
            (self.parts[part].index, int(self.parts[part].arrays["places"][place])), self.text(row, "source"), [problem]
        )


def _names(decision: Decision, parts: Sequence[Part], first: int) -> list[str]:
    """The commonest facts, groups or questions of the component that a row belongs to, as far as known."""
    import numpy as np

    counts = np.concatenate([part.arrays["key_counts"] for part in parts])
    keys = np.concatenate([part.arrays["keys"] for part in parts])
    inside = decision.keep & (decision.components.of_row == decision.components.of_row[first])
    found, n = np.unique(keys[np.repeat(inside, counts)], return_counts=True)
    names = {key: text for part in parts for key, text in part.names.items()}
    ordered = [int(found[i]) for i in np.argsort(-n, kind="stable")]
    known = [f"{kind} {text!r}" for key in ordered if key in names for kind, _, text in [names[key].partition(":")]]
    return known[:5] + ([f"{len(ordered) - 5} more"] if len(ordered) > 5 and known else [])
