"""The watch after its window, to the end of the script: medians of blocks of steps, and changes.

Each rank leaves its blocks in the job's store, where nobody waits for anybody. Rank 0 judges those
that all ranks have left, and names in the store the step at which every rank begins a new window.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ddplab_watch.change_points import BATCH, ChangePoints
from ddplab_watch.record import Record, say
from ddplab_watch.step_blocks import (
    MEASURED,
    MEMORY,
    MOST_ALONE,
    SINGLE,
    Block,
    Schedule,
    block_steps,
)

KEPT = 4
"""Blocks of a rank that the store keeps: the next one takes the first one's place."""
JUMP_S = 2.0
"""The time of day has jumped if it is off by so much more than at the block before."""
TRIES = 2
"""Timed steps after a block in which rank 0 asks for it again: ranks end it one after another."""
SLACK_BLOCKS = 2
"""A new window begins so many blocks later: by then every rank has read of it."""


class LongWatch:
    """Steps between two windows.

    Args:
        record: record of this rank's blocks.
        ranks: rank of this process, and number of ranks.
        store: store of the job; None for a process by itself.
        resident_bytes: reads the process's memory.
        first: number of the first step that is followed.
        usual_s: a step's usual time in seconds.
    """

    def __init__(
        self,
        record: Record,
        ranks: tuple[int, int],
        store: dist.Store | None,
        resident_bytes: Callable[[], int],
        first: int,
        usual_s: float,
    ) -> None:
        self.record, self.store, self.first = record, store, first
        self.rank, self.ranks = ranks
        self.resident_bytes = resident_bytes
        self.window_at: int | None = None
        """Step at which the next window begins; None while there is none."""
        self.points = ChangePoints(range(self.ranks)) if self.rank == 0 else None
        self._windows = 0
        self._steps: list[dict[str, float]] = []
        self._unjudged: list[tuple[int, int, int, float]] = []
        """Blocks that other ranks have not left yet: number, first and last step, end."""
        self._offset_s = time.time() - time.perf_counter()
        self.schedule: Schedule | None = None
        """None until this rank knows what rank 0 has chosen, as is ``_ahead``."""
        self._ahead: Schedule | None = None
        """The same schedule, at the block of the next step that is timed."""
        if self.rank == 0:
            longest = block_steps(usual_s, self.ranks)
            self._follow(Schedule(first, longest))
            if store is not None:
                store.set(self._key("longest"), str(longest))

    def _follow(self, schedule: Schedule) -> None:
        self.schedule, self._ahead = schedule, copy(schedule)

    def _key(self, *parts: object) -> str:
        return "/".join(["ddplab-watch", "hours", str(self.record.path.parent), *map(str, parts)])

    def next_timed(self, number: int) -> int:
        """Returns the first step, of this number or later, that is to be timed.

        Called in the steps' order. Steps are added some time after they have ended: the schedule
        has not come as far then.
        """
        if self._ahead is None:
            return number
        while self._ahead.last < number or max(self._ahead.timed) < number:
            self._ahead.advance()
        return min(timed for timed in self._ahead.timed if timed >= number)

    def add(self, number: int, row: dict[str, Any]) -> None:
        """Takes a step that was timed and has ended.

        Args:
            number: number of the step.
            row: ms of its phases by their names in ``step_blocks``, and ``elements``.
        """
        try:
            self._add(number, row)
        except RuntimeError:  # of the store, which ends with the process that keeps it
            self.record.unseen("changes while it runs", "the ranks' store has ended")
            self.store, self._unjudged = None, []

    def _add(self, number: int, row: dict[str, Any]) -> None:
        if self.schedule is None:
            if self.store is None or not self.store.check([self._key("longest")]):
                return
            self._follow(Schedule(self.first, int(self.store.get(self._key("longest")))))
        while number > self.schedule.last:  # whose last steps were not timed
            self._go_on()
        self._steps.append(row)
        if self._unjudged and len(self._steps) <= TRIES:
            self._judge_left()
        if number == self.schedule.last:
            self._go_on()

    def _go_on(self) -> None:
        """Ends a block, which is recorded if all its timed steps were added."""
        steps, self._steps = self._steps, []
        if len(steps) >= len(self.schedule.timed):
            self._end_block(steps)
        self.schedule.advance()

    def begins_window(self, updated: int) -> bool:
        """Returns True at the step at which a new window begins."""
        if self.window_at is None or updated < self.window_at:
            return False
        self.window_at = None
        self._steps = []
        return True

    def resume(self, first: int) -> None:
        """Goes on after a window, with the step of this number."""
        self._steps, self._unjudged = [], []
        schedule = Schedule(first, self.schedule.longest)
        schedule.number = self._ahead.number + KEPT
        self._follow(schedule)

    def _end_block(self, steps: list[dict[str, Any]]) -> None:
        """Records a block, leaves it to rank 0, and reads what rank 0 has found."""
        number, first, last = self.schedule.number, self.schedule.first, self.schedule.last
        self._look_at_clock(last)
        names = [name for name in MEASURED if name != MEMORY]
        row: dict[str, Any] = {
            name: round(statistics.median(step[name] for step in steps), 4) for name in names
        }
        row[MEMORY] = self.resident_bytes()
        row["alone_ms"] = [
            round(sum(step[name] for name in SINGLE), 3) for step in steps[:MOST_ALONE]
        ]
        unix_s = time.time()
        self.record.add("blocks", first=first, last=last, unix_s=unix_s, **row)
        if self.ranks == 1:
            self._judge(Block(first, last, unix_s, {0: row}))
            return
        if self.store is None:
            return
        self.store.set(self._key(number % KEPT, self.rank), json.dumps([number, row]))
        if self.rank == 0:
            self._unjudged = [*self._unjudged[1 - KEPT :], (number, first, last, unix_s)]
            self._judge_left()
        elif self.store.check([self._key("window")]):
            windows, step = json.loads(self.store.get(self._key("window")))
            if windows > self._windows:
                self._windows, self.window_at = windows, step

    def _judge_left(self) -> None:
        """Judges the blocks that all ranks have left."""
        while self._unjudged and (block := self._left_by_all(*self._unjudged[0])):
            self._unjudged.pop(0)
            self._judge(block)

    def _left_by_all(self, number: int, first: int, last: int, unix_s: float) -> Block | None:
        """Reads a block of all ranks; None while one has not left it."""
        keys = [self._key(number % KEPT, rank) for rank in range(self.ranks)]
        if not self.store.check(keys):
            return None
        blocks = [json.loads(text) for text in self.store.multi_get(keys)]
        if any(of_rank != number for of_rank, _ in blocks):
            return None
        return Block(first, last, unix_s, {rank: row for rank, (_, row) in enumerate(blocks)})

    def _judge(self, block: Block) -> None:
        """Judges a block; says and records a change, and asks for a window after it."""
        change = self.points.add(block)
        if change is None:
            return
        say(change.said())
        if change.phase != BATCH:
            self._windows += 1
            self.window_at = block.last + 1 + SLACK_BLOCKS * self.schedule.size
        self.record.add("changes", **asdict(change))
        if self.store is not None and self.window_at is not None:
            self.store.set(self._key("window"), json.dumps([self._windows, self.window_at]))

    def _look_at_clock(self, step: int) -> None:
        """Says that the time of day has jumped. What is timed is timed by another clock."""
        offset_s = time.time() - time.perf_counter()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(jump_s) > JUMP_S:
            self.record.unseen("the time of day", f"it jumped by {jump_s:+.0f} s by step {step}")
            if self.rank == 0:
                say(f"the time of day has jumped by {jump_s:+.0f} s by step {step}")
