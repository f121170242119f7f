"""Deploy the run's merged model as the Serve application `rankline`, and wait until it answers.

Without a flag it deploys; the flags look after a service that is up.
"""

import argparse
import json
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import artifacts, cli, serve_state, serve_wait
from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import say
from jobs.serve_spec import base_url, check_model, make_spec, mounted, needs_key

if TYPE_CHECKING:
    from serve_app.app import Spec


def run(config: Config) -> Any:
    """Deploy this run's merged model, or the base with serve.adapters mounted, and wait until it answers a chat.

    Returns the artifact of the merged model; None when adapters are mounted.
    """
    merged = None
    if config.serve.adapters:
        from cluster import models

        model = models.fetch(config).path
    else:
        merged = artifacts.read(artifacts.location(config, "merge"))
        model = merged.path / "model"
    url = deploy(config, model)
    names = ", ".join([config.serve.served_model_name, *config.serve.adapters])
    say("serve", f"{names} at {url}/v1. Try:\n{curl(config, url)}")
    return merged


def deploy(config: Config, model: Path) -> str:
    """Deploy the model directory `model`, replacing what was deployed, and wait until it answers.

    Returns the base URL, like http://127.0.0.1:8000. Raises UserError with the engine's own words when it cannot
    start, and for a broken model directory, a port in use, or no running cluster.
    """
    check_model(model)
    adapters = mounted(config, model)
    cli.offline(config)
    _connect(config)
    from serve_app import app

    spec = make_spec(config, model)
    user_config = {"keys": serve_state.accepted_keys(required=spec.require_key), "adapters": adapters}
    return _put_up(config, spec, app.sources(), user_config)


def rollback(config: Config) -> str:
    """Put the previous deployment back as it was, or the last that answered if a newer one failed.

    Returns the base URL.
    """
    _connect(config)
    from ray import serve

    from serve_app import app

    state = serve.status().applications.get(app.APP)
    entry = serve_state.before(healthy=state is not None and state.status == "RUNNING")
    spec = app.Spec(**entry["spec"])
    check_model(Path(spec.model))
    say("serve", f"going back to {spec.served_model_name} from {spec.model}")
    user_config = {"keys": serve_state.accepted_keys(required=spec.require_key), "adapters": entry["adapters"]}
    url = _put_up(config, spec, {name: text.encode() for name, text in entry["code"].items()}, user_config)
    return url


def delete(config: Config) -> None:
    """Take the application down, leaving the cluster up; no error when it is not there."""
    _connect(config)
    from ray import serve

    from serve_app import app

    if app.APP in serve.status().applications:
        serve.delete(app.APP)
        say("serve", "stopped")
    else:
        say("serve", "nothing is deployed")


def status(config: Config) -> None:
    """Print the application's state and one line per replica: its node, process, GPUs and log."""
    _connect(config)
    from ray import serve
    from ray.util.state import list_actors

    from serve_app import app

    state = serve.status().applications.get(app.APP)
    if state is None:
        raise UserError("nothing is deployed: `python -m jobs.serve --config FILE` deploys")
    say("serve", f"{app.APP} is {state.status}; listening on {base_url(config)}")
    mine: list[Any] = [("class_name", "=", f"ServeReplica:{app.APP}:{app.DEPLOYMENT}"), ("state", "!=", "DEAD")]
    replicas: list[Any] = list_actors(filters=mine, detail=True)
    for replica in replicas:
        gpus = (replica.required_resources or {}).get("GPU", 0)
        print(f"  {replica.name}  {replica.state}  node {replica.node_id}  PID {replica.pid}  GPUs {gpus:g}")


def add_key(config: Config, name: str) -> None:
    """Make another API key, print it once, and hand it to a running service."""
    from serve_app import auth

    try:
        print(auth.add(serve_state.keys_path(), name))
    except ValueError as error:
        raise UserError(str(error)) from None
    _push_keys(config)


def revoke_key(config: Config, name: str) -> None:
    """Remove an API key, also from a running service, without a restart."""
    from serve_app import auth

    try:
        auth.revoke(serve_state.keys_path(), name)
    except ValueError as error:
        raise UserError(str(error)) from None
    _push_keys(config)


def curl(config: Config, url: str) -> str:
    """A command that asks the service one question, to be pasted into a shell."""
    body = {
        "model": config.serve.served_model_name,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
    }
    key = (
        f'-H "Authorization: Bearer $(cat {shlex.quote(str(serve_state.secret_path()))})" ' if needs_key(config) else ""
    )
    target = f"{url}/v1/chat/completions"
    return f"  curl --noproxy '*' {target} {key}-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _put_up(config: Config, spec: "Spec", code: dict[str, bytes], user_config: dict[str, Any]) -> str:
    began = time.monotonic()
    serve_wait.start_serve(config)
    _submit(spec, code, user_config)
    url = base_url(config)
    serve_wait.until_answered(config, spec, url, began)
    serve_state.remember(spec, code, user_config)
    say("serve", f"ready in {time.monotonic() - began:.0f} s")
    return url


def _submit(spec: "Spec", code: dict[str, bytes], user_config: dict[str, Any]) -> None:
    from ray import serve

    from serve_app import app

    target = serve.RunTarget(app.build(spec, user_config=user_config, code=code), name=app.APP, route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _push_keys(config: Config) -> None:
    entry = serve_state.deployed()
    from cluster import local

    if entry is None or (local.running() is None and config.cluster.address is None):
        return
    _connect(config)
    from ray import serve

    from serve_app import app

    if app.APP not in serve.status().applications:
        return
    spec = app.Spec(**entry["spec"])
    user_config = {"keys": serve_state.accepted_keys(required=spec.require_key), "adapters": entry["adapters"]}
    _submit(spec, {name: text.encode() for name, text in entry["code"].items()}, user_config)
    say("serve", "the running service takes the change over within a second")


def _connect(config: Config) -> None:
    import ray

    if not ray.is_initialized():
        from cluster import local

        local.connect(config, private=False)
    for name in ("ray.serve", "ray"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML config; without one the defaults hold")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override, for example serve.port=8001")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--status", action="store_true", help="show the service and its replicas")
    actions.add_argument("--rollback", action="store_true", help="put the previous deployment back")
    actions.add_argument("--delete", action="store_true", help="take the service down, leaving the cluster up")
    actions.add_argument("--add-key", metavar="NAME", help="make another API key and print it once")
    actions.add_argument("--revoke-key", metavar="NAME", help="remove an API key; no restart")
    args = parser.parse_args()
    plain: dict[str, Callable[[Config], Any]] = {"status": status, "rollback": rollback, "delete": delete}
    action = next((act for name, act in plain.items() if getattr(args, name)), run)

    def act() -> None:
        config = config_module.load(args.config, args.overrides)
        if args.add_key:
            add_key(config, args.add_key)
        elif args.revoke_key:
            revoke_key(config, args.revoke_key)
        else:
            action(config)

    cli.guard(act)


if __name__ == "__main__":
    _main()
