"""Batches are arithmetic: which rows, in what order, packed how. No torch here."""

import math

import numpy as np
import pytest

from jobs import packing


def batches(*, seed: int, rows: int, batch_size: int, steps: int, snapshot: str = "abc") -> list[list[int]]:
    return [
        packing.batch_rows(snapshot, seed=seed, step=s, rows=rows, batch_size=batch_size).tolist() for s in range(steps)
    ]


def test_an_epoch_sees_every_row_once_and_the_next_in_another_order() -> None:
    first = batches(seed=0, rows=21, batch_size=4, steps=12)
    assert [len(b) for b in first[:6]] == [4, 4, 4, 4, 4, 1]
    one, two = sum(first[:6], []), sum(first[6:], [])
    assert sorted(one) == sorted(two) == list(range(21))
    assert one != two


def test_a_batch_depends_on_snapshot_seed_and_step_alone() -> None:
    whole = batches(seed=3, rows=50, batch_size=8, steps=10)
    assert packing.batch_rows("abc", seed=3, step=9, rows=50, batch_size=8).tolist() == whole[9]  # asked for alone
    assert batches(seed=4, rows=50, batch_size=8, steps=10) != whole
    assert batches(seed=3, rows=50, batch_size=8, steps=10, snapshot="abd") != whole


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "most", "expected"),
    [
        (100, 8, 1.0, None, 13),
        (100, 8, 3.0, None, 39),
        (100, 8, 3.0, 5, 5),
        (100, 8, 0.5, None, 6),
        (3, 8, 0.1, None, 1),
    ],
)
def test_number_of_steps(rows: int, batch: int, epochs: float, most: int | None, expected: int) -> None:
    assert packing.total_steps(rows, batch_size=batch, num_epochs=epochs, max_steps=most) == expected


def test_dealing_gives_every_row_to_one_worker_and_evens_out_the_tokens() -> None:
    lengths = [900, 100, 400, 300, 250, 250, 700, 100]
    for workers in (1, 2, 4, 8, 11):
        shares = packing.deal(lengths, workers=workers)
        assert len(shares) == workers
        assert sorted(sum(shares, [])) == list(range(8))
    loads = [sum(lengths[i] for i in share) for share in packing.deal(lengths, workers=2)]
    assert loads == [1550, 1450]  # by hand: 900+300+250+100 and 700+400+250+100


def test_bins_hold_every_row_and_never_more_than_fits() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 700, 200).tolist()
    groups = packing.bins(lengths, capacity=1024)
    assert sorted(sum(groups, [])) == list(range(200))
    assert all(sum(lengths[i] for i in group) <= 1024 for group in groups)
    # First-fit-decreasing needs at most 11/9 of the optimum + 6/9 (Dosa 2007); the optimum is at least the volume.
    assert len(groups) <= 11 / 9 * math.ceil(sum(lengths) / 1024) + 1


def test_a_row_over_the_capacity_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"row 1 has 1025 tokens, over train\.micro_batch_tokens 1024"):
        packing.bins([10, 1025], capacity=1024)


def test_packing_by_hand() -> None:
    batch = packing.pack([([10, 11, 12, 13], [0, 0, 1, 1]), ([20, 21, 22], [1, 0, 1])])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.boundaries.tolist() == [0, 4, 7]
    # 12 and 13 are predicted from positions 1 and 2, 22 from 5. The mask on 20 is void: nothing comes before it.
    assert batch.predict.tolist() == [1, 2, 5]
    assert batch.targets.tolist() == [12, 13, 22]
    assert packing.supervised_tokens([[0, 0, 1, 1], [1, 0, 1]]) == 3


def test_learning_rate_warms_up_and_falls_to_zero_along_a_cosine() -> None:
    def rate(step: int) -> float:
        return packing.learning_rate_at(step, total=100, peak=1.0, warmup_ratio=0.1)

    assert [rate(s) for s in (0, 4, 9)] == pytest.approx([1 / 11, 5 / 11, 10 / 11])
    assert rate(10) == 1.0
    assert rate(55) == pytest.approx(0.5)  # half of the 90 steps that decay
    assert 0 < rate(99) < 0.001
    assert packing.learning_rate_at(0, total=1, peak=1.0, warmup_ratio=0.05) > 0  # a run of one step still learns
