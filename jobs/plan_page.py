"""A memory plan as a page for a terminal."""

import os
from collections.abc import Sequence

from jobs import estimate, gpus, memory, plan_fixes
from jobs.architecture import kv_arithmetic
from jobs.config import Config
from jobs.errors import UserError
from jobs.gpus import Gpu
from jobs.memory import GIB, Item, Serving, Training
from jobs.model_shape import Shape
from jobs.text_page import Page, size


def show(page: Page, config: Config, shape: Shape, gpu: Gpu | None) -> None:
    """Training and serving on `gpu` with what would make each fit; without one, this CPU and common cards."""
    count = f"{shape.parameters / 1e9:.2f} billion parameters"
    page.line(f"Plan of run {config.run.name!r}: {config.model.source}, {count} (from {shape.source})")
    if gpu is None:
        page.line("No GPU here, none named: this machine's CPU, then common GPUs (for one: --gpu NAME or --gpu 24GB)")
    else:
        page.line(f"GPU: {gpu.name}, {gpu.total / GIB:.2f} GiB seen by a process")
    try:
        train: Training | None = estimate.training(config, shape, cpu=gpu is None)
    except UserError as error:
        page.section("TRAINING")
        page.wrapped(f"cannot be planned: {error}")
        train = None
    if train is not None:
        _show_training(page, config, shape, gpu, train)
    _show_serving(page, config, shape, gpu, estimate.serving(config, shape, gpu))
    if gpu is None:
        _show_common(page, config, shape)


def _show_training(page: Page, config: Config, shape: Shape, gpu: Gpu | None, train: Training) -> None:
    total = gpu.total if gpu else float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    fits = train.needed <= total
    room = f"{train.needed / GIB:.1f} of {total / GIB:.1f} GiB{'' if gpu else ' of RAM'}"
    page.section(f"TRAINING, one worker: {'fits' if fits else 'DOES NOT FIT'}, {room}")
    rows = _rows(train.items)
    peak = "torch.cuda.max_memory_allocated" if gpu else "resident memory of the worker"
    rows.append(["peak", size(train.allocated), f"{peak}, at {train.tokens:,} tokens in a batch"])
    page.table(rows, right=(1,))
    if config.sweep.ranks and config.sweep.gpus_per_trial < 1:
        share = config.sweep.gpus_per_trial
        page.line(f"  sweep.gpus_per_trial {share:g}: {int(1 / share)} trials on a card, each takes this much")
    _unmodelled(page, train.unmodelled)
    if gpu is not None and not fits:
        _show_fixes(page, config, shape, gpu, "train")


def _show_serving(page: Page, config: Config, shape: Shape, gpu: Gpu | None, serving: Serving) -> None:
    serve, load = config.serve, config.load
    fits = serving.max_concurrency >= 1
    verdict = "fits" if fits else "DOES NOT FIT: vLLM refuses to start with room for less than one request"
    split = serve.tensor_parallel_size
    where = f"one of {split} GPUs of a replica" if split > 1 else "one replica"
    page.section(f"SERVING, {where}: {verdict}")
    rows = _rows(serving.items)
    if gpu is not None:
        rows.append(["left for KV cache", size(serving.kv_bytes), "what the lines above leave"])
    page.table(rows, right=(1,))
    page.field("each token", kv_arithmetic(shape.arch, config.model.dtype))
    page.field("KV cache", f"{serving.kv_tokens:,} tokens")
    page.field("full length", f"{serving.max_concurrency:.2f} requests of {serve.max_model_len:,} tokens at once")
    length = load.input_len + load.output_len
    many = memory.requests_that_fit(serving, length)
    page.field("this load", f"{many:,} requests of {load.input_len:,} + {load.output_len:,} tokens fit at once")
    if many >= serve.max_num_seqs:
        page.field("", f"serve.max_num_seqs lets {serve.max_num_seqs} run: the cache is not the limit")
    else:
        page.field("", f"serve.max_num_seqs is {serve.max_num_seqs}: beyond {many} one waits or is computed again")
    _unmodelled(page, serving.unmodelled)
    if gpu is not None and not fits:
        _show_fixes(page, config, shape, gpu, "serve")


def _show_fixes(page: Page, config: Config, shape: Shape, gpu: Gpu, stage: str) -> None:
    found = plan_fixes.fixes(config, shape, gpu, stage=stage)
    if not found:
        larger = [n for n in gpus.COMMON if _fits_on(config, shape, gpus.find(n), stage)]
        cards = ", ".join(larger) or "none of the common cards"
        page.line(f"  no change of the config makes it fit here; it fits on {cards}")
        return
    page.line("  To make it fit, cheapest first, each enough alone:" if len(found) > 1 else "  To make it fit:")
    for overrides, cost, needs in found:
        page.line(f"    {' '.join(overrides)}")
        page.line(f"        {needs}; {cost}")


def _show_common(page: Page, config: Config, shape: Shape) -> None:
    rows: list[list[str]] = []
    for name in gpus.COMMON:
        gpu = gpus.find(name)
        serving = estimate.serving(config, shape, gpu)
        try:
            train = estimate.training(config, shape, cpu=False)
            trains = f"{'' if train.needed <= gpu.total else 'no, '}{train.needed / GIB:.1f} GiB"
        except UserError:
            trains = "unknown"
        row = [name, f"{gpu.total / GIB:.1f} GiB", trains]
        many = memory.requests_that_fit(serving, config.load.input_len + config.load.output_len)
        fits = serving.max_concurrency >= 1
        rows.append([*row, f"{serving.kv_tokens:,}" if fits else "no", f"{serving.max_concurrency:.1f}", f"{many:,}"])
    load = f"{config.load.input_len} + {config.load.output_len}"
    page.section("COMMON GPUS")
    head = ["", "memory", "training", "KV tokens", f"of {config.serve.max_model_len:,}", f"of {load} tokens"]
    page.table(rows, head=head, right=(1, 2, 3, 4, 5))


def _fits_on(config: Config, shape: Shape, gpu: Gpu, stage: str) -> bool:
    if stage == "train":
        return estimate.training(config, shape, cpu=False).needed <= gpu.total
    return estimate.serving(config, shape, gpu).max_concurrency >= 1


def _rows(items: Sequence[Item]) -> list[list[str]]:
    return [[item.name, size(item.bytes), item.note] for item in items]


def _unmodelled(page: Page, names: Sequence[str]) -> None:
    if names:
        page.line(f"  not in this estimate: {', '.join(names)}")
