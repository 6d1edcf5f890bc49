"""``ddplab study watching``: what ``ddplab-watch`` adds to a step.

Two ranks train the same model without a watch, twice, in its plain window, in its bucket window
and, where it is installed, under TraceML, in rotated rounds, each with a new model under DDP. A
step is the slowest rank's. The visits without a watch beside each other show the noise, which on a
shared machine is larger than what is looked for; so the hooks also time themselves. What they do in
a step does not grow with the step.

A visit's median step does not show what comes once in many steps, such as a sample of the system:
its mean step does, with more noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from common.cluster.launch import launch
from common.report.progress import StageProgress
from common.runtime.flags import as_flags
from common.runtime.paths import project_root
from common.runtime.recorder import require_positive
from common.studies.study import study_run, with_verdicts

RANKS = 2
SCRIPT = project_root() / "common" / "studies" / "watching_ranks.py"
BARE, AGAIN = "bare", "bare again"
PROMISED = {"plain window": 0.01}
"""Largest share of a step that a window may add; what the bucket window adds is only stated."""
LONG_MS = 50.0
"""The promise is made for steps that are at least so long."""
MOST_NOISE = 0.01
"""Upper bound on half the width of an interval; a share that is known worse is not judged."""
DRAWS = 2000


@dataclass(frozen=True)
class WatchingStudy:
    """Settings of the study."""

    widths: tuple[int, ...] = (64, 448)
    rounds: int = 10
    visit_s: float = 4.0

    def __post_init__(self) -> None:
        require_positive(self, "rounds", "visit_s")


def run_study(study: WatchingStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures and judges; returns the run directory."""
    with study_run("watching", study, output_dir, progress, backend="gloo", ranks=RANKS) as run:
        folder = run.path.absolute()  # ranks start in another folder
        settings = {
            "widths": study.widths,
            "rounds": study.rounds,
            "visit_s": study.visit_s,
            "device": "cpu",
            "output_dir": folder,
            "run_id": "ranks",
        }
        with progress.stage("steps with and without a watch") as update:
            launch(SCRIPT, as_flags(settings), RANKS, folder / "ranks.log", on_output=update)
        found = added(pd.read_csv(folder / "ranks" / "step-samples.csv"))
        run.write_table("added.csv", found)
        verdicts = judge(found)
        run.write_table("verdicts.csv", verdicts)
    progress.say(found.to_string(index=False, float_format="%.4f"))
    progress.say(verdicts.to_string(index=False, float_format="%.4f"))
    return run.path


def added(samples: pd.DataFrame) -> pd.DataFrame:
    """Computes what each arm adds to a step, as a share of it, with its 95 % interval.

    A visit's time is its median step, or its mean one; a round's bare time is the mean of its two
    bare visits. The share is the median over rounds of an arm's time over the bare one, minus 1;
    its interval comes from drawing the rounds anew.

    Args:
        samples: rows of rank, width, arm, round, step and step_time_ms.

    Returns:
        A row per width, step ("median" or "mean") and arm: width, step, arm, bare_ms, added, low,
        high, and hooks_us, the median microseconds of a step that the slowest rank was in hooks of
        the watch.
    """
    slowest = samples.groupby(["width", "arm", "round", "step"])["step_time_ms"].max()
    visits = slowest.groupby(["width", "arm", "round"]).agg(["median", "mean"])
    in_hooks = samples.groupby(["width", "arm", "round", "step"])["hooks_time_ms"].max()
    hooks_ms = in_hooks.groupby(["width", "arm"]).median()
    draw = np.random.default_rng(0)
    rows = []
    for (width, own), step in product(visits.groupby("width"), visits.columns):
        wide = own[step].droplevel("width").unstack("arm")
        bare = (wide[BARE] + wide[AGAIN]) / 2
        for arm in wide.columns.drop(BARE):
            beside = wide[BARE] if arm == AGAIN else bare
            shares = (wide[arm] / beside - 1).to_numpy()
            chosen = draw.integers(0, len(shares), (DRAWS, len(shares)))
            low, high = np.quantile(np.median(shares[chosen], axis=1), [0.025, 0.975])
            rows.append(
                {
                    "width": width,
                    "step": step,
                    "arm": arm,
                    "bare_ms": float(bare.median()),
                    "added": float(np.median(shares)),
                    "low": float(low),
                    "high": float(high),
                    "hooks_us": float(hooks_ms[width, arm]) * 1e3,
                }
            )
    return pd.DataFrame(rows)


def judge(found: pd.DataFrame) -> pd.DataFrame:
    """Compares what the windows add with what is promised; returns a row per width, step and arm.

    The promise is judged by the hooks' own time, and by the steps where the noise allows it.
    """
    rows = []
    for row in found.itertuples():
        bound = PROMISED.get(row.arm)
        known = row.bare_ms >= LONG_MS and (row.high - row.low) / 2 <= MOST_NOISE
        what = f"{row.arm}, {row.step} step of {row.bare_ms:.1f} ms"
        rows.append({"promise": what, "at_most": bound if known else None, "found": row.added})
        if row.hooks_us > 0 and row.step == "median":
            what = f"{row.arm}, hooks of {row.hooks_us:.0f} µs beside a step of {LONG_MS:.0f} ms"
            share = row.hooks_us / 1e3 / LONG_MS
            rows.append({"promise": what, "at_most": bound, "found": share})
    return with_verdicts(pd.DataFrame(rows))
