"""Predicted beside measured memory on a GPU: training's peak under our own loop, serving's KV cache under vLLM.

    python tests/bench/plan_accuracy.py [--out FILE] [--only train|serve] [--limit-s 540]     measures what FILE lacks
    python tests/bench/plan_accuracy.py --table [--out FILE]                                  prints FILE, needs no GPU

Weights are random (memory does not mind). Training runs three steps of jobs/qlora.py on synthetic rows and reads
torch.cuda.max_memory_allocated; serving starts vLLM's engine with dummy weights and stops it at the log line that says
"GPU KV cache size". Every setting runs in a forked process of its own; results are appended as they come, one JSON a
line, so that several visits to a GPU add up. Predictions are made from the file when the table is printed.
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from jobs import architecture, config, memory  # noqa: E402
from jobs.memory import GIB  # noqa: E402

QWEN3_4B = json.loads((ROOT / "tests" / "qwen3" / "config.json").read_text())
SIZES = {
    "4B": QWEN3_4B,
    "0.6B": QWEN3_4B
    | {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "8B": QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
# model, config overrides, rows of a step, tokens of a row
TRAIN: list[tuple[str, list[str], int, int]] = [
    ("4B", ["lora.r=16", "train.micro_batch_tokens=8192"], 8, 1024),
    ("4B", ["lora.r=16", "train.micro_batch_tokens=8192", "train.gradient_checkpointing=true"], 8, 1024),
    ("4B", ["lora.r=16", "train.micro_batch_tokens=16384"], 16, 1024),
    ("4B", ["lora.r=16", "train.micro_batch_tokens=8192", "train.quantization=none"], 8, 1024),
    ("4B", ["lora.r=64", "train.micro_batch_tokens=4096"], 4, 1024),
    ("4B", ["lora.r=8", "train.micro_batch_tokens=2048", "train.gradient_checkpointing=true"], 8, 256),
    ("4B", ["lora.r=16", "train.micro_batch_tokens=32768", "train.gradient_checkpointing=true"], 32, 1024),
    ("4B", ["lora.r=16", "train.micro_batch_tokens=4096"], 16, 512),
    ("4B", ["lora.r=128", "train.micro_batch_tokens=4096", "train.quantization=none"], 1, 4096),
    ("0.6B", ["lora.r=16", "train.micro_batch_tokens=8192"], 8, 1024),
    ("4B", ["lora.r=16", "lora.lora_dropout=0.05", "train.micro_batch_tokens=8192"], 8, 1024),
]
SERVE: list[tuple[str, list[str]]] = [
    ("4B", ["serve.max_model_len=4096", "serve.max_num_seqs=256", "serve.gpu_memory_utilization=0.85"]),
    # The share of an H200 that is 0.85 of a 24 GB card, with such a card's default batch.
    (
        "4B",
        [
            "serve.max_model_len=4096",
            "serve.max_num_seqs=4",
            "serve.max_num_batched_tokens=2048",
            "serve.gpu_memory_utilization=0.1359",
        ],
    ),
    (
        "4B",
        [
            "serve.max_model_len=2048",
            "serve.max_num_seqs=16",
            "serve.gpu_memory_utilization=0.2",
            "serve.enforce_eager=true",
        ],
    ),
    ("4B", ["serve.max_model_len=32768", "serve.max_num_seqs=64", "serve.gpu_memory_utilization=0.3"]),
    (
        "4B",
        [
            "serve.max_model_len=8192",
            "serve.max_num_seqs=1024",
            "serve.max_num_batched_tokens=16384",
            "serve.gpu_memory_utilization=0.5",
        ],
    ),
    ("0.6B", ["serve.max_model_len=4096", "serve.max_num_seqs=256", "serve.gpu_memory_utilization=0.1"]),
    ("8B", ["serve.max_model_len=4096", "serve.max_num_seqs=128", "serve.gpu_memory_utilization=0.3"]),
    (
        "4B",
        [
            "serve.max_model_len=4096",
            "serve.max_num_seqs=256",
            "serve.gpu_memory_utilization=0.2",
            "serve.engine_args.kv_cache_dtype=fp8",
        ],
    ),
    ("4B", ["serve.max_model_len=4096", "serve.max_num_seqs=512", "serve.gpu_memory_utilization=0.9"]),
]


def train_key(setting: tuple[str, list[str], int, int]) -> dict[str, Any]:
    size, overrides, rows, length = setting
    return {"kind": "train", "size": size, "overrides": overrides, "rows": rows, "length": length}


def serve_key(setting: tuple[str, list[str]]) -> dict[str, Any]:
    return {"kind": "serve", "size": setting[0], "overrides": setting[1]}


def predict(row: dict[str, Any]) -> float:
    """GiB at training's peak, or tokens of KV cache, for one line of the results."""
    arch = architecture.from_config(SIZES[row["size"]], row["size"])
    settings = config.load(None, row["overrides"])
    if row["kind"] == "serve":
        count = sum(architecture.parameters(arch).values())
        return memory.serving(
            arch, settings.serve, total=row["total"], parameter_count=count, name=row["gpu"]
        ).kv_tokens
    rows = min(row["rows"], settings.train.micro_batch_tokens // row["length"])
    found = memory.training(
        arch,
        settings.train,
        settings.lora,
        dtype="bfloat16",
        tokens=rows * row["length"],
        supervised=rows * (row["length"] // 4),
        longest=row["length"],
    )
    return found.allocated / GIB


def measure_train(row: dict[str, Any], model: str) -> dict[str, Any]:
    """Three steps of our own loop: peak GiB that torch counted, after the model was loaded."""
    import numpy
    import torch

    from jobs import lora, qlora

    more = [f"train.batch_size={row['rows']}", f"data.max_seq_len={row['length']}"]
    settings = config.load(None, [*row["overrides"], *more])
    device = torch.device("cuda", 0)
    tuned = lora.load(Path(model), settings, seed=0, device=device, revision=None)
    loaded, peak_loading = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    chance = numpy.random.default_rng(0)
    mask = numpy.arange(row["length"]) >= row["length"] - row["length"] // 4
    rows = [(chance.integers(0, 1000, row["length"]), mask) for _ in range(row["rows"] * 3)]
    loop = qlora.Loop(settings, tuned, qlora.Rows(rows), qlora.Rows(rows[:1]), "bench")
    torch.cuda.reset_peak_memory_stats()
    lines = [loop.step(step) for step in range(3)]
    return {
        "actual": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "loaded": loaded / GIB,
        "peak_loading": peak_loading / GIB,
        "tokens_per_s": lines[-1]["tokens_per_s"],
    }


class Reached(logging.Handler):
    """Reads vLLM's log: keeps the lines about memory, and ends the process at the one that says the cache's size."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.send, self.kept = send, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if re.search(r"GiB|memory", line):
            self.kept.append(line[:400])
        size = re.search(r"GPU KV cache size: ([\d,]+) tokens", line)
        if size:
            many = re.search(r"per request: ([\d.]+)x", line)
            found = {"actual": int(size[1].replace(",", "")), "concurrency": float(many[1]) if many else None}
            self.send(found | {"log": self.kept})
            os._exit(0)


def measure_serve(row: dict[str, Any], model: str, send: Callable[[dict[str, Any]], None]) -> None:
    """Start vLLM's engine in this process as `serve_app` configures it; never returns."""
    import logging as standard

    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    log = standard.getLogger("vllm")
    log.setLevel(standard.DEBUG)
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.addHandler(Reached(send))
    serve = config.load(None, row["overrides"]).serve
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": serve.max_model_len,
        "max_num_seqs": serve.max_num_seqs,
        "gpu_memory_utilization": serve.gpu_memory_utilization,
        "enforce_eager": serve.enforce_eager,
        **serve.engine_args,
    }
    if serve.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = serve.max_num_batched_tokens
    LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER)
    raise RuntimeError("vLLM started without saying the size of its KV cache")


