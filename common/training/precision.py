"""Precisions: what they are to torch, what a forward pass runs in, and which device has them."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from common.errors import UserError

PRECISION_NAMES = {
    "auto": "",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp64": "float64",
    "float64": "float64",
}
"""Maps the names that the flags of text training accept to full names; ``auto`` depends on the
device."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolved_precision(name: str, device: torch.device) -> str:
    """Returns float32, bfloat16, float16 or float64 by one of PRECISION_NAMES.

    ``auto`` is float32 on a CPU, bfloat16 on a GPU that supports it, and else float16.
    """
    if name != "auto":
        return PRECISION_NAMES[name]
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if has_bfloat16(device) else "float16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Returns what a forward pass runs in: autocast for bfloat16 and float16, else nothing."""
    if precision in ("bfloat16", "float16"):
        return torch.autocast(device.type, DTYPES[precision])
    return nullcontext()


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Returns a gradient scaler that scales under float16 and does nothing otherwise."""
    return torch.amp.GradScaler(device.type, enabled=precision == "float16")


def set_tf32(enabled: bool) -> None:
    """Lets float32 matrix products and convolutions on GPUs use TensorFloat-32, or not.

    ``allow_tf32`` sets ``fp32_precision``, its successor, as well. Not so the other way round: once
    ``fp32_precision`` is set alone, reading ``allow_tf32`` raises an error, and torch.compile reads
    it in torch 2.9 and some later versions (pytorch#166387).
    """
    with warnings.catch_warnings():
        # From torch 2.9 on, some versions recommend the successor.
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        torch.backends.cuda.matmul.allow_tf32 = enabled
        torch.backends.cudnn.allow_tf32 = enabled


def check_precision(precision: str, device: torch.device) -> None:
    """Raises UserError for bfloat16 on a GPU that would only emulate it."""
    if device.type == "cuda" and precision == "bfloat16" and not has_bfloat16(device):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"precision bfloat16: {name} has no bfloat16 arithmetic; use --precision float16 "
            "or float32"
        )


def has_bfloat16(device: torch.device) -> bool:
    """Returns True if a GPU computes in bfloat16 and does not only emulate it."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
