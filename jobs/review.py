"""What a person reads and fills in: answers side by side, a review sheet, and a blind choice between two answers."""

import csv
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import artifacts, report_html
from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import say
from jobs.report_blocks import Answers, Block, Heading, Table, Text

TO_FILL_IN = ("facts_right", "instruction_followed", "repetition", "cut_off", "reviewer")
NAMES = {
    "base": "base model",
    "adapter": "base + adapter",
    "merged": "merged model",
    "nf4": "NF4 base + adapter",
}
CHOICES = {"a": "left", "b": "right", "s": "same"}


def run(config: Config, reviewer: str, *, pair: str) -> dict[str, int]:
    """Blind review of the run's compare artifact in the terminal; choices go to <run>/reviews/<reviewer>.jsonl.

    The sheet to fill in is copied beside them, since the artifact itself must not change.
    """
    if not re.fullmatch(r"[\w.-]{1,60}", reviewer):
        raise UserError(f"--review {reviewer!r}: use 1 to 60 letters, digits, '.', '_' or '-'")
    one, _, two = pair.partition(",")
    made = artifacts.read(artifacts.location(config, "compare"))
    answers = [json.loads(line) for line in (made.path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    folder = Path(config_module.resolve_storage(config.run.root)) / config.run.name / "reviews"
    wins = blind(answers, folder / f"{reviewer}.jsonl", reviewer=reviewer, pair=(one.strip(), two.strip()))
    sheet = folder / f"{reviewer}.csv"
    if not sheet.exists():
        shutil.copyfile(made.path / "review.csv", sheet)
    counts = ", ".join(f"{name} {count}" for name, count in wins.items())
    say("compare", f"better: {counts} (held-out rows, split {made.numbers['split']}); {sheet} is for single answers")
    return wins


def write(
    path: Path, answers: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any], *, lines: Sequence[str]
) -> None:
    """compare.html (the answers side by side and the figures) and review.csv (one line per answer, to be filled in)."""
    page = report_html.html(
        blocks(answers, numbers, lines=lines),
        title="Base, adapter and merged model",
        subtitle=f"{numbers['prompts']} prompts of the held-out split ({numbers['split']}), greedy, BF16",
    )
    (path / "compare.html").write_text(page, encoding="utf-8")
    with open(path / "review.csv", "w", newline="", encoding="utf-8-sig") as handle:  # the mark makes Excel read UTF-8
        writer = csv.writer(handle)
        writer.writerow(["id", "split", "model", "question", "answer", *TO_FILL_IN])
        for row in answers:
            for name, text in row["answers"].items():
                cells = [row["id"], row["split"], name, question(row), text]
                writer.writerow([*map(_no_formula, cells), *[""] * len(TO_FILL_IN)])


def blocks(answers: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any], *, lines: Sequence[str]) -> list[Block]:
    """The page as blocks of jobs.report_blocks."""
    found: list[Block] = [Text(line) for line in lines[:3]]
    losses = [
        [_title(name), f"{f['loss']:.4f}", _interval(f["loss_95"]), f"{f['perplexity']:.3f}"]
        + [f"{f['minus_base']:+.4f} {_interval(f['minus_base_95'])}" if "minus_base" in f else ""]
        for name, f in numbers["loss"].items()
    ]
    title = f"Loss on {numbers['loss_rows']} held-out rows ({numbers['split']}), {numbers['loss_tokens']} answer tokens"
    found.append(Table(["Model", "Loss", "95 %", "Perplexity", "Against the base, paired"], losses, title))
    faults = [[_title(name), *map(str, counts.values())] for name, counts in numbers["faults"].items()]
    title = f"Of {numbers['prompts']} answers of at most {numbers['max_new_tokens']} tokens"
    found.append(Table(["Model", "Repeat in a loop", "Turn not ended", "<think> shown"], faults, title))
    found.append(Heading("The same prompts, side by side"))
    for row in answers:
        said = [(_title(name), text) for name, text in row["answers"].items()]
        found.append(Answers(question(row), [*said, ("reference", row["reference"])]))
    return found


