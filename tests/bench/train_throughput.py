"""Training throughput side by side: a plain transformers + PEFT loop, TRL where it is installed, and ours.

    python3 tests/bench/train_throughput.py --model DIR [--tokens 8192] [--rows 1024|science|N] [--steps 12] [--only …]

DIR is a model directory; without weights in it, random ones of its config are made (speed and memory only). Every
variant runs in a process of its own on the same rows in the same order, NF4 base, rank 16 on all linear layers, AdamW.
Tokens are real ones: the plain loop pads each batch to its longest row, and padding is not counted. MFU is against
this device's own best matrix product, at 4 FLOP a token and weight (forward, and backward to the activations), which
recomputation does not raise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VARIANTS = ("plain+ckpt", "plain", "trl", "ours", "ours-eager", "ours+ckpt", "ours-bf16")
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model directory, with or without weights")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in one optimizer step")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens in one pass of ours; none takes --tokens")
    parser.add_argument("--rows", default="1024", help="row length in tokens, or `science` for that data's lengths")
    parser.add_argument("--supervised", type=float, default=1.0, help="share of each row's end that has a loss")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--only", default=",".join(VARIANTS), help=f"comma-separated, of {', '.join(VARIANTS)}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT " + json.dumps(measure(args)), flush=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        args.model = with_weights(Path(args.model), Path(scratch))
        peak = matmul_peak()
        found: list[dict[str, Any]] = []
        for variant in args.only.split(","):
            command = [sys.executable, __file__, "--one", variant, "--model", args.model, "--tokens", str(args.tokens)]
            command += ["--rows", args.rows, "--steps", str(args.steps), "--warmup", str(args.warmup)]
            command += ["--supervised", str(args.supervised)]
            if args.micro_batch_tokens:
                command += ["--micro-batch-tokens", str(args.micro_batch_tokens)]
            print(f"# {variant} …", flush=True)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if lines:
                found.append({"variant": variant, **json.loads(lines[0][7:])})
            else:
                reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
                found.append({"variant": variant, "error": reason[:160]})
            show([found[-1]], peak, header=False)
    print()
    show(found, peak, header=True)


def show(found: list[dict[str, Any]], peak: float, *, header: bool) -> None:
    if header:
        import platform

        import torch
        import transformers

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
        print(
            f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}"
        )
        print(f"best matrix product {peak / 1e12:.0f} TFLOP/s\n")
        print(f"{'variant':<12} {'tokens/s':>9} {'peak GiB':>9} {'MFU':>6} {'first loss':>11} {'last loss':>10}")
    for row in found:
        if "error" in row:
            print(f"{row['variant']:<12} {row['error']}", flush=True)
            continue
        mfu = row["tokens_per_s"] * 4 * row["weights"] / peak
        print(
            f"{row['variant']:<12} {row['tokens_per_s']:>9,.0f} {row['peak_gib']:>9.1f} {mfu:>6.1%} "
            f"{row['losses'][0]:>11.4f} {row['losses'][-1]:>10.4f}",
            flush=True,
        )


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def with_weights(model: Path, scratch: Path) -> str:
    """`model`, or a copy with random weights of its config."""
    if list(model.glob("*.safetensors")):
        return str(model)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    print("# random weights …", flush=True)
    torch.manual_seed(0)
    with torch.device(device()):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(model)), dtype=torch.bfloat16)
    made.save_pretrained(str(scratch / "model"))
    for file in model.glob("*"):
        if file.is_file() and not (scratch / "model" / file.name).exists():
            (scratch / "model" / file.name).write_bytes(file.read_bytes())
    del made
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return str(scratch / "model")


def matmul_peak() -> float:
    """FLOP/s of the best of some large bfloat16 products."""
    import torch

    size = 8192 if device().type == "cuda" else 2048
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device()) for _ in range(2))
    best = 0.0
    for _ in range(12):
        sync()
        began = time.perf_counter()
        for _ in range(5):
            a @ b
        sync()
        best = max(best, 5 * 2 * size**3 / (time.perf_counter() - began))
    del a, b
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return best


def sync() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lengths(kind: str, model: str, total: int) -> list[int]:
    """Row lengths of one step of about `total` tokens: equal ones, or those of the science data in file order."""
    if kind.isdigit():
        return [int(kind)] * max(1, total // int(kind))
    from transformers import AutoTokenizer

    from data import prompts

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (ROOT / "data/science/facts.jsonl").read_text("utf-8").splitlines()
    facts = {card["id"]: card for card in map(json.loads, lines)}
    found: list[int] = []
    examples = (ROOT / "data/science/examples.jsonl").read_text("utf-8").splitlines()
    for line in examples * 20:
        row = json.loads(line)
        messages = [*prompts.build_messages(facts, row), {"role": "assistant", "content": row["answer"]}]
        length = len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
        if sum(found) + length > total:
            break
        found.append(length)
    return found


def batches(args: argparse.Namespace) -> list[list[tuple[Any, Any]]]:
    """The rows of every step, the same for every variant: random tokens, which a model can learn by heart."""
    import numpy as np
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(args.model).vocab_size
    rng = np.random.default_rng(0)
    sizes = lengths(args.rows, args.model, args.tokens)
    # Two batches in turn: what was learned from the first shows in the loss of its second visit.
    pair = [
        [(rng.integers(10, min(vocabulary, 5000), n), np.arange(n) >= n - round(n * args.supervised)) for n in sizes]
        for _ in range(2)
    ]
    return [pair[step % 2] for step in range(args.steps)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run one variant in this process."""
    import torch

    steps = batches(args)
    torch.manual_seed(0)
    step = _ours(args) if args.one.startswith("ours") else _trl(args) if args.one == "trl" else _plain(args)
    losses: list[float] = []
    began = 0.0
    for index, rows in enumerate(steps):
        if index == args.warmup:
            sync()
            began = time.perf_counter()
        losses.append(float(step["run"](rows)))
    sync()
    tokens = sum(len(ids) for rows in steps[args.warmup :] for ids, _ in rows)
    if torch.cuda.is_available():
        gib = torch.cuda.max_memory_allocated() / 2**30
    else:
        import resource

        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "tokens_per_s": tokens / (time.perf_counter() - began),
        "peak_gib": gib,
        "losses": losses,
        "weights": step["weights"],
    }


