"""Computes what the tab of buckets shows: a timeline, T(b) with b*, and efficiency over ranks.

All of it is the project's own model (``DdpModel``) of a system in which some quantities were moved.
α and β are those of the system's all-reduces on the ranks that it starts with: α is the shortest
time, and β comes from both ends of the curve, as in the course. Moving them stretches the curve
(``scaled``), which keeps its measured shape; on other numbers of ranks it is a ring's.

The model calls what students write. A part that needs a task which is not written yet is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import NotYetWritten, UserError
from common.explore.systems import Placed, System, as_curve
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import scaled
from common.perfmodel.ddp.best_cap import BestCap
from common.perfmodel.ddp.profile import DdpCosts, SecondsBySize
from common.perfmodel.ddp.step import StepOptions
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.settings import NonNegative, Positive, Settings

RANKS = tuple(2**power for power in range(1, 11))
"""Numbers of ranks that efficiency is computed for, beside 1 and the system's own."""
SMALLEST_SHOWN_MIB = 1 / 16
Found = TypeVar("Found")


@dataclass(frozen=True)
class BucketSettings(Settings):
    """Settings of the sliders.

    Attributes:
        alpha_us, beta_gb_per_s: latency and bandwidth of an all-reduce on the ranks that the system
            starts with, in microseconds and 10⁹ bytes per second.
        ranks: number of ranks, at least 2.
        cap_mib: the bucket cap.
        compute: forward and backward pass take this many times as long.
        contention: 1 as measured, 0 for none, 2 for twice as much.
    """

    alpha_us: Annotated[float, Positive]
    beta_gb_per_s: Annotated[float, Positive]
    ranks: int
    cap_mib: Annotated[float, Positive]
    compute: Annotated[float, Positive] = 1.0
    contention: Annotated[float, NonNegative] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks < 2:
            raise UserError(f"{self.ranks} ranks: at least 2 exchange gradients")


@dataclass(frozen=True, eq=False)
class BucketView:
    """Contents of the plots. A part that needs an unwritten task is None.

    Attributes:
        timeline: the backward pass at the chosen cap.
        best: T(b) of all distinct bucketings, and b*.
        ranks: numbers of ranks, from 1.
        at_cap, at_best: the efficiency on each, at the chosen cap and at the b* of these settings.
        unwritten: tasks that are needed and not written yet.
    """

    timeline: BackwardTimeline | None
    best: BestCap | None
    ranks: tuple[int, ...]
    at_cap: NDArray | None
    at_best: NDArray | None
    unwritten: tuple[str, ...]


def first_settings(system: System, cap_mib: float) -> BucketSettings:
    """Returns the settings that change nothing, with this bucket cap."""
    return BucketSettings(
        alpha_us=system.line.alpha_s * 1e6,
        beta_gb_per_s=system.line.bandwidth_bytes_per_s / 1e9,
        ranks=system.ranks,
        cap_mib=cap_mib,
    )


def placed(system: System, settings: BucketSettings, ranks: int | None = None) -> Placed:
    """Returns the system with these settings, on ``ranks`` or on those of the settings."""
    there = system.on(ranks or settings.ranks)
    model, at_first = there.model, first_settings(system, settings.cap_mib)
    latency = settings.alpha_us / at_first.alpha_us
    transfer = at_first.beta_gb_per_s / settings.beta_gb_per_s
    network, crowded = model.network, model.crowded_network
    if (latency, transfer) != (1.0, 1.0):
        network = scaled(as_curve(network), latency=latency, transfer=transfer)
        crowded = scaled(crowded, latency=latency, transfer=transfer) if crowded else None
    changed = replace(
        model,
        profile=model.profile.scaled(compute=settings.compute),
        network=network,
        crowded_network=crowded,
        costs=with_contention(model.costs, settings.contention),
    )
    return Placed(changed, replace(there.parts, forward_s=there.parts.forward_s * settings.compute))


