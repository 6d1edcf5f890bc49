"""Assumptions behind a prediction for an unmeasured cluster: values, their ranges, and draws.

A range is a triangle: its peak is the value that the prediction uses, its ends are what is thought
possible. Bands come from draws of all ranges together (a Latin hypercube with a fixed seed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError, require_known, unknown_name
from common.perfmodel.cluster.stragglers import DISTRIBUTIONS, slowest_at, slowest_of

LEAST_DRAWS, MOST_DRAWS = 20, 2000


@dataclass(frozen=True)
class Range:
    """A likeliest value between a lowest and a highest one."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, name: str, numbers: Sequence[float], least: float, most: float) -> Range:
        """Makes a range of a user's numbers: one, taken as certain, or value, lowest and highest.

        Raises UserError for others, and for a range that is not within ``least`` to ``most``.
        """
        if len(numbers) not in (1, 3):
            raise UserError(
                f"{name} takes one number, or three: value, lowest, highest; not {len(numbers)}"
            )
        value, low, high = numbers if len(numbers) == 3 else 3 * tuple(numbers)
        span = cls(value, low, high)
        words = " ".join(f"{number:g}" for number in numbers)
        if not all(map(math.isfinite, numbers)) or not least <= span.low or not span.high <= most:
            raise UserError(f"{name} {words}: it must be from {least:g} to {most:g}")
        if not span.low <= span.value <= span.high:
            raise UserError(f"{name} {words}: the value must be between the lowest and the highest")
        return span

    @property
    def is_certain(self) -> bool:
        """Returns True if the range is a single value."""
        return self.low == self.high

    def at(self, quantile: NDArray) -> NDArray:
        """Returns the values at these quantiles of the triangle, in the shape of ``quantile``."""
        if self.is_certain:
            return np.full(np.shape(quantile), self.value)
        # The inverse of the triangle's cumulative distribution, which is a parabola on either side
        # of the peak. The peak itself is at the quantile left / width.
        width, left, right = self.high - self.low, self.value - self.low, self.high - self.value
        rising = self.low + np.sqrt(quantile * width * left)
        falling = self.high - np.sqrt((1 - quantile) * width * right)
        return np.where(quantile < left / width, rising, falling)

    def text(self, form: str = "{:g}") -> str:
        """Formats the range: ``1.19 (1 to 1.4)``, or the value alone where it is certain."""
        value, low, high = (form.format(number) for number in (self.value, self.low, self.high))
        return value if self.is_certain else f"{value} ({low} to {high})"


PASS_RATE = Range(1.0, 0.6, 1.55)
"""Speed of forward and backward pass relative to ``pass_time``'s. The ends were chosen so that
intervals of 90 % hold as many published rows (``data/RESULTS.md``, Other people's GPUs)."""
NETWORK_SPEED = Range(1.0, 0.5, 1.1)
"""Speed of collectives relative to the model of NCCL. Downwards there is congestion, and the
model's own error: without a fit it is a third off, too fast, on the one published table of several
H100 nodes, and most of all at 4 to 64 MiB (``common.analysis.clusters.nccl_accuracy``)."""
STRAGGLER_SPREAD = Range(0.006, 0.005, 0.009)
"""Ranks with equal work differ by 0.5 to 0.9 % in published traces of three production jobs (8, 64
and 128 GPUs). In the one at hand, two replicas of four stages differ by 0.6, 0.6, 0.6 and 0.9 %
(ByteDance-Seed/StragglerAnalysis, trace ST): the standard deviation within a step."""
TEXTS_SPREAD = Range(0.12, 0.10, 0.14)
"""Ranks with texts of unequal lengths differ by 10 to 14 % in published traces. There the largest
of 32 is 3.5 % above that of a lognormal law. A Gumbel law's is 3.7 to 4.1 % above it at these
spreads, an exponential's 6.6 to 7.8 %: a rank is as slow as its longest texts, the largest of
many."""
OF_WORK = {"equal": (STRAGGLER_SPREAD, "lognormal"), "texts": (TEXTS_SPREAD, "gumbel")}
"""Work of ranks → spread and distribution."""
OVERLAP_SLOWDOWN = Range(1.19, 1.0, 1.4)
"""Computation beside communication: 19 % longer on average, 40 % at most (arXiv 2507.03114)."""


