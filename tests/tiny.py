"""A two-layer model and a small snapshot: real files in the real layout, made in a second, for tests of training."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from data import snapshot
from jobs import artifacts, config
from jobs.config import Config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model(into: Path, *, tokenizer: Path, vocab_size: int = 512) -> Path:
    """A random two-layer Llama of width 64 with four heads in two groups, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            dtype="float32",
        )
    )
    made.save_pretrained(str(into))
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, into / name)
    return into


def rows(count: int, *, seed: int = 0, vocab_size: int = 512) -> list[tuple[list[int], list[int]]]:
    """Rows that can be learned: a prompt of random tokens, then its first tokens again as the supervised answer."""
    rng = np.random.default_rng(seed)
    made: list[tuple[list[int], list[int]]] = []
    for _ in range(count):
        prompt = rng.integers(3, vocab_size, rng.integers(10, 40)).tolist()
        answer = [*prompt[: rng.integers(3, 9)], 2]
        made.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    return made


def prepared(settings: Config, *, train: int = 40, held_out: int = 8, vocab_size: int = 512) -> artifacts.Artifact:
    """Publish a prepare artifact of such rows for a run."""
    with artifacts.create(settings, "prepare", {}, {}) as draft:
        for split, count, seed in (("train", train, 1), ("eval", held_out, 2)):
            table = [
                {
                    "id": f"{split}-{index}",
                    "source": f"made.jsonl:{index + 1}",
                    "input_ids": ids,
                    "loss_mask": mask,
                    "length": len(ids),
                    "prompt_length": mask.index(1),
                    "messages": json.dumps([]),
                    "answer": "",
                }
                for index, (ids, mask) in enumerate(rows(count, seed=seed, vocab_size=vocab_size))
            ]
            snapshot.write(draft.path, split, 0, pa.Table.from_pylist(table, schema=snapshot.schema()))
        draft.numbers["snapshot_hash"] = f"made-{train}-{held_out}-{vocab_size}"
    return artifacts.read(artifacts.location(settings, "prepare"))


def settings(root: Path, source: Path, *overrides: str) -> Config:
    """A float32 run of the two-layer model under `root`."""
    return config.load(
        None,
        [
            f"run.root={root / 'runs'}",
            f"model.source={source}",
            f"model.cache={root / 'models'}",
            "model.dtype=float32",
            "data.max_seq_len=64",
            "train.quantization=none",
            "train.micro_batch_tokens=64",
            "train.learning_rate=3e-3",
            "train.num_epochs=9",
            "train.max_steps=6",
            "train.checkpoint_steps=2",
            *overrides,
        ],
    )
