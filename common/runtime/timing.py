"""The clock of a benchmark: the watch's, but it is refused where torch lacks what it needs."""

from __future__ import annotations

import torch
from ddplab_watch.marks import Clock, clock_of

from common.runtime import torch_internals

MARK_S = 8e-6
"""Time in which a Python hook marks a moment on CUDA: estimated, not measured."""


def clock_for(device: torch.device) -> Clock:
    """Returns the clock for work on ``device``.

    Its ``hold`` raises UserError where this version of torch cannot keep a stream busy: a benchmark
    would measure the host instead.
    """
    return clock_of(device, torch_internals.sleep_on_gpu)
