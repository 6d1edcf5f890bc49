"""Progress of a long measurement: at most one line every two seconds, from rank 0."""

from __future__ import annotations

import logging
import time

INTERVAL_S = 2.0
logger = logging.getLogger(__name__)


class Progress:
    """A counter of the steps of a known total, which logs the progress and the time left."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self.total = total
        self.enabled = enabled
        self.done = 0
        self._start = self._last = time.monotonic()

    def step(self, doing: str) -> None:
        """Counts one more step, which ``doing`` describes."""
        self.done += 1
        moment = time.monotonic()
        if self.enabled and (moment - self._last >= INTERVAL_S or self.done == self.total):
            self._last = moment
            remaining_s = (moment - self._start) / self.done * (self.total - self.done)
            logger.info("[%d/%d] %s, about %.0f s left", self.done, self.total, doing, remaining_s)
