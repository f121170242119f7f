"""What the report says: the facts of a run as headings, sentences, tables and figures, answer first.

Pure: from the gathered facts to blocks. `report_html` and `report` print the same blocks, so the two formats cannot
disagree.
"""

import math
from collections.abc import Mapping
from typing import Any

from jobs import plots
from jobs.loadgen import tables
from jobs.loadgen.tables import number
from jobs.plots import Axis, Series
from jobs.report_blocks import Answers, Block, Figure, Heading, Table, Text, Tiles
from jobs.report_load import load_blocks, short_table

Facts = Mapping[str, Any]


def page(facts: Facts) -> list[Block]:
    """The whole report, in reading order."""
    return [
        *_answer(facts),
        *load_blocks(facts),
        *_training(facts),
        *_sweep(facts),
        *_answers(facts),
        *_lineage(facts),
    ]


def verdict(facts: Facts) -> str:
    """Is the tuned model better on held-out rows? One sentence: by the paired interval where stages measured one."""
    losses = (facts["compared"] or {}).get("loss") or {}
    merged, base = losses.get("merged"), losses.get("base")
    if merged and base and merged.get("minus_base_95"):
        low, high = merged["minus_base_95"]
        word = "better than" if high < 0 else ("worse than" if low > 0 else "not proven better or worse than")
        return (
            f"The tuned model is {word} its base on {facts['compared']['loss_rows']} held-out rows: loss "
            f"{merged['loss']:.3f} against {base['loss']:.3f}, {merged['minus_base']:+.3f} "
            f"[{low:+.3f}, {high:+.3f}] (paired, 95 %)."
        )
    tuned = facts["tuned"]
    if tuned is None or tuned.get("eval_loss") is None or tuned.get("eval_loss_base") is None:
        return "This run measured no held-out loss, so it does not say whether the tuned model is better than its base."
    before, loss = tuned["eval_loss_base"], tuned["eval_loss"]
    word = "better than" if loss < before else ("worse than" if loss > before else "no different from")
    return (
        f"The tuned model is {word} its base on held-out rows: loss {loss:.3f} against {before:.3f} "
        f"(perplexity {math.exp(loss):.2f} against {math.exp(before):.2f})."
    )


def _answer(facts: Facts) -> list[Block]:
    blocks: list[Block] = [Text(verdict(facts), "answer")]
    rows = facts["load"]
    tiles: list[tuple[str, str, str]] = []
    before, after = _losses(facts)
    if before and after is not None:
        change = (after / before - 1) * 100
        tiles.append(("Held-out loss", f"{after:.3f}", f"{change:+.0f} % against the base model's {before:.3f}"))
    check = facts["merge_check"]
    if check:
        tiles.append(("Adapter against merged", check["value"], check["note"]))
    if rows:
        best = max(rows, key=lambda r: r["output_throughput"] or 0)
        calm = min(rows, key=lambda r: r["median_ttft_ms"] or math.inf)
        where = f"{tables.variant_name(best['variant'])}, load {tables.load_name(best)}"
        tiles.append(("Output tokens/s", number(best["output_throughput"]), f"at most; {where}"))
        where = f"{tables.variant_name(calm['variant'])}, load {tables.load_name(calm)}"
        tiles.append(("First token", f"{number(calm['median_ttft_ms'], 0)} ms", f"median at best; {where}"))
        held = [r for r in rows if r.get("slo_broken") == []]
        if any(r.get("slo_broken") is not None for r in rows):
            most = max(held, key=lambda r: r.get("rate") or r["concurrency"], default=None)
            unit = "requests/s" if rows[0].get("rate") else "users at a time"
            value = "none" if most is None else tables.load_name(most).removesuffix("/s")
            tiles.append(("Load within the targets", value, f"{unit}; {facts['load_config'].get('slo')}"))
        failed, total = sum(r["failed"] for r in rows), sum(r["failed"] + r["completed"] for r in rows)
        tiles.append(("Failed requests", f"{failed:,}", f"of {total:,}"))
    if tiles:
        blocks.append(Tiles(tiles))
    if rows:
        sentence = tables.trade_sentence(rows)
        if sentence:
            blocks.append(Text(sentence))
        blocks += [short_table(rows)]
    else:
        blocks.append(Text("The load test has not run, so nothing is known about speed.", "warning"))
    return blocks


def _losses(facts: Facts) -> tuple[float | None, float | None]:
    """Held-out loss of the base and of the tuned model: the comparison's, else the training run's."""
    losses = (facts["compared"] or {}).get("loss") or {}
    if "base" in losses and "merged" in losses:
        return losses["base"]["loss"], losses["merged"]["loss"]
    tuned = facts["tuned"] or {}
    return tuned.get("eval_loss_base"), tuned.get("eval_loss")


