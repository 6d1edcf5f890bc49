"""Step times from visits, one per DDP instance: the unit of every comparison; without torch."""

from __future__ import annotations

import pandas as pd


def instance_times(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns seconds of each instance's step by round (index) and setting (columns).

    A step is as long as its slowest rank's; an instance's is the median of its steps.
    """
    slowest = samples.groupby(["setting", "round", "iteration"])["step_time_ms"].max()
    return slowest.groupby(["round", "setting"]).median().unstack() / 1e3


def all_instance_times(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns ``instance_times`` over all stages; their rounds are numbered one after another."""
    parts = [instance_times(part) for _, part in samples.groupby("stage", sort=False)]
    return pd.concat(parts, ignore_index=True)


def spread(times_s: pd.Series) -> float:
    """Computes the relative spread of one setting's instances: standard deviation over median."""
    return float(times_s.std(ddof=1) / times_s.median())
