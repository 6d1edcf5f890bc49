"""Blocks of steps that follow each other, of which each rank has the median of each phase."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

SINGLE = ("data", "forward", "update", "between")
"""Phases in which a rank waits for no other, but for FSDP's forward pass; ``data`` are fetches."""
COPY, BACKWARD, STEP, MEMORY, ELEMENTS = "copy", "backward", "step", "memory", "elements"
"""Between its fetch and the model's call a batch is copied, and ranks may meet: transformers'
Trainer counts the tokens of all ranks there. The backward pass holds the exchange, and waits for
other ranks. A step is from the end of the one before to its own. Memory is the process's, elements
are those of a batch."""
MEASURED = (*SINGLE, COPY, BACKWARD, STEP, MEMORY, ELEMENTS)
"""Numbers that a block has of each rank."""
MOST_ALONE = 10
"""Steps of a block of which it says how long a rank took by itself."""
BLOCK_STEPS, BLOCK_S = 3, 4.0
"""A block has so many steps, or more of short ones, so that it takes so many seconds."""
LONGEST_OVER_FIRST = 8
"""The longest blocks are so many times as long as the first."""
DOUBLED_AFTER = 80
"""Blocks after which the next are longer."""
MOST_TIMED = 10
"""Steps of a long block that are timed; in the others hooks return at once."""
JUDGED_S, MOST_OVERHEAD = 1e-4, 0.001
"""Seconds that a rank's part of a block takes to judge, and the share of the time that it may."""


@dataclass(frozen=True)
class Block:
    """A block of steps.

    Attributes:
        first, last: numbers of its first and last step.
        unix_s: when it ended.
        ranks: of each rank the median ms of ``SINGLE``, ``COPY``, ``BACKWARD`` and ``STEP``, over
            the steps that are timed; ``memory`` in bytes, ``elements`` of its batch; 0 where
            unknown. ``alone_ms`` lists, for the first of these steps, the ms of the phases in which
            the rank waits for no other.
    """

    first: int
    last: int
    unix_s: float
    ranks: Mapping[int, Mapping]


class Schedule:
    """The steps at which blocks end: they double in length until they take ``BLOCK_S``.

    So the first ones are judged soon. All ranks have the same, and time the same steps.

    Args:
        first: number of the first block's first step.
        longest: steps of the longest blocks (``block_steps``).
    """

    def __init__(self, first: int, longest: int) -> None:
        self.first, self.longest = first, longest
        self.size = min(max(BLOCK_STEPS, longest // LONGEST_OVER_FIRST), longest)
        self.number = self._of_size = 0
        self.timed: set[int] = set()
        """Numbers of the block's steps that are timed."""
        self._choose()

    @property
    def last(self) -> int:
        """Returns the number of the block's last step."""
        return self.first + self.size - 1

    def _choose(self) -> None:
        """Draws a timed step from each of up to ``MOST_TIMED`` parts of the block.

        Steps that were equally far apart would all be those in which a loop logs, or none of them.
        """
        part, draw = math.ceil(self.size / MOST_TIMED), random.Random(self.first)
        starts = range(self.first, self.last + 1, part)
        self.timed = {draw.randrange(at, min(at + part, self.last + 1)) for at in starts}

    def advance(self) -> None:
        """Goes on to the next block."""
        self.first += self.size
        self.number += 1
        self._of_size += 1
        if self._of_size == DOUBLED_AFTER and self.size < self.longest:
            self.size, self._of_size = min(2 * self.size, self.longest), 0
        self._choose()


def block_steps(step_s: float, ranks: int) -> int:
    """Returns the number of steps of a block, by a step's usual time and the number of ranks.

    Judging a block takes ``JUDGED_S`` a rank, on rank 0: of many ranks blocks are longer.
    """
    block_s = max(BLOCK_S, ranks * JUDGED_S / MOST_OVERHEAD)
    return max(BLOCK_STEPS, math.ceil(block_s / max(step_s, 1e-4)))


def steps_in(block: Block) -> int:
    """Returns the number of steps of a block."""
    return block.last + 1 - block.first


def merged(first: Block, second: Block) -> Block:
    """Returns two blocks as one, by their means."""
    ranks = {
        rank: {name: (row[name] + second.ranks[rank][name]) / 2 for name in MEASURED}
        | {"alone_ms": [*row["alone_ms"], *second.ranks[rank]["alone_ms"]][:MOST_ALONE]}
        for rank, row in first.ranks.items()
    }
    return Block(first.first, second.last, first.unix_s, ranks)
