"""The rank sweep: its arithmetic, and three real trials on six logical CPUs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import artifacts, config, sweep, train
from jobs.errors import UserError
from tests import tiny


def row(rank: int, loss: float, seed: int = 0) -> dict[str, Any]:
    return {"name": f"r{rank}-seed{seed}", "rank": rank, "seed": seed, "eval_loss": loss}


def test_trials_are_ranks_times_seeds_with_alpha_in_proportion() -> None:
    trials = sweep.trials_of(config.load(None, ["sweep.ranks=[4,16]", "sweep.seeds=[1,2]"]))
    found = [(t.name, t.config.lora.r, t.config.lora.lora_alpha, t.config.run.seed) for t in trials]
    assert found == [
        ("r4-seed1", 4, 8, 1),
        ("r4-seed2", 4, 8, 2),
        ("r16-seed1", 16, 32, 1),
        ("r16-seed2", 16, 32, 2),
    ]
    (fixed,) = sweep.trials_of(config.load(None, ["sweep.ranks=[4]", "sweep.alpha_over_r=null", "lora.lora_alpha=7"]))
    assert (fixed.name, fixed.config.lora.lora_alpha) == ("r4", 7)


def test_the_lowest_mean_wins_and_the_smaller_rank_on_a_tie() -> None:
    # Rank 4 has the single best run but the worse mean (2.0 against 1.9).
    winner = sweep.choose([row(4, 1.5), row(4, 2.5, 1), row(8, 2.0), row(8, 1.8, 1)])
    assert winner["name"] == "r8-seed1"
    assert winner["adapter"] == "trials/r8-seed1/adapter"
    assert "1.9000" in winner["why"]
    assert sweep.choose([row(16, 1.0), row(4, 1.0)])["name"] == "r4-seed0"


@pytest.mark.parametrize(
    ("overrides", "cpus", "gpus", "expected"),
    [
        (("sweep.max_concurrent_trials=3",), 6, 0, 3),
        (("sweep.max_concurrent_trials=9",), 6, 0, 4),  # 4 x 1.01 fit into 5; one CPU stays free
        (("sweep.max_concurrent_trials=9", "train.cpus_per_worker=2"), 6, 0, 2),
        (("sweep.max_concurrent_trials=9",), 64, 2, 2),
        (("sweep.max_concurrent_trials=9", "sweep.gpus_per_trial=0.25"), 64, 2, 8),
    ],
)
def test_no_more_trials_at_once_than_the_cluster_has_room_for(
    overrides: tuple[str, ...], cpus: float, gpus: float, expected: int
) -> None:
    assert sweep.concurrency(config.load(None, overrides), cpus=cpus, gpus=gpus) == expected


def test_a_cluster_too_small_for_one_trial_is_refused_where_ray_would_wait_for_ever() -> None:
    with pytest.raises(UserError, match=r"needs 2 workers x 3 CPUs .* the cluster has 6 CPUs"):
        sweep.concurrency(
            config.load(None, ["train.num_workers=2", "train.cpus_per_worker=3", "train.batch_size=8"]), cpus=6, gpus=0
        )


@pytest.fixture(scope="module")
def swept(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[artifacts.Artifact]:
    """A finished sweep of three ranks, all at once, on the two-layer model."""
    import ray

    root = tmp_path_factory.mktemp("sweep")
    small = tiny.model(tmp_path_factory.mktemp("tiny"), tokenizer=base_model)
    settings = tiny.settings(root, small, "sweep.ranks=[2,4,8]", "sweep.max_concurrent_trials=3")
    tiny.prepared(settings)
    yield sweep.run(settings)
    ray.shutdown()


def test_every_trial_is_a_train_artifact_and_the_best_one_wins(swept: artifacts.Artifact) -> None:
    import pyarrow.parquet as pq

    rows = swept.numbers["trials"]
    assert [(r["name"], r["rank"], r["alpha"]) for r in rows] == [("r2", 2, 4), ("r4", 4, 8), ("r8", 8, 16)]
    assert rows[1]["parameters"] == 2 * rows[0]["parameters"]
    assert len({r["eval_loss_base"] for r in rows}) == 1
    assert all(r["eval_loss"] < r["eval_loss_base"] for r in rows)
    best = min(rows, key=lambda r: r["eval_loss"])
    assert swept.numbers["winner"]["name"] == best["name"]
    assert (swept.path / swept.numbers["winner"]["adapter"] / "adapter_model.safetensors").is_file()
    for name in ("r2", "r4", "r8"):
        found = {
            p.relative_to(swept.path / "trials" / name).as_posix() for p in (swept.path / "trials" / name).rglob("*")
        }
        assert {"adapter/adapter_config.json", "base.lock.json", "metrics.jsonl"} <= found
    assert pq.read_table(swept.path / "sweep.parquet").to_pylist() == rows


def test_a_trial_is_exactly_the_train_run_of_its_rank(swept: artifacts.Artifact, tmp_path: Path) -> None:
    source = swept.manifest["config"]["model"]["source"]
    settings = tiny.settings(tmp_path, Path(source), "lora.r=4", "lora.lora_alpha=8")
    tiny.prepared(settings)
    alone = train.run(settings)
    trial = next(r for r in swept.numbers["trials"] if r["rank"] == 4)
    assert trial["eval_loss"] == alone.numbers["eval_loss"]
