"""Counts how often, and where, the host waits for its GPU.

PyTorch warns of each such call while ``torch.cuda.set_sync_debug_mode("warn")`` holds: ``.item()``,
``.cpu()``, ``.nonzero()``, a tensor taken as a condition, and a copy to the GPU that is not
``non_blocking``. By its documents not all are seen; collectives are not. The warnings are counted
here, by the line of the script that they are of, and never shown. ``torch.cuda.synchronize()``
gives none and is counted by itself.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ddplab_watch import marks
from ddplab_watch.hooks import Hooks

MESSAGE = re.compile("called a synchronizing|Synchronization debug mode is a prototype")
"""Warnings of a wait, and of the mode itself, once in a process (``c10/cuda``,
``torch/csrc/cuda``)."""
PASSED_ON = ("warnings.py", marks.__file__)
"""Files of functions that wait for a caller of theirs."""
ALWAYS = ("always", MESSAGE, UserWarning, None, 0)
"""Filter of warnings: all of them, even where a script makes errors of others."""


def can_be_counted(device: torch.device) -> bool:
    """Returns True for a device that a host waits for."""
    return device.type == "cuda"


class HostWaits:
    """Counts waits from ``install`` to ``remove``.

    Args:
        phase: says in which phase the loop is.
        named: returns the line of the script, and the library's function called there, of a frame.
    """

    def __init__(
        self, phase: Callable[[], str], named: Callable[[FrameType], tuple[str, str]]
    ) -> None:
        self.phase, self.named = phase, named
        self.places: Counter[tuple[str, str, str]] = Counter()
        """Waits by phase, line and call."""
        self.unseen = ""
        """Reason why none are counted; empty while they are."""
        self._hooks = Hooks()
        self._is_on = False
        self._count = 0

    def install(self) -> None:
        """Begins to count."""
        if torch.cuda.get_sync_debug_mode():
            self.unseen = "the script has set torch.cuda.set_sync_debug_mode by itself"
            return
        self._is_on = True
        # Into the list itself: a call of ``filterwarnings`` would let warnings that a script has
        # shown once be shown once more.
        warnings.filters.insert(0, ALWAYS)  # type: ignore[attr-defined]
        self._hooks.replace(warnings, "showwarning", self._counting)
        self._hooks.replace(torch.cuda, "synchronize", self._synchronising)
        torch.cuda.set_sync_debug_mode("warn")

    def _counting(self, plain: Callable) -> Callable:
        def showwarning(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
            if not (self._is_on and MESSAGE.match(str(message))):
                plain(message, category, *args, **kwargs)
            elif str(message).startswith("called"):
                self._note(sys._getframe(1), "")

        return showwarning

    def _synchronising(self, plain: Callable) -> Callable:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            self._note(sys._getframe(1), "torch.cuda.synchronize")
            return plain(*args, **kwargs)

        return synchronize

    def _note(self, frame: FrameType | None, call: str) -> None:
        """Counts a wait in a frame, or where the warnings or a clock that waits were called.

        This project's own benchmarks wait by the clock of the watch.
        """
        while frame is not None and frame.f_code.co_filename.endswith(PASSED_ON):
            frame = frame.f_back
        if frame is None or not self._is_on or "ddplab_watch" in frame.f_code.co_filename:
            return
        line, called = self.named(frame)
        self.places[(self.phase(), line, call or called)] += 1
        self._count += 1

    def taken(self) -> int:
        """Returns the number of waits since the last call."""
        count, self._count = self._count, 0
        return count

    def remove(self) -> None:
        """Stops counting; the mode is again what it was."""
        if not self._is_on:
            return
        self._is_on = False
        torch.cuda.set_sync_debug_mode("default")
        self._hooks.remove()
        if ALWAYS in warnings.filters:
            warnings.filters.remove(ALWAYS)  # type: ignore[attr-defined]
