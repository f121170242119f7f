"""The base model with a LoRA adapter in it, ready to train: one function that loads, one that gives the loss."""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs import kernels, pointwise
from jobs.config import Config
from jobs.errors import UserError
from jobs.packing import Packed


@dataclass
class Tuned:
    """A PEFT model, its backbone (hidden states) and head, and the device they are on."""

    model: Any
    backbone: Any
    head: Tensor
    device: torch.device
    autocast: bool

    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapter's parameters, in a fixed order."""
        return [p for _, p in sorted(self.model.named_parameters()) if p.requires_grad]


def load(path: Path, config: Config, *, seed: int, device: torch.device, revision: str | None) -> Tuned:
    """Load the base from `path`, quantize it as configured, and add a fresh adapter drawn from `seed`.

    The same seed gives the same adapter in every process. Raises UserError when no layer matches the targets.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging as chatter

    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.model.dtype]
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": kernels.register_attention()}
    if config.train.quantization == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    base = AutoModelForCausalLM.from_pretrained(str(path), device_map={"": device}, **options)
    base.config.use_cache = False
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # In evaluation bitsandbytes repacks a 4-bit weight for a CPU kernel that has no gradient, for good.
            module.__dict__["support_avx512bf16_for_cpu"] = False
    lora, targets = config.lora, config.lora.target_modules
    torch.manual_seed(seed)
    warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path` was renamed")
    try:
        model = get_peft_model(
            base,
            LoraConfig(
                r=lora.r,
                lora_alpha=lora.lora_alpha,
                lora_dropout=lora.lora_dropout,
                target_modules=targets if isinstance(targets, str) else list(targets),
                use_rslora=lora.use_rslora,
                use_dora=lora.use_dora,
                task_type="CAUSAL_LM",
                base_model_name_or_path=config.model.source,
                revision=revision,
            ),
        )
    except ValueError as error:
        names = sorted({n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)})
        raise UserError(f"lora.target_modules {targets}: {error}. Linear layers here are {', '.join(names)}") from None
    wanted = model.peft_config["default"]
    wanted.base_model_name_or_path, wanted.revision = config.model.source, revision
    layers = sum(1 for name, _ in model.named_modules() if name.endswith(".lora_A"))
    fused = kernels.fuse_lora(model)
    compiled = device.type == "cuda" if config.train.compile is None else config.train.compile
    if compiled:
        pointwise.fuse(base, compiled=True)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Tuned(
        model=model,
        backbone=base.model,
        head=base.lm_head.weight,
        device=device,
        # PEFT's own forward multiplies float32 adapters: autocast brings those layers to bfloat16.
        autocast=dtype == torch.bfloat16 and fused < layers,
    )


def loss_sum(tuned: Tuned, batch: Packed) -> Tensor:
    """Cross-entropy summed over the supervised tokens of a packed batch, float32 scalar with gradient."""
    device, on_gpu = tuned.device, tuned.device.type == "cuda"
    with torch.autocast(device.type, torch.bfloat16, enabled=tuned.autocast):
        hidden = tuned.backbone(
            input_ids=torch.from_numpy(batch.input_ids)[None].to(device),
            position_ids=torch.from_numpy(batch.position_ids)[None].to(device),
            use_cache=False,
            boundaries=batch.boundaries.tolist(),
            cu_seqlens=torch.from_numpy(batch.boundaries).to(device, torch.int32) if on_gpu else None,
        ).last_hidden_state[0]
        predicted = hidden[torch.from_numpy(batch.predict).to(device)].to(tuned.head.dtype)
    return kernels.HeadLoss.apply(predicted, tuned.head, torch.from_numpy(batch.targets).to(device))  # type: ignore