def with_contention(costs: DdpCosts, factor: float) -> DdpCosts:
    """Returns costs whose contention is ``factor`` times what it was; copies stay."""

    def more(slowdown: float) -> float:
        return 1 + (slowdown - 1) * factor

    def times(known: SecondsBySize | None) -> SecondsBySize | None:
        return known and (known[0], tuple(time_s * factor for time_s in known[1]))

    return replace(
        costs,
        communication_slowdown=more(costs.communication_slowdown),
        compute_slowdown=more(costs.compute_slowdown),
        lost_compute=times(costs.lost_compute),
        delays=times(costs.delays),
    )


def explore(system: System, settings: BucketSettings, known: BestCap | None = None) -> BucketView:
    """Computes everything that the tab shows.

    Args:
        system, settings: what is asked.
        known: T(b) of the same settings but for the cap, which it does not depend on.
    """
    here = placed(system, settings)
    unwritten: dict[str, None] = {}

    def if_written(compute: Callable[[], Found]) -> Found | None:
        try:
            return compute()
        except NotYetWritten as error:
            unwritten[error.task] = None
            return None

    timeline = if_written(lambda: here.model.at_cap(settings.cap_mib))
    best = known or if_written(
        lambda: here.model.best_cap(system.caps_mib, bucketings=system.bucketings)
    )
    ranks = shown_ranks(system)
    at_cap = if_written(lambda: efficiency(system, settings, settings.cap_mib, ranks))
    at_best = best and if_written(lambda: efficiency(system, settings, best.cap_mib, ranks))
    return BucketView(timeline, best, (1, *ranks), at_cap, at_best, tuple(unwritten))


def shown_ranks(system: System) -> list[int]:
    """Returns the numbers of ranks that efficiency is computed for, the system's own among them."""
    return sorted({*RANKS, system.ranks})


def efficiency(
    system: System, settings: BucketSettings, cap_mib: float, ranks: Sequence[int] = RANKS
) -> NDArray:
    """Computes the efficiency of weak scaling on one rank and on each of ``ranks``.

    It is the step of one rank that exchanges nothing over a step of so many ranks, all with the
    same batch each.
    """
    alone_s = system.alone_s(settings.compute)
    options = StepOptions(DdpOptions(cap_mib))
    steps = [placed(system, settings, count) for count in ranks]
    times_s = np.array([there.model.step(there.parts, options).total_s for there in steps])
    return np.concatenate([[1.0], alone_s / times_s])


def falls_below(view: BucketView, share: float) -> int | None:
    """Returns the first number of ranks whose efficiency at the chosen cap is under ``share``."""
    below = [n for n, found in zip(view.ranks, view.at_cap, strict=True) if found < share]
    return below[0] if below else None


def cap_curve(best: BestCap) -> tuple[NDArray, NDArray, NDArray]:
    """Returns T(b) as a line with steps: caps in MiB, T in ms, and T where it is within 1 % of b*.

    The latter is NaN elsewhere. Caps below ``SMALLEST_SHOWN_MIB`` are left out.
    """
    shown = [one for one in best.candidates if one.high_mib > SMALLEST_SHOWN_MIB]
    low = np.maximum([one.low_mib for one in shown], SMALLEST_SHOWN_MIB)
    caps = np.stack([low, [one.high_mib for one in shown]], axis=1).ravel()
    times_ms = np.repeat([one.total_s * 1e3 for one in shown], 2)
    near = np.where(times_ms <= best.total_s * 1e3 * 1.01, times_ms, np.nan)
    return caps, times_ms, near


def lanes(timeline: BackwardTimeline) -> list[int]:
    """Returns the lane of each bucket's all-reduce, so that no two of one lane overlap."""
    ends: list[float] = []
    chosen = []
    for event in timeline.events:
        free = [lane for lane, end in enumerate(ends) if end <= event.start_s * (1 + 1e-12)]
        lane = free[0] if free else len(ends)
        ends[lane : lane + 1] = [event.end_s]
        chosen.append(lane)
    return chosen
