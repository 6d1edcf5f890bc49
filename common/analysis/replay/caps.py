"""T(b) of a job at other bucket caps, from its traces, by the lab's model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from common.analysis.replay.job import Job
from common.analysis.replay.system import TraceSystem, system_of
from common.errors import UserError
from common.perfmodel.replay.changes import of_another_run
from common.perfmodel.replay.gate import LIMIT

CAPS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)


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


def at_caps(system: TraceSystem, steps_s: ArrayLike, caps: Sequence[float | None]) -> pd.DataFrame:
    """Predicts backward pass and step at caps, a row per cap: the mean of the trace's steps.

    Columns: bucket_cap_mib (NaN is DDP's default), buckets, backward_s, exposed_s, and step_s,
    low_s, high_s: the measured steps with the difference to the trace's own buckets, and the
    interval of the mean of another run of as many steps.

    Args:
        system: the system.
        steps_s: the measured steps.
        caps: caps in MiB.
    """
    own_s = np.array([model.simulate(system.buckets).total_s for model in system.models])
    steps_s = np.asarray(steps_s)[: len(own_s)]
    rows = []
    for cap in caps:
        lines = [model.at_cap(cap) for model in system.models]
        total_s = np.array([line.total_s for line in lines])
        step = of_another_run(steps_s + total_s - own_s, float(steps_s.mean()))
        rows.append(
            (
                np.nan if cap is None else float(cap),
                lines[0].num_buckets,
                total_s.mean(),
                np.mean([line.exposed_communication_s for line in lines]),
                step.estimate,
                step.low,
                step.high,
            )
        )
    columns = ["bucket_cap_mib", "buckets", "backward_s", "exposed_s", "step_s", "low_s", "high_s"]
    return pd.DataFrame(rows, columns=columns)