@dataclass(frozen=True)
class Draws:
    """Values drawn from the ranges, each an array; the first entry is what the prediction uses.

    ``pass_rate`` is the MFU where one is assumed. ``slowest_quantile`` is a job's luck with its
    slowest GPU, evenly between 0 and 1; in place of its first entry the prediction uses the mean.
    """

    pass_rate: NDArray
    network_speed: NDArray
    straggler_spread: NDArray
    overlap_slowdown: NDArray
    slowest_quantile: NDArray


@dataclass(frozen=True)
class Assumptions:
    """Everything that is assumed and may be changed.

    Attributes:
        mfu: model FLOPs utilisation of a GPU that computes and does not wait; None where the time
            of passes is ``pass_time``'s.
        pass_rate: speed of passes relative to that time; without effect on an MFU.
        network_speed: speed of collectives, relative to the model of NCCL.
        work: ``equal`` where all ranks have the same work, ``texts`` where they have texts of
            unequal lengths; it chooses the next two, where they are not given.
        straggler_spread: standard deviation of a GPU's computation in a step, as a share.
        straggler_distribution: see ``stragglers``.
        overlap_slowdown: computation beside a collective takes this many times longer.
        draws, seed: number of draws that the bands come from, and their seed.
    """

    mfu: Range | None = None
    pass_rate: Range = PASS_RATE
    network_speed: Range = NETWORK_SPEED
    straggler_spread: Range | None = None
    overlap_slowdown: Range = OVERLAP_SLOWDOWN
    straggler_distribution: str | None = None
    draws: int = 64
    seed: int = 0
    work: str = "equal"

    def __post_init__(self) -> None:
        require_known("work", self.work, OF_WORK)
        for name, default in zip(
            ("straggler_spread", "straggler_distribution"), OF_WORK[self.work], strict=True
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.straggler_distribution not in DISTRIBUTIONS:
            name = self.straggler_distribution
            raise UserError(unknown_name("straggler distribution", name, DISTRIBUTIONS))
        if not LEAST_DRAWS <= self.draws <= MOST_DRAWS:
            raise UserError(f"{self.draws} draws: from {LEAST_DRAWS} to {MOST_DRAWS}")
        if self.seed < 0:
            raise UserError(f"seed {self.seed}: at least 0")

    def drawn(self) -> Draws:
        """Draws from all ranges: of each its value, then ``draws`` draws spread evenly over it."""
        generator = np.random.default_rng(self.seed)
        ranges = (
            self.mfu or self.pass_rate,
            self.network_speed,
            self.straggler_spread,
            self.overlap_slowdown,
        )
        # Latin hypercube (McKay, Beckman and Conover 1979): the quantiles of each range are cut
        # into as many equal strata as there are draws, and each stratum gives one draw, in an order
        # of the range's own. So a few draws cover every range, and ranges vary independently.
        columns = []
        for span in ranges:
            places = generator.permutation(self.draws) + generator.random(self.draws)
            columns.append(np.concatenate([[span.value], span.at(places / self.draws)]))
        places = generator.permutation(self.draws) + generator.random(self.draws)
        return Draws(*columns, np.concatenate([[0.5], places / self.draws]))

    def slowest(self, gpus: int, draws: Draws) -> NDArray:
        """Computes the pace of the slowest of ``gpus`` in each draw, as a multiple of the mean's.

        With equal work a slow rank stays slow: a draw is a job with a slowest rank, and the first
        entry their mean. Lengths of texts vary from step to step, so there every draw has the mean.
        """
        spread, kind = draws.straggler_spread, self.straggler_distribution
        expected = slowest_of(gpus, spread, kind)
        if self.work == "texts":
            return expected
        drawn = slowest_at(gpus, spread, draws.slowest_quantile, kind)
        return np.concatenate([expected[:1], drawn[1:]])