def in_child(row: dict[str, Any], model: str, *, timeout: float) -> dict[str, Any]:
    """Measure one setting in a forked process: {"actual", …}, or {"error"}."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def body() -> None:
        try:
            import torch

            about = {"gpu": torch.cuda.get_device_name(0), "total": torch.cuda.mem_get_info(0)[1]}
            if row["kind"] == "train":
                send.send(about | measure_train(row, model))
            else:
                measure_serve(row, model, lambda found: send.send(about | found))
        except BaseException as error:  # the parent must hear of it, whatever it is
            send.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})
        os._exit(0)

    process = context.Process(target=body)
    process.start()
    found = receive.recv() if receive.poll(timeout) else {"error": f"no answer in {timeout:.0f} s"}
    process.join(20)
    if process.is_alive():
        process.kill()
        process.join()
    return found


def random_weights(folder: str) -> None:
    """A model directory of random BF16 weights, made on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((Path(folder) / "config.json").read_text())
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def table(rows: list[dict[str, Any]]) -> str:
    """Predicted, measured and error of every line, and the largest error of each kind."""
    lines = [f"{'':5} {'model':5} {'predicted':>12} {'measured':>12} {'error':>8}  setting"]
    worst: dict[str, float] = {}
    for row in rows:
        guess = predict(row)
        error = guess / row["actual"] - 1
        worst[row["kind"]] = max(worst.get(row["kind"], 0.0), abs(error))
        form = "{:12.2f}" if row["kind"] == "train" else "{:12,.0f}"
        what = " ".join(o.partition(".")[2] for o in row["overrides"])
        shape = f"{row['rows']} x {row['length']} " if row["kind"] == "train" else ""
        numbers = f"{form.format(guess)} {form.format(row['actual'])} {100 * error:+7.1f} %"
        lines.append(f"{row['kind']:5} {row['size']:5} {numbers}  {shape}{what}")
    units = {"train": "training peak (GiB)", "serve": "KV cache (tokens)"}
    lines += [f"{units[kind]}: largest error {100 * value:.1f} %" for kind, value in worst.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--only", choices=["train", "serve"])
    parser.add_argument("--limit-s", type=float, default=540, help="start no setting after this many seconds")
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = [json.loads(line) for line in lines]
    if not args.table:
        started = time.monotonic()
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        wanted = [*map(serve_key, SERVE)] if args.only != "train" else []
        wanted = ([*map(train_key, TRAIN)] if args.only != "serve" else []) + wanted
        with tempfile.TemporaryDirectory() as work:
            for size, settings in SIZES.items():
                (Path(work) / size).mkdir()
                (Path(work) / size / "config.json").write_text(json.dumps(settings))
            if args.only != "train":
                with contextlib.suppress(ImportError):  # once here, so that no child pays for it; touches no GPU
                    import vllm.v1.engine.llm_engine  # noqa: F401
            if args.only != "serve":
                import peft  # noqa: F401
                import transformers  # noqa: F401
            print(f"imports: {time.monotonic() - started:.0f} s", flush=True)
            for key in wanted:
                if any(all(row.get(k) == v for k, v in key.items()) for row in done):
                    continue
                if time.monotonic() - started > args.limit_s:
                    print("out of time: run again for the rest", flush=True)
                    break
                folder, began = str(Path(work) / key["size"]), time.monotonic()
                if key["kind"] == "train" and not list(Path(folder).glob("*.safetensors")):
                    maker = multiprocessing.get_context("fork").Process(target=random_weights, args=(folder,))
                    maker.start()
                    maker.join()
                row = key | in_child(key, folder, timeout=240) | {"seconds": round(time.monotonic() - began, 1)}
                if "error" in row:
                    print(f"FAILED {row}", flush=True)
                    continue
                done.append(row)
                print(f"{row['seconds']:6.1f} s {table([row]).splitlines()[1]}", flush=True)
                with args.out.open("a") as handle:
                    handle.write(json.dumps(row) + "\n")
    print(table(done) if done else "nothing measured yet")


if __name__ == "__main__":
    main()
