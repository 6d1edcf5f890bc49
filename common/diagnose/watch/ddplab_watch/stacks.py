"""A thread that looks, now and then, at what the training thread is doing.

Sampled stacks say what a phase consists of without a hook on anything: which call it is that takes
long between two steps, or what a rank waits in that does not go on. The same thread writes the
record, so that what was seen is kept when the process is killed.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddplab_watch.record import Record

SAMPLED_EVERY_S = 0.02
"""A look takes about 20 µs: a tenth of a per cent."""
WRITTEN_EVERY_S = 1.0
STALLED_S, STALLED_STEPS = 15.0, 20.0
"""A step that takes longer than both, seconds and median steps, is noted with its stack."""
LIBRARY = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}lib{os.sep}python",
    "<frozen",
    "ddplab_watch",
)
WRAPPERS = ("wrapper", "wrapped", "decorate_context", "_no_grad_wrapper", "_fn")
"""Names of functions that decorators put around a library's own."""
EXCHANGE_OF_GRADIENTS = "torch.distributed.nn.functional.backward"
"""An exchange in a backward pass, whose caller is ``backward()`` of the loss."""
DEEPEST = 40
MODULE_FILE = os.path.join("torch", "nn", "modules", "module.py")
EVALUATION = "evaluation"
"""The phase of passes without gradients."""


class Stacks:
    """Samples of one thread's stack, counted by phase and place.

    Args:
        phase: says which phase the loop is in.
        progress: returns the number of steps so far, and a step's usual seconds (0: not known).
    """

    def __init__(
        self,
        record: Record,
        phase: Callable[[], str],
        progress: Callable[[], tuple[int, float]],
    ) -> None:
        self.record, self.phase, self.progress = record, phase, progress
        self.thread_id = threading.get_ident()
        self._counting = self._is_over = False
        self.is_training = True
        """False while the watch measures something by itself: no step is to end then."""
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddplab-watch", daemon=True)

    @property
    def counting(self) -> bool:
        """Returns True while samples are taken; a stall is noticed anyway."""
        return self._counting

    @counting.setter
    def counting(self, value: bool) -> None:
        self._counting = value
        self._awake.set()  # a window may be shorter than the thread's sleep

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and writes what is left."""
        self._is_over = True
        self._awake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        self.record.write()

    def flush(self) -> None:
        """Adds the counts to the record."""
        counts, self.counts = self.counts, Counter()
        for (phase, line, call), count in counts.most_common(200):
            self.record.add("stacks", phase=phase, place=line, call=call, samples=count)

    def _run(self) -> None:
        steps, since, written, stalled = -1, time.monotonic(), time.monotonic(), False
        while not self._is_over:
            if self._awake.wait(SAMPLED_EVERY_S if self.counting else WRITTEN_EVERY_S):
                self._awake.clear()
            elif self.counting:
                self._sample()
            now = time.monotonic()
            newest, usual_s = self.progress()
            if newest != steps:
                if stalled:
                    self.record.add("resumed", step=newest, seconds=now - since)
                steps, since, stalled = newest, now, False
            elif not self.is_training:  # no step is to end while probes run
                since = now
            elif not stalled and now - since > max(STALLED_S, STALLED_STEPS * usual_s):
                stalled = True
                self._stalled(steps, now - since)
            if now - written > WRITTEN_EVERY_S:
                written = now
                self.record.write()

    def _sample(self) -> None:
        frame = sys._current_frames().get(self.thread_id)
        if frame is None:
            return
        phase = self.phase()
        if phase == EVALUATION:  # lines within the model do not tell who evaluates, and where
            frame = _caller_of_module(frame)
        self.counts[(phase, *self.named(frame))] += 1

    def named(self, frame: FrameType) -> tuple[str, str]:
        """Returns the innermost line of the user's own code, and the library function called."""
        call, deep = "", 0
        inner: FrameType | None = frame
        while inner is not None and deep < DEEPEST:
            code = inner.f_code
            if not any(part in code.co_filename for part in LIBRARY):
                file = self.record.name_or_hash(code.co_filename)
                return f"{file}:{inner.f_lineno} {code.co_name}", call
            is_told = call == EXCHANGE_OF_GRADIENTS or (call and code.co_name in WRAPPERS)
            if "ddplab_watch" not in code.co_filename and not is_told:
                call = f"{_module(code.co_filename)}.{code.co_name}"
            inner, deep = inner.f_back, deep + 1
        return "", call

    def _stalled(self, step: int, seconds: float) -> None:
        frame = sys._current_frames().get(self.thread_id)
        lines: list[str] = []
        while frame is not None and len(lines) < DEEPEST:
            code = frame.f_code
            text = (
                "" if self.record.anonymise else linecache.getline(code.co_filename, frame.f_lineno)
            )
            file = self.record.name_or_hash(code.co_filename)
            lines.append(f"{file}:{frame.f_lineno} {code.co_name}: {text.strip()}")
            frame = frame.f_back
        self.record.add(
            "stalled",
            step=step,
            seconds=seconds,
            phase=self.phase(),
            stack=lines,
            unix_s=time.time(),
        )
        self.record.write()


def norm_lines(modules: Iterable[nn.Module], name: Callable[[str], str]) -> str:
    """Returns lines where batch norms of the script's own compute: ``file:first-last;…``.

    Args:
        modules: modules of the model.
        name: returns what a file is called in the record.
    """
    passes = (type(module).forward for module in modules if isinstance(module, _NormBase))
    codes = {getattr(forward, "__code__", None) for forward in passes} - {None}
    lines = []
    for code in codes:
        if not any(part in code.co_filename for part in LIBRARY):
            last = max(line for *_, line in code.co_lines() if line)
            lines.append(f"{name(code.co_filename)}:{code.co_firstlineno}-{last}")
    return ";".join(sorted(lines))


def _caller_of_module(frame: FrameType) -> FrameType:
    """Returns the frame that called the outermost module; the frame itself outside of any."""
    outermost, inner = frame, frame.f_back
    while inner is not None:
        if inner.f_code.co_filename.endswith(MODULE_FILE):
            outermost = inner
        inner = inner.f_back
    return outermost


def _module(file: str) -> str:
    """Returns a library file's name as a module: torch/serialization.py → torch.serialization."""
    for part in (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}"):
        if part in file:
            file = file.rpartition(part)[2]
    words = file.removesuffix(".py").split(os.sep)
    if words and words[0].startswith("python3"):
        words = words[1:]
    return ".".join(words)
