"""The settings of a tuning run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.settings import Positive, RankOptions

SWEEP_ROUNDS = 2
"""Visits that an exhaustive sweep makes to each bucketing; tuning takes a share of their time."""


@dataclass(frozen=True)
class TuneSettings(RankOptions):
    """Find the best DDP settings for a model on the ranks of this job.

    Recipe: uv run torchrun --nproc_per_node=2 common/tuning/job.py --function my_model:make
    (or ddplab tune my_model:make). Settings may also come from --config FILE (a YAML file; flags
    win).
    """

    function: str = ""
    """MODULE:FUNCTION that returns (module, batch, loss)."""
    folder: str = "."
    """Folder in which MODULE is looked for, besides the installed packages."""
    share: Annotated[float, Positive] = 0.2
    """Time for tuning, as a share of an exhaustive sweep's; few bucketings may need more."""
    seed: int = 42
    """Seed that is set before FUNCTION is called, the same on all ranks."""
    output_dir: str = "outputs/tune"
