"""Rows of tokens -> packed batches: pure arithmetic on arrays, so a batch can be made again at any time.

Which rows a step trains on is a function of (snapshot hash, seed, epoch, step) alone. A run that resumes at step N
therefore needs no iterator to be rewound, and any number of workers sees the same global batch. Within a step the
rows are dealt to the workers by length and packed without padding: one long sequence whose positions restart at
every row, with the boundaries beside it so that attention never crosses one.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """Some rows as one sequence of T tokens, without padding.

    `boundaries` (rows + 1): where each row starts, and T. `predict` (S): positions whose next token is supervised;
    `targets` (S): that token. Logits are needed at `predict` only, which saves most of a large vocabulary's cost.
    """

    input_ids: Ints
    position_ids: Ints
    boundaries: Ints
    predict: Ints
    targets: Ints


def steps_per_epoch(rows: int, batch_size: int) -> int:
    """Optimizer steps of one pass; the last one may hold fewer rows."""
    return math.ceil(rows / batch_size)


def total_steps(rows: int, *, batch_size: int, num_epochs: float, max_steps: int | None) -> int:
    """Optimizer steps of a run: `num_epochs` passes (fractions allowed), at most `max_steps`, at least one."""
    steps = max(1, round(num_epochs * steps_per_epoch(rows, batch_size)))
    return steps if max_steps is None else min(steps, max_steps)


def batch_rows(snapshot_hash: str, *, seed: int, step: int, rows: int, batch_size: int) -> Ints:
    """Row numbers that optimizer step `step` (from 0) trains on, over all workers."""
    epoch, within = divmod(step, steps_per_epoch(rows, batch_size))
    digest = hashlib.sha256(f"{snapshot_hash}:{seed}:{epoch}".encode()).digest()
    order = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big"))).permutation(rows)
    return order[within * batch_size : (within + 1) * batch_size]


def deal(lengths: Sequence[int], *, workers: int) -> list[list[int]]:
    """Share rows out so that every worker gets about as many tokens: longest first, to the least loaded.

    Returns one list of indices into `lengths` per worker; the union is every row once.
    """
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        worker = loads.index(min(loads))
        shares[worker].append(index)
        loads[worker] += lengths[index]
    return shares


def bins(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Group rows into as few sequences of at most `capacity` tokens as first-fit-decreasing finds.

    Returns lists of indices into `lengths`. Raises ValueError for a row longer than `capacity`.
    """
    groups: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"row {index} has {length} tokens, over train.micro_batch_tokens {capacity}")
        place = next((i for i, room in enumerate(free) if room >= length), None)
        if place is None:
            groups.append([])
            free.append(capacity)
            place = len(free) - 1
        groups[place].append(index)
        free[place] -= length
    return groups


def pack(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Packed:
    """Concatenate (input_ids, loss_mask) rows into one sequence.

    A row's first token is predicted by nothing, so its mask is ignored: a token is never predicted across a boundary.
    """
    lengths = [len(ids) for ids, _ in rows]
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    input_ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in rows])
    mask = np.concatenate([np.asarray(mask, dtype=bool) for _, mask in rows])
    mask[boundaries[:-1]] = False
    supervised = np.flatnonzero(mask)
    return Packed(
        input_ids=input_ids,
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        boundaries=boundaries,
        predict=supervised - 1,
        targets=input_ids[supervised],
    )


def supervised_tokens(masks: Sequence[Sequence[int]]) -> int:
    """Number of predicted tokens of the rows, as `pack` counts them: the divisor of a step's loss."""
    return sum(int(np.count_nonzero(np.asarray(mask)[1:])) for mask in masks)


def learning_rate_at(step: int, *, total: int, peak: float, warmup_ratio: float) -> float:
    """Rate of step `step` (from 0): linear warm-up over the first share of the steps, then cosine to zero."""
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
