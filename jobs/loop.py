"""The training loop of one worker: steps and held-out loss. Knows nothing of Ray.

The gradient of a step is that of (sum of the loss over supervised tokens) / (their number over all workers). Each
worker divides by the global number and one all-reduce sums the adapter's gradients, so packing, accumulation and the
number of workers change nothing. There is no DistributedDataParallel, hence no averaging to undo: the adapter is the
only thing that is reduced, and it is small.
"""

import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobs import checkpoint, lora, packing
from jobs.config import Config
from jobs.errors import UserError

Row = tuple[Any, Any]


@dataclass
class Rows:
    """A split in memory: token ids and loss masks per row, lengths and supervised tokens."""

    rows: list[Row]
    lengths: list[int] = field(init=False)
    supervised: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [len(ids) for ids, _ in self.rows]
        self.supervised = [packing.supervised_tokens([mask]) for _, mask in self.rows]


@dataclass
class Loop:
    """One worker's training run; `state` is what a checkpoint keeps."""

    config: Config
    tuned: lora.Tuned
    train: Rows
    held_out: Rows
    snapshot_hash: str
    rank: int = 0
    world: int = 1
    tell: Callable[..., None] = lambda **_: None
    save: Callable[[dict[str, Any], Any, torch.optim.Optimizer], None] = lambda *_: None
    state: dict[str, Any] = field(default_factory=lambda: {"step": 0, "metrics": [], "train_tokens": 0, "train_s": 0.0})

    def __post_init__(self) -> None:
        train = self.config.train
        if not self.train.rows or not self.held_out.rows:
            raise UserError("the snapshot has no training or no held-out rows: give data.path more rows")
        self.parameters = self.tuned.parameters()
        b = [p for n, p in sorted(self.tuned.model.named_parameters()) if p.requires_grad and ".lora_B." in n]
        rest = [p for p in self.parameters if not any(p is q for q in b)]
        ratio = self.config.lora.loraplus_lr_ratio
        groups = [{"params": rest, "ratio": 1.0}, {"params": b, "ratio": ratio}]
        self.optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, weight_decay=train.weight_decay)
        self.total = packing.total_steps(
            len(self.train.rows), batch_size=train.batch_size, num_epochs=train.num_epochs, max_steps=train.max_steps
        )

    def resume(self, directory: Path) -> None:
        """Go on from a checkpoint."""
        self.state = checkpoint.load(
            directory, model=self.tuned.model, optimizer=self.optimizer, device=self.tuned.device
        )

    def steps(self) -> dict[str, Any]:
        """Train to the end; returns the figures of the run."""
        train, state = self.config.train, self.state
        started = time.monotonic() - state.get("elapsed_s", 0.0)
        if "eval_loss_base" not in state:
            with self.tuned.model.disable_adapter():
                state["eval_loss_base"] = self.evaluate("held-out loss of the base")
            state["metrics"].append({"step": 0, "eval_loss": state["eval_loss_base"]})
        while state["step"] < self.total:
            line = self.step(state["step"])
            state["step"] += 1
            done, last = state["step"], state["step"] == self.total
            state["train_tokens"] += line["tokens"]
            state["train_s"] += line.pop("step_s")
            state["elapsed_s"] = time.monotonic() - started
            state["metrics"].append({**line, "elapsed_s": round(state["elapsed_s"], 2)})
            shown = {key: line[key] for key in ("loss", "tokens_per_s", "grad_norm")}
            self.tell(phase="", step=done, total=self.total, **shown)
            if last or (train.eval_steps and done % train.eval_steps == 0):
                state["eval_loss"] = self.evaluate("held-out loss")
                state["metrics"].append({"step": done, "eval_loss": state["eval_loss"]})
                self.tell(eval_loss=state["eval_loss"])
            state["elapsed_s"] = time.monotonic() - started
            if last or done % train.checkpoint_steps == 0:
                state |= self.figures()
                self.save(state, self.tuned.model, self.optimizer)
        return {key: value for key, value in state.items() if key != "metrics"}

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns its line of metrics.jsonl."""
        train, began = self.config.train, time.monotonic()
        chosen = packing.batch_rows(
            self.snapshot_hash,
            seed=self.config.run.seed,
            step=step,
            rows=len(self.train.rows),
            batch_size=train.batch_size,
        ).tolist()
        lengths = [self.train.lengths[i] for i in chosen]
        mine = [chosen[i] for i in packing.deal(lengths, workers=self.world)[self.rank]]
        supervised = sum(self.train.supervised[i] for i in chosen)
        torch.manual_seed(hash((self.config.run.seed, step, self.rank)))  # dropout; int hashes are the same everywhere
        self.tuned.model.train()
        loss, too_big = torch.zeros((), device=self.tuned.device), 0
        for group in packing.bins([self.train.lengths[i] for i in mine], capacity=train.micro_batch_tokens):
            batch = packing.pack([self.train.rows[mine[i]] for i in group])
            try:
                part = lora.loss_sum(self.tuned, batch) / supervised
                part.backward()
            except torch.OutOfMemoryError:  # told to the other workers, which wait for this one's gradients
                too_big = len(batch.input_ids)
                break
            loss += part.detach()
        value, too_big = self._sum_over_workers(loss, too_big)
        if too_big:
            raise UserError(self._too_big(step, too_big))
        if not math.isfinite(value):
            raise UserError(
                f"the loss is {value} at step {step + 1}: lower train.learning_rate (now {train.learning_rate:g}), "
                f"raise train.warmup_ratio or lower train.max_grad_norm (now {train.max_grad_norm:g})"
            )
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, train.max_grad_norm))
        rate = packing.learning_rate_at(
            step, total=self.total, peak=train.learning_rate, warmup_ratio=train.warmup_ratio
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        spent, tokens = time.monotonic() - began, sum(lengths)
        return {
            "step": step + 1,
            "epoch": round((step + 1) / packing.steps_per_epoch(len(self.train.rows), train.batch_size), 4),
            "loss": value,
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": tokens,
            "tokens_per_s": round(tokens / spent, 1),
            "step_s": spent,
        }

    def evaluate(self, phase: str) -> float:
        """Mean loss over the supervised tokens of the held-out rows."""
        self.tuned.model.eval()
        groups = packing.bins(self.held_out.lengths, capacity=self.config.train.micro_batch_tokens)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for index, group in enumerate(groups[self.rank :: self.world]):
                self.tell(phase=f"{phase} {index * self.world}/{len(groups)}")
                total += lora.loss_sum(self.tuned, packing.pack([self.held_out.rows[i] for i in group])).double().cpu()
        if self.world > 1:
            total = total.to(self.tuned.device)
            dist.all_reduce(total)
        return float(total) / sum(self.held_out.supervised)

    def figures(self) -> dict[str, Any]:
        """Figures of the run so far, for the checkpoint and the manifest."""
        if self.tuned.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.tuned.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "tokens_per_s": round(self.state["train_tokens"] / max(self.state["train_s"], 1e-9), 1),
            "trainable_parameters": sum(p.numel() for p in self.parameters),
            "peak_memory_gib": round(peak / 2**30, 2),
            "pid": os.getpid(),
        }

    def _sum_over_workers(self, loss: torch.Tensor, too_big: int) -> tuple[float, int]:
        """Sum loss and gradients; also the tokens of a pass that did not fit in memory, summed, 0 for none."""
        for parameter in self.parameters:
            if parameter.grad is None:  # a worker whose share of a short batch is empty
                parameter.grad = torch.zeros_like(parameter)
        if self.world == 1:
            return float(loss), too_big
        head = torch.stack([loss, torch.full_like(loss, too_big)])
        flat = torch.cat([head, *(p.grad.reshape(-1) for p in self.parameters)])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        at = 2
        for parameter in self.parameters:
            parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        return float(flat[0]), int(flat[1])

    def _too_big(self, step: int, tokens: int) -> str:
        train, longest = self.config.train, max(self.train.lengths)
        total = torch.cuda.mem_get_info(self.tuned.device)[1] if self.tuned.device.type == "cuda" else 0
        have = f" on a card of {total / 2**30:.1f} GiB" if total else ""
        ways = [] if train.gradient_checkpointing else ["set train.gradient_checkpointing=true (a third more work)"]
        if longest <= train.micro_batch_tokens // 2:
            # What a pass takes beside the weights grows with its tokens, so half the tokens take half of it.
            ways.append(
                f"lower train.micro_batch_tokens from {train.micro_batch_tokens} to {train.micro_batch_tokens // 2}"
            )
        else:
            ways.append(f"lower data.max_seq_len: one row alone has {longest} tokens")
        return f"out of memory at step {step + 1}, in a pass of {tokens} tokens{have}: " + ", or ".join(ways)
