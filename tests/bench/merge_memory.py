"""Merge a model of Qwen3-4B's shape on the CPU: seconds, anonymous memory, and what bounds it.

    python tests/bench/merge_memory.py [--layers 36] [--at /tmp]

Writes 8 GB of random base and as much again as the result under --at, and deletes both. Random weights show speed and
memory only. Bounds held: at most 4 minutes on two cores; anonymous memory at most twice the largest shard + 1 GiB.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
HIDDEN, INNER, HEADS, KV, HEAD_DIM, VOCABULARY = 2560, 9728, 32, 8, 128, 151936
SHARD = 4_000_000_000
RANK = 16


def linear_shapes(layers: int) -> dict[str, tuple[int, int]]:
    """Module name -> [out, in] of every adapted layer."""
    shapes: dict[str, tuple[int, int]] = {}
    for i in range(layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{at}.q_proj": (HEADS * HEAD_DIM, HIDDEN), f"{at}.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{at}.k_proj": (KV * HEAD_DIM, HIDDEN), f"{at}.v_proj": (KV * HEAD_DIM, HIDDEN)}
        shapes |= {f"{mlp}.gate_proj": (INNER, HIDDEN), f"{mlp}.up_proj": (INNER, HIDDEN)}
        shapes |= {f"{mlp}.down_proj": (HIDDEN, INNER)}
    return shapes


def make(base: Path, adapter: Path, layers: int) -> None:
    """A random base in shards, and a random adapter on all its linear layers."""
    import torch

    from jobs import safetensors_io
    from jobs.safetensors_io import Spec

    linear = linear_shapes(layers)
    specs = [Spec("model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN))]
    specs += [Spec(f"{name}.weight", "BF16", shape) for name, shape in linear.items()]
    for i in range(layers):
        for norm, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            specs.append(Spec(f"model.layers.{i}.{norm}.weight", "BF16", (size,)))
        for norm in ("q_norm", "k_norm"):
            specs.append(Spec(f"model.layers.{i}.self_attn.{norm}.weight", "BF16", (HEAD_DIM,)))
    specs.append(Spec("model.norm.weight", "BF16", (HIDDEN,)))

    def produce(spec: Spec) -> Iterator[torch.Tensor]:
        if len(spec.shape) == 1:
            yield torch.ones(spec.shape, dtype=torch.bfloat16)
            return
        for start in range(0, spec.shape[0], 4096):
            rows = min(4096, spec.shape[0] - start)
            yield torch.empty(rows, spec.shape[1], dtype=torch.bfloat16).normal_(0, 0.02)

    base.mkdir()
    safetensors_io.write(base, specs, limit=SHARD, produce=produce)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "tie_word_embeddings": True, "max_position_embeddings": 4096, "dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (base / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(ROOT / "tests/cases/b/base_tied" / name, base / name)
    adapter.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, (out, inside) in linear.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inside) * 0.02
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, RANK) * 0.02
    safetensors_io.write_file(adapter / "adapter_model.safetensors", tensors)
    names = sorted({name.rpartition(".")[2] for name in linear})
    lora = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": names}
    (adapter / "adapter_config.json").write_text(json.dumps(lora))


def measured_merge(base: Path, adapter: Path, out: Path) -> None:
    """In a process of its own: merge as a user does, and print the figures as JSON."""
    most = {"anonymous": 0}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            text = Path("/proc/self/status").read_text()
            line = next(x for x in text.splitlines() if x.startswith("RssAnon"))
            most["anonymous"] = max(most["anonymous"], int(line.split()[1]) * 1024)

    threading.Thread(target=watch, daemon=True).start()
    from jobs import merge

    started, cpu = time.monotonic(), time.process_time()
    merge.by_hand(base, adapter, out)
    took, cpu = time.monotonic() - started, time.process_time() - cpu
    stop.set()
    numbers = json.loads((out / "manifest.json").read_text())["numbers"]
    keys = ("bytes", "shards", "tensors_merged", "write_seconds", "seconds", "changed_share")
    print(json.dumps({**{k: numbers[k] for k in keys}, **most, "all_seconds": took, "cpu_seconds": cpu}))


def copied_seconds(base: Path, to: Path) -> float:
    """Reading the base and writing it once, with nothing computed: the floor that the disk sets."""
    started = time.monotonic()
    to.mkdir()
    for file in sorted(base.glob("*.safetensors")):
        shutil.copyfile(file, to / file.name)
    os.sync()
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--at", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--measure", nargs=3, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measured_merge(*args.measure)
        return
    with tempfile.TemporaryDirectory(prefix="merge-bench-", dir=args.at) as folder:
        base, adapter, out = (Path(folder) / name for name in ("base", "adapter", "out"))
        make(base, adapter, args.layers)
        largest = max(p.stat().st_size for p in base.glob("*.safetensors"))
        command = [sys.executable, __file__, "--measure", str(base), str(adapter), str(out)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
        found = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(out)
        copied = copied_seconds(base, Path(folder) / "copy")
    bound = 2 * largest + 2**30
    rate = found["bytes"] / 1e9 / found["write_seconds"]
    print(f"{found['bytes'] / 1e9:.1f} GB in {found['shards']} shards, {found['tensors_merged']} tensors merged")
    print(f"whole command {found['all_seconds']:.0f} s (bound 240), {found['cpu_seconds']:.0f} s of CPU time:")
    print(f"  merged and written  {found['write_seconds']:.0f} s ({rate:.2f} GB/s)")
    print(f"  loaded and answered {found['seconds'] - found['write_seconds']:.0f} s")
    print(f"  hashed              {found['all_seconds'] - found['seconds']:.0f} s (base before, result after)")
    print(f"copying the base alone: {copied:.0f} s")
    print(f"anonymous memory at most {found['anonymous'] / 2**30:.2f} GiB (bound {bound / 2**30:.2f} GiB)")
    if found["all_seconds"] > 240 or found["anonymous"] > bound:
        sys.exit("over its bound")


if __name__ == "__main__":
    main()
