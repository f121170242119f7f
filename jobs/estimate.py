"""The memory of a config's training and serving: jobs/memory.py's arithmetic on this config, model and GPU."""

import os

from jobs import artifacts, memory
from jobs.config import Config
from jobs.gpus import Gpu
from jobs.memory import Serving, Training
from jobs.model_shape import Shape

SUPERVISED = 0.25  # share of a batch's tokens that is supervised, before the rows are known


def training(config: Config, shape: Shape, *, cpu: bool) -> Training:
    """Memory of one training worker; the batch is the largest that the prepared rows make, else the largest allowed."""
    train = config.train
    rows = max(1, train.batch_size // train.num_workers)
    longest = config.data.max_seq_len
    tokens = min(train.micro_batch_tokens, rows * longest)
    supervised = int(tokens * SUPERVISED)
    known = largest_batch(config)
    if known is not None:
        tokens, supervised, longest = known
    return memory.training(
        shape.arch,
        train,
        config.lora,
        dtype=config.model.dtype,
        tokens=tokens,
        supervised=supervised,
        longest=longest,
        cpu=cpu,
    )


def serving(config: Config, shape: Shape, gpu: Gpu | None) -> Serving:
    """Memory of one GPU of a replica; without a GPU, serve.kv_cache_gib holds the cache."""
    if gpu is None:
        return memory.serving_on_cpu(
            shape.arch, config.serve, parameter_count=shape.parameters, dtype=config.model.dtype
        )
    return memory.serving(
        shape.arch,
        config.serve,
        total=gpu.total,
        parameter_count=shape.parameters,
        name=gpu.name,
        dtype=config.model.dtype,
    )


def largest_batch(config: Config) -> tuple[int, int, int] | None:
    """(tokens, supervised positions, longest row) of the largest packed batch of the run, once its rows are prepared.

    Batches are a function of the snapshot, the seed and the step (jobs/packing.py), so they can be made in advance.
    """
    where = artifacts.location(config, "prepare")
    if "://" in where or not os.path.isfile(os.path.join(where, artifacts.MANIFEST)):
        return None
    from data import snapshot
    from jobs import packing

    artifact = artifacts.read(where)
    table = snapshot.read(artifact.path, "train")
    lengths = [int(n) for n in table["length"].to_pylist()]
    supervised = [packing.supervised_tokens([mask]) for mask in table["loss_mask"].to_pylist()]
    train = config.train
    total = packing.total_steps(
        len(lengths), batch_size=train.batch_size, num_epochs=train.num_epochs, max_steps=train.max_steps
    )
    largest = (0, 0, 0)
    for step in range(min(total, 2000)):
        chosen = packing.batch_rows(
            str(artifact.numbers["snapshot_hash"]),
            seed=config.run.seed,
            step=step,
            rows=len(lengths),
            batch_size=train.batch_size,
        ).tolist()
        for share in packing.deal([lengths[i] for i in chosen], workers=train.num_workers):
            mine = [chosen[i] for i in share]
            for group in packing.bins([lengths[i] for i in mine], capacity=train.micro_batch_tokens):
                rows = [mine[i] for i in group]
                found = sum(lengths[i] for i in rows), sum(supervised[i] for i in rows), max(lengths[i] for i in rows)
                largest = max(largest, found)
    return largest if largest[0] else None
