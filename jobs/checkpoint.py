"""What a training run needs to go on exactly where it was, in one directory.

    adapter/        adapter_config.json, adapter_model.safetensors (PEFT's layout)
    optimizer.pt    AdamW's moments
    metrics.jsonl   one line per step and evaluation so far
    state.json      step, losses, and size and SHA-256 of the files above; written last

There is no random state and no data position to keep: batches and dropout are functions of the seed and the step. A
directory whose files differ from state.json (an upload that was cut off) is refused.
"""

import json
from pathlib import Path
from typing import Any

import torch

from jobs.artifacts import sha256_file

STATE = "state.json"


def save(into: Path, *, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write a checkpoint; `state` holds step, metrics (list of lines) and figures, as plain values."""
    model.save_pretrained(str(into / "adapter"), save_embedding_layers=False)
    (into / "adapter" / "README.md").unlink(missing_ok=True)  # PEFT's template of a model card, all blanks
    torch.save(optimizer.state_dict(), into / "optimizer.pt")
    lines = "".join(json.dumps(line) + "\n" for line in state["metrics"])
    (into / "metrics.jsonl").write_text(lines, encoding="utf-8")
    files = sorted(p for p in into.rglob("*") if p.is_file())
    listed = {p.relative_to(into).as_posix(): [p.stat().st_size, sha256_file(p)] for p in files}
    rest = {key: value for key, value in state.items() if key != "metrics"}
    (into / STATE).write_text(json.dumps({**rest, "files": listed}), encoding="utf-8")


def read_state(path: Path) -> dict[str, Any]:
    """The state of a complete checkpoint, metrics lines included. Raises ValueError when a file is cut off."""
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    for name, (size, digest) in state.pop("files").items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size or sha256_file(file) != digest:
            raise ValueError(f"{file}: differs from {STATE}, so this checkpoint is cut off: delete {path}")
    state["metrics"] = [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]
    return state


def load(path: Path, *, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """Put a checkpoint's adapter and optimizer state into fresh ones; returns the state."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    state = read_state(path)
    loaded = set_peft_model_state_dict(model, load_file(path / "adapter" / "adapter_model.safetensors", str(device)))
    if loaded.unexpected_keys:
        raise ValueError(f"{path / 'adapter'}: holds {loaded.unexpected_keys[0]}, which this model does not have")
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location=device, weights_only=True))
    return state
