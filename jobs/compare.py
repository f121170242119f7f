"""Prove that the merged model is the adapter, and show what the adapter changed: the same rows through all of them.

    python -m jobs.compare --config FILE [key=value ...]
    python -m jobs.compare --config FILE --endpoint URL      the served model against the compared one
    python -m jobs.compare --config FILE --review NAME       a person's blind choice between two answers

Base, base + adapter and merged model answer the same held-out prompts at the same precision (BF16), greedy. A merge
whose weights are not base + adapter rounded once, or whose logits are farther from the adapter's than that rounding
explains, fails the stage.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import adapter_fit, artifacts, cli, judging, merge
from jobs import config as config_module
from jobs.artifacts import Artifact
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import Progress, say

if TYPE_CHECKING:
    from jobs.columns import Answer, Column, Row

STAGE = "compare"
SPLIT = "eval"
# Adapter and merged model differ by one rounding of the weights and what follows from it in the activations. Measured
# on SmolLM2-135M, that is 1.1 times what one such rounding does to the merged model itself, in the mean and at most.
TOLERANCE = 2.0


def run(config: Config) -> Artifact:
    """Compare on the held-out rows of prepare. Raises UserError when the merge is off, or was made of other inputs."""
    from cluster import models
    from jobs import reload, review

    reload.share_cores()
    snapshot = artifacts.read(artifacts.location(config, "prepare"))
    merged = artifacts.read(artifacts.location(config, "merge"))
    source = merge.find_adapter(config)
    if merged.manifest["inputs"].get(source.origin) != source.sha256:
        raise UserError(f"{merged.path}: merged from another adapter than {source.path}: delete it and run jobs.merge")
    base = models.fetch(config)
    sections = {
        **artifacts.sections_of(config, "compare"),
        "model": {"enable_thinking": config.model.enable_thinking},
        "train": {"quantization": config.train.quantization},
    }
    inputs = {"prepare": snapshot.sha256, source.origin: source.sha256, "merge": merged.sha256}
    made = artifacts.existing(config, STAGE, sections, inputs)
    if made is not None:
        say(STAGE, f"up to date: {made.path}")
        return made
    with artifacts.create(config, STAGE, sections, inputs) as draft:
        rows = read_rows(snapshot.path)
        numbers, answers = measure(config, base=base.path, adapter=source.path, merged=merged.path / "model", rows=rows)
        draft.numbers |= {"snapshot_hash": snapshot.numbers.get("snapshot_hash"), **numbers}
        write_answers(draft.path, answers)
        review.write(draft.path, answers, draft.numbers, lines=review.summary(draft.numbers))
    made = artifacts.read(artifacts.location(config, STAGE))
    for line in review.summary(made.numbers):
        say(STAGE, line)
    return made


def read_rows(snapshot: Path) -> "list[Row]":
    """The held-out rows of a snapshot, in order."""
    from data import snapshot as snapshots
    from jobs.columns import Row

    table = snapshots.read(snapshot, SPLIT)
    names = ("id", "input_ids", "prompt_length", "messages", "answer")
    values: list[tuple[Any, ...]] = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
    if not values:
        raise UserError(f"{snapshot}: no held-out rows to compare on: raise data.eval_fraction")
    return [Row(i, ids, start, json.loads(messages), answer) for i, ids, start, messages, answer in values]


def spread(rows: "Sequence[Row]", count: int) -> "list[Row]":
    """`count` rows evenly spaced over all of them: neighbours are often about the same fact."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def measure(
    config: Config, *, base: Path, adapter: Path, merged: Path, rows: "Sequence[Row]"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(figures, answers side by side) of base, adapter and merged model, and of NF4 + adapter where it was trained so.

    Raises UserError when adapter and merged model differ by more than BF16 rounding explains.
    """
    from jobs import columns, proof

    fitted = adapter_fit.validate(adapter, base)
    asked, scored = spread(rows, config.compare.num_prompts), list(rows[: config.compare.loss_rows])
    device, vocabulary = columns.pick_device(base), _vocabulary(fitted, base)
    plain, tuned, _ = columns.load_pair(base, adapter, device=device, rows=vocabulary)
    result, tokenizer = columns.load_merged(merged, device=device)
    with Progress(STAGE, len(fitted.updates), unit=" modules checked") as progress:
        weights = proof.check_weights(tuned.model, fitted, base, merged, tick=lambda done, _: progress.update(done))
    logits = proof.check_logits(
        tuned, result, asked, modules=columns.adapted_modules(adapter), factor=TOLERANCE, seed=config.run.seed
    )
    trio = [plain, tuned, result]
    answers = {c.name: _answers(config, c, tokenizer, asked) for c in trio}
    sums, agreed, count = _losses(trio, scored)
    if config.compare.nf4 != "off" and config.train.quantization == "nf4":
        quantized = columns.load_nf4(base, adapter, device=device, rows=vocabulary)
        sums |= _losses([quantized], scored)[0]
        if config.compare.nf4 == "answers":
            answers["nf4"] = _answers(config, quantized, tokenizer, asked)
    tokens = [len(row.ids) - row.prompt_length for row in scored]
    texts = {name: [a.text for a in found] for name, found in answers.items()}
    thinking = config.model.enable_thinking
    pairs = list(zip(answers["adapter"], answers["merged"], strict=True))
    longest = sum(max(len(a.ids), len(b.ids)) for a, b in pairs)
    numbers = {
        "split": SPLIT,
        "prompts": len(asked),
        "max_new_tokens": config.compare.max_new_tokens,
        "identical_answers": sum(a.ids == b.ids for a, b in pairs),
        "answer_token_agreement": round(
            sum(judging.common_prefix(a.ids, b.ids) for a, b in pairs) / max(longest, 1), 4
        ),
        "loss_rows": len(scored),
        "loss_tokens": sum(tokens),
        "loss": judging.bootstrap(sums, tokens, seed=config.run.seed),
        "token_agreement": round(agreed / count, 5),
        **logits,
        "weights": weights,
        "faults": {
            name: judging.faults(texts[name], [a.ended for a in answers[name]], enable_thinking=thinking)
            for name in answers
        },
    }
    lines = [
        {
            "id": row.id,
            "split": SPLIT,
            "messages": row.messages,
            "reference": row.reference,
            "answers": {name: texts[name][i] for name in texts},
            "ended": {name: answers[name][i].ended for name in texts},
            "prompt_tokens": row.prompt_length,
        }
        for i, row in enumerate(asked)
    ]
    return numbers, lines


def write_answers(path: Path, answers: Sequence[Mapping[str, Any]]) -> None:
    """answers.jsonl, and the same on the terminal."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in answers)
    (path / "answers.jsonl").write_text(text, encoding="utf-8")
    for line in answers:
        question = next((m["content"] for m in reversed(line["messages"]) if m["role"] == "user"), "")
        print(f"\n  {line['id']}  {question}")
        for name, said in line["answers"].items():
            end = "" if line["ended"][name] else " …"
            print(f"    {name:<8} {' '.join(said.split())}{end}")
    print(flush=True)


