"""Check a dataset, split it by fact, tokenize it with the model's own chat template, and write a snapshot.

    python -m jobs.prepare --config FILE [--drop-invalid] [key=value ...]
    python -m jobs.prepare --check SNAPSHOT_DIRECTORY      hash a snapshot again and compare

Formats: ours, OpenAI chat, ShareGPT and Alpaca, as JSON lines, a JSON array or Parquet, plain, .gz or .zst, from a
directory, a file, a glob or a URI. Every bad row is reported with file, line and field, up to data.max_errors;
--drop-invalid (data.drop_invalid=true) drops and counts them instead. Nothing is truncated. Loss is on the last
answer and its end-of-turn token.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data import dataset, decision, files, formats, parts, rendering, snapshot
from jobs import artifacts, cli
from jobs.artifacts import Artifact, Draft
from jobs.config import Config, resolve_storage
from jobs.errors import UserError
from jobs.progress import Progress, say

if TYPE_CHECKING:
    import pyarrow as pa

    Load = Callable[[int], "pa.Table"]

SPAN_BYTES = 4 << 20
FILE_ROWS = 50_000
SMALL_BYTES = 16 << 20  # some 20,000 rows: tokenized here before Ray would have started
SHAPING = {"format", "split_by", "group_key", "eval_fraction", "max_seq_len", "drop_invalid", "role_prompt"}


def run(config: Config) -> Artifact:
    """Make the snapshot of `config.data`, or return the one that is there.

    Raises UserError listing the bad rows, or naming the file, key or component that stands in the way.
    """
    from cluster import models

    data = config.data
    if data.split_by == "group" and data.group_key is None:
        raise UserError("data.split_by=group needs data.group_key: the key of a row whose rows stay together")
    assets = rendering.load_assets(models.fetch(config).path, enable_thinking=config.model.enable_thinking)
    found = files.find(dataset_path(data.path))
    sources, spans = dataset.planned(found.rows, span_bytes=SPAN_BYTES)
    card_sources, card_spans = dataset.planned(found.facts, span_bytes=SPAN_BYTES)
    sections = {
        "data": data.model_dump(mode="json", include=SHAPING),
        "model": {"enable_thinking": config.model.enable_thinking},
        "run": {"seed": config.run.seed},
    }
    inputs = {
        "dataset": artifacts.sha256_json([[s.name, s.sha256] for s in (*sources, *card_sources)]),
        "tokenizer": assets.fingerprint,
    }
    if (artifact := artifacts.existing(config, "prepare", sections, inputs)) is not None:
        say("prepare", f"up to date: {artifact.path}")
        return artifact
    rules = dataset.rules_for(data, spans, card_spans)
    named = f"{data.path}: {len(sources)} file(s), {sum(s.size for s in sources) / 1e6:,.1f} MB"
    how = " (detected)" if data.format == "auto" else ""
    say("prepare", f"{named}, format {rules.format}{how}, split by {rules.together}")
    with processed(config, spans, rules, assets) as (done, load):
        decided = judged(config, rules, done, load)
        with artifacts.create(config, "prepare", sections, inputs) as draft:
            header = {**sections, "tokenizer": assets.fingerprint, "format": rules.format}
            header["data"] = {**sections["data"], "format": rules.format, "drop_invalid": None, "role_prompt": None}
            if rules.format == "rankline":
                header["data"]["role_prompt"] = rules.role_prompt
            write(draft, done, load, decided, header)
            draft.numbers |= {
                "path": data.path,
                "format": rules.format,
                "files": len(sources),
                "dropped": dict(decided.kinds),
                "lengths": decision.lengths(done, max_seq_len=data.max_seq_len),
                "notes": dict(sum((part.notes for part in done), Counter[str]())),
            }
    artifact = artifacts.read(artifacts.location(config, "prepare"))
    rows = ", ".join(f"{n:,} {split}" for split, n in artifact.numbers["rows"].items())
    say("prepare", f"{rows} rows, snapshot {artifact.numbers['snapshot_hash'][:16]}, in {artifact.path}")
    return artifact


def dataset_path(path: str) -> str:
    """Where the dataset lies: as given, in the working directory, or else where runs are kept."""
    if "://" in path or os.path.isabs(path):
        return path
    here = os.path.abspath(os.path.expanduser(path))
    return here if os.path.exists(here) or any(c in path for c in "*?[") else resolve_storage(path)


@contextlib.contextmanager
def processed(
    config: Config, spans: Sequence[files.Span], rules: formats.Rules, assets: rendering.Assets
) -> Generator[tuple[list[parts.Part], "Load"]]:
    """Every span tokenized: the parts in order, and a function that gives the rows of one.

    Small datasets are worked on in this process, large ones by Ray Data; the parts are the same.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    limits = {"max_seq_len": config.data.max_seq_len, "max_errors": config.data.max_errors}
    sizes = {span.number: _bytes(span) for span in spans}
    if sum(sizes.values()) <= SMALL_BYTES:
        renderer = rendering.renderer(assets)
        done: list[parts.Part] = []
        tables: list[pa.Table] = []
        with Progress("prepare", round(sum(sizes.values()) / 1e6, 1), unit=" MB") as progress:
            for span in spans:
                rows: list[pa.Table] = []
                done.append(parts.prepare(span, rules, renderer, **limits, write=rows.append))
                tables.append(pa.concat_tables(rows) if rows else snapshot.schema().empty_table())
                progress.update(round(sum(sizes[part.index] for part in done) / 1e6, 1))
        yield done, tables.__getitem__
        return
    from cluster import local
    from data import distributed

    local.connect(config)
    with _staging(config) as staging, Progress("prepare", round(sum(sizes.values()) / 1e6, 1), unit=" MB") as progress:
        started, arrived, size, count = time.monotonic(), list[parts.Part](), 0.0, 0
        for part in distributed.stream(spans, rules, assets, staging=staging, **limits):
            arrived.append(part)
            size, count = size + sizes[part.index] / 1e6, count + part.rows
            progress.update(round(size, 1), f"{count:,} rows, {count / (time.monotonic() - started):,.0f} rows/s")
        arrived.sort(key=lambda part: part.index)
        store, _ = files.filesystem(staging)

        def load(i: int) -> pa.Table:
            path = files.filesystem(distributed.staging_file(staging, arrived[i].index))[1]
            return pq.ParquetFile(path, filesystem=store).read()

        yield arrived, load


