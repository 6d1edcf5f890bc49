"""Batches are copied to a GPU without waiting for what it is doing."""

from __future__ import annotations

import pytest
import torch
from ddplab_watch.marks import CudaClock

from common.training.trainer import on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_host_goes_on_while_the_gpu_is_busy_and_what_arrives_is_what_was_sent() -> None:
    device = torch.device("cuda", 0)
    clock = CudaClock(device)
    tokens = torch.arange(2**20).view(1024, 1024)
    list(on_device([(tokens, tokens + 1)], device))  # CUDA and its pinned memory are there
    clock.wait()
    clock.hold(0.05)
    ((copied, targets),) = on_device([(tokens, tokens + 1)], device)
    done = clock.mark()
    assert not done.query()
    assert torch.equal(copied.cpu(), tokens)
    assert torch.equal(targets.cpu(), tokens + 1)
