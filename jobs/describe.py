"""What is in a model: files, shape, parameters, KV cache, tokenizer, chat template, tensors. Nothing is loaded.

python -m jobs.describe MODEL_DIR                      a model or adapter directory, or a stage's artifact
python -m jobs.describe FILE.gguf
python -m jobs.describe org/name --revision COMMIT     a hub id, fetched into the model cache first
python -m jobs.describe MODEL_DIR --text "Why is the sky blue?"
python -m jobs.describe MODEL_DIR --tensor model.norm.weight
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jobs import cli, describe_page, gguf_header, model_facts, safetensors_header, tensor_facts
from jobs.errors import UserError
from jobs.text_page import Page, emit


def describe(path: Path) -> dict[str, Any]:
    """All facts of a model directory, adapter directory or GGUF file, as plain values (see jobs.model_facts).

    Raises UserError when there is nothing to describe; faults of a model are listed under "problems" instead.
    """
    if path.is_file():
        return model_facts.of_gguf(path, _gguf(path))
    return model_facts.of_directory(_model_directory(path))


def tokens(path: Path, text: str) -> list[dict[str, Any]]:
    """The pieces of `text` under the model's tokenizer: [{"id", "piece", "whole"}], no special tokens added.

    `whole` is False where a piece is only some bytes of a character.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{path}: no tokenizer.json: --text needs a model directory with its tokenizer")
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for anything it cannot read
        raise UserError(f"{file}: not a tokenizer that can be read ({error}): copy it again") from None
    found: list[dict[str, Any]] = []
    for number in tokenizer.encode(text, add_special_tokens=False).ids:
        piece = tokenizer.decode([number], skip_special_tokens=False)
        found.append({"id": number, "piece": piece, "whole": "\ufffd" not in piece})
    return found


def tensor(path: Path, name: str) -> dict[str, Any]:
    """Shape, dtype, size, statistics and a corner of one tensor; only its bytes are read."""
    if path.is_file():
        held: Mapping[str, Any] = _gguf(path).tensors
    else:
        directory = _model_directory(path)
        adapter = directory / "adapter_model.safetensors"
        if adapter.is_file():
            held = safetensors_header.read_file(adapter)[0]
        else:
            held = safetensors_header.read_model(directory)
    if name not in held:
        import difflib

        near = difflib.get_close_matches(name, list(held), n=3, cutoff=0.3)
        raise UserError(f"{path}: no tensor {name!r}; {'near it: ' + ', '.join(near) if near else 'see --tensors'}")
    one = held[name]
    file = cast(Path, getattr(one, "file", path))
    place = tensor_facts.Place(name, one.dtype, one.shape, file, one.start)
    facts = {"name": name, "dtype": one.dtype, "shape": list(one.shape), "bytes": one.bytes, "file": file.name}
    return facts | tensor_facts.statistics(place)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jobs.describe`; never returns. Exit status 1 when the model has a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.describe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory, GGUF file, hub id or smollm2-135m-instruct")
    parser.add_argument("--revision", help="pinned revision of a hub id")
    parser.add_argument("--text", action="append", default=[], help="show its pieces and ids; may be given again")
    parser.add_argument("--tensor", metavar="NAME", help="statistics and a corner of one tensor")
    parser.add_argument("--tensors", action="store_true", help="list every tensor instead of groups")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    args = parser.parse_args(argv)
    cli.guard(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    path = _find(args.model, args.revision)
    page = Page()
    facts: dict[str, Any] = {}
    if args.text:
        directory = _model_directory(path)
        facts["texts"] = []
        for text in cast(list[str], args.text):
            pieces = tokens(directory, text)
            facts["texts"].append({"text": text, "tokens": pieces})
            describe_page.show_tokens(page, text, pieces)
    if args.tensor:
        facts["tensor"] = tensor(path, args.tensor)
        describe_page.show_tensor(page, facts["tensor"])
    if not args.text and not args.tensor:
        facts = describe(path)
        describe_page.show(page, facts, every_tensor=args.tensors)
    emit(json.dumps(facts, indent=1, ensure_ascii=False, default=str) if args.json else page.text())
    if facts.get("problems"):
        raise UserError("\n       ".join(cast(list[str], facts["problems"])))


def _find(model: str, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.count("/") > 1 or model.startswith((".", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise UserError(f"{model}: no such file or directory")
    from cluster import models
    from jobs import config

    given = [f"model.source={model}", *([f"model.revision={revision}"] if revision else [])]
    return models.fetch(config.load(None, given)).path


def _model_directory(path: Path) -> Path:
    """The directory to describe: `path`, or the model or adapter inside a stage's artifact."""
    if not path.is_dir():
        raise UserError(f"{path}: expected a model directory")
    if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        for inner in ("model", "adapter"):
            if (path / inner).is_dir():
                return path / inner
        known = [file for file in path.iterdir() if file.name.endswith((".safetensors", ".json", *model_facts.PICKLES))]
        if not known:
            raise UserError(f"{path}: no model here: expected config.json, the tokenizer and safetensors files")
    return path


def _gguf(path: Path) -> gguf_header.Gguf:
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: give the directory that holds this file, {path.parent}")
    if path.name.endswith(model_facts.PICKLES):
        raise UserError(f"{path}: a pickle, which can run code when loaded: it was not opened; use safetensors instead")
    return gguf_header.read(path)


if __name__ == "__main__":
    main()
