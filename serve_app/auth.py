"""API keys: named, hashed at rest, each with a salt that keeps its prompts out of other tenants' prefix cache.

The key file (mode 600) holds only hashes. Replicas get its content through Serve's `user_config`, so that a key can
be added or revoked without a restart.
"""

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Key:
    """One key as it is kept: SHA-256 of the secret (256 random bits, so no slow hash is needed) and the cache salt."""

    name: str
    sha256: str
    cache_salt: str


class Keyring:
    """Finds the key of an Authorization header."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._by_hash = {key.sha256: key for key in keys}

    def find(self, authorization: bytes | None) -> Key | None:
        """The key that `Bearer <secret>` names, or None. A hash is looked up: no timing tells about a secret."""
        scheme, _, secret = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._by_hash.get(hashlib.sha256(secret.strip()).hexdigest())


def keyring(table: Iterable[Mapping[str, str]]) -> Keyring:
    """A Keyring from plain values, as `plain` makes them."""
    return Keyring(Key(**entry) for entry in table)


def plain(keys: Iterable[Key]) -> list[dict[str, str]]:
    """Keys as JSON values."""
    return [asdict(key) for key in keys]


def read(path: Path) -> list[Key]:
    """The keys of a key file; none when there is no file. ValueError when it is broken or open to others."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return []
    if mode & 0o077:
        raise ValueError(f"{path}: mode {mode:03o} lets others in: run `chmod 600 {path}`")
    try:
        return [Key(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["keys"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a key file ({type(error).__name__}: {error}): delete it to start anew") from None


def add(path: Path, name: str) -> str:
    """Make a key called `name` and keep its hash in `path`; returns the secret, which is shown this once."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(f"{name!r} cannot name a key: use 1 to 64 letters, digits, '.', '_' or '-'")
    keys = read(path)
    if any(key.name == name for key in keys):
        raise ValueError(f"{path}: there is a key called {name!r} already: revoke it first, or take another name")
    secret = "rl-" + secrets.token_urlsafe(32)
    made = Key(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest(), cache_salt=secrets.token_urlsafe(24))
    _write(path, [*keys, made])
    return secret


def revoke(path: Path, name: str) -> None:
    """Remove the key called `name`; ValueError when there is none."""
    keys = read(path)
    if all(key.name != name for key in keys):
        known = ", ".join(key.name for key in keys) or "none"
        raise ValueError(f"{path}: no key called {name!r}; there are: {known}")
    _write(path, [key for key in keys if key.name != name])


def _write(path: Path, keys: list[Key]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as handle:
        json.dump({"keys": plain(keys)}, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(path)