def summary(numbers: Mapping[str, Any]) -> list[str]:
    """What was found, in a few lines for the terminal."""
    weights = numbers["weights"]
    lines = [
        f"merged is base + adapter: {weights['modules']} modules and {weights['tensors_equal']} other tensors checked, "
        f"{weights['other_elements']} of {weights['elements']} elements not the nearest BF16 number; rounding keeps "
        f"{weights['update_kept']:.1%} of the update",
        f"logits of adapter and merged differ by {numbers['mean_abs_logit_difference']:.4f} in the mean and "
        f"{numbers['max_abs_logit_difference']:.3f} at most; {numbers['tolerance_mean']:.4f} and "
        f"{numbers['tolerance_max']:.3f} are allowed ({numbers['tolerance_how']})",
        f"{numbers['identical_answers']} of {numbers['prompts']} answers identical; the most likely token agrees in "
        f"{numbers['token_agreement']:.2%} of {numbers['loss_tokens']} held-out answer tokens",
    ]
    for name, found in numbers["loss"].items():
        low, high = found["loss_95"]
        line = (
            f"held-out loss {name:<8} {found['loss']:.4f} [{low:.4f}, {high:.4f}], perplexity {found['perplexity']:.3f}"
        )
        if "minus_base" in found:
            low, high = found["minus_base_95"]
            line += f"; {found['minus_base']:+.4f} [{low:+.4f}, {high:+.4f}] against the base, paired"
        lines.append(line)
    for name, found in numbers["faults"].items():
        seen = [f"{count} {kind.replace('_', ' ')}" for kind, count in found.items() if count]
        if seen:
            lines.append(f"answers of {name}: {', '.join(seen)} (of {numbers['prompts']})")
    return lines


def question(row: Mapping[str, Any]) -> str:
    """The last words of the user in a row of answers.jsonl."""
    return next((str(m["content"]) for m in reversed(row["messages"]) if m["role"] == "user"), str(row["id"]))


def blind(
    answers: Sequence[Mapping[str, Any]],
    file: Path,
    *,
    reviewer: str,
    pair: tuple[str, str],
    ask: Callable[[str], str] = input,
    show: Callable[[str], None] = print,
) -> dict[str, int]:
    """Show two answers of each row in an order the reviewer cannot know, and append each choice to `file`.

    Rows judged before are left out, so a stopped review goes on. Returns wins {name: count, "same": count}. The
    order comes from reviewer and row, so going on shows the same. Raises UserError when a column is missing.
    """
    if len(set(pair)) != 2:
        raise UserError(f"a pair to choose from is two columns, like base,merged; found {','.join(pair)}")
    missing = [name for name in pair if any(name not in row["answers"] for row in answers)]
    if missing:
        raise UserError(f"no answers of {missing[0]!r} to review; there are {', '.join(answers[0]['answers'])}")
    pair = (min(pair), max(pair))
    done = {(line["id"], tuple(line["pair"])): line["better"] for line in _lines(file)}
    todo = [row for row in answers if (row["id"], pair) not in done]
    file.parent.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(todo, 1):
        left, right = random.Random(f"{reviewer} {row['id']}").sample(pair, 2)
        show(f"\n({number} of {len(todo)}) {question(row)}\n")
        show(f"  a: {' '.join(row['answers'][left].split())}\n\n  b: {' '.join(row['answers'][right].split())}\n")
        choice = ""
        while choice not in (*CHOICES, "q"):
            choice = ask("Which is better? a, b, s (same), q (stop): ").strip().lower()
        if choice == "q":
            break
        better = {"left": left, "right": right, "same": "same"}[CHOICES[choice]]
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {
            "id": row["id"],
            "split": row["split"],
            "pair": pair,
            "better": better,
            "reviewer": reviewer,
            "at": when,
        }
        with open(file, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line, ensure_ascii=False) + "\n")
        done[(row["id"], pair)] = better
    mine = [better for (_, judged), better in done.items() if judged == pair]
    return {name: mine.count(name) for name in (*pair, "same")}


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _title(column: str) -> str:
    return str(NAMES.get(column, column))


def _interval(pair: Sequence[float]) -> str:
    return f"[{pair[0]:.4f}, {pair[1]:.4f}]"


def _no_formula(text: Any) -> str:
    """A cell that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{text}" if str(text).startswith(("=", "+", "-", "@", "\t", "\r")) else str(text)
