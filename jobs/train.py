"""Train a LoRA adapter with Ray Train: NF4 base, packed batches, checkpoints that a killed run goes on from.

    python -m jobs.train --config FILE [key=value ...]

Checkpoints lie in runs/<name>/.work/ under a name made of config and inputs: the same command again goes on from the
last one, whatever was killed. The directory goes away when the artifact is published.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import artifacts, board, cli
from jobs.config import Config, resolve_storage
from jobs.errors import UserError
from jobs.progress import Progress, say

NUMBERS = ("eval_loss_base", "eval_loss", "tokens_per_s", "trainable_parameters", "peak_memory_gib")
# What changes how a run is carried out, but not what comes out of it.
NOT_SHAPING = {
    "model": {"cache"},
    "train": {"max_failures", "keep_checkpoints", "checkpoint_steps"},
}


@dataclass(frozen=True)
class Fitted:
    """A finished training run: where its last checkpoint lies (path or URI) and its figures."""

    checkpoint: str
    numbers: dict[str, Any]


def run(config: Config) -> artifacts.Artifact:
    """Train as configured and publish the artifact `train`; returns at once when it is there already."""
    from cluster import models

    prepared = artifacts.read(artifacts.location(config, "prepare"))
    base = models.fetch(config)
    sections = shaping(config)
    inputs = {"prepare": prepared.sha256, "base": artifacts.sha256_json(base.lock)}
    made = artifacts.existing(config, "train", sections, inputs)
    if made is not None:
        say("train", f"up to date: {made.path}")
        return made
    with artifacts.create(config, "train", sections, inputs) as draft:
        connect(config)
        posted, work = board.post(), workspace(config)
        name = f"train-{artifacts.sha256_json([sections, inputs])[:12]}"
        with Progress("train") as progress:
            fitted = board.watch(
                lambda: fit(
                    config, name=name, storage=work, snapshot=artifacts.location(config, "prepare"), posted=posted
                ),
                board.Teller(progress, posted, config).show,
            )
        write(fitted, draft.path, lock=base.lock)
        draft.numbers |= fitted.numbers
    discard(work)
    return artifacts.read(artifacts.location(config, "train"))


def connect(config: Config) -> None:
    """Join or start Ray, with the workers' chatter left in Ray's log files: progress comes over the board."""
    os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")
    from cluster import local

    local.connect(config)


def fit(
    config: Config,
    *,
    name: str,
    storage: str,
    snapshot: str,
    posted: Any = None,
    callbacks: Sequence[Any] = (),
    gpus_per_worker: float = 1.0,
) -> Fitted:
    """Train one adapter on the Ray cluster that this process is connected to, or go on with the run `name`.

    `storage`: directory or URI that all nodes see. `snapshot`: location of the prepare artifact.
    `posted`: the board that workers write to (jobs.board.post). Raises UserError for
    what the user can put right: a loss that is not finite, memory, disk, a cluster that is too small.
    """
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    from jobs.qlora import work

    # The controller looks at its workers this often; its default of 2 s is a tenth of a short run.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    if len(ray.nodes()) == 1:  # one more process per run, and nothing to watch
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    resources = ray.cluster_resources()
    use_gpu = resources.get("GPU", 0) > 0
    needed = config.train.num_workers * config.train.cpus_per_worker
    if 0 < resources.get("CPU", 0) < needed and len(ray.nodes()) == 1:
        raise UserError(
            f"train.num_workers {config.train.num_workers} x train.cpus_per_worker {config.train.cpus_per_worker} "
            f"needs {needed} CPUs, and the cluster has {resources['CPU']:g}: lower one, or raise cluster.num_cpus"
        )
    per_worker: dict[str, float] = {"CPU": config.train.cpus_per_worker}
    if use_gpu:
        per_worker["GPU"] = gpus_per_worker
    started = time.monotonic()
    trainer = TorchTrainer(
        work,
        train_loop_config={
            "config": absolute(config).model_dump(mode="json"),
            "name": name,
            "snapshot": snapshot,
            "board": posted,
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.train.num_workers, use_gpu=use_gpu, resources_per_worker=per_worker
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=config.train.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.train.keep_checkpoints),
            callbacks=list(callbacks),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise _explained(error, storage) from error
    figures: dict[str, Any] = result.return_value or {}
    if "error" in figures:
        raise UserError(str(figures["error"]))
    assert result.checkpoint is not None
    lora = config.lora
    numbers = {key: figures[key] for key in NUMBERS} | {
        "steps": figures["step"],
        "tokens": figures["train_tokens"],
        "seconds": round(time.monotonic() - started, 1),
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
    }
    return Fitted(checkpoint=_location(result.checkpoint), numbers=numbers)


def write(fitted: Fitted, into: Path, *, lock: dict[str, Any]) -> None:
    """Lay out a train artifact from a run's last checkpoint: adapter/, metrics.jsonl, base.lock.json."""
    import json

    import ray.train

    from jobs import checkpoint, curves

    with ray.train.Checkpoint(fitted.checkpoint).as_directory() as directory:
        source = Path(directory)
        checkpoint.read_state(source)  # refuses one that was cut off
        shutil.copytree(source / "adapter", into / "adapter", dirs_exist_ok=True)
        shutil.copyfile(source / "metrics.jsonl", into / "metrics.jsonl")
    curves.draw(into / "metrics.jsonl", into / "loss.png")
    curves.tensorboard(into / "metrics.jsonl", into / "tensorboard")
    (into / "base.lock.json").write_text(json.dumps(lock, indent=1), encoding="utf-8")


