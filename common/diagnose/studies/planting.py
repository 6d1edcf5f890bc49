"""What plants faults: functions that change how a script's DDP is made and called."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

PLANTED = Path(__file__).with_name("planted_faults.py")
"""Script that plants faults in another one."""


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        plant: function that plants it in a process.
        strength: strength where none is given: a share, a factor, a number of threads, milliseconds
            and so on, as the function's docstring says.
        rank: rank that has the fault; None for all.
    """

    plant: Callable[[float], None]
    strength: float = 0.0
    rank: int | None = None

    def concerns_this_rank(self) -> bool:
        """Returns True on the ranks that have the fault, as torchrun numbers them."""
        return self.rank in (None, int(os.environ.get("RANK", 0)))


def in_place_of(owner: type, name: str) -> Callable[[Callable], None]:
    """Decorates a function that takes a method's place; its first argument is the method."""

    def install(new: Callable) -> None:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def method(*arguments: Any, **named: Any) -> Any:
            return new(plain, *arguments, **named)

        setattr(owner, name, method)

    return install


def around_forward(extra_s: Callable[[float], float]) -> None:
    """Makes DDP's forward pass longer by ``extra_s`` of the seconds that it took."""

    @in_place_of(DistributedDataParallel, "forward")
    def longer(plain, *inputs, **named):
        began = time.perf_counter()
        outputs = plain(*inputs, **named)
        time.sleep(max(0.0, extra_s(time.perf_counter() - began)))
        return outputs


def change_ddp(
    after: Callable[[DistributedDataParallel], None] = lambda ddp: None, **arguments: object
) -> None:
    """Changes every DDP that a script makes; those that the watch tries are as they are asked for.

    Args:
        after: called with each when it is made.
        arguments: arguments that each gets, whatever the script gives.
    """

    @in_place_of(DistributedDataParallel, "__init__")
    def changed(plain, ddp, module, *positional, **named):
        caller = sys._getframe(2)  # past the method that calls this function
        if "ddplab_watch" in caller.f_code.co_filename:
            plain(ddp, module, *positional, **named)
            return
        plain(ddp, module, *positional, **(named | arguments))
        after(ddp)
