"""Runs ``ddplab_watch`` as its command does, and times its hooks between windows.

``timed_watch.py HOOKS [OPTION=VALUE ...] SCRIPT [ARGUMENT ...]``. Each rank leaves ``HOOKS`` with
its number as a suffix: JSON with the seconds that the training waited for the hooks, and the
seconds that went by, from the end of the first window and its probes on. Windows that follow a
change count in the second alone. ``step_s`` is the mean time from one update to the next, without
the first ``SKIPPED`` steps. With ``watch=off`` in place of options the script runs without a watch,
and ``step_s`` is all that is left.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddplab_watch.__main__ import leave, main, run_as_main
from ddplab_watch.watch import Watch
from torch.optim.optimizer import register_optimizer_step_post_hook

OFF = "watch=off"
SKIPPED = 200
"""Updates before steps are timed: the watch's first window is over by then."""


class HookTimes:
    """Adds up what hooks take, and times steps by their updates.

    Attributes:
        path: file that is left at the end.
        hooks_s: seconds in hooks.
        began_s: when the first of them began; None before.
        updates: number of updates so far.
        skipped_s, updated_s: when the last skipped update and the newest one ended.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.hooks_s = path, 0.0
        self.began_s: float | None = None
        self.updates, self.skipped_s, self.updated_s = 0, 0.0, 0.0

    def timed(self, watch: Watch, hook: Callable) -> Callable:
        """Returns a hook that is timed once the watch is between windows."""

        @functools.wraps(hook)
        def call(*arguments: Any) -> Any:
            if watch.session is None or not watch.session.calls.brief:
                return hook(*arguments)
            began_s = time.perf_counter()
            if self.began_s is None:
                self.began_s = began_s
            try:
                return hook(*arguments)
            finally:
                self.hooks_s += time.perf_counter() - began_s

        return call

    def count(self, *_: Any) -> None:
        """Notes an update."""
        self.updates += 1
        self.updated_s = time.perf_counter()
        if self.updates == SKIPPED:
            self.skipped_s = self.updated_s

    def leave(self) -> None:
        """Writes the seconds."""
        times = {}
        if self.began_s is not None:
            passed_s = time.perf_counter() - self.began_s
            times = {"hooks_s": self.hooks_s, "passed_s": passed_s}
        if self.updates > SKIPPED:
            times["step_s"] = (self.updated_s - self.skipped_s) / (self.updates - SKIPPED)
        if times:
            self.path.write_text(json.dumps(times))


if __name__ == "__main__":
    times = HookTimes(Path(f"{sys.argv[1]}.{os.environ.get('RANK', 0)}"))
    guarded = Watch.guarded
    Watch.guarded = lambda watch, *how, **more: times.timed(watch, guarded(watch, *how, **more))
    atexit.register(times.leave)
    register_optimizer_step_post_hook(times.count)
    words = sys.argv[2:]
    if words[0] == OFF:
        sys.argv = words[1:]
        sys.path[0] = str(Path(words[1]).parent)
        run_as_main(Path(words[1]))
        leave()
    else:
        main(words)