def shaping(config: Config) -> dict[str, Any]:
    """The part of the config that decides what comes out of training."""
    sections = artifacts.sections_of(config, "model", "lora", "train")
    for section, keys in NOT_SHAPING.items():
        for key in keys:
            sections[section].pop(key)
    return {"run": {"seed": config.run.seed}, **sections}


def workspace(config: Config) -> str:
    """Where checkpoints of unfinished runs lie: beside the artifacts, hidden."""
    return artifacts.location(config, ".work")


def discard(work: str) -> None:
    """Remove a workspace whose run is published."""
    if "://" not in work:
        shutil.rmtree(work, ignore_errors=True)
        return
    from pyarrow import fs

    store, path = fs.FileSystem.from_uri(work)
    with contextlib.suppress(OSError):
        store.delete_dir(path)


def absolute(config: Config) -> Config:
    """The config with absolute locations: Ray Train moves its workers into directories of its own."""
    run = config.run.model_copy(update={"root": resolve_storage(config.run.root)})
    found = {"cache": resolve_storage(config.model.cache)}
    local = os.path.expanduser(config.model.source)
    if "://" not in local and os.path.isdir(resolve_storage(local)):
        found["source"] = resolve_storage(local)
    return config.model_copy(update={"run": run, "model": config.model.model_copy(update=found)})


def _location(checkpoint: Any) -> str:
    kind = checkpoint.filesystem.type_name
    if kind == "local":
        return str(checkpoint.path)
    return f"{'gs' if kind == 'gcs' else kind}://{checkpoint.path}"


def _explained(error: Any, storage: str) -> Exception:
    """The UserError for a failed run when its cause is one that a user can do something about, else the error."""
    causes = list(getattr(error, "worker_failures", {}).values()) or [error]
    text = "\n".join(str(cause) for cause in causes)
    if "No space left on device" in text:
        return UserError(f"{storage}: the disk is full: free some space or put run.root elsewhere, then run this again")
    if "OutOfMemoryError" in text or "out of memory" in text:
        return UserError(
            "training ran out of memory: lower train.micro_batch_tokens or data.max_seq_len, or set "
            "train.gradient_checkpointing=true; then run this again to go on from the last checkpoint"
        )
    return error


if __name__ == "__main__":
    cli.main("train", run, __doc__)
