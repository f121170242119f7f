"""The whole line: prepare, train (or sweep), merge, compare, serve, load test, report.

    python -m jobs.pipeline --config jobs/configs/laptop.yaml [key=value ...]
    ray job submit --working-dir . -- python -m jobs.pipeline --config jobs/configs/laptop.yaml

A stage whose artifact matches config and inputs is skipped, so the same command again goes on where it stopped.
"""

import time
from collections.abc import Callable

from jobs import artifacts, cli
from jobs.config import Config
from jobs.progress import clock, say


def run(config: Config) -> artifacts.Artifact:
    """Run every stage in order and return the report's artifact."""
    cli.offline(config)
    from jobs import compare, loadtest, merge, prepare, report, serve, sweep, train

    started = time.monotonic()
    tuning = ("sweep", sweep.run) if config.sweep.ranks else ("train", train.run)
    for name, stage in (("prepare", prepare.run), tuning, ("merge", merge.run), ("compare", compare.run)):
        _timed(name, stage, config)
    # A measured endpoint needs no second start: `python -m jobs.serve` puts it up again.
    if not loadtest.is_current(config):
        if not config.load.variants():
            _timed("serve", serve.run, config)  # a sweep of serve flags deploys each variant itself
        _timed("loadtest", loadtest.run, config)
    else:
        say("loadtest", "up to date; the endpoint is not redeployed (`python -m jobs.serve` does)")
    made = _timed("report", report.run, config)
    say("pipeline", f"finished in {clock(time.monotonic() - started)}; report: {made.path}/report.html")
    return made


def _timed(name: str, stage: Callable[[Config], artifacts.Artifact], config: Config) -> artifacts.Artifact:
    say(name, "…")
    started = time.monotonic()
    made = stage(config)
    say(name, f"done in {clock(time.monotonic() - started)}")
    return made


if __name__ == "__main__":
    cli.main("pipeline", run, __doc__)
