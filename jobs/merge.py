"""Merge a LoRA adapter into its unquantized base: a complete BF16 model directory, on the CPU.

    python -m jobs.merge --config FILE [key=value ...]                     the run's own adapter
    python -m jobs.merge --model DIR --adapter DIR --output DIR            any base and adapter

Every adapted tensor is float32(W + s·BA), rounded once to BF16; the others are copied. Tensors stream from file to
file, so memory does not grow with the model. What cannot be merged exactly is refused with the tensor's name.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import adapter_fit, adapters, artifacts, cli, safetensors_header
from jobs import config as config_module
from jobs.artifacts import Artifact
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import Progress, clock, say

STAGE = "merge"
LOCK = "base.lock.json"


@dataclass(frozen=True)
class Source:
    """The adapter to merge: its directory, where it came from, and the lock of its base, if there is one."""

    path: Path
    origin: str
    sha256: str
    lock: Mapping[str, Any] | None
    lineage: Mapping[str, Any]


def run(config: Config) -> Artifact:
    """Merge the run's adapter (merge.adapter, else the sweep's winner, else train's) into `merge/model`."""
    source = find_adapter(config)
    from cluster import models

    base = models.fetch(config)
    if source.lock is not None:
        check_lock(source.lock, base.lock["files"], where=base.path, adapter=source.path)
    sections = {**artifacts.sections_of(config, "merge"), "model": {"source": config.model.source}}
    inputs = {source.origin: source.sha256, "base": artifacts.sha256_json(base.lock["files"])}
    made = artifacts.existing(config, STAGE, sections, inputs)
    if made is not None:
        say(STAGE, f"up to date: {made.path / 'model'}")
        return made
    with artifacts.create(config, STAGE, sections, inputs) as draft:
        (draft.path / "model").mkdir()
        draft.numbers |= build(
            base.path,
            source,
            draft.path / "model",
            limit=int(config.merge.max_shard_size_gb * 1e9),
            base_lock=base.lock,
            enable_thinking=config.model.enable_thinking,
        )
    made = artifacts.read(artifacts.location(config, STAGE))
    say(
        STAGE, f"wrote {made.path / 'model'} in {clock(made.numbers['seconds'])}; it answers: {made.numbers['reply']!r}"
    )
    return made