def _training(facts: Facts) -> list[Block]:
    tuned = facts["tuned"]
    if tuned is None:
        return []
    blocks: list[Block] = [Heading("Training")]
    steps = [m for m in tuned["metrics"] if m.get("loss") is not None]
    evals = [m for m in tuned["metrics"] if m.get("eval_loss") is not None]
    lines = [Series("training rows", [m["step"] for m in steps], [m["loss"] for m in steps], marks=False, thin=True)]
    lines.append(Series("held-out rows", [m["step"] for m in evals], [m["eval_loss"] for m in evals]))
    base = tuned.get("eval_loss_base")
    reference = None if base is None else ("base, held out", float(base))
    svg = plots.line_chart(
        lines,
        x=Axis("step"),
        y=Axis("loss, nats a token", zero=False),
        reference=reference,
        title="Loss by training step",
    )
    if svg:
        blocks.append(Figure("loss", svg, f"Loss of {tuned['name']}"))
    wanted = (
        ("Rank / alpha", " / ".join(str(tuned[k]) for k in ("r", "lora_alpha") if tuned.get(k) is not None)),
        ("Trainable parameters", number(tuned.get("trainable_parameters"), 0)),
        ("Steps", number(tuned.get("steps"), 0)),
        ("Tokens seen", number(tuned.get("tokens"), 0)),
        ("Tokens/s", number(tuned.get("tokens_per_s"), 0)),
        ("Peak memory, GiB", number(tuned.get("peak_memory_gib"), 2)),
        ("Seconds", number(tuned.get("seconds"), 0)),
    )
    blocks.append(Table(["What", "Value"], [[a, b] for a, b in wanted if b not in ("n/a", "")], "The training run"))
    return blocks


def _sweep(facts: Facts) -> list[Block]:
    sweep = facts["sweep"]
    if sweep is None:
        return []
    trials: list[Mapping[str, Any]] = sweep["trials"]
    winner = sweep["winner"]
    done = sorted((t for t in trials if t.get("eval_loss") is not None), key=lambda t: (t["rank"], t.get("seed") or 0))
    blocks: list[Block] = [Heading("Sweep over ranks")]
    base = next((t["eval_loss_base"] for t in done if t.get("eval_loss_base") is not None), None)
    svg = plots.line_chart(
        [Series("tuned", [t["rank"] for t in done], [t["eval_loss"] for t in done])],
        x=Axis("LoRA rank", log=True, ticks=sorted({float(t["rank"]) for t in done})),
        y=Axis("held-out loss", zero=False),
        reference=None if base is None else ("base", float(base)),
        title="Held-out loss by rank",
    )
    if svg:
        blocks.append(Figure("sweep", svg, "Held-out loss by LoRA rank"))
    head = ["Trial", "Rank", "Alpha", "rsLoRA", "Seed", "Parameters", "Held-out loss", "Seconds", "Tokens/s"]
    body = [
        [
            f"{t['name']}{' (chosen)' if t['name'] == winner['name'] else ''}",
            str(t["rank"]),
            str(t.get("alpha", "n/a")),
            "yes" if t.get("use_rslora") else "no",
            str(t.get("seed", "n/a")),
            number(t.get("parameters"), 0),
            "n/a" if t.get("eval_loss") is None else f"{t['eval_loss']:.4f}",
            number(t.get("seconds"), 0),
            number(t.get("tokens_per_s"), 0),
        ]
        for t in trials
    ]
    blocks.append(Table(head, body, "Trials"))
    if winner.get("why"):
        blocks.append(Text(f"Chosen: {winner['name']}. {winner['why']}"))
    return blocks


def _answers(facts: Facts) -> list[Block]:
    compared = facts["answers"]
    if not compared:
        return []
    blocks: list[Block] = [Heading("Base, adapter and merged model"), *_comparison(facts["compared"] or {})]
    for row in compared:
        asked = [m for m in row["messages"] if m.get("role") == "user"]
        found = [(str(name), str(text)) for name, text in row["answers"].items()]
        if row.get("reference"):
            found.append(("reference", str(row["reference"])))
        prompt = str(asked[-1]["content"]) if asked else str(row.get("id", ""))
        blocks.append(Answers(prompt, found))
    return blocks


def _comparison(numbers: Mapping[str, Any]) -> list[Block]:
    rows: list[list[str]] = []
    for name, found in (numbers.get("loss") or {}).items():
        low, high = found["loss_95"]
        against = ""
        if found.get("minus_base_95"):
            a, b = found["minus_base_95"]
            against = f"{found['minus_base']:+.4f} ({a:+.4f} to {b:+.4f})"
        rows.append([name, f"{found['loss']:.4f} ({low:.4f}-{high:.4f})", f"{found['perplexity']:.3f}", against])
    head = ["Model", "Held-out loss (95 %)", "Perplexity", "Against the base, paired (95 %)"]
    blocks: list[Block] = [Table(head, rows, "Held-out answers, all three at one precision")] if rows else []
    if numbers.get("max_abs_logit_difference") is not None:
        blocks.append(
            Text(
                f"Logits of the mounted adapter and of the merged model differ by at most "
                f"{numbers['max_abs_logit_difference']:.3g}; {numbers.get('tolerance_max', math.nan):.3g} is allowed."
            )
        )
    return blocks


def _lineage(facts: Facts) -> list[Block]:
    blocks: list[Block] = [Heading("Where the numbers come from")]
    blocks.append(Table(["What", "Which", "Identified by"], facts["lineage"], "What this model is made of"))
    head = ["Stage", "Made (UTC)", "Seconds", "Manifest SHA-256", "From"]
    blocks.append(Table(head, facts["stages"], "Artifacts behind this report"))
    blocks.append(Table(["Number", "Value", "Artifact", "Decided by"], facts["numbers"], "Each number and its source"))
    blocks.append(Text(facts["config_text"], "code"))
    return blocks
