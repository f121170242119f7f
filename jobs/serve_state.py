"""What the service must remember between commands, under .rankline/: API keys and the last deployments."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import environment
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import say
from serve_app import auth

if TYPE_CHECKING:
    from serve_app.app import Spec

KEPT = 5  # deployments


def keys_path() -> Path:
    """The file of hashed keys that replicas accept."""
    return environment.folder() / "keys.json"


def secret_path() -> Path:
    """The first key in the clear (mode 600), for this project's own commands and for the user to copy."""
    return environment.folder() / "api-key"


def accepted_keys(*, required: bool) -> list[dict[str, str]]:
    """The keys to hand to replicas. The first time that one is required a key is made, and said where it lies."""
    try:
        keys = auth.read(keys_path())
        if required and not keys:
            secret = auth.add(keys_path(), "first")
            with open(os.open(secret_path(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
                handle.write(secret + "\n")
            say("serve", f'made an API key: {secret_path()}. Send it as "Authorization: Bearer $(cat {secret_path()})"')
            keys = auth.read(keys_path())
    except ValueError as error:
        raise UserError(str(error)) from None
    return auth.plain(keys) if required else []


def secret(config: Config) -> str | None:
    """The key for our own requests: from the environment variable load.api_key_env, else the first key's file."""
    given = os.environ.get(config.load.api_key_env)
    if given:
        return given
    try:
        return secret_path().read_text().strip()
    except FileNotFoundError:
        return None


def remember(spec: "Spec", code: dict[str, bytes], user_config: dict[str, Any]) -> None:
    """Keep a deployment that answered, so that `--rollback` can put it back as it was, its code included."""
    entry = {
        "spec": asdict(spec),
        "code": {name: text.decode() for name, text in code.items()},
        "adapters": user_config.get("adapters", []),
    }
    kept = [one for one in _history() if one != entry]
    _write([*kept, entry][-KEPT:])


def deployed() -> dict[str, Any] | None:
    """The deployment that answered last."""
    history = _history()
    return history[-1] if history else None


def before(*, healthy: bool) -> dict[str, Any]:
    """What to go back to: the deployment before the last that answered, or that one itself if it is not healthy now.

    UserError when there is none.
    """
    history = _history()
    wanted = 2 if healthy else 1
    if len(history) < wanted:
        raise UserError(f"{_path()}: there is no earlier deployment to go back to")
    return history[-wanted]


def _path() -> Path:
    return environment.folder() / "deployments.json"


def _history() -> list[dict[str, Any]]:
    try:
        return json.loads(_path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{_path()}: not valid JSON ({error}): delete it; the service itself goes on") from None


def _write(history: list[dict[str, Any]]) -> None:
    draft = environment.folder() / f".deployments.{os.getpid()}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as handle:
        json.dump(history, handle)
    draft.replace(_path())
