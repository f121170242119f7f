"""Which rows go where: components of rows that share a fact, duplicates, and questions that would leak.

Everything works on 64-bit hashes in numpy arrays, some 50 bytes a row, so that millions of rows fit anywhere.
"""

import hashlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LARGEST_COMPONENT = 0.3


class Components(NamedTuple):
    """`of_row`: component of each row, numbered from 0. `order`: a component's place in [0, 2^64), fixed by the
    seed and by one of its keys, so that rows added later do not move it."""

    of_row: "NDArray[np.int64]"
    order: "NDArray[np.uint64]"


def hash64(text: str) -> int:
    """64 bits of BLAKE2b: equal texts collide, others practically never (1e-7 among two million)."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def components(keys: "NDArray[np.uint64]", counts: "NDArray[np.int64]", *, seed: int) -> Components:
    """Rows that share a key, directly or through others, form one component.

    `keys`: the hashed keys of all rows one after another; `counts`: how many each row has (at least one).
    """
    import numpy as np

    unique, inverse = np.unique(keys, return_inverse=True)
    starts = np.cumsum(counts) - counts
    row_of_key = np.repeat(np.arange(len(counts)), counts)
    first = inverse[starts][row_of_key]
    edges = np.unique(np.stack([first, inverse], axis=1)[first != inverse], axis=0)
    parent = np.arange(len(unique))
    for a, b in edges.tolist():
        a, b = _root(parent, a), _root(parent, b)
        parent[max(a, b)] = min(a, b)
    for i in {int(x) for x in edges.ravel()}:
        parent[i] = _root(parent, i)
    roots, of_key = np.unique(parent, return_inverse=True)
    # The component's name is one of its keys, drawn by hash; a second hash of it decides. One hash for both would
    # send components with many keys to the evaluation split more often.
    name = np.full(len(roots), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(name, of_key, _mixed(unique, seed))
    return Components(of_key[inverse[starts]], _mixed(name, seed + 1))


def assign(parts: Components, keep: "NDArray[np.bool_]", *, eval_fraction: float) -> "NDArray[np.bool_]":
    """True for rows of the evaluation split. With at least two components neither split is empty: the component that
    comes first (or last) is moved if need be."""
    import numpy as np

    held_out = parts.order < np.uint64(int(eval_fraction * 2**64))
    used = np.unique(parts.of_row[keep])
    if len(used) > 1:
        by_order = used[np.argsort(parts.order[used], kind="stable")]
        if not held_out[used].any():
            held_out[by_order[0]] = True
        elif held_out[used].all():
            held_out[by_order[-1]] = False
    return held_out[parts.of_row]


def too_large(parts: Components, keep: "NDArray[np.bool_]", *, at_least: int = 2) -> list[tuple[int, float]]:
    """(first row, share of rows) of every component of `at_least` that many rows that is over LARGEST_COMPONENT."""
    import numpy as np

    rows = np.flatnonzero(keep)
    sizes = np.bincount(parts.of_row[rows], minlength=len(parts.order))
    large = np.flatnonzero((sizes >= at_least) & (sizes > LARGEST_COMPONENT * len(rows)))
    return [(int(rows[parts.of_row[rows] == c][0]), float(sizes[c] / len(rows))) for c in large]


def repeated(hashes: "NDArray[np.uint64]") -> list[tuple[int, int]]:
    """(later row, first row) for every value that occurs again."""
    import numpy as np

    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
    if not len(same):
        return []
    starts = np.flatnonzero(np.concatenate([[True], hashes[order][1:] != hashes[order][:-1]]))
    first = order[starts[np.searchsorted(starts, same, side="right") - 1]]
    return sorted(zip(order[same].tolist(), first.tolist(), strict=True))


def leaking(
    questions: "NDArray[np.uint64]", held_out: "NDArray[np.bool_]", keep: "NDArray[np.bool_]"
) -> list[tuple[int, int]]:
    """(row, first row with its question) where the two are in different splits."""
    import numpy as np

    common = np.intersect1d(questions[held_out & keep], questions[~held_out & keep])
    if not len(common):
        return []
    rows = np.flatnonzero(keep & np.isin(questions, common))
    first: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for row in rows.tolist():
        leader = first.setdefault(int(questions[row]), row)
        if held_out[row] != held_out[leader]:
            found.append((row, leader))
    return found


def _root(parent: "NDArray[np.int64]", i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = int(parent[i])
    return i


def _mixed(values: "NDArray[np.uint64]", seed: int) -> "NDArray[np.uint64]":
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), salted: a fixed shuffle of the 64-bit integers."""
    import numpy as np

    mixed = values ^ np.uint64(hash64(f"seed {seed}"))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
