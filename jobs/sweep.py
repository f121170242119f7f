"""Try several LoRA ranks and keep the best by held-out loss: one Ray Tune trial per rank and seed.

    python -m jobs.sweep --config FILE [key=value ...]

A trial is a plain function that fits a TorchTrainer (Tune no longer takes trainers). It asks for a hundredth of a CPU,
so that trials which wait for their workers never hold what the workers wait for, and no more trials run at once than
the cluster has room for.
"""

import logging
import os
import statistics
from dataclasses import dataclass
from typing import Any

from jobs import artifacts, board, cli, train
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import Progress, say

DRIVER_CPUS = 0.01  # zero is refused by Tune


@dataclass(frozen=True)
class Trial:
    """One train run of the sweep."""

    name: str
    config: Config


def trials_of(config: Config) -> list[Trial]:
    """The sweep's runs: every rank with every seed."""
    seeds = config.sweep.seeds or (config.run.seed,)
    trials: list[Trial] = []
    for rank in config.sweep.ranks:
        ratio = config.sweep.alpha_over_r
        alpha = config.lora.lora_alpha if ratio is None else max(1, round(ratio * rank))
        lora = config.lora.model_copy(update={"r": rank, "lora_alpha": alpha})
        for seed in seeds:
            run = config.run.model_copy(update={"seed": seed})
            name = f"r{rank}" if len(seeds) == 1 else f"r{rank}-seed{seed}"
            trials.append(Trial(name, config.model_copy(update={"lora": lora, "run": run})))
    return trials


def run(config: Config) -> artifacts.Artifact:
    """Run the sweep and publish the artifact `sweep`; returns at once when it is there already."""
    from cluster import models

    if not config.sweep.ranks:
        raise UserError("sweep.ranks is empty: name the ranks to try, like sweep.ranks=[4,8,16]")
    prepared = artifacts.read(artifacts.location(config, "prepare"))
    base = models.fetch(config)
    own = config.sweep.model_dump(mode="json", exclude={"max_concurrent_trials"})
    sections = train.shaping(config) | {"sweep": own}
    inputs = {"prepare": prepared.sha256, "base": artifacts.sha256_json(base.lock)}
    made = artifacts.existing(config, "sweep", sections, inputs)
    if made is not None:
        say("sweep", f"up to date: {made.path}")
        return made
    trials = trials_of(config)
    with artifacts.create(config, "sweep", sections, inputs) as draft:
        train.connect(config)
        key = artifacts.sha256_json([sections, inputs])[:12]
        fitted = _tune(config, trials, key=key)
        rows = [_row(trial, fitted[trial.name].numbers) for trial in trials]
        for trial in trials:
            train.write(fitted[trial.name], draft.path / "trials" / trial.name, lock=base.lock)
        draft.numbers |= {"trials": rows, "winner": choose(rows)}
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), draft.path / "sweep.parquet")
    train.discard(train.workspace(config))
    for line in table(rows):
        print(line, flush=True)
    winner = choose(rows)
    say("sweep", f"{winner['name']}: {winner['why']}")
    return artifacts.read(artifacts.location(config, "sweep"))


