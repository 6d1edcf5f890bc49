"""Visits two arms in rounds whose times are made up: ``rounds_worker.py FOLDER OPTIONS``.

OPTIONS are those of ``RoundOptions``, as JSON. Each rank prints the visits that it made. Over the
rounds the times of arm b settle down: their ratio to a's is known ever better.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np
import pandas as pd

from common.runtime.group.process_group import process_group
from common.runtime.records.recorder import record_run
from common.settings import RankOptions, RoundOptions

ARMS = ("a", "b")


@dataclass(frozen=True)
class Options(RoundOptions, RankOptions):
    """Settings of a run of made-up rounds."""


def made_up(rounds: int) -> pd.DataFrame:
    """Returns times of rounds: arm b takes twice a's time, and 30 % more or less at first."""
    off = 0.3 / np.arange(1, rounds + 1) ** 2 * (-1) ** np.arange(rounds)
    return pd.DataFrame({"a": np.ones(rounds), "b": 2 * np.exp(off)})


if __name__ == "__main__":
    settings = Options(output_dir=sys.argv[1], run_id="run", **json.loads(sys.argv[2]))
    visits: list[tuple[int, str]] = []
    with process_group("cpu") as worker, record_run(settings, "made-up", worker) as recorder:
        # Rank 0 alone has times; the others are told.
        times = (lambda: made_up(len(visits) // len(ARMS))) if worker.is_main else pd.DataFrame
        for visit in recorder.rounds(ARMS, settings, stage="arms", times=times):
            visits.append(visit)
    print(json.dumps(visits))
