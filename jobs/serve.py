"""Deploy a model as the Serve application `rankline` and wait until it answers.

python -m jobs.serve --config FILE [key=value ...]    deploy the run's merged model
python -m jobs.serve --delete                         take the service down, leaving the cluster up
"""

import http.client
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

from jobs import artifacts, cli
from jobs.config import Config, resolve_storage
from jobs.errors import UserError
from jobs.progress import Progress, say

START_ERROR = "rankline could not start the engine: "


def run(config: Config) -> artifacts.Artifact:
    """Deploy this run's merged model; returns its artifact once the service answers a chat request."""
    merged = artifacts.read(artifacts.location(config, "merge"))
    url = deploy(config, merged.path / "model")
    say("serve", f"{config.serve.served_model_name} answers at {url}/v1. Try:\n{curl(config, url)}")
    return merged


def deploy(config: Config, model: Path) -> str:
    """Deploy the model directory `model`, replacing what was deployed, and wait until it answers.

    Returns the base URL, like http://127.0.0.1:8000. Raises UserError with the engine's own words when it cannot
    start, and for a broken model directory, a port in use, or no running cluster.
    """
    check_model(model)
    cli.offline(config)
    _connect(config)
    from ray import serve

    from serve_app import app

    for name in ("ray.serve", "ray"):
        logging.getLogger(name).setLevel(logging.WARNING)
    began = time.monotonic()
    spec = make_spec(config, model)
    _start_serve(config)
    application = app.build(spec)
    serve.run_many(
        [serve.RunTarget(application, name=app.APP, route_prefix="/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    url = base_url(config)
    _wait(config, url, began)
    say("serve", f"ready in {time.monotonic() - began:.0f} s")
    return url


def delete(config: Config) -> None:
    """Take the application down; nothing happens when it is not there."""
    _connect(config)
    from ray import serve

    from serve_app import app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if app.APP in serve.status().applications:
        serve.delete(app.APP)
        say("serve", "stopped")
    else:
        say("serve", "nothing is deployed")


def make_spec(config: Config, model: Path) -> Any:
    """What to deploy: the config's serve section as engine flags and resources. Needs an initialized Ray."""
    import ray

    from serve_app.app import Spec

    wanted = config.serve
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    gpus = wanted.tensor_parallel_size if on_gpus else 0
    if on_gpus and ray.cluster_resources()["GPU"] < gpus * wanted.num_replicas:
        raise UserError(
            f"serve.num_replicas {wanted.num_replicas} x serve.tensor_parallel_size {gpus} needs "
            f"{gpus * wanted.num_replicas} GPUs; the cluster has {ray.cluster_resources()['GPU']:g}"
        )
    flags: dict[str, Any] = {
        "model": str(model),
        "served_model_name": wanted.served_model_name,
        "max_model_len": wanted.max_model_len,
        "max_num_seqs": wanted.max_num_seqs,
        "max_num_batched_tokens": wanted.max_num_batched_tokens,
        "tensor_parallel_size": wanted.tensor_parallel_size if on_gpus else 1,
        "enable_prefix_caching": wanted.enable_prefix_caching,
        "enforce_eager": wanted.enforce_eager,
        "load_format": wanted.load_format,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "generation_config": "vllm",  # the model's own file would change sampling defaults
        "allowed_origins": [],  # no web page of another origin may call a service on loopback
        "disable_fastapi_docs": True,
    }
    flags |= (
        {"gpu_memory_utilization": wanted.gpu_memory_utilization}
        if on_gpus
        else {"kv_cache_memory_bytes": int(wanted.kv_cache_gib * 2**30)}
    )
    flags |= wanted.engine_args
    env = {"HF_HUB_OFFLINE": "1"}
    cache = resolve_storage(config.model.cache)
    if "://" not in cache:  # compiled kernels outlive the replica, and are found again by the next
        env["VLLM_CACHE_ROOT"] = f"{cache}/.vllm"
    free = ray.available_resources()
    return Spec(
        model=str(model),
        served_model_name=wanted.served_model_name,
        flags=flags,
        num_replicas=wanted.num_replicas,
        gpus=gpus,
        cpus=wanted.cpus_per_replica,
        threads=wanted.cpu_threads,
        max_requests=wanted.max_requests or max(1024, 4 * wanted.max_num_seqs),
        drain_s=float(wanted.drain_timeout_s),
        env=env,
        surge=on_gpus and free.get("GPU", 0) >= gpus,
    )


def check_model(model: Path) -> None:
    """Raise UserError for a directory that no engine could load."""
    if not model.is_dir():
        raise UserError(f"{model}: no such model directory: run `python -m jobs.merge` first")
    try:
        json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{model}: no config.json, so this is no model directory") from None
    except ValueError as error:
        raise UserError(f"{model / 'config.json'}: not valid JSON: {error}") from None
    if not any(model.glob("tokenizer*")):
        raise UserError(f"{model}: no tokenizer files")


def base_url(config: Config) -> str:
    """Where the service of this config listens, as seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.serve.host, config.serve.host)
    return f"http://{host}:{config.serve.port}"


def curl(config: Config, url: str) -> str:
    """A command that asks the service one question, to be pasted into a shell."""
    body = {
        "model": config.serve.served_model_name,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
    }
    text = json.dumps(body).replace("'", "'\\''")
    return f"  curl --noproxy '*' {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{text}'"


def ask(url: str, model: str, timeout_s: float) -> str | None:
    """One short chat request; None when it was answered, else what came instead."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    # http.client knows no proxies: HTTP_PROXY must not swallow a request to this machine.
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        return None if answer.status == 200 else f"HTTP {answer.status}: {text[:300]}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _connect(config: Config) -> None:
    import ray

    if not ray.is_initialized():
        from cluster import local

        local.connect(config, private=False)


def _start_serve(config: Config) -> None:
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    running = _listening()
    want = (config.serve.host, config.serve.port)
    if running is None:
        _check_port_is_free(*want)
        # Serve's front end on the head node is enough: it reaches replicas on every node.
        serve.start(
            http_options=HTTPOptions(host=want[0], port=want[1]),
            proxy_location="HeadOnly",
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
            # Serve's log files stay; copies on standard error would reach every terminal attached to the cluster.
            controller_options={"runtime_env": {"env_vars": {"RAY_SERVE_LOG_TO_STDERR": "0"}}},
        )
    elif running != want:
        raise UserError(
            f"Serve already listens on {running[0]}:{running[1]} in this cluster, and cannot change that while it "
            f"runs: use serve.host={running[0]} serve.port={running[1]}, or `make stop` and start the cluster again"
        )


def _listening() -> tuple[str, int] | None:
    from ray.serve.context import _get_global_client  # pyright: ignore[reportPrivateUsage]

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    options = client.http_config
    return str(options.host), int(options.port)


def _check_port_is_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"serve.port: cannot listen on {host}:{port} ({error.strerror}): stop what uses it, or choose another "
                "with serve.port=…"
            ) from None


def _wait(config: Config, url: str, began: float) -> None:
    """Until the new deployment answers a chat request; UserError when it fails or takes too long."""
    from ray import serve

    from serve_app import app

    limit = config.serve.start_timeout_s
    with Progress("serve") as progress:
        while True:
            state = serve.status().applications.get(app.APP)
            note = "waiting for Serve"
            if state is not None:
                messages = [d.message for d in state.deployments.values() if d.message] + [state.message]
                if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise UserError(_failure(messages))
                if state.status == "RUNNING":
                    trouble = ask(url, config.serve.served_model_name, timeout_s=30)
                    if trouble is None:
                        return
                    note = f"waiting for an answer ({trouble[:80]})"
                else:
                    note = "waiting for the engine to load the model"
            spent = time.monotonic() - began
            if spent > limit:
                raise UserError(f"the service did not answer within serve.start_timeout_s {limit} s: last seen {note}")
            progress.update(0, note)
            time.sleep(0.2)


def _failure(messages: list[str]) -> str:
    """The engine's own error out of Serve's status messages."""
    for message in messages:
        for line in message.splitlines():
            if START_ERROR in line:
                cause = line.split(START_ERROR, 1)[1].strip()
                hint = " Here that is serve.kv_cache_gib." if "--kv-cache-memory-bytes" in cause else ""
                return f"the engine did not start: {cause}{hint}"
    return "the service did not start: " + " ".join(m.strip() for m in messages if m)[-2000:]


if __name__ == "__main__":
    import sys

    if "--delete" in sys.argv:
        from jobs import config as config_module

        rest = [a for a in sys.argv[1:] if a != "--delete"]
        path = rest[rest.index("--config") + 1] if "--config" in rest else None
        cli.guard(lambda: delete(config_module.load(path, [a for a in rest if "=" in a])))
    cli.main("serve", run, __doc__)
