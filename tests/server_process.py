"""A real service for tests, in a process of its own: python -m tests.server_process MODEL [key=value ...]

Starts a private Ray (no dashboard), deploys MODEL through jobs.serve, prints one line of JSON {"url", "model"} and
stays until its standard input closes; then it takes down what it started.
"""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path


def main() -> None:
    model, *overrides = sys.argv[1:]
    root = tempfile.mkdtemp(prefix="rl-test-")
    place = Path(tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp"))  # Ray's socket paths must stay under 108 bytes

    from cluster import environment
    from jobs import config as config_module
    from jobs import serve

    os.environ["RANKLINE_ROOT"] = root
    os.environ |= environment.variables(place, environment.token())
    config = config_module.load("jobs/configs/laptop.yaml", overrides)

    import ray
    from ray import serve as ray_serve

    ray.init(
        address="local", num_cpus=8, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False,
        object_store_memory=256 << 20, _temp_dir=str(place),
    )  # fmt: skip
    try:
        url = serve.deploy(config, Path(model))
        print(json.dumps({"url": url, "model": config.serve.served_model_name, "ray": str(place)}), flush=True)
        sys.stdin.read()
    finally:
        ray_serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
