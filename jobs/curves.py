"""A run's metrics.jsonl as a picture and as TensorBoard events."""

import json
from pathlib import Path
from typing import Any


def draw(metrics: Path, into: Path) -> None:
    """Training and held-out loss over the steps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = _read(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per supervised token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(into, dpi=120, metadata={"Software": None})


def tensorboard(metrics: Path, into: Path) -> None:
    """Every number of every line as a scalar at its step."""
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(into), flush_secs=3600) as writer:
        for line in _read(metrics):
            kind = "eval" if "eval_loss" in line else "train"
            for key, value in line.items():
                if key != "step":
                    writer.add_scalar(f"{kind}/{key}", value, line["step"])


def _read(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