def choose(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The winning trial: of the rank with the lowest mean held-out loss (the smaller on a tie), its best seed."""
    ranks = {row["rank"] for row in rows}
    means = {r: statistics.fmean(row["eval_loss"] for row in rows if row["rank"] == r) for r in ranks}
    rank = min(means, key=lambda r: (means[r], r))
    best = min((row for row in rows if row["rank"] == rank), key=lambda row: (row["eval_loss"], row["seed"]))
    others = ", ".join(f"{means[r]:.4f} at rank {r}" for r in sorted(means) if r != rank)
    why = f"rank {rank} has the lowest held-out loss, {means[rank]:.4f}" + (f" (against {others})" if others else "")
    return {"name": best["name"], "adapter": f"trials/{best['name']}/adapter", "why": why}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The sweep as lines to print."""
    head = "trial         rank  alpha  parameters  held-out loss     base  seconds  tokens/s"
    lines = [
        f"{r['name']:<12} {r['rank']:>5} {r['alpha']:>6} {r['parameters']:>11,} {r['eval_loss']:>14.4f} "
        f"{r['eval_loss_base']:>8.4f} {r['seconds']:>8.1f} {r['tokens_per_s']:>9,.0f}"
        for r in rows
    ]
    return [head, *lines]


def concurrency(config: Config, *, cpus: float, gpus: float) -> int:
    """How many trials may run at once on a cluster of `cpus` and `gpus`: one CPU always stays free for other tasks.

    Raises UserError when not even one fits, where Ray would wait for ever.
    """
    workers = config.train.num_workers
    room = int((cpus - 1) / (workers * config.train.cpus_per_worker + DRIVER_CPUS))
    if gpus:
        room = min(room, int(gpus / (workers * config.sweep.gpus_per_trial)))
    if room < 1:
        raise UserError(
            f"one trial needs {workers} workers x {config.train.cpus_per_worker} CPUs"
            + (f" and {workers * config.sweep.gpus_per_trial:g} GPUs" if gpus else "")
            + f" and one CPU beside them; the cluster has {cpus:g} CPUs and {gpus:g} GPUs: "
            "lower train.num_workers or train.cpus_per_worker, or raise cluster.num_cpus"
        )
    return min(room, config.sweep.max_concurrent_trials)


def _tune(config: Config, trials: list[Trial], *, key: str) -> dict[str, train.Fitted]:
    import ray
    import ray.tune

    # Tune's own tables and result files say less than ours, and its header comes even at verbosity 0.
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    resources = ray.cluster_resources()
    at_once = concurrency(config, cpus=resources.get("CPU", 0), gpus=resources.get("GPU", 0))
    posted, work = board.post(), train.workspace(config)
    orders = {
        t.name: {
            "config": train.absolute(t.config).model_dump(mode="json"),
            "name": f"{t.name}-{key}",
            "storage": work,
            "snapshot": artifacts.location(config, "prepare"),
            "posted": posted,
            "gpus_per_worker": config.sweep.gpus_per_trial,
        }
        for t in trials
    }
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(_trial, {"CPU": DRIVER_CPUS}),
        param_space={"trial": ray.tune.grid_search(list(orders)), "orders": orders},
        tune_config=ray.tune.TuneConfig(metric="eval_loss", mode="min", max_concurrent_trials=at_once),
        run_config=ray.tune.RunConfig(
            name=f"tune-{key}-{os.getpid()}",
            storage_path=work,
            verbose=0,
            # A trial that is killed starts anew, and its training run goes on from its own checkpoint.
            failure_config=ray.tune.FailureConfig(max_failures=config.train.max_failures),
        ),
    )
    teller = _Teller(len(trials))
    grid = board.watch(tuner.fit, lambda: teller.show(board.latest(posted)))
    fitted: dict[str, train.Fitted] = {}
    for result in grid:
        if result.error is not None:
            raise result.error
        metrics = result.metrics or {}
        if "error" in metrics:
            raise UserError(str(metrics["error"]))
        fitted[metrics["name"]] = train.Fitted(metrics["checkpoint_path"], metrics["numbers"])
    return fitted


def _trial(params: dict[str, Any]) -> dict[str, Any]:
    """What a trial runs: one training run under a name of its own, so that a second attempt goes on where it was."""
    order = params["orders"][params["trial"]]
    config = Config.model_validate(order.pop("config"))
    try:
        fitted = train.fit(config, **order)
    except UserError as error:
        return {"name": params["trial"], "error": str(error), "eval_loss": float("inf")}
    return {
        "name": params["trial"],
        "eval_loss": fitted.numbers["eval_loss"],
        "checkpoint_path": fitted.checkpoint,
        "numbers": fitted.numbers,
    }


def _row(trial: Trial, numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": trial.name,
        "rank": numbers["r"],
        "alpha": numbers["lora_alpha"],
        "use_rslora": numbers["use_rslora"],
        "seed": trial.config.run.seed,
        "parameters": numbers["trainable_parameters"],
        "eval_loss": numbers["eval_loss"],
        "eval_loss_base": numbers["eval_loss_base"],
        "seconds": numbers["seconds"],
        "tokens_per_s": numbers["tokens_per_s"],
    }


class _Teller:
    """Turns the board's news into one progress line over all trials."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self._progress = Progress("sweep")

    def show(self, news: dict[str, dict[str, Any]]) -> None:
        totals = [n["total"] for n in news.values() if "total" in n]
        if totals and self._progress.total is None:  # a new clock: starting up says nothing about the steps
            self._progress = Progress("sweep", totals[0] * self._trials)
        notes: list[str] = []
        for name, n in sorted(news.items()):
            where = ""
            if "total" in n:
                where = f"{n['step']}/{n['total']} loss {n['loss']:.2f} {n['tokens_per_s']:,.0f} tokens/s"
            notes.append(" ".join(filter(None, [name.rpartition("-")[0], where, n.get("phase", "")])))
        self._progress.update(sum(n.get("step", 0) for n in news.values()), " · ".join(notes) or "starting trials")


if __name__ == "__main__":
    cli.main("sweep", run, __doc__)
