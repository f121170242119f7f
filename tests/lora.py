"""Small bases and adapters, made by transformers and PEFT, for the tests of merge, compare and adapters."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM


def save_base(path: Path, **config: Any) -> Path:
    """A tiny random model of transformers' `model_type`, in BF16, weights large enough to matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(path)
    return path


def save_adapter(base: Path, path: Path, **lora: Any) -> Path:
    """An adapter with random A, B and biases (PEFT's own start has B = 0, which would test nothing)."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
            elif parameter.requires_grad:
                parameter.mul_(1 + torch.rand(parameter.shape))
    peft.save_pretrained(path)
    return path


def peft_merge(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The state that PEFT's merge_and_unload gives in BF16."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    return dict(merged.state_dict())


def bf16_step(value: torch.Tensor) -> torch.Tensor:
    """The distance between neighbouring BF16 numbers at |value|: 8 significant bits."""
    exponent = torch.floor(torch.log2(value.double().abs().clamp_min(2.0**-126)))
    return 2.0 ** (exponent - 7)
