"""The ``ddplab predict`` that answers for a system and settings, and what it cannot be told."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.explore.systems import ClusterAsked, RunAsked, System
from common.perfmodel.cluster.assumptions import MFU, OVERLAP_SLOWDOWN

if TYPE_CHECKING:
    from common.explore.buckets import BucketSettings

COMMAND = ("uv", "run", "ddplab", "predict")


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
        system: what is explored.
        now: the settings.
        at_first: settings that the system starts with, which need no flag.
    """
    words = {
        "alpha_us": "α",
        "beta_gb_per_s": "β",
        "ranks": "the number of ranks",
        "compute": "the time of computation",
        "contention": "contention",
    }
    moved = [name for name in words if getattr(now, name) != getattr(at_first, name)]
    if isinstance(system.asked, RunAsked):
        flags, told = _of_run(system, now, moved), {"alpha_us"}
        told = told if "--alpha-us" in flags else set()
        lacks: Iterable[str] = system.asked.lacks
    else:
        flags, told = _of_cluster(system.asked, now, moved)
        lacks = ["the bucket cap"]
        if not system.asked.is_this:
            lacks = ["the published times (this computes the same model on such a cluster)", *lacks]
    missing = [*lacks, *(words[name] for name in moved if name not in told)]
    return PredictLine(shlex.join([*COMMAND, *flags]), tuple(missing))


def _of_run(system: System, now: BucketSettings, moved: list[str]) -> list[str]:
    """Returns the flags for a run. ``--alpha-us`` stands for α where it means the same.

    It moves the curve of all-reduces one after another. Where those of several at a time were
    measured, too, the explorer moves both, and with another β or more ranks there is no flag.
    """
    flags = [*system.asked.flags, "--bucket-cap-mb", f"{now.cap_mib:g}"]
    model = system.start.model
    one_curve = model.crowded_network is None
    smallest_first = model.network.times_s[0] == model.network.times_s.min()
    if moved and moved[0] == "alpha_us" and len(moved) == 1 and one_curve and smallest_first:
        flags += ["--alpha-us", f"{now.alpha_us:g}"]
    return flags


def _of_cluster(
    asked: ClusterAsked, now: BucketSettings, moved: list[str]
) -> tuple[list[str], set[str]]:
    """Returns the flags for a cluster, and the settings that they tell."""
    work = asked.workload
    flags = ["--cluster", asked.cluster, "--model", work.model, "--gpus", f"{now.ranks}"]
    flags += ["--batch-size", f"{work.batch_size}", "--precision", work.precision]
    told = {"ranks"}
    if not asked.is_this:
        return flags, told
    mfu = MFU.value / now.compute
    if "compute" in moved and 0.001 <= mfu <= 1:
        flags += ["--mfu", f"{mfu:.12g}"]
        told.add("compute")
    if "contention" in moved:
        slowdown = 1 + (OVERLAP_SLOWDOWN.value - 1) * now.contention
        flags += ["--overlap-slowdown", f"{slowdown:.12g}"]
        told.add("contention")
    return flags, told
