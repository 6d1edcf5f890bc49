"""Change points in the times of a long run: when, on which rank, in which phase, by how much.

Each phase is a series of values of blocks (``step_blocks``), and ``cusum`` says how much speaks for
its growth. An alarm needs three things beside it: a growth that matters, that lasts, and a level
above any that the run had for as long with this batch. Nothing here imports torch: the watch judges
blocks as they end, the diagnosis any table of steps.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ddplab_watch.cusum import HISTORY, Levels, Series, limit
from ddplab_watch.step_blocks import (
    BACKWARD,
    BLOCK_S,
    COPY,
    ELEMENTS,
    MEASURED,
    MEMORY,
    SINGLE,
    STEP,
    Block,
    merged,
    steps_in,
)

BATCH = "batch"
ALARMS_IN_TEN_HOURS = 0.5
"""Alarms that all series of a run raise between them while nothing changes."""
LONGER = 1.3
"""Blocks longer by this factor are compared with merged ones."""
LEAST_SHARE, LEAST_MEMORY = 0.02, 0.1
"""Growth that matters: of a phase as a share of the step, of memory as a share of itself."""
LASTING_S = 10.0
"""Seconds that a growth must have lasted: others use a shared machine for less now and then."""
OTHER_BATCH = 0.05
"""A batch has changed if its elements differ by so much, and from all blocks before."""
FIXED = 8
"""Steps from which a batch that their blocks have in common counts as fixed."""
UNLIKELY = 2_000_000
"""Orders of blocks whose batches vary, of which one at most may pass for a change."""
SLOWEST_OFTEN = 0.8
"""A rank that takes longest in so many steps is slow; else the ranks take turns."""
AS_MUCH = 0.7
"""Share of a rank's growth from which another rank's, in other phases, may be its reason."""
MAY_WAIT_FOR = {COPY: ("data", "update", "between"), "forward": (*SINGLE, COPY)}
"""Phases of other ranks that a rank may wait for; in all other phases it is ``SINGLE``. A forward
pass may wait itself, as under FSDP, and then for what comes before another rank's."""
LEAST_TOLD = 5
"""Blocks, and half of ``LASTING_S``, from which a series tells by itself since when it grows."""
WITH_SIZE = 0.8
"""Correlation of a phase's time with the elements of its batches from which these explain it."""
LEAST_UNIX_S = 1e9
"""A smaller number of seconds is of a clock that does not tell the time of day."""


@dataclass(frozen=True)
class Change:
    """A change that was noticed.

    Attributes:
        step, unix_s: first step of the first block that shows it, and when that block ended.
        noticed: last step before it was noticed.
        rank: rank that is slower; None for what all ranks share.
        phase: ``SINGLE``, ``COPY``, ``BACKWARD``, ``STEP`` or ``MEMORY``; ``BATCH`` is no alarm:
            times are compared anew from there.
        before, after: medians in ms; of memory in bytes, of a batch in elements.
        step_ms: step before the change.
        why: sentence on what the correlation between steps tells; empty for nothing.
    """

    step: int
    unix_s: float
    noticed: int
    rank: int | None
    phase: str
    before: float
    after: float
    step_ms: float
    why: str = ""

    def said(self) -> str:
        """Returns the change as a sentence, with its time of day where that is known."""
        grown = (self.after / self.before - 1) if self.before else math.inf
        is_known = self.unix_s > LEAST_UNIX_S
        at = time.strftime(" (%H:%M:%S)", time.localtime(self.unix_s)) if is_known else ""
        since = f"since step {self.step}{at}"
        whose = "all ranks'" if self.rank is None else f"rank {self.rank}'s"
        if self.phase == BATCH:
            return (
                f"{since} a batch has {self.after:.6g} elements instead of {self.before:.6g}: "
                "times are compared anew from there"
            )
        if self.phase == MEMORY:
            return (
                f"{since} {whose} memory grows: {self.after / 2**20:.0f} MiB instead of "
                f"{self.before / 2**20:.0f} by step {self.noticed} ({grown:+.0%})"
            )
        share = (self.after - self.before) / self.step_ms if self.step_ms else 0.0
        what = {
            BACKWARD: "backward pass and exchange",
            COPY: "time between a fetch and the forward pass",
            STEP: "steps",
            "forward": "forward pass",
        }
        verb = "take" if self.phase == STEP else "takes"
        by = f"{grown:+.0%}, " if math.isfinite(grown) else ""
        return (
            f"{since} {whose} {what.get(self.phase, self.phase)} {verb} {self.after:.3g} ms "
            f"instead of {self.before:.3g} ({by}{share:.0%} of a step){self.why}; noticed at step "
            f"{self.noticed}"
        )


Key = tuple[int | None, str]
"""A series: the rank, None for all ranks, and the phase."""


