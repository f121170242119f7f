"""Spans through Ray Data: streaming, with memory bounded by the spans in flight and not by the dataset.

A task reads its own span, works on it in batches and writes the rows to a staging directory that all nodes share;
only some 70 bytes a row come back. So the object store stays almost empty and nothing is spilled.
"""

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from data import parts
from data.files import Span, filesystem
from data.formats import Rules
from data.parts import Part
from data.rendering import Assets, Renderer, renderer
from jobs.errors import UserError


def stream(
    spans: Sequence[Span], rules: Rules, assets: Assets, *, staging: str, max_seq_len: int, max_errors: int
) -> Iterator[Part]:
    """The parts of all spans, as they are finished. Needs a connected Ray.

    Rows are staged as `staging_file(staging, part.index)`. Raises UserError for a file that is broken as a whole.
    """
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # warns that its bars are off
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # tokenizer files are some 10 MB: put once, fetched once by each process
    held = ray.put(assets)
    limits = {"max_seq_len": max_seq_len, "max_errors": max_errors}

    def work(row: dict[str, Any]) -> dict[str, Any]:
        span: Span = pickle.loads(row["span"])
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a task: the cores are filled by tasks
        try:
            part = _staged(span, rules, renderer(ray.get(held)), staging, **limits)
        except UserError as error:
            part = Part(span.number, error=str(error))
        return {"part": pickle.dumps(part, protocol=5)}

    items = [{"span": pickle.dumps(span)} for span in spans]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map(work, num_cpus=_cpus_per_task())
    for row in dataset.iter_rows():
        part: Part = pickle.loads(row["part"])
        if part.error is not None:
            raise UserError(part.error)
        yield part


def staging_file(staging: str, index: int) -> str:
    """Where the rows of a span are staged."""
    return f"{staging}/{index:06}.parquet"


def _staged(span: Span, rules: Rules, renderer: Renderer, staging: str, *, max_seq_len: int, max_errors: int) -> Part:
    import pyarrow.parquet as pq

    from data.snapshot import schema

    store, path = filesystem(staging_file(staging, span.number))
    with (
        store.open_output_stream(path) as sink,
        pq.ParquetWriter(sink, schema(), compression="lz4", use_dictionary=False, write_statistics=False) as writer,
    ):
        return parts.prepare(
            span, rules, renderer, max_seq_len=max_seq_len, max_errors=max_errors, write=writer.write_table
        )


def _cpus_per_task() -> float:
    """One real core a task. A local head is started with more logical CPUs than cores, so each counts for less."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    logical = sum(node["Resources"].get("CPU", 0.0) for node in nodes)
    if len(nodes) != 1:
        return 1.0
    return float(max(1, int(logical) // (os.cpu_count() or 1)))  # over one CPU, Ray takes whole numbers only
