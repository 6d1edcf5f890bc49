"""A GPU for the options benchmark that is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from common.benchmarks.one_device import options


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] = (8, 0),
    bf16: bool = True,
    gpu_bytes: float = 2**40,
    host_bytes: float = 2**40,
) -> None:
    """Lets torch and the benchmark see a GPU of a capability, and these memories."""
    properties = SimpleNamespace(total_memory=int(gpu_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretend GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(options, "available_memory_bytes", lambda: int(host_bytes))
