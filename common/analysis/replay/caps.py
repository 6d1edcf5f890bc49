"""T(b) of a job at other bucket caps, from its traces, by the lab's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from common.analysis.replay.job import Job
from common.analysis.replay.system import TraceSystem, system_of
from common.errors import UserError
from common.perfmodel.cluster.steps import default_caps_mib
from common.perfmodel.ddp.best_cap import BestCap, fastest_cap
from common.perfmodel.ddp.bucketings import distinct_bucketings
from common.perfmodel.replay.changes import of_another_run
from common.perfmodel.replay.gate import LIMIT
from common.samples import Interval, paired_difference

CAPS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)
SEARCHED = 100
"""Number of caps that b* is searched among: each is predicted for each step."""


def default_caps(system: TraceSystem) -> list[float | None]:
    """Returns DDP's default, and caps up to one bucket of all gradients."""
    largest = system.models[0].profile.total_bytes / 2**20
    return [None, *(cap for cap in CAPS_MIB if cap < 2 * largest)]


def own_error(system: TraceSystem) -> float:
    """Returns the error of T at the trace's own buckets, which the trace shows as well."""
    predicted = np.mean([model.simulate(system.buckets).total_s for model in system.models])
    return float(predicted / system.measured_s.mean() - 1)


def checked_system(job: Job) -> TraceSystem:
    """Makes a system from a job's traces, which gives the trace's own backward pass back.

    Raises UserError where it does not, or cannot be made.
    """
    system = system_of(job)
    if abs(error := own_error(system)) > LIMIT:
        raise UserError(
            f"at the trace's own buckets the model is off by {error:+.1%} (at most {LIMIT:.0%}), "
            "so it says nothing of others"
        )
    return system


def at_caps(system: TraceSystem, steps_s: pd.Series, caps: Sequence[float | None]) -> pd.DataFrame:
    """Predicts backward pass and step at caps, a row per cap: the mean of the trace's steps.

    Columns: bucket_cap_mib (NaN is DDP's default), buckets, backward_s, exposed_s, and step: the
    measured steps with the difference to the trace's own buckets, with the interval of the mean of
    another run of as many steps (step_s, low_s, high_s are its numbers).

    Args:
        system: the system.
        steps_s: the measured steps, by number.
        caps: caps in MiB.
    """
    own_s = np.array([model.simulate(system.buckets).total_s for model in system.models])
    steps_s = steps_s.loc[[*system.numbers]].to_numpy()
    rows = []
    for cap in caps:
        lines = [model.at_cap(cap) for model in system.models]
        total_s = np.array([line.total_s for line in lines])
        step = of_another_run(steps_s + total_s - own_s, float(steps_s.mean()))
        rows.append(
            {
                "bucket_cap_mib": np.nan if cap is None else float(cap),
                "buckets": lines[0].num_buckets,
                "backward_s": total_s.mean(),
                "exposed_s": np.mean([line.exposed_communication_s for line in lines]),
                "step": step,
                "step_s": step.estimate,
                "low_s": step.low,
                "high_s": step.high,
            }
        )
    return pd.DataFrame(rows)


def best_cap(system: TraceSystem) -> tuple[BestCap, Interval]:
    """Finds the cap of the shortest pass, by the mean of the trace's steps, among ``SEARCHED``.

    Returns:
        the cap, and by how many seconds its passes differ from those at DDP's default.
    """
    profile = system.models[0].profile
    bucketings = distinct_bucketings(profile, default_caps_mib(profile.total_bytes, SEARCHED))
    lines = [[model.simulate(b.buckets) for model in system.models] for b in bucketings]
    total_s = np.array([[line.total_s for line in of_steps] for of_steps in lines])
    means_s = total_s.mean(axis=1).tolist()
    means = [
        replace(first, total_s=mean_s) for (first, *_), mean_s in zip(lines, means_s, strict=True)
    ]
    best = fastest_cap(bucketings, means)
    chosen = best.candidates.index(best.candidate(best.cap_mib))
    default_s = [model.backward_s(None) for model in system.models]
    return best, paired_difference(total_s[chosen], default_s)
