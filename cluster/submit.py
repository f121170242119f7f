"""Run the pipeline, or one stage, as a Ray job: uploads this project, follows the log, ends with the job's status.

    python -m cluster.submit --config FILE [--stage NAME] [key=value ...]

Ctrl-C stops the job, waits until it has cleaned up, and exits with 130. A submitter that is lost loses nothing: the job
runs on, and the dashboard shows it.
"""

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster import environment, local
from jobs import artifacts, cli
from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import say


def submit(config: Config, entrypoint: Sequence[str], *, working_dir: Path) -> int:
    """Run `entrypoint` (words, not a shell line) as a job in a copy of `working_dir`. Returns the exit status.

    0 succeeded, 130 stopped, else the entrypoint's own. KeyboardInterrupt stops the job before it is raised again.
    UserError when there is no cluster, or when it does not take the job.
    """
    client = _client(_address(config))
    # What .gitignore and .rayignore name stays here, and Ray's own defaults (.git, .venv) too.
    try:
        job = client.submit_job(
            entrypoint=shlex.join(entrypoint),
            runtime_env={"working_dir": str(working_dir)},
            metadata={"run": config.run.name},
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the cluster did not take the job: {_first_line(error)}") from None
    say("submit", f"job {job}")
    try:
        asyncio.run(_follow(client, job))
    except KeyboardInterrupt:
        say("submit", f"stopping {job}")
        client.stop_job(job)
        _wait(client, job, timeout_s=60)
        raise
    info = _wait(client, job, timeout_s=60)
    if str(info.status) == "SUCCEEDED":
        return 0
    say("submit", f"job {job}: {info.status}")
    if str(info.status) == "STOPPED":
        return 130
    if info.driver_exit_code is None:  # it never ran: nothing of this is in its log
        print(f"error: {info.message}", file=sys.stderr)
    return info.driver_exit_code or 1


async def _follow(client: Any, job: str) -> None:
    """Print the job's log as it grows, until the job ends; goes on where it was when the connection breaks."""
    shown = 0
    for attempt in range(10):
        seen = 0
        try:
            async for text in client.tail_job_logs(job):
                seen += len(text)
                if seen > shown:
                    print(text[shown - seen :], end="", flush=True)
                    shown = seen
            if client.get_job_status(job).is_terminal():
                return
        except Exception as error:  # aiohttp's, requests' and Ray's own kinds: all mean that the line went dead
            if attempt == 9:
                raise UserError(f"lost the cluster while job {job} ran: {_first_line(error)}") from None
        await asyncio.sleep(1)


def _wait(client: Any, job: str, *, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (info := client.get_job_info(job)).status.is_terminal():
        if time.monotonic() > deadline:
            raise UserError(f"job {job} is still {info.status} after {timeout_s:.0f} s: look at the dashboard")
        time.sleep(0.2)
    return info


def _client(address: str) -> Any:
    import logging

    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.ERROR)  # twenty lines about what is not uploaded
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            f"no Jobs API at {address}: {_first_line(error)}. Look with `python -m cluster.local status`"
        ) from None


def _address(config: Config) -> str:
    """URL of the Jobs API: cluster.address if it is one, RAY_API_SERVER_ADDRESS, or the local head's."""
    environment.bypass_proxies(os.environ)
    if config.cluster.address and "://" in config.cluster.address:
        return config.cluster.address
    if address := os.environ.get("RAY_API_SERVER_ADDRESS"):
        return address
    head = local.running()
    if head is None:
        raise UserError(
            "no cluster to submit to: start one with `python -m cluster.local start`, or set RAY_API_SERVER_ADDRESS "
            "(and RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH) for one elsewhere"
        )
    os.environ.update(local.client_environment(head))
    return head.dashboard


def _config_argument(path: str, working_dir: Path, address: str) -> str:
    """How the job names the config file: relative to the upload, or absolute when the cluster is this machine."""
    file = Path(path).resolve()
    if file.is_relative_to(working_dir):
        return str(file.relative_to(working_dir))
    if urlsplit(address).hostname in environment.LOOPBACK:
        return str(file)
    raise UserError(f"--config {path}: lies outside {working_dir}, which is all that the cluster gets: copy it there")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML config; without one the defaults hold")
    parser.add_argument("--stage", metavar="NAME", default="pipeline", help="a module of jobs/ (default: pipeline)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override, for example run.name=mine")
    args = parser.parse_args()

    def act() -> None:
        config = config_module.load(args.config, args.overrides)  # a mistake shows here, not in a job
        working_dir = Path.cwd()
        if not (working_dir / "jobs" / f"{args.stage}.py").is_file():
            raise UserError(f"jobs/{args.stage}.py: not in {working_dir}; run this in the project's directory")
        words = ["python", "-m", f"jobs.{args.stage}"]
        if args.config:
            words += ["--config", _config_argument(args.config, working_dir, _address(config))]
        status = submit(config, [*words, *args.overrides], working_dir=working_dir)
        if status == 0 and args.stage == "pipeline":
            say("submit", f"report: {artifacts.location(config, 'report')}/report.html")
        sys.exit(status)

    cli.guard(act)


if __name__ == "__main__":
    _main()
