"""Starting Ray Serve itself, and waiting until what was deployed answers a request."""

import http.client
import json
import socket
import time
from typing import TYPE_CHECKING, Any

from jobs import serve_state
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import Progress

if TYPE_CHECKING:
    from serve_app.app import Spec

START_ERROR = "rankline could not start the engine: "  # as serve_app.replica words it


def start_serve(config: Config) -> None:
    """Start Serve's controller and front end; UserError when it runs elsewhere already, or the port is taken."""
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    running = _listening()
    want = (config.serve.host, config.serve.port)
    if running is None:
        check_port_is_free(*want)
        serve.start(
            http_options=HTTPOptions(host=want[0], port=want[1]),
            # The head node's front end is enough: it reaches the replicas of every node.
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


def check_port_is_free(host: str, port: int) -> None:
    """UserError when nothing can listen there."""
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


def until_answered(config: Config, spec: "Spec", url: str, began: float) -> None:
    """Until the new deployment answers a chat request; UserError when it fails or takes too long."""
    from ray import serve

    from serve_app import app

    limit = config.serve.start_timeout_s
    key = serve_state.secret(config) if spec.require_key else None
    with Progress("serve") as progress:
        while True:
            state = serve.status().applications.get(app.APP)
            note = "waiting for Serve"
            if state is not None:
                messages = [d.message for d in state.deployments.values() if d.message] + [state.message]
                if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    kept = any(_replicas(d, "RUNNING") for d in state.deployments.values())
                    after = (
                        "the former deployment goes on"
                        if kept
                        else "`python -m jobs.serve --rollback` puts the last back"
                    )
                    raise UserError(f"{_failure(messages)} ({after})")
                if state.status == "RUNNING":
                    trouble = ask(url, spec.served_model_name, key=key, timeout_s=30)
                    if trouble is None:
                        return
                    if "HTTP 401" in trouble:
                        raise UserError(
                            f"the service runs, but its key is not known here: set {config.load.api_key_env}"
                        )
                    note = f"waiting for an answer ({trouble[:80]})"
                elif any(_replicas(d, "STOPPING") for d in state.deployments.values()):
                    note = "waiting for the former replica to finish its answers"
                else:
                    note = "waiting for the engine to load the model"
            spent = time.monotonic() - began
            if spent > limit:
                raise UserError(f"the service did not answer within serve.start_timeout_s {limit} s: last seen {note}")
            progress.update(0, note)
            time.sleep(0.2)


def ask(url: str, model: str, *, key: str | None, timeout_s: float) -> str | None:
    """One short chat request; None when it was answered, else what came instead."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    # http.client knows no proxies: HTTP_PROXY must not swallow a request to this machine.
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        return None if answer.status == 200 else f"HTTP {answer.status}: {text[:300]}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _failure(messages: list[str]) -> str:
    """The engine's own error out of Serve's status messages."""
    for message in messages:
        for line in message.splitlines():
            if START_ERROR in line:
                cause = line.split(START_ERROR, 1)[1].strip()
                hint = " Here that is serve.kv_cache_gib." if "--kv-cache-memory-bytes" in cause else ""
                return f"the engine did not start: {cause}{hint}"
    return "the service did not start: " + " ".join(m.strip() for m in messages if m)[-2000:]


def _replicas(deployment: Any, state: str) -> int:
    """How many replicas of a deployment's status are in a state, which is a str enumeration."""
    return int(deployment.replica_states.get(state, 0))