def judged(config: Config, rules: formats.Rules, done: Sequence[parts.Part], load: "Load") -> decision.Decision:
    """Decide on every row, print the length report and what was dropped. Raises UserError for what is refused."""
    data = config.data
    decided = decision.decide(
        done, load, seed=config.run.seed, eval_fraction=data.eval_fraction, max_errors=data.max_errors
    )
    for text, n in sum((part.notes for part in done), Counter[str]()).items():
        say("prepare", f"{text} ({n:,}×)")
    lengths = decision.lengths(done, max_seq_len=data.max_seq_len)
    for line in decision.lengths_text(lengths) if lengths["rows"] else ():
        say("prepare", line)
    if decided.bad_rows and not data.drop_invalid:
        raise decision.refuse_rows(decided, data.path, max_errors=data.max_errors)
    if decided.bad_rows:
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in decided.kinds.most_common())
        say("prepare", f"dropped {decided.bad_rows:,} bad rows: {kinds}")
    decision.check_split(decided, done, load, data.path, by_question=rules.together == "question")
    return decided


def write(
    draft: Draft, done: Sequence[parts.Part], load: "Load", decided: decision.Decision, header: dict[str, Any]
) -> None:
    """Write the kept rows to their splits, at least FILE_ROWS a file, and the snapshot's hash into the numbers."""
    import numpy as np
    import pyarrow as pa

    digests: dict[str, list[bytes]] = {split: [] for split in snapshot.SPLITS}
    waiting: dict[str, list[pa.Table]] = {split: [] for split in snapshot.SPLITS}
    rows, written = dict.fromkeys(snapshot.SPLITS, 0), dict.fromkeys(snapshot.SPLITS, 0)
    start, last = 0, len(done) - 1
    with Progress("prepare", len(done), unit=" parts written") as progress, ThreadPoolExecutor(2) as pool:
        writing: list[Future[None]] = []
        for i, part in enumerate(done):
            table = load(i)
            span = slice(start, start + part.rows)
            start += part.rows
            for split, flags in (("train", ~decided.held_out[span]), ("eval", decided.held_out[span])):
                chosen: Any = flags & decided.keep[span]
                if np.any(chosen):
                    waiting[split].append(table.filter(pa.array(chosen)))
                    digests[split].append(part.arrays["digests"][chosen].tobytes())
                    rows[split] += int(chosen.sum())
                if waiting[split] and (i == last or sum(t.num_rows for t in waiting[split]) >= FILE_ROWS):
                    together = pa.concat_tables(waiting[split])
                    writing.append(pool.submit(snapshot.write, draft.path, split, written[split], together))
                    waiting[split] = []
                    written[split] += 1
            while len(writing) > (2 if i < last else 0):  # two files at a time, so that memory stays bounded
                writing.pop(0).result()
            progress.update(i + 1)
    draft.numbers |= {"snapshot_hash": snapshot.combine(header, digests), "hash_header": header, "rows": rows}


@contextlib.contextmanager
def _staging(config: Config) -> Generator[str]:
    """A directory or URI beside the artifact, gone afterwards together with the parents that were made for it."""
    where = artifacts.location(config, "prepare")
    if "://" in where:
        store, path = files.filesystem(f"{where}.staging")
        store.create_dir(path)
        try:
            yield f"{where}.staging"
        finally:
            store.delete_dir(path)
        return
    parent = Path(where).parent
    parent.mkdir(parents=True, exist_ok=True)
    staging = tempfile.mkdtemp(prefix=".prepare.staging-", dir=parent)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # keeps a directory that holds anything
            parent.rmdir()


def _bytes(span: files.Span) -> int:
    if span.source.kind == "lines" and span.source.compression is None:
        return span.stop - span.start
    return span.source.size * (1 if span.source.kind == "array" and span.source.compression is None else 4)


def check(directory: str) -> None:
    """Verify a snapshot and say so. Raises UserError naming what differs."""
    path = Path(directory)
    if (path / "prepare").is_dir():
        path = path / "prepare"
    say("prepare", f"{path}: {snapshot.verify(path)} holds")


def main(argv: Sequence[str]) -> None:
    """The command line; never returns."""
    given = list(argv)
    if given and given[0] == "--check":
        if len(given) != 2:
            cli.guard(lambda: _usage("--check takes the directory of one snapshot"))
        cli.guard(lambda: check(given[1]))
    if "--drop-invalid" in given:
        given.remove("--drop-invalid")
        given.append("data.drop_invalid=true")
    cli.main("prepare", run, __doc__, given)


def _usage(text: str) -> None:
    raise UserError(text)


if __name__ == "__main__":
    main(sys.argv[1:])
