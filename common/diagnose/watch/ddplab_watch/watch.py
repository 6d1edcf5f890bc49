"""The watch of one rank: hooks from its start on, a session and its stages from the first update.

    update 1            who am I, what is trained: the record begins, hooks go on the model
    then                its stages, up to the probes
    at the end          every hook is taken off

All ranks count the same updates, so what they do together, the probes, they do after the same one.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddplab_watch.options import Options
from ddplab_watch.record import say

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ddplab_watch.marks import Mark
    from ddplab_watch.session import Session
    from ddplab_watch.stages import Stages

_active: Watch | None = None


def start(folder: str | None = None, **settings: Any) -> None:
    """Starts the watch of this process, once; the first update opens the bundle.

    Args:
        folder: folder of the bundle; by default as the environment says.
        settings: fields of ``Options``, such as ``window=50``.

    Raises ValueError: a setting that is not legal.
    """
    global _active
    if _active is not None:
        return
    from dataclasses import replace

    options = Options.from_environment()
    chosen = {"folder": folder, "named": True} if folder else {}
    options = replace(options, **chosen, **settings)
    _active = Watch(options)
    _active.install()


def stop() -> None:
    """Ends the watch of this process now; what was seen is in the bundle."""
    global _active
    if _active is not None:
        _active.close("stopped")
        _active.update_hooks.remove()
        _active = None


class Watch:
    """Hooks on a training, whose session begins with its first update."""

    def __init__(self, options: Options) -> None:
        from ddplab_watch.feed import Feed
        from ddplab_watch.hooks import Hooks

        self.options = options
        self.hooks, self.update_hooks = Hooks(), Hooks()
        self.feed = Feed()
        self.is_over = False
        """Nothing more is looked at. Hooks may still be there: none can be taken off while it, or
        another one of its kind, is being called."""
        self.closed = False
        self.loads_elsewhere = False
        """Batches are fetched by a thread that does not train."""
        self.session: Session | None = None
        """None before the first update, as are ``stages``."""
        self.stages: Stages | None = None
        self._update_ended = self.guarded(self.update_ended, rests=False)

    def install(self) -> None:
        """Hooks what tells of the loop."""
        from ddplab_watch import hooks

        hooks.watch_updates(self.update_hooks, self.after_update)
        hooks.watch_backward(
            self.hooks, self.guarded(self.backward_began), self.guarded(self.backward_ended)
        )
        hooks.watch_fetches(
            self.hooks,
            self.guarded(self.fetch_began),
            self.guarded(self.fetch_ended),
            self.guarded(self.emptied),
        )
        atexit.register(self.leave)
        if multiprocessing.parent_process() is not None:  # such a child leaves without atexit
            multiprocessing.util.Finalize(None, self.leave, exitpriority=100)

    def guarded(self, function: Callable, rests: bool = True) -> Callable:
        """Returns a function that ends the watch instead of raising: the training goes on.

        While a CUDA graph is captured nothing is noted: marks would be captured, too.

        Args:
            rests: nothing is noted while the loop rests, either.
        """
        from ddplab_watch import torch_internals

        def call(*args: Any) -> Any:
            session = self.session
            if self.is_over or (rests and session is not None and session.loop.is_resting):
                return None
            if session is not None and torch_internals.is_capturing(session.device):
                return None
            try:
                return function(*args)
            except Exception as error:
                self.is_over = True
                say(f"stopped: {type(error).__name__}: {error}")
                if os.environ.get("DDPLAB_WATCH_DEBUG"):
                    raise
                if self.session is not None:
                    record = self.session.record
                    record.unseen("the rest", f"{type(error).__name__}: {error}")
                    record.write()
                return None

        return call

    def after_update(self, optimizer: Optimizer, skipped: bool) -> None:
        """Notes an update; no other hook is being called now, so the others may be taken off."""
        self._update_ended(optimizer, skipped)
        if self.is_over and not self.closed:
            with contextlib.suppress(Exception):  # what ended the watch may be met once more
                self.close("failed")

    def leave(self) -> None:
        """Ends the watch as the process ends: by itself, or by an exception such as Ctrl-C."""
        if getattr(sys, "last_type", None) is not None:
            self.close("interrupted")
        else:  # a watch to the end has seen all that it was to see
            self.close("complete" if self.stages and self.stages.long else "ended")

    def close(self, status: str) -> None:
        """Takes off all hooks but those of updates, and writes what is left; at most once."""
        if self.closed:
            return
        self.closed = self.is_over = True
        if self.stages is not None:
            self.stages.end()
        self.hooks.remove()
        if self.session is not None:
            self.session.end(status)

    def fetch_began(self) -> tuple[Mark, float] | None:
        """Notes that a batch is asked for; returns the moment, for ``fetch_ended``."""
        return self.session.loop.fetch_began() if self.is_trained_here() else None

    def is_trained_here(self) -> bool:
        """Returns True in the thread that trains. One that loads ahead makes nobody wait."""
        if self.session is None:
            return False
        if threading.get_ident() == self.session.thread_id:
            return True
        if not self.loads_elsewhere:
            self.loads_elsewhere = True
            self.session.record.unseen("waiting for data", "a thread that does not train loads it")
        return False

    def fetch_ended(
        self, began: tuple[Mark, float] | None, iterator: Any, ids: Any, batch: Any
    ) -> None:
        """Notes a batch: its loader, its epoch, its samples."""
        self.feed.count_epochs(iterator)
        if self.session is not None and began is not None:
            self.session.loop.fetch_ended(began, self.feed.fetch(iterator, ids, batch))

    def emptied(self) -> None:
        """Notes that an epoch's last batch has been fetched: what follows lies between steps."""
        if self.is_trained_here():
            self.session.loop.phase = "between"

    def backward_began(self) -> None:
        """Notes that backward() is called."""
        if self.stages is not None:
            self.stages.backward_began()

    def backward_ended(self) -> None:
        """Notes that backward() has returned."""
        if self.stages is not None:
            self.stages.backward_ended()

    def update_ended(self, optimizer: Optimizer, skipped: bool) -> None:
        """Notes an update: begins with the first, and ends after the window."""
        if self.stages is None:
            self.open(optimizer)
        elif self.stages.update_ended(optimizer, skipped):
            self.close("complete")

    def open(self, optimizer: Optimizer) -> None:
        """Begins the record: who this rank is, what it trains, where it runs."""
        from ddplab_watch.session import Session
        from ddplab_watch.stages import Stages

        self.session = Session(optimizer, self.options, self.feed)
        self.session.introduce()
        self.stages = Stages(self.session)
        self.session.begin(self.hooks, self.guarded)