def _four_bit() -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _weights(config: Any) -> int:
    """Weights that every token is multiplied by: the linear layers and the head."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    linear = sum(m.weight.numel() for m in empty.modules() if isinstance(m, torch.nn.Linear))
    return linear


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """What a tutorial writes: padded batches, transformers' loss, bfloat16 autocast, AdamW."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, quantization_config=_four_bit(), device_map={"": device()}
    )
    base.config.use_cache = False
    if args.one.endswith("+ckpt"):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, weight_decay=0.0)

    def run(rows: list[tuple[Any, Any]]) -> Any:
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for i, (row, wanted) in enumerate(rows):
            n = len(row)
            ids[i, :n], mask[i, :n] = torch.from_numpy(row), 1
            labels[i, :n] = torch.where(torch.from_numpy(wanted), torch.from_numpy(row), torch.tensor(-100))
        # The mask is left out where it says nothing, as in the fastest plain loop; rows as long as --tokens allow.
        options = {} if bool(mask.all()) else {"attention_mask": mask.to(device())}
        with torch.autocast(device().type, torch.bfloat16):
            loss = model(input_ids=ids.to(device()), labels=labels.to(device()), **options).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return {"run": run, "weights": _weights(base.config)}


def _ours(args: argparse.Namespace) -> dict[str, Any]:
    """The loop of jobs.loop, as a training worker runs it."""
    import numpy as np

    from jobs import config, lora
    from jobs.loop import Loop, Rows

    quantization = "none" if "bf16" in args.one else "nf4"
    flat = [row for rows in batches(args)[:2] for row in rows]
    count = len(flat) // 2
    micro = args.micro_batch_tokens or sum(len(ids) for ids, _ in flat[:count])
    settings = config.load(
        None,
        [
            f"model.source={args.model}",
            f"data.max_seq_len={max(len(ids) for ids, _ in flat)}",
            f"lora.r={RANK}",
            f"lora.lora_alpha={2 * RANK}",
            f"train.quantization={quantization}",
            f"train.batch_size={count}",
            f"train.micro_batch_tokens={micro}",
            "train.learning_rate=2e-4",
            "train.warmup_ratio=0",
            "train.max_steps=1000000",  # so far from the end that the rate is constant, as in the plain loop
            "train.num_epochs=100000",
            f"train.gradient_checkpointing={'true' if args.one.endswith('+ckpt') else 'false'}",
            *(["train.compile=false"] if args.one.endswith("-eager") else []),
        ],
    )
    tuned = lora.load(Path(args.model), settings, seed=0, device=device(), revision=None)
    held_out = Rows([(np.asarray([1, 2, 3]), np.asarray([0, 1, 1]))])
    halves = [flat[:count], flat[count:]]
    loops = [Loop(config=settings, tuned=tuned, train=Rows(h), held_out=held_out, snapshot_hash="x") for h in halves]
    loops[1].optimizer = loops[0].optimizer
    at = iter(range(args.steps))

    def run(_: list[tuple[Any, Any]]) -> Any:
        index = next(at)
        return loops[index % 2].step(index)["loss"]

    return {"run": run, "weights": _weights(tuned.model.get_base_model().config)}


def _trl(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's SFTTrainer with padding-free packing and gradient checkpointing as it comes; one training step per call."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    steps = batches(args)
    rows = [{"input_ids": ids.tolist()} for batch in steps[:2] for ids, _ in batch]
    base = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, quantization_config=_four_bit(), device_map={"": device()}
    )
    trainer = SFTTrainer(
        model=base,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=SFTConfig(output_dir=tempfile.mkdtemp(), bf16=True, learning_rate=2e-4, report_to=[], max_length=None),
    )
    model = trainer.model.to(device()).train()
    trainer.create_optimizer()

    def run(batch: list[tuple[Any, Any]]) -> Any:
        inputs = trainer.data_collator([{"input_ids": ids.tolist()} for ids, _ in batch])
        loss = trainer.training_step(model, {k: v.to(device()) for k, v in inputs.items()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss

    return {"run": run, "weights": _weights(base.config)}


if __name__ == "__main__":
    main()
