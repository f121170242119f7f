"""jobs.train as a user runs it: Ray Train on a private cluster, the two-layer model, real checkpoints."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import artifacts, train
from jobs.errors import UserError
from tests import tiny


@pytest.fixture(scope="module")
def small(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("tiny"), tokenizer=base_model)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A private cluster of six logical CPUs, as on a laptop."""
    import ray

    from jobs import config

    train.connect(config.load(None))
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(small: Path, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> artifacts.Artifact:
    """A finished run of six steps that nothing disturbed."""
    config = tiny.settings(tmp_path_factory.mktemp("undisturbed"), small, "train.eval_steps=3")
    tiny.prepared(config)
    return train.run(config)


def lines(artifact: artifacts.Artifact) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]


def losses(artifact: artifacts.Artifact) -> list[tuple[int, float]]:
    return [(line["step"], line.get("loss", line.get("eval_loss"))) for line in lines(artifact)]


def test_a_run_publishes_adapter_lock_metrics_and_figures(undisturbed: artifacts.Artifact, small: Path) -> None:
    files = set(undisturbed.manifest["files"])
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= files
    assert {"base.lock.json", "metrics.jsonl"} <= files
    assert (undisturbed.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((undisturbed.path / "base.lock.json").read_text())["source"] == str(small)
    numbers = undisturbed.numbers
    assert numbers["eval_loss"] < numbers["eval_loss_base"]
    assert (numbers["steps"], numbers["r"], numbers["lora_alpha"], numbers["use_rslora"]) == (6, 8, 16, False)
    # Rank 8 on q, k, v, o, gate, up, down of two layers: r x (in + out) each; width 64, k and v 32, inner 128.
    assert numbers["trainable_parameters"] == 2 * 8 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
    steps = [line for line in lines(undisturbed) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert numbers["tokens"] == sum(line["tokens"] for line in steps)
    evaluations = [(line["step"], line["eval_loss"]) for line in lines(undisturbed) if "eval_loss" in line]
    assert [step for step, _ in evaluations] == [0, 3, 6]
    assert (evaluations[0][1], evaluations[2][1]) == (numbers["eval_loss_base"], numbers["eval_loss"])
    assert not (undisturbed.path.parent / ".work").exists()


def test_tensorboard_shows_every_step(undisturbed: artifacts.Artifact) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(undisturbed.path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in shown] == pytest.approx(
        [line["loss"] for line in lines(undisturbed) if "loss" in line]
    )


def test_the_adapter_loads_in_peft_and_gives_the_reported_loss(undisturbed: artifacts.Artifact, small: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(str(small)), str(undisturbed.path / "adapter")
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, mask in tiny.rows(8, seed=2):
            labels = torch.tensor([i if m else -100 for i, m in zip(ids, mask, strict=True)])
            supervised = sum(mask[1:])
            total += model(input_ids=torch.tensor([ids]), labels=labels[None]).loss.item() * supervised
            count += supervised
    assert total / count == pytest.approx(undisturbed.numbers["eval_loss"], abs=1e-4)


def test_a_second_run_is_up_to_date_and_another_config_is_refused(
    undisturbed: artifacts.Artifact, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = undisturbed.path.parent.parent.parent
    again = train.run(tiny.settings(root, small, "train.eval_steps=3", "train.max_failures=5"))
    assert again.sha256 == undisturbed.sha256
    assert "up to date" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"lora\.r = 8, now 4"):
        train.run(tiny.settings(root, small, "train.eval_steps=3", "lora.r=4"))


def test_a_worker_killed_midway_costs_nothing_but_time(
    undisturbed: artifacts.Artifact, small: Path, tmp_path: Path
) -> None:
    # A report waits until the controller took the one before, twice a second: six of them leave time to kill.
    config = tiny.settings(tmp_path, small, "train.eval_steps=3", "train.checkpoint_steps=1")
    tiny.prepared(config)
    killed: list[int] = []
    unfinished: list[bool] = []

    def kill_after_a_checkpoint() -> None:
        # The loop writes its process id into each checkpoint: kill that very process once one is published.
        until = time.monotonic() + 120
        while not killed and time.monotonic() < until:
            for state in (tmp_path / "runs").glob("*/.work/train-*/step-000002/state.json"):
                try:
                    pid = json.loads(state.read_text())["pid"]
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    unfinished.append(not (state.parent.parent / "step-000006").exists())
                except (ValueError, ProcessLookupError):
                    continue
            time.sleep(0.02)

    thread = threading.Thread(target=kill_after_a_checkpoint)
    thread.start()
    made = train.run(config)
    thread.join()
    assert killed
    assert unfinished == [True]
    assert losses(made) == losses(undisturbed)
    assert made.numbers["eval_loss"] == undisturbed.numbers["eval_loss"]


def test_more_workers_than_cpus_is_refused_before_anything_waits(
    small: Path, ray_cluster: None, tmp_path: Path
) -> None:
    config = tiny.settings(tmp_path, small, "train.num_workers=8")
    tiny.prepared(config)
    with pytest.raises(UserError, match=r"train\.num_workers 8 x train\.cpus_per_worker 1 needs 8 CPUs"):
        train.run(config)
    assert not (tmp_path / "runs" / "demo" / "train").exists()


def test_a_loss_that_explodes_ends_in_one_message(small: Path, ray_cluster: None, tmp_path: Path) -> None:
    config = tiny.settings(tmp_path, small, "train.learning_rate=1e30", "train.warmup_ratio=0")
    tiny.prepared(config)
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step \d: lower train\.learning_rate"):
        train.run(config)


@pytest.mark.slow
def test_two_workers_give_the_losses_of_one(undisturbed: artifacts.Artifact, small: Path, tmp_path: Path) -> None:
    config = tiny.settings(tmp_path, small, "train.eval_steps=3", "train.num_workers=2")
    tiny.prepared(config)
    made = train.run(config)
    for (step, mine), (_, other) in zip(losses(made), losses(undisturbed), strict=True):
        assert mine == pytest.approx(other, abs=1e-4), step
