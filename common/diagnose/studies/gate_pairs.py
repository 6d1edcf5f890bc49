"""``ddplab study gate``: how often the gate of ``ddplab diagnose --compare`` is wrong.

Pairs are windows of consecutive steps of a recorded run, as they were, so steps are as alike as
they are in training. Two windows of one run differ in nothing: a failure is a false alarm. Then all
times of the second are made longer. What one run differs from the next is not in it. Whether the
machine was disturbed is left out, as the watch tells it of a whole run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import pandas as pd

from common.analysis.runs import Run
from common.cluster.launch import launch
from common.diagnose.compared_runs import FAILED, PASSED, SAID, Comparison
from common.diagnose.diagnosis import case_of
from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.evidence.bundle_tables import write_run
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import STEPS
from common.diagnose.opened import Opened, open_diagnosis
from common.diagnose.studies.script_cases import RANKS
from common.diagnose.studies.watched_scripts import WATCH
from common.errors import UserError
from common.judged import NOT_WITNESSED
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import say_tables, study_run, with_verdicts
from common.runtime.stage_progress import StageProgress
from common.samples import rotated, slowest_rank
from common.settings import AtLeast, Settings

LIMIT = 5.0
"""Per cent that the gate lets pass."""
LEVEL = 61
"""Steps of the rolling median that is taken for the machine's speed."""
PLANTED = (0, 5, 10, 20)
"""Slow-downs in per cent."""
SIDES = ((1, 30), (1, 60), (4, 30), (4, 60))
"""Windows of a side, which stand for runs, and steps of each."""
FALSE_ALARMS, POWER = 0.05, 0.9
SCRIPT = str(project_root() / "assignments" / "assignment4" / "scripts" / "plain.py")
BEFORE = 20
"""Steps of the healthy run besides those that are judged, at least the watch's first ones."""


@dataclass(frozen=True)
class GateStudy(Settings):
    """Settings of the study."""

    table: tuple[str, ...] = ()
    """Bundles whose steps are judged; by default that of a healthy run of two ranks."""
    steps: Annotated[int, AtLeast(600)] = 6000
    """Steps of the healthy run."""
    rounds: Annotated[int, AtLeast(1)] = 200
    """Pairs of each kind."""


SETTINGS = GateStudy


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
    run = replace(run, opened=recorded, tables={**run.tables, STEPS: rows})
    return replace(opened, case=Case(run), later=())


def with_all_steps(path: str, folder: Path) -> Opened:
    """Opens a bundle with the steps after each change, too: windows lie anywhere."""
    tables = write_run(read_bundle(Path(path)), folder)
    return replace(open_diagnosis(path), case=case_of(tables, None))


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
        steps, runs: steps of a window, and windows of a side, which stand for runs.
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


def run_study(study: GateStudy, output_dir: str, progress: StageProgress) -> Path:
    """Judges pairs of each bundle; without any, first records a healthy run of two ranks.

    Returns:
        the run directory: ``pairs.csv``, a row per bundle, machine, size of a side and slow-down,
        and ``verdicts.csv``.
    """
    for name in study.table:
        require_steps(name)  # before anything is written
    environment = describe_environment("gloo", "cpu", RANKS)
    with (
        study_run("gate", study, output_dir, progress, environment) as run,
        TemporaryDirectory() as scratch,
    ):
        paths = list(study.table)
        if not paths:
            folder = (run.path / "healthy").absolute()
            words = [f"folder={folder}", f"window={study.steps}", "probe=0", "bucket_steps=0"]
            words += [SCRIPT, "--steps", str(study.steps + BEFORE)]
            with progress.stage("healthy run") as update:
                launch(WATCH, words, RANKS, folder.with_suffix(".log"), on_output=update)
            require_steps(str(folder))
            paths = [str(folder)]
        tables = (Path(scratch) / f"tables-{at}" for at in range(len(paths)))
        bundles = [with_all_steps(*pair) for pair in zip(paths, tables, strict=True)]
        rows = []
        for opened, (runs, steps) in itertools.product(bundles, SIDES):
            with progress.stage(f"{opened.name}, {runs} × {steps} steps a side"):
                for machine, judged in (("as recorded", opened), ("levelled", levelled(opened))):
                    outcomes = outcomes_of(judged, steps, runs, study.rounds, seed=0)
                    keys = {"bundle": opened.name, "machine": machine, "runs": runs, "steps": steps}
                    rows += [keys | row for row in outcomes.to_dict("records")]
            run.write_table("pairs.csv", pd.DataFrame(rows))
        verdicts = judge(pd.DataFrame(rows))
        run.write_table("verdicts.csv", verdicts)
    say_tables(progress, verdicts)
    return run.path


def require_steps(path: str) -> None:
    """Raises UserError unless a bundle has the steps of two of the largest sides."""
    least = 2 * max(runs * steps for runs, steps in SIDES)
    with TemporaryDirectory() as folder:
        opened = with_all_steps(path, Path(folder) / "tables")
    if (count := opened.case.run.unwatched["step"].nunique()) < least:
        raise UserError(f"{opened.name} has {count} plain steps; pairs need at least {least}")


def judge(pairs: pd.DataFrame) -> pd.DataFrame:
    """Compares outcomes with what is promised; returns a row per promise, for the worst rows."""
    shares = pairs.set_index("slower_percent")[list(SAID.values())]
    shares = shares.div(shares.sum(axis=1), axis=0)
    failed = shares[SAID[FAILED]]
    largest = pairs.set_index("slower_percent")["runs"].eq(pairs["runs"].max()).to_numpy()
    most = f"of {pairs['runs'].max()} runs a side, at least"
    promises = [
        ("equal pairs that fail, at most", None, FALSE_ALARMS, failed.loc[[0]].max()),
        (f"pairs 10 % slower that fail, {most}", POWER, None, failed[largest].loc[[10]].min()),
        ("pairs 20 % slower that pass, at most", None, 0.0, shares.loc[[20], SAID[PASSED]].max()),
    ]
    return with_verdicts(promises)
