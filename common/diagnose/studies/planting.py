"""What plants faults: functions that change how a script's DDP is made and called."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel


def rank() -> int:
    """Returns this process's rank, as torchrun tells it."""
    return int(os.environ.get("RANK", 0))


def around_forward(extra_s: Callable[[float], float]) -> None:
    """Makes DDP's forward pass longer by ``extra_s`` of the seconds that it took."""
    plain = DistributedDataParallel.forward

    @functools.wraps(plain)
    def longer(self, *inputs, **named):
        began = time.perf_counter()
        outputs = plain(self, *inputs, **named)
        time.sleep(max(0.0, extra_s(time.perf_counter() - began)))
        return outputs

    DistributedDataParallel.forward = longer


def change_ddp(
    after: Callable[[DistributedDataParallel], None] = lambda ddp: None, **arguments: object
) -> None:
    """Changes every DDP that a script makes; those that the watch tries are as they are asked for.

    Args:
        after: called with each when it is made.
        arguments: arguments that each gets, whatever the script gives.
    """
    plain = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def changed(self, module, *positional, **named):
        if "ddplab_watch" in sys._getframe(1).f_code.co_filename:
            plain(self, module, *positional, **named)
            return
        plain(self, module, *positional, **(named | arguments))
        after(self)

    DistributedDataParallel.__init__ = changed
