"""The steps that have ended: written once the device has passed their marks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from ddplab_watch import rows
from ddplab_watch.feed import Feed
from ddplab_watch.marks import Mark
from ddplab_watch.record import Record
from ddplab_watch.steps import Loop, Step

USUAL_OF = 20
"""A step's usual time is the median of so many of the last."""


class EndedSteps:
    """Takes a loop's steps as they end, and writes their rows.

    Args:
        loop: loop that the steps end in.
        record: record of the rows.
        feed: keeps the samples of the steps after warm-up.
        warmup: steps that are recorded as warm-up.
        facts: returns the row on what is trained; called when the first step is written.
    """

    def __init__(
        self,
        loop: Loop,
        record: Record,
        feed: Feed,
        warmup: int,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.loop, self.record, self.feed = loop, record, feed
        self.warmup, self.facts = warmup, facts
        self.written = 0
        self._unread: list[Step] = []
        self._last_ended: Mark | None = None
        """Mark of the end of the step that was written last."""
        self._recent_s: list[float] = []
        self._recent_waits_s: list[float] = []
        """Times that the same steps took for data."""

    def collect(self) -> None:
        """Takes the steps that have ended since, and writes those that can be read."""
        self._unread += self.loop.ended
        self.loop.ended = []
        while self._unread and self.loop.clock.passed(self._unread[0].ended):
            self._write(self._unread.pop(0))

    def finish(self, wait: bool) -> None:
        """Ends the newest step; writes the rest if ``wait``, else what can be read."""
        self.loop.finish()
        if wait and (self._unread or self.loop.ended):
            self.loop.clock.wait()
        self.collect()
        self._unread = []

    def usual_s(self) -> float:
        """Returns a step's usual time in seconds; 0 before there is one."""
        return statistics.median(self._recent_s) if self._recent_s else 0.0

    def share_waited(self) -> float:
        """Returns the share of the last steps in which this rank waited for its data."""
        return sum(self._recent_waits_s) / max(sum(self._recent_s), 1e-9)

    def _write(self, step: Step) -> None:
        if step.profiled:
            return
        number, clock = self.written, self.loop.clock
        self.written += 1
        # By the same clock as the step: a host that waits for its GPU does so within the step.
        before, self._last_ended = self._last_ended, step.ended
        between_ms = None if before is None else clock.elapsed_s(before, step.began) * 1e3
        self._recent_s = [*self._recent_s[1 - USUAL_OF :], clock.elapsed_s(step.began, step.ended)]
        waited_s = sum(clock.elapsed_s(p.fetched, p.forward) for p in step.passes)
        self._recent_waits_s = [*self._recent_waits_s[1 - USUAL_OF :], waited_s]
        if number == 0:
            self.record.add("facts", **self.facts())
        is_warmup = number < self.warmup
        self.record.add(
            "steps",
            step=number,
            warmup=is_warmup,
            between_time_ms=between_ms,
            **rows.of_step(step, clock),
        )
        for row in rows.of_buckets(step, clock):
            self.record.add("buckets", step=number, **row)
        if not is_warmup:
            for fetch in step.fetches:
                self.feed.keep(fetch)