class ChangePoints:
    """Follows the blocks of a run.

    Args:
        ranks: ranks whose blocks are added.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._levels_before: defaultdict[Key, Levels] = defaultdict(Levels)
        """Levels of each series before its first value."""
        self._begin()

    def _begin(self) -> None:
        """Forgets all blocks: what comes next is compared with what follows."""
        self._blocks: deque[Block] = deque(maxlen=HISTORY)
        self._sizes: deque[float] = deque(maxlen=HISTORY)
        """Elements of the blocks' batches, of all ranks."""
        self._series: dict[Key, Series] = {}
        self._newest: dict[Key, int] = {}
        """Blocks since the growth of each series began, once there is an alarm."""

    def add(self, block: Block) -> Change | None:
        """Judges a block; returns a change of times or memory, or of the batch, or None.

        After a change all series begin anew, and after one of the batch their levels, too. A block
        with a time that is none is left out.
        """
        if not all(
            math.isfinite(row[name]) and row[name] >= 0
            for row in block.ranks.values()
            for name in MEASURED
        ):
            return None
        longer = steps_in(block) / steps_in(self._blocks[-1]) if self._blocks else 1.0
        if longer > LONGER:
            self._merge()
        elif longer < 1 / LONGER:  # a window lies between
            self._begin()
        self._take(block)
        if batch := self._other_batch(block):
            self._levels_before.clear()
            self._begin()
            return batch
        self._follow(block)
        in_ten_hours = 36_000 / BLOCK_S * len(self._series)
        highest = limit(in_ten_hours / ALARMS_IN_TEN_HOURS)
        alarms = [
            key
            for key, series in self._series.items()
            if series.evidence > highest * series.variance and self._alarms(key)
        ]
        if not alarms:
            return None
        self._newest = self._began(min(len(self._series[key].suspects) for key in alarms))
        change = self._change(self._main(alarms))
        for key, series in self._series.items():
            self._levels_before[key] = series.all_levels()
        self._begin()
        return change

    def _take(self, block: Block) -> None:
        self._blocks.append(block)
        self._sizes.append(sum(float(row[ELEMENTS]) for row in block.ranks.values()))

    def _follow(self, block: Block) -> None:
        for key, value in self._values(block).items():
            if key not in self._series:
                self._series[key] = Series(steps_in(block), self._levels_before[key])
            self._series[key].add(value)

    def _merge(self) -> None:
        """Makes one block of each two, as those that come are longer."""
        blocks = [*self._blocks]
        blocks = blocks[len(blocks) % 2 :]
        self._begin()
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            joined = merged(first, second)
            self._take(joined)
            self._follow(joined)

    def _values(self, block: Block) -> dict[Key, float]:
        """Returns a block's value of each series."""
        values: dict[Key, float] = {}
        for name in (*SINGLE, COPY, BACKWARD):
            by_rank = [float(block.ranks[rank][name]) for rank in self.ranks]
            values[None, name] = min(by_rank)
            if len(by_rank) > 1 and name != BACKWARD:
                ordered = sorted(by_rank)
                for rank, value in zip(self.ranks, by_rank, strict=True):
                    values[rank, name] = value - _median_of_others(ordered, value)
        values[None, STEP] = statistics.median(float(row[STEP]) for row in block.ranks.values())
        for rank in self.ranks:
            values[rank, MEMORY] = float(block.ranks[rank][MEMORY])
        return values

    def _alarms(self, key: Key) -> bool:
        series = self._series[key]
        newest = len(series.suspects)
        step_ms, usual_ms = self._levels((None, STEP), newest)
        if newest * series.steps * step_ms / 1e3 < LASTING_S:
            return False
        least = LEAST_SHARE * usual_ms
        if key[1] == MEMORY:
            least = LEAST_MEMORY * self._levels(key, newest)[1]
            if not (least > 0 and series.is_rising()):
                return False
        return self._growth(key, newest) > least and series.is_above(least)

    def _growth(self, key: Key, newest: int) -> float:
        """Returns by how much a series' newest values are above those before."""
        values = [*self._series[key].history, *self._series[key].suspects]
        return statistics.median(values[-newest:]) - statistics.median(values[:-newest])

    def _grown(self, key: Key) -> float:
        """Returns by how much a series is above what it was, after an alarm."""
        return self._growth(key, self._newest[key])

    def _began(self, newest: int) -> dict[Key, int]:
        """Returns the blocks since each series' growth began: those of the alarm, or fewer.

        What others did with the machine may have come just before a series began to grow.
        """
        step_ms = self._levels((None, STEP), newest)[0]
        began = {}
        for key, series in self._series.items():
            count = len(series.suspects)
            lasts = count * series.steps * step_ms / 1e3 >= LASTING_S / 2
            began[key] = count if lasts and LEAST_TOLD <= count < newest else newest
        return began

    def _levels(self, key: Key, newest: int) -> tuple[float, float]:
        """Returns medians of the newest blocks, and of those before, of a rank or of all."""
        rank, name = key
        values = [
            float(block.ranks[rank][name])
            if rank is not None
            else statistics.median(float(row[name]) for row in block.ranks.values())
            for block in self._blocks
        ]
        return statistics.median(values[-newest:]), statistics.median(values[:-newest])

    def _main(self, alarms: Sequence[Key]) -> Key:
        """Returns the phase that has grown most; the step where it has grown twice as much.

        Of a rank that takes longer before its forward pass while another one's phase grows, the
        other is named: it waits for that one there. Memory comes last, as time is what it may cost.
        """
        if all(phase == MEMORY for _, phase in alarms):
            return alarms[0]
        times = [key for key in self._series if key[1] not in (MEMORY, STEP)]
        main, step = max(times, key=self._grown), (None, STEP)
        if self._grown(main) <= self._grown(step) / 2:
            return step
        return (self._awaited(main) if main[1] == COPY else None) or main

    def _change(self, key: Key) -> Change:
        newest = self._newest[key]
        after, before = self._levels(key, newest)
        blocks = [*self._blocks]
        first = blocks[-newest]
        return Change(
            step=first.first,
            unix_s=first.unix_s,
            noticed=blocks[-1].last,
            rank=key[0],
            phase=key[1],
            before=before,
            after=after,
            step_ms=self._levels((None, STEP), newest)[1],
            why=self._why(key, blocks, newest) + self._waiting(key) if len(self.ranks) > 1 else "",
        )

    def _waiting(self, key: Key) -> str:
        """Tells of another rank that takes as much longer in another phase.

        Where ranks meet outside of the exchange, as after an evaluation, one of the two waits for
        the other there, and the blocks do not tell which.
        """
        if key[1] == MEMORY or not (awaited := self._awaited(key)):
            return ""
        return f", or it waits for rank {awaited[0]}, whose {awaited[1]} takes as much longer"

    def _awaited(self, key: Key) -> Key | None:
        """Returns the phase that has grown most on another rank that has grown as much in all.

        None without such a rank.
        """
        rank, phase = key
        if rank is None:
            return None
        names = [name for name in MAY_WAIT_FOR.get(phase, SINGLE) if name != phase]
        grown = {
            other: {(other, name): self._grown((other, name)) for name in names}
            for other in self.ranks
            if other != rank
        }
        in_all = {other: sum(max(0.0, ms) for ms in of.values()) for other, of in grown.items()}
        if not in_all or max(in_all.values()) <= AS_MUCH * self._grown(key):
            return None
        slowest = grown[max(in_all, key=in_all.__getitem__)]
        return max(slowest, key=slowest.__getitem__)

    def _why(self, key: tuple[int | None, str], blocks: list[Block], newest: int) -> str:
        """Tells a slow rank from unequal lengths by how steps go together."""
        rank, phase = key
        if phase == COPY:
            return ""  # in which ranks may wait: it is in none of their times alone
        if rank is not None and phase == "forward":
            values = [float(block.ranks[rank][phase]) for block in blocks]
            sizes = [float(block.ranks[rank][ELEMENTS]) for block in blocks]
            if correlation(values, sizes) > WITH_SIZE:
                return ", as its batches have grown"
        by_rank = {
            rank: [ms for block in blocks[-newest:] for ms in block.ranks[rank]["alone_ms"]]
            for rank in self.ranks
        }
        steps = list(zip(*by_rank.values(), strict=False))
        slowest = [self.ranks[times.index(max(times))] for times in steps]
        most = statistics.mode(slowest)
        often = slowest.count(most) / len(slowest)
        waits_ms = statistics.median(max(times) - min(times) for times in steps)
        if rank is None and waits_ms < self._grown(key) / 2:
            return ""  # no rank waits long enough for another
        if often >= SLOWEST_OFTEN:
            return f", and rank {most} is the slowest in {often:.0%} of the steps"
        if rank is None:
            return ", and ranks take turns as the slowest, as with batches of unequal length"
        return ""

    def _other_batch(self, block: Block) -> Change | None:
        """Returns a change of the batch's size, which makes times before and after unlike.

        Two blocks are to differ from all before, as an epoch's last batch may be smaller. Where
        sizes vary anyway, or a few steps do not tell, so many are to that one order of blocks in
        ``UNLIKELY`` has them last.
        """
        sizes = [*self._sizes]
        if len(sizes) < 4 or not min(sizes[:-2]) > 0:
            return None
        count, usual = 2, statistics.median(sizes[:-2])
        of_usual = sizes[:-2].count(usual)
        if of_usual * steps_in(self._blocks[-1]) < FIXED or 2 * of_usual <= len(sizes) - 2:
            while math.comb(len(sizes), count) < UNLIKELY:
                count += 1
                if 2 * count > len(sizes):
                    return None
        before, newest = sizes[:-count], sizes[-count:]
        usual = statistics.median(before)
        if not (min(newest) > max(before) or max(newest) < min(before)):
            return None
        if min(abs(size / usual - 1) for size in newest) < OTHER_BATCH:
            return None
        first = self._blocks[-count]
        at = (first.first, first.unix_s, block.last)
        return Change(*at, None, BATCH, usual, newest[-1], 0.0)


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Returns the median of values without one of them, in order."""
    at = bisect_left(ordered, value)
    count = len(ordered) - 1
    pick = [index + (index >= at) for index in ((count - 1) // 2, count // 2)]
    return (ordered[pick[0]] + ordered[pick[1]]) / 2


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the correlation of two sequences; 0 where one of them does not vary."""
    try:
        return statistics.correlation(first, second)
    except statistics.StatisticsError:
        return 0.0
