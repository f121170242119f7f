"""Run one training step with 1, 2 and 8 workers: `gloo_workers.py MODEL OUTPUT`. Writes world-N.json for each.

A script of its own so that it can fork before any thread exists: eight processes then share one set of imports.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402
import peft  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402, F401

from jobs import lora, packing  # noqa: E402
from jobs.loop import Loop, Rows  # noqa: E402
from tests import tiny  # noqa: E402


def worker(model: Path, output: Path, *, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}/store-{world}", rank=rank, world_size=world)
    config = tiny.settings(output, model, "train.batch_size=8", "train.max_grad_norm=1e9")
    tuned = lora.load(model, config, seed=0, device=torch.device("cpu"), revision=None)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in tuned.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    rng = np.random.default_rng(0)
    # Rows of 40 tokens, one to a pass of at most 64, with 2 to 20 supervised tokens: means of means would differ.
    rows = [(rng.integers(3, 512, 40), np.arange(40) >= 40 - supervised) for supervised in rng.integers(2, 21, 8)]
    run = Loop(
        config=config, tuned=tuned, train=Rows(rows), held_out=Rows(rows[:5]), snapshot_hash="x", rank=rank, world=world
    )
    held_out = run.evaluate("")
    seen: list[torch.Tensor] = []
    run.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in run.parameters]))  # type: ignore
    line = run.step(0)
    passes = len(packing.bins([40] * (8 // world), capacity=64))
    assert passes == 8 // world
    if rank == 0:
        found = {"loss": line["loss"], "eval_loss": held_out, "gradient": seen[0].tolist()}
        (output / f"world-{world}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(model: Path, output: Path) -> int:
    for world in (1, 2, 8):
        children: list[int] = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    worker(model, output, rank=rank, world=world)
                    status = 0
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(pid)
        if any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
