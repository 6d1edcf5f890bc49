"""Runs ``ddplab_watch`` as its command does, and times its hooks between windows.

``timed_watch.py HOOKS [OPTION=VALUE ...] SCRIPT [ARGUMENT ...]``. Each rank leaves ``HOOKS`` with
its number as a suffix: JSON with the seconds that the training waited for the hooks, and the
seconds that went by, from the end of the first window and its probes on. Windows that follow a
change count in the second alone.
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

from ddplab_watch.__main__ import main
from ddplab_watch.watch import Watch


class HookTimes:
    """Adds up what hooks take.

    Attributes:
        path: file that is left at the end.
        hooks_s: seconds in hooks.
        began_s: when the first of them began; None before.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.hooks_s = path, 0.0
        self.began_s: float | None = None

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

    def leave(self) -> None:
        """Writes the seconds."""
        if self.began_s is not None:
            passed_s = time.perf_counter() - self.began_s
            self.path.write_text(json.dumps({"hooks_s": self.hooks_s, "passed_s": passed_s}))


if __name__ == "__main__":
    times = HookTimes(Path(f"{sys.argv[1]}.{os.environ.get('RANK', 0)}"))
    guarded = Watch.guarded
    Watch.guarded = lambda watch, *how, **more: times.timed(watch, guarded(watch, *how, **more))
    atexit.register(times.leave)
    main(sys.argv[2:])