def by_hand(model: Path, adapter: Path, output: Path, *, max_shard_size_gb: float = 4.0) -> Path:
    """Merge any adapter into any base directory; `output` becomes the model directory, with a manifest.json.

    Without a base.lock.json beside the adapter every shape must match, and the manifest says "base": "unverified".
    Raises UserError as `run` does; then nothing is left at `output`.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: is not empty; name a directory that does not exist yet")
    source = _directory(adapter)
    files = safetensors_header.read_model(model)
    hashes = {file.name: artifacts.sha256_file(file) for file in sorted({t.file for t in files.values()})}
    if source.lock is not None:
        check_lock(source.lock, hashes, where=model, adapter=adapter)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    except OSError as error:
        raise UserError(f"{output}: cannot write there: {error.strerror}") from None
    try:
        work.chmod(0o755)
        lock = {"source": str(model), "revision": None, "files": hashes}
        numbers = build(model, source, work, limit=int(max_shard_size_gb * 1e9), base_lock=lock, enable_thinking=None)
        manifest = {
            "stage": STAGE,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "inputs": {"adapter": source.sha256, "base": artifacts.sha256_json(hashes)},
            "versions": artifacts.versions(),
            "numbers": numbers,
            "files": {
                p.name: {"size": p.stat().st_size, "sha256": artifacts.sha256_file(p)} for p in sorted(work.iterdir())
            },
        }
        (work / artifacts.MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
        if output.is_dir():
            output.rmdir()
        os.rename(work, output)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(STAGE, f"wrote {output} in {clock(numbers['seconds'])}; it answers: {numbers['reply']!r}")
    return output


def find_adapter(config: Config) -> Source:
    """The adapter that this config merges: merge.adapter, else the sweep's winner, else the train run's."""
    if config.merge.adapter is not None:
        return _directory(Path(config_module.resolve_storage(os.path.expanduser(config.merge.adapter))))
    stage = "sweep" if config.sweep.ranks else "train"
    made = artifacts.read(artifacts.location(config, stage))
    inside = made.numbers["winner"]["adapter"] if stage == "sweep" else "adapter"
    path = made.path / inside
    lineage = {stage: str(made.path), **{f"{stage} input {k}": v for k, v in made.manifest["inputs"].items()}}
    return Source(path, stage, made.sha256, _lock_beside(path), lineage)


def check_lock(lock: Mapping[str, Any], files: Mapping[str, str], *, where: Path, adapter: Path) -> None:
    """Refuse a base whose weight files are not those that the adapter was trained on. `files`: name -> SHA-256."""
    wanted: Mapping[str, str] = lock["files"]
    trained_on = f"{lock.get('source')} (revision {lock.get('revision')})"
    for name in sorted(wanted.keys() | files.keys()):
        if wanted.get(name) != files.get(name):
            have = f"its SHA-256 is {files[name]}" if name in files else "is missing"
            want = wanted.get(name, "no such file")
            raise UserError(
                f"{where / name}: {have}, but {adapter} was trained on {trained_on}, where it is {want}: "
                "merge into that base (model.source, model.revision)"
            )


def build(
    base: Path, source: Source, out: Path, *, limit: int, base_lock: Mapping[str, Any], enable_thinking: bool | None
) -> dict[str, Any]:
    """Write the merged model into the empty directory `out`, load it back and let it answer; returns the figures.

    `limit`: bytes of the largest weight file. Raises UserError for anything that cannot be merged exactly.
    """
    started = time.monotonic()
    adapter = adapters.read(source.path)
    from jobs import modelfiles, reload

    reload.share_cores()
    from jobs import merging

    tensors = safetensors_header.read_model(base)
    merging.check_unquantized(base, tensors)
    adapter_fit.check_base(adapter, tensors, where=base, tied=adapters.is_tied(base))
    adapter_fit.check_values(adapter)
    plan = merging.plan(adapter, tensors)
    modelfiles.write(base, adapter, out, rows=plan.rows)
    for warning in adapter.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    with Progress(STAGE, round(plan.nbytes / 1e9, 2), unit=" GB") as progress:
        figures = merging.write(plan, out, limit=limit, wrote=lambda n: progress.update(round(n / 1e9, 2)))
    written = time.monotonic()
    prompt, reply = reload.answer(out, enable_thinking=enable_thinking)
    facts = {
        "base": {**{k: base_lock[k] for k in ("source", "revision")}, "files": dict(base_lock["files"])},
        "base_check": "verified against the adapter's lock" if source.lock is not None else "unverified",
        "adapter": {
            "path": str(source.path),
            "sha256": artifacts.sha256_file(adapter.file),
            **{key: adapter.config.get(key) for key in ("r", "lora_alpha", "use_rslora", "use_dora")},
            "max_rank": adapter.max_rank,
        },
        "lineage": dict(source.lineage),
    }
    modelfiles.write_card(out, facts, figures)
    return {
        **figures,
        **facts,
        "warnings": list(adapter.warnings),
        "prompt": prompt,
        "reply": reply,
        "write_seconds": round(written - started, 2),
        "seconds": round(time.monotonic() - started, 2),
    }


def _directory(path: Path) -> Source:
    file = path / adapters.WEIGHTS
    digest = artifacts.sha256_file(file) if file.is_file() else ""
    config = path / adapters.CONFIG
    both = artifacts.sha256_json([digest, artifacts.sha256_file(config) if config.is_file() else ""])
    return Source(path, "adapter", both, _lock_beside(path), {})


def _lock_beside(adapter: Path) -> Mapping[str, Any] | None:
    file = adapter.resolve().parent / LOCK
    if not file.is_file():
        return None
    lock = adapters.read_json(file, "delete it to merge without checking the base, or train again")
    if not isinstance(lock.get("files"), dict):
        raise UserError(f"{file}: has no 'files' (weight file -> SHA-256): train again")
    return lock


def _main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML config; without one the defaults hold")
    parser.add_argument("--model", metavar="DIR", type=Path, help="base model directory, unquantized")
    parser.add_argument("--adapter", metavar="DIR", type=Path, help="PEFT adapter directory")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="where the merged model goes; must not hold anything"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override, for example run.name=mine")
    args = parser.parse_args(argv)
    paths = (args.model, args.adapter, args.output)
    if any(paths) and (not all(paths) or args.config):
        parser.error("--model, --adapter and --output belong together, without --config")

    def action() -> None:
        config = config_module.load(args.config, args.overrides)
        if not any(paths):
            run(config)
            return
        cli.offline(config)
        by_hand(*(Path(p).expanduser() for p in paths), max_shard_size_gb=config.merge.max_shard_size_gb)

    cli.guard(action)


if __name__ == "__main__":
    _main()
