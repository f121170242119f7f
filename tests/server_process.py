"""A real service for tests, in a process of its own: python -m tests.server_process MODEL [key=value ...]

Starts a private Ray (no dashboard), deploys MODEL through jobs.serve, prints one line of JSON {"url", "model"} and
stays until its standard input closes; then it takes down what it started. A line on its input is a list of further
overrides to deploy with, or "rollback"; either is answered with such a line of JSON, or {"error": ...}.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from jobs.errors import UserError


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # a time-out above us: take down what we started all the same
    model, *overrides = sys.argv[1:]
    overrides.insert(0, f"model.cache={os.getcwd()}/models")  # vLLM's caches last from one test run to the next
    root = tempfile.mkdtemp(prefix="rl-test-")
    place = Path(tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp"))  # Ray's socket paths must stay under 108 bytes

    from cluster import environment, processes
    from jobs import config as config_module
    from jobs import serve

    os.environ["RANKLINE_ROOT"] = root
    os.environ |= environment.variables(place, environment.token())
    # HAProxy's last resort: by default one port for all clusters of a machine, so one would answer for another.
    os.environ["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(processes.free_port())
    config = config_module.load("jobs/configs/laptop.yaml", overrides)

    import ray
    from ray import serve as ray_serve

    ray.init(
        address="local", num_cpus=8, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False,
        object_store_memory=256 << 20, _temp_dir=str(place),
    )  # fmt: skip
    try:
        answer(lambda: serve.deploy(config, Path(model)), config.serve.served_model_name)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked == "rollback":
                answer(lambda: serve.rollback(config), config.serve.served_model_name)
            else:
                new = config_module.load("jobs/configs/laptop.yaml", [*overrides, *asked])
                answer(lambda new=new: serve.deploy(new, Path(model)), new.serve.served_model_name)
    finally:
        ray_serve.shutdown()
        ray.shutdown()
        for directory in (root, place):
            shutil.rmtree(directory, ignore_errors=True)


def answer(action: Callable[[], str], model: str) -> None:
    try:
        print(json.dumps({"url": action(), "model": model}), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
