"""Computes what the tab of buckets shows: a timeline, T(b) with b*, efficiency over ranks, and the
``ddplab predict`` that answers the same.

All of it is the project's own model (``DdpModel``) of a system in which some quantities were moved.
α and β are those of the system's all-reduces on the ranks that it starts with: α is the shortest
time, and β comes from both ends of the curve, as in the course. Moving them stretches the curve
(``scaled``), which keeps its measured shape; on other numbers of ranks it is a ring's.

The model calls what students write. A part that needs a task which is not written yet is left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import NotYetWritten
from common.explore.systems import ClusterCommand, Placed, RunCommand, System, as_curve
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.cluster.assumptions import OVERLAP_SLOWDOWN, PASS_RATE
from common.perfmodel.collectives import scaled
from common.perfmodel.ddp.best_cap import BestCap
from common.perfmodel.ddp.profile import DdpCosts, SecondsBySize
from common.perfmodel.ddp.step import StepOptions
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.settings import AtLeast, NonNegative, Positive, Settings

RANKS = tuple(2**power for power in range(1, 11))
"""Numbers of ranks that efficiency is computed for, beside 1 and the system's own."""
SMALLEST_SHOWN_MIB = 1 / 16
COMMAND = ("uv", "run", "ddplab", "predict")
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
    ranks: Annotated[int, AtLeast(2)]
    cap_mib: Annotated[float, Positive]
    compute: Annotated[float, Positive] = 1.0
    contention: Annotated[float, NonNegative] = 1.0


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

    def times(by_size: SecondsBySize | None) -> SecondsBySize | None:
        return by_size and (by_size[0], tuple(time_s * factor for time_s in by_size[1]))

    return replace(
        costs,
        communication_slowdown=more(costs.communication_slowdown),
        compute_slowdown=more(costs.compute_slowdown),
        lost_compute=times(costs.lost_compute),
        delays=times(costs.delays),
    )


def explore(system: System, settings: BucketSettings, best: BestCap | None = None) -> BucketView:
    """Computes everything that the tab shows.

    Args:
        system: System to start from.
        settings: Settings of the sliders.
        best: T(b) of the same settings but for the cap, which it does not depend on.
    """
    chosen = placed(system, settings)
    unwritten: dict[str, None] = {}

    def if_written(compute: Callable[[], Found]) -> Found | None:
        try:
            return compute()
        except NotYetWritten as error:
            unwritten[error.task] = None
            return None

    timeline = if_written(lambda: chosen.model.at_cap(settings.cap_mib))
    best = best or if_written(
        lambda: chosen.model.best_cap(system.caps_mib, bucketings=system.bucketings)
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
    reached = zip(view.ranks, view.at_cap, strict=True)
    below = [ranks for ranks, efficiency_ in reached if efficiency_ < share]
    return below[0] if below else None


def cap_curve(best: BestCap) -> tuple[NDArray, NDArray, NDArray]:
    """Returns T(b) as a line with steps: caps in MiB, T in ms, and T where it is within 1 % of b*.

    The latter is NaN elsewhere. Caps below ``SMALLEST_SHOWN_MIB`` are left out.
    """
    visible = [
        (max(candidate.low_mib, SMALLEST_SHOWN_MIB), candidate.high_mib, candidate.total_s * 1e3)
        for candidate in best.candidates
        if candidate.high_mib > SMALLEST_SHOWN_MIB
    ]
    low, high, total_ms = np.array(visible).T
    caps = np.stack([low, high], axis=1).ravel()
    times_ms = np.repeat(total_ms, 2)
    near = np.where(times_ms <= best.total_s * 1e3 * 1.01, times_ms, np.nan)
    return caps, times_ms, near


@dataclass(frozen=True)
class PredictLine:
    """A command for a shell, and the settings of the explorer that it does not have."""

    line: str
    missing: tuple[str, ...]

    @property
    def note(self) -> str:
        """Returns a sentence about what is missing; empty where nothing is."""
        return f"Not in this command: {', '.join(self.missing)}." if self.missing else ""


def predict_line(system: System, now: BucketSettings, at_first: BucketSettings) -> PredictLine:
    """Returns the command for a system with these settings.

    Args:
        system: System that is explored.
        now: Settings of the sliders.
        at_first: Settings that the system starts with, which need no flag.
    """
    words = {
        "alpha_us": "α",
        "beta_gb_per_s": "β",
        "ranks": "the number of ranks",
        "compute": "the time of computation",
        "contention": "contention",
    }
    moved = [name for name in words if getattr(now, name) != getattr(at_first, name)]
    if isinstance(system.command, RunCommand):
        flags = _of_run(system, now, moved)
        covered = {"alpha_us"} if "--alpha-us" in flags else set()
        lacks = []
    else:
        flags, covered = _of_cluster(system.command, now, moved)
        lacks = ["the bucket cap"]
        if not system.command.is_this:
            lacks = ["the published times (this computes the same model on such a cluster)", *lacks]
    missing = [*lacks, *(words[name] for name in moved if name not in covered)]
    return PredictLine(shlex.join([*COMMAND, *flags]), tuple(missing))


def _of_run(system: System, now: BucketSettings, moved: list[str]) -> list[str]:
    """Returns the flags for a run. ``--alpha-us`` stands for α where it means the same.

    It moves the curve of all-reduces one after another. Where those of several at a time were
    measured, too, the explorer moves both, and with another β or more ranks there is no flag.
    """
    flags = [*system.command.flags, "--bucket-cap-mb", f"{now.cap_mib:g}"]
    model = system.start.model
    one_curve = model.crowded_network is None
    smallest_first = model.network.times_s[0] == model.network.times_s.min()
    takes_alpha = one_curve and smallest_first and "--from-traces" not in flags
    if moved == ["alpha_us"] and takes_alpha:
        flags += ["--alpha-us", f"{now.alpha_us:g}"]
    return flags


def _of_cluster(
    command: ClusterCommand, now: BucketSettings, moved: list[str]
) -> tuple[list[str], set[str]]:
    """Returns the flags for a cluster, and the settings that they tell."""
    flags = ["--cluster", command.cluster, *command.flags, "--gpus", f"{now.ranks}"]
    covered = {"ranks"}
    if not command.is_this:
        return flags, covered
    if "compute" in moved:
        flags += ["--pass-rate", f"{PASS_RATE.value / now.compute:.12g}"]
        covered.add("compute")
    if "contention" in moved:
        slowdown = 1 + (OVERLAP_SLOWDOWN.value - 1) * now.contention
        flags += ["--overlap-slowdown", f"{slowdown:.12g}"]
        covered.add("contention")
    return flags, covered
