"""What one training worker does: loads the base with an adapter, trains, and hands checkpoints to Ray."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs import artifacts, checkpoint, kernels, lora
from jobs.config import Config
from jobs.errors import UserError
from jobs.loop import Loop, Rows


def read_rows(snapshot: Path, split: str, limit: int | None = None) -> Rows:
    """Rows of a split of the snapshot, the first `limit` of them."""
    from data import snapshot as snapshots

    table = snapshots.read(snapshot, split).slice(0, limit)
    ids, masks = table["input_ids"].to_pylist(), table["loss_mask"].to_pylist()
    return Rows([(np.asarray(i), np.asarray(m)) for i, m in zip(ids, masks, strict=True)])


def work(order: dict[str, Any]) -> dict[str, Any]:
    """The function every worker of the TorchTrainer runs. `order` is what jobs.train.fit puts together.

    Returns {"error": message} for what the user can put right, so that Ray does not retry in vain.
    """
    import ray.train
    import ray.train.torch

    config = Config.model_validate(order["config"])
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(config.train.cpus_per_worker)
        kernels.keep_freed_memory()

    gauges = _gauges(order["name"]) if rank == 0 else {}

    def tell(**news: Any) -> None:
        if rank == 0 and order["board"] is not None:
            order["board"].tell.remote(order["name"], news)
        for key in gauges.keys() & news.keys():
            gauges[key].set(float(news[key]))

    def save(state: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer) -> None:
        metrics = {k: v for k, v in state.items() if isinstance(v, int | float)}
        if rank != 0:
            ray.train.report(metrics, checkpoint=None)  # a barrier: every rank reports
            return
        with tempfile.TemporaryDirectory() as work_dir:
            checkpoint.save(Path(work_dir), model=model, optimizer=optimizer, state=state)
            ray.train.report(
                metrics,
                checkpoint=ray.train.Checkpoint.from_directory(work_dir),
                checkpoint_dir_name=f"step-{state['step']:06d}",
            )

    try:
        tell(phase="loading the model")
        from cluster import models

        base = models.fetch(config)
        snapshot = artifacts.read(order["snapshot"])
        tuned = lora.load(base.path, config, seed=config.run.seed, device=device, revision=base.lock.get("revision"))
        run = Loop(
            config=config,
            tuned=tuned,
            train=read_rows(snapshot.path, "train"),
            held_out=read_rows(snapshot.path, "eval", config.train.eval_rows),
            snapshot_hash=str(snapshot.numbers["snapshot_hash"]),
            rank=rank,
            world=world,
            tell=tell,
            save=save,
        )
        previous = ray.train.get_checkpoint()
        if previous:
            with previous.as_directory() as directory:
                run.resume(Path(directory))
        return run.steps()
    except UserError as error:
        return {"error": str(error)}


def _gauges(name: str) -> dict[str, Any]:
    """Metrics on the dashboard's Prometheus endpoint, tagged with the run's name."""
    from ray.util.metrics import Gauge

    described = {
        "step": "Optimizer steps done.",
        "loss": "Loss of the last step, per supervised token.",
        "eval_loss": "Held-out loss, per supervised token.",
        "tokens_per_s": "Real tokens a second in the last step, all workers.",
        "grad_norm": "Gradient norm before clipping.",
    }
    found: dict[str, Any] = {}
    for key, text in described.items():
        found[key] = Gauge(f"rankline_train_{key}", description=text, tag_keys=("run",))
        found[key].set_default_tags({"run": name})
    return found