def _answers(config: Config, column: "Column", tokenizer: Any, rows: "Sequence[Row]") -> "list[Answer]":
    from jobs import columns

    with Progress(STAGE, len(rows), unit=f" answers of {column.name}") as progress:
        return columns.answers(
            column, tokenizer, rows, max_new_tokens=config.compare.max_new_tokens, tick=progress.update
        )


def _losses(trio: "Sequence[Column]", rows: "Sequence[Row]") -> tuple[dict[str, list[float]], int, int]:
    """({column: summed loss of each row}, tokens where the last two columns' most likely token agrees, all tokens)."""
    from jobs import columns

    sums: dict[str, list[float]] = {column.name: [] for column in trio}
    agreed, count = 0, 0
    with Progress(STAGE, len(rows), unit=" rows scored") as progress:
        for done, row in enumerate(rows, 1):
            likely: list[Any] = []
            for column in trio:
                logits = columns.answer_logits(column, row)
                sums[column.name].append(float(columns.losses(logits, row).double().sum()))
                likely.append(logits.argmax(-1))
            agreed += int((likely[-1] == likely[-2]).sum()) if len(likely) > 1 else 0
            count += likely[-1].numel()
            progress.update(done)
    return sums, agreed, count


def _vocabulary(adapter: Any, base: Path) -> int | None:
    from jobs import safetensors_header

    return adapter_fit.resized(adapter, safetensors_header.read_model(base))


def _main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML config; without one the defaults hold")
    parser.add_argument("--endpoint", metavar="URL", help="ask the served model the compared prompts")
    parser.add_argument("--review", metavar="NAME", help="choose between two answers without knowing whose they are")
    parser.add_argument("--pair", metavar="ONE,TWO", default="base,merged", help="whose answers (default: base,merged)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override, for example run.name=mine")
    args = parser.parse_args(argv)

    def action() -> None:
        config = config_module.load(args.config, args.overrides)
        cli.offline(config)
        if args.endpoint:
            from jobs import served

            served.run(config, args.endpoint)
        elif args.review:
            from jobs import review

            review.run(config, args.review, pair=args.pair)
        else:
            run(config)

    cli.guard(action)


if __name__ == "__main__":
    _main()
