"""GPU memory and capacity before anything runs: does it fit, what would make it fit, how many replicas are needed.

    python -m jobs.plan --config FILE                       on this machine's GPU, or on common ones
    python -m jobs.plan --config FILE --gpu rtx4090         or --gpu 24GB, with overrides: lora.r=64 …
    python -m jobs.plan --config FILE --users 200 --think-time 20s --slo 'ttft_p99<1s' --loadtest runs/NAME
    python -m jobs.plan --config FILE --loadtest runs/ONE --measured runs/TWO
                                                            prediction held against a run of more replicas

Answers in seconds: nothing is loaded, and no GPU is needed.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import artifacts, capacity_page, cli, estimate, gpus, model_shape, plan_page
from jobs import config as config_module
from jobs.config import Config
from jobs.gpus import Gpu
from jobs.memory import GIB
from jobs.text_page import Page, emit


def predicted(config: Config, gpu: Gpu | None = None) -> dict[str, Any]:
    """What this config will need, to be stored beside what is measured; plain values.

    {"device", "model", "train": {"peak_gib", "needed_gib", "batch_tokens", "items"},
    "serve": {"kv_cache_gib", "kv_cache_tokens", "max_concurrency", "items"}}. `gpu` is the detected one when not
    given; without any, the figures are for this machine's CPU. Where the prepare stage is done, its rows say how large
    the largest batch really is.
    """
    shape, gpu = model_shape.find(config), gpu or gpus.detected()
    train = estimate.training(config, shape, cpu=gpu is None)
    serve = estimate.serving(config, shape, gpu)
    return {
        "device": gpu.name if gpu else "cpu",
        "model": config.model.source,
        "train": {
            "peak_gib": round(train.allocated / GIB, 3),
            "needed_gib": round(train.needed / GIB, 3),
            "batch_tokens": train.tokens,
            "items": [asdict(item) for item in train.items],
        },
        "serve": {
            "kv_cache_gib": round(serve.kv_bytes / GIB, 3),
            "kv_cache_tokens": serve.kv_tokens,
            "max_concurrency": round(serve.max_concurrency, 2),
            "items": [asdict(item) for item in serve.items],
        },
    }


def beside(plan: Mapping[str, Any], *, train: Mapping[str, Any] | None, serve: Mapping[str, Any] | None) -> list[Any]:
    """Predicted beside measured: [{"what", "predicted", "actual", "error"}], error as a share of the actual value.

    `train`: numbers of the train stage (peak_memory_gib). `serve`: {"kv_cache_tokens", "max_concurrency"} as vLLM
    logged them. What was not measured is left out.
    """
    pairs = [
        ("training peak, GiB", plan["train"]["peak_gib"], (train or {}).get("peak_memory_gib")),
        ("KV cache, tokens", plan["serve"]["kv_cache_tokens"], (serve or {}).get("kv_cache_tokens")),
        ("maximum concurrency", plan["serve"]["max_concurrency"], (serve or {}).get("max_concurrency")),
    ]
    return [
        {"what": what, "predicted": guess, "actual": actual, "error": round(guess / actual - 1, 4)}
        for what, guess, actual in pairs
        if actual
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jobs.plan`; never returns."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML config; without one the defaults hold")
    parser.add_argument("--gpu", metavar="NAME|SIZE", help="rtx4090, h100, 24GB, …; without it the one in this machine")
    parser.add_argument("--users", type=int, metavar="N", help="people who use the service at once")
    parser.add_argument("--think-time", default="20s", metavar="TIME", help="from an answer to the next question")
    parser.add_argument("--slo", default="ttft_p99<1s", metavar="WHAT<TIME", help="objectives, comma-separated")
    parser.add_argument("--loadtest", metavar="RUN_DIR", help="run or loadtest directory; none is this config's")
    parser.add_argument("--measured", metavar="RUN_DIR", help="load test of more replicas, to check the prediction")
    parser.add_argument("--json", action="store_true", help="print plain values as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override, for example lora.r=64")
    args = parser.parse_args(argv)
    cli.guard(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    config = config_module.load(args.config, args.overrides)
    page = Page()
    if args.users is not None or args.loadtest is not None or args.measured is not None:
        own = artifacts.location(config, "loadtest")
        where = Path(args.loadtest or (artifacts.read(own).path if "://" in own else own))
        facts = capacity_page.answer(
            page,
            where,
            users=args.users,
            think=args.think_time,
            slo=args.slo,
            measured=Path(args.measured) if args.measured else None,
        )
    else:
        shape = model_shape.find(config)
        gpu = gpus.find(args.gpu) if args.gpu else gpus.detected()
        facts = predicted(config, gpu)
        plan_page.show(page, config, shape, gpu)
    emit(json.dumps(facts, indent=1, ensure_ascii=False) if args.json else page.text())


if __name__ == "__main__":
    main()
