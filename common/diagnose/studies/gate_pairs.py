"""How often the gate of ``ddplab diagnose --compare`` is wrong: ``python -m … BUNDLE [BUNDLE …]``

Pairs are windows of consecutive steps of a recorded run, as they were, so steps are as alike as
they are in training. Two windows of one run differ in nothing: a failure is a false alarm. Then all
times of the second are made longer. What one run differs from the next is not in it. Whether the
machine was disturbed is left out, as the watch tells it of a whole run.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

import numpy as np
import pandas as pd

from common.analysis.runs import Run
from common.diagnose.compared_runs import SAID, Comparison
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import STEPS
from common.diagnose.opened import Opened, open_diagnosis
from common.judged import NOT_WITNESSED
from common.samples import rotated, slowest_rank

LIMIT = 5.0
"""Per cent that the gate lets pass."""
LEVEL = 61
"""Steps of the rolling median that is taken for the machine's speed."""
PLANTED = (0, 5, 10, 20)
"""Slow-downs in per cent."""


class Unwitnessed(Run):
    """A run of which nobody says how quiet its machine was."""

    @property
    def machine_state(self) -> str:
        """Returns ``NOT_WITNESSED``."""
        return NOT_WITNESSED


def window(opened: Opened, first: int, steps: int, slower: float = 1.0) -> Opened:
    """Returns consecutive steps of a run as a run, all of their times longer by a factor."""
    run = opened.case.run
    rows = run.unwatched
    numbers = np.sort(rows["step"].unique())[first : first + steps]
    rows = rows[rows["step"].isin(numbers)].copy()
    rows["step"] -= numbers[0]
    times = [name for name in rows if name.endswith("_time_ms")]
    rows[times] = rows[times].apply(pd.to_numeric, errors="coerce") * slower
    recorded = Unwitnessed(run.opened.folder, run.opened.source)
    return replace(
        opened, case=Case(replace(run, opened=recorded, tables={**run.tables, STEPS: rows}))
    )


def levelled(opened: Opened) -> Opened:
    """Returns a run on a machine that does not drift: times over their rolling median.

    What steps share with those within ``LEVEL`` of them stays.
    """
    run = opened.case.run
    rows = run.unwatched.copy()
    by_step = slowest_rank(rows, "step_time_ms", by=["step"])
    level = by_step.rolling(LEVEL, center=True, min_periods=1).median() / by_step.median()
    times = [name for name in rows if name.endswith("_time_ms")]
    rows[times] = (
        rows[times].apply(pd.to_numeric, errors="coerce").div(rows["step"].map(level), axis=0)
    )
    return replace(opened, case=Case(replace(run, tables={**run.tables, STEPS: rows})))


def outcomes_of(opened: Opened, steps: int, runs: int, pairs: int, seed: int) -> pd.DataFrame:
    """Judges pairs of sides: a row per slow-down, counts by outcome.

    Sides of one run are windows that lie anywhere and do not overlap. Of several, they take turns.

    Args:
        opened: a run of at least twice as many steps.
        steps: steps of a window.
        runs: windows of a side, which stand for runs.
        pairs: number of pairs; each is judged at every slow-down.
        seed: seed of the draws.
    """
    draw = np.random.default_rng(seed)
    last = opened.case.run.unwatched["step"].nunique() - steps
    counts = {planted: dict.fromkeys(SAID.values(), 0) for planted in PLANTED}
    for _ in range(pairs):
        first, second = draw.integers(last + 1, size=2)
        while runs == 1 and abs(first - second) < steps:
            first, second = draw.integers(last + 1, size=2)
        starts = [[first], [second]]
        if runs > 1:
            begin = draw.integers(last + 1 - (2 * runs - 1) * steps)
            order = [side for number in range(runs) for side in rotated((0, 1), number)]
            starts = [
                [begin + at * steps for at, turn in enumerate(order) if turn == side]
                for side in (0, 1)
            ]
        before = [window(opened, start, steps) for start in starts[0]]
        for planted, outcomes in counts.items():
            after = [window(opened, start, steps, 1 + planted / 100) for start in starts[1]]
            outcomes[SAID[Comparison(before, after).status(LIMIT)]] += 1
    return pd.DataFrame(counts).T.rename_axis("slower_percent").reset_index()


def main() -> None:
    """Prints how pairs of windows of the named bundles were judged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--steps", type=int, nargs="+", default=[30, 60])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--pairs", type=int, default=200)
    flags = parser.parse_args()
    for bundle, steps, runs in itertools.product(flags.bundles, flags.steps, flags.runs):
        opened = open_diagnosis(bundle)
        for how, run in {"as recorded": opened, "levelled": levelled(opened)}.items():
            table = outcomes_of(run, steps, runs, flags.pairs, seed=0)
            print(f"{opened.name}, {how}: {runs} × {steps} steps a side, limit {LIMIT:g} %:")
            print(table.to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
