"""``ddplab study onsets``: what ``ddplab diagnose --to_end`` says of faults that begin in a run.

Scripts run on two ranks, watched to their end. After ``BEFORE`` steps a fault begins, planted by
``planted_faults``; the first change that is noticed from there on must come in time and name the
fault's rank and phase. One that is noticed before is a false alarm. Quiet runs have no fault. Of
their longest blocks ten hours are drawn, in stretches of a minute, and judged as a run's: where two
stretches meet the machine's speed jumps, so that they are harder than ten hours of a run.

Pairs of quiet runs, one watched and one not, in rotated order, tell what a watch adds to a step.

``ddplab study onsets --continues RUN_DIR`` goes on with a study that was cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
from ddplab_watch.change_points import BATCH, LONGER, Change
from ddplab_watch.step_blocks import (
    BACKWARD,
    BLOCK_S,
    COPY,
    MEASURED,
    MEMORY,
    SINGLE,
    STEP,
    Block,
    steps_in,
)

from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.cluster.launch import launch
from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.long_runs import changes_in, recorded_blocks, recorded_change
from common.diagnose.studies.planting import PLANTED
from common.diagnose.studies.script_cases import RANKS
from common.errors import UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import earlier_table, say_tables, study_run, with_verdicts
from common.runtime.stage_progress import StageProgress
from common.samples import paired_ratio, rotated

SCRIPTS = project_root() / "assignments" / "assignment4" / "scripts"
SIZES = {
    "plain": "--batch_size 256 --width 640",
    "streaming": "--batch_size 8 --tokens 24",
    "trainer": "--batch_size 4 --tokens 24",
}
"""Flags with which a step of a script takes some 25 ms on two cores."""
BEFORE, AFTER = 800, 900
"""Steps before a fault begins, and with it."""
QUIET, QUIET_STEPS, QUIET_RUNS = "quiet", 78_000, 4
"""Cause and fault of quiet runs, their steps, and how many there are."""
PAIRED, PAIRED_STEPS, PAIRS = "paired", 3_000, 8
"""The same of pairs of quiet runs; one of each pair is not watched."""
WITHOUT_FAULT = (QUIET, PAIRED)
IN_STEPS, IN_S = 30, 60.0
"""A change is to be noticed within so many steps or seconds, whichever are more."""
STRETCH = 15
"""Blocks that follow each other, of those that are drawn: a minute."""
HOURS, DRAWS = 10, 20
FOUND_SHARE = 0.95
RATE = "2gbit"
"""Rate of the links before one is cut."""
MOST_OVERHEAD = 0.003
"""Share of a rank's time that hooks may take between windows."""
RESULTS, BLOCKS, HOOKS, UNWATCHED = "cases.csv", "blocks.csv", ".hooks", "-unwatched"
TIMED_WATCH = project_root() / "common" / "diagnose" / "studies" / "timed_watch.py"


@dataclass(frozen=True)
class Onset:
    """A run whose fault begins after ``BEFORE`` steps.

    Attributes:
        script: name of one of assignment 4's scripts.
        fault: argument of ``planted_faults``.
        ranks: ranks of which any may be named; None stands for all ranks together.
        phases: phases of which any may be named.
    """

    script: str
    fault: str
    ranks: tuple[int | None, ...] = ()
    phases: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """Returns the fault's name."""
        return self.fault.partition("=")[0]

    @property
    def name(self) -> str:
        """Returns the script and the fault."""
        return f"{self.script}-{self.cause}"

    def words(self) -> list[str]:
        """Returns the script that runs and its arguments."""
        steps = {QUIET: QUIET_STEPS, PAIRED: PAIRED_STEPS}.get(self.cause, BEFORE + AFTER)
        name = self.script.partition("-")[0]
        script = [str(SCRIPTS / f"{name}.py"), *SIZES[name].split(), "--steps", str(steps)]
        planted = [] if self.cause in WITHOUT_FAULT else [str(PLANTED), f"{self.fault}@{BEFORE}"]
        return planted + script

    def is_named_by(self, change: Change) -> bool:
        """Returns True if a change names the fault's rank and phase.

        A rank is named, too, where all ranks' steps take longer and it is the slowest in them.
        """
        if change.rank in self.ranks and change.phase in self.phases:
            return True
        is_shared = change.rank is None and change.phase in (BACKWARD, STEP)
        of_one = is_shared and None not in self.ranks
        return of_one and any(f"rank {rank} is the slowest" in change.why for rank in self.ranks)


def _onsets(script: str, layers: int) -> list[Onset]:
    """Returns a script's cases; ``layers`` is how often its linear layers are then computed."""
    of_all = (None, 0, 1)
    return [
        Onset(script, "slow-forward=6", (1,), ("forward",)),
        Onset(script, "slow-backward=6", (None, 1), (BACKWARD, STEP)),
        Onset(script, "slow-loader=6", (1,), ("data",)),
        Onset(script, "slow-data=6", of_all, ("data",)),
        Onset(script, "slow-update=6", (0,), ("update",)),
        Onset(script, "garbage=150", of_all, ("forward",)),
        Onset(script, "growing-memory=1", of_all, (MEMORY,)),
        Onset(script, f"slow-compute={layers}", (1,), ("forward",)),
        Onset(script, "busy-neighbour=1", (1,), (*SINGLE,)),
        Onset(script, "slow-link=1000", (None,), (BACKWARD, STEP)),
    ]


CASES = (
    *_onsets("plain", layers=2),
    *_onsets("streaming", layers=2),
    *_onsets("trainer", layers=6),
    *(Onset(f"plain-{number}", QUIET) for number in range(1, QUIET_RUNS + 1)),
    *(Onset(f"plain-{number}", PAIRED) for number in range(1, PAIRS + 1)),
)


@dataclass(frozen=True)
class OnsetStudy:
    """Settings of the study."""

    only: tuple[str, ...] = ()
    """Names of cases, faults or scripts; by default all."""
    continues: str = ""
    """Run directory of a study that was cut."""

    def __post_init__(self) -> None:
        names = {word for case in CASES for word in (case.name, case.cause, case.script)}
        for name in self.only:
            if name not in names:
                raise UserError(f"unknown case {name!r}; a case's name, a script's or a fault's")

    def cases(self) -> list[Onset]:
        """Returns the cases asked for."""
        wanted = set(self.only)
        return [
            case for case in CASES if not wanted or wanted & {case.name, case.cause, case.script}
        ]


SETTINGS = OnsetStudy


def run_study(study: OnsetStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs every case and judges what the watch noticed.

    Returns:
        the run directory: ``cases.csv``, ``blocks.csv`` of quiet runs, ``drawn.csv``,
        ``verdicts.csv``, and in ``runs/`` each bundle and log.
    """
    cases = study.cases()
    if (reason := why_no_hosts()) and any(case.cause == "slow-link" for case in cases):
        raise UserError(f"cases of slow-link: {reason}; choose others by --only")
    rows, blocks = (
        earlier_table(study.continues, name, ["case"]).to_dict("records")
        for name in (RESULTS, BLOCKS)
    )
    recorded = {row["case"] for row in rows}
    environment = describe_environment("gloo", "cpu", RANKS)
    with study_run("onsets", study, output_dir, progress, environment) as run:
        folder = (run.path / "runs").absolute()  # ranks start in another folder
        folder.mkdir()

        def keep() -> None:
            run.write_table(BLOCKS, pd.DataFrame(blocks, columns=None if blocks else ["case"]))
            run.write_table(RESULTS, pd.DataFrame(rows))

        if rows:
            keep()
        for number, case in enumerate(cases):
            if case.name in recorded:
                continue
            with progress.stage(case.name) as update:
                for watched in rotated((True, False), number):
                    if watched or case.cause == PAIRED:
                        run_case(case, folder, update, watched)
            row, of_quiet = outcome_of(case, folder / case.name)
            rows.append(row)
            blocks += of_quiet
            keep()  # whole after each
        drawn = drawn_alarms(pd.read_csv(run.path / BLOCKS))
        run.write_table("drawn.csv", drawn)
        table = pd.read_csv(run.path / RESULTS)
        verdicts = judge(table, drawn)
        run.write_table("verdicts.csv", verdicts)
    say_tables(progress, table, verdicts)
    return run.path


def run_case(case: Onset, folder: Path, update: Callable[[str], None], watched: bool) -> None:
    """Runs a case, watched to its end or not; leaves its bundle and its log in ``folder``."""
    hosts = EmulatedCluster.of(RANKS, [RATE]) if case.cause == "slow-link" else None
    name = case.name if watched else f"{case.name}{UNWATCHED}"
    options = [f"folder={folder / name}", "to_end=1", "probe=0"] if watched else ["watch=off"]
    words = [str(folder / f"{name}{HOOKS}"), *options, *case.words()]
    launch(TIMED_WATCH, words, RANKS, folder / f"{name}.log", hosts=hosts, on_output=update)


def outcome_of(case: Onset, path: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Returns a case's row, and a quiet run's longest blocks: a row for each and each rank."""
    bundle = read_bundle(path)
    changes = [recorded_change(row) for row in bundle.of("changes").to_dict("records")]
    changes = [change for change in changes if change.phase != BATCH]
    blocks = recorded_blocks(bundle)
    ends = [block.last for block in blocks], [block.unix_s for block in blocks]
    began = np.inf if case.cause in WITHOUT_FAULT else BEFORE
    first = next((change for change in changes if change.noticed >= began), None)
    row = {
        "case": case.name,
        "planted": case.cause,
        "script": case.script,
        "strength": case.fault.partition("=")[2],
        "minutes": (ends[1][-1] - ends[1][0]) / 60,
        "step_ms": median(of[STEP] for block in blocks for of in block.ranks.values()),
        "hooks_share": max(of["hooks_s"] / of["passed_s"] for of in times_of(path)),
        "watched_ms": None,
        "unwatched_ms": None,
        "alarms_before": sum(change.noticed < began for change in changes),
        "delay_steps": None,
        "delay_s": None,
        "rank": None,
        "phase": "",
        "is_named": False,
        "said": "",
    }
    if first is not None:
        at_s, began_s = np.interp([first.noticed, BEFORE], *ends)
        whose = "all" if first.rank is None else first.rank
        row |= {"delay_steps": first.noticed - BEFORE, "delay_s": at_s - began_s}
        row |= {"rank": whose, "phase": first.phase, "is_named": case.is_named_by(first)}
        row["said"] = first.said()
    if case.cause == PAIRED:
        for column, name in (("watched_ms", path.name), ("unwatched_ms", path.name + UNWATCHED)):
            row[column] = max(of["step_s"] for of in times_of(path.with_name(name))) * 1e3
    if case.cause != QUIET:
        return row, []
    longest = max(map(steps_in, blocks))  # some are as long but for a few steps
    about = [(block, rank, of) for block in blocks for rank, of in block.ranks.items()]
    return row, [
        {"case": case.name, "first": block.first, "last": block.last, "unix_s": block.unix_s}
        | {"rank": rank}
        | {name: of[name] for name in MEASURED}
        | {"alone_ms": json.dumps(of["alone_ms"])}
        for block, rank, of in about
        if LONGER * steps_in(block) > longest
    ]


def times_of(path: Path) -> list[dict[str, float]]:
    """Returns what ``timed_watch`` has left of each rank of a run."""
    return [json.loads(file.read_text()) for file in path.parent.glob(f"{path.name}{HOOKS}.*")]


def drawn_alarms(table: pd.DataFrame) -> pd.DataFrame:
    """Counts the alarms in hours of blocks that are drawn from quiet runs' blocks.

    Args:
        table: ``blocks.csv``.

    Returns:
        A row per draw: draw, hours, alarms. None where there are no quiet runs.
    """
    table = table.assign(**{COPY: table[COPY].fillna(0.0) if COPY in table else 0.0})
    by_block: dict[tuple, dict[int, dict]] = {}
    for row in table.to_dict("records"):
        row["alone_ms"] = json.loads(row["alone_ms"])
        by_block.setdefault((row["case"], row["first"], row["last"]), {})[row["rank"]] = row
    runs: dict[str, list[Block]] = {}
    for (case, first, last), ranks in by_block.items():
        ended_s = max(row["unix_s"] for row in ranks.values())
        runs.setdefault(case, []).append(Block(first, last, ended_s, ranks))
    stretches = [
        blocks[at : at + STRETCH]
        for blocks in runs.values()
        for at in range(len(blocks) + 1 - STRETCH)
        # A window and short blocks lie between those before a change and those after it.
        if all(after.first == before.last + 1 for before, after in pairwise(blocks[at:][:STRETCH]))
    ]
    rows = []
    for number in range(DRAWS) if stretches else ():
        draw = np.random.default_rng(number)
        count = round(HOURS * 3600 / BLOCK_S / STRETCH)
        begun = draw.integers(len(stretches), size=count)
        chosen = [block for at in begun for block in stretches[at]]
        changes = changes_in(_one_run(chosen))
        alarms = sum(change.phase != BATCH for change in changes)
        rows.append({"draw": number, "hours": HOURS, "alarms": alarms})
    return pd.DataFrame(rows, columns=["draw", "hours", "alarms"])


def _one_run(blocks: Sequence[Block]) -> list[Block]:
    """Returns blocks of one length with the numbers of steps and times of one run."""
    steps = steps_in(blocks[0])
    begun_s = blocks[0].unix_s
    return [
        replace(block, first=at * steps, last=(at + 1) * steps - 1, unix_s=begun_s + at * BLOCK_S)
        for at, block in enumerate(blocks)
    ]


def judge(cases: pd.DataFrame, drawn: pd.DataFrame) -> pd.DataFrame:
    """Compares what was noticed with what is promised; returns a row per promise.

    Of what was not run nothing is said.
    """
    onsets = cases[~cases["planted"].isin(WITHOUT_FAULT)]
    in_time = (onsets["delay_steps"] <= IN_STEPS) | (onsets["delay_s"] <= IN_S)
    named = in_time & onsets["is_named"].astype(bool)
    quiet, pairs = (cases[cases["planted"] == cause] for cause in WITHOUT_FAULT)
    hooks, promises = cases.loc[cases["planted"].ne(PAIRED), "hooks_share"], []
    if len(hooks):
        promises.append(("median share of time in hooks", None, MOST_OVERHEAD, hooks.median()))
    if len(onsets):
        promises += [
            ("share of onsets noticed in time", FOUND_SHARE, None, in_time.mean()),
            ("share of onsets noticed in time, by rank and phase", None, None, named.mean()),
            ("alarms before an onset", None, 0.0, onsets["alarms_before"].sum()),
            ("median seconds to notice", None, IN_S, onsets["delay_s"].median()),
        ]
    if len(quiet):
        promises.append(("alarms in quiet runs", None, 1.0, quiet["alarms_before"].sum()))
    if len(drawn):
        mean = drawn["alarms"].mean()
        promises.append(("alarms in ten hours of drawn blocks", None, 1.0, mean))
    if len(pairs) and (added := paired_ratio(pairs["watched_ms"], pairs["unwatched_ms"])).is_told:
        for what, ratio in (("estimate", added.estimate), ("low", added.low), ("high", added.high)):
            promises.append((f"share that a watch adds to a step, {what}", None, None, ratio - 1))
    return with_verdicts(promises)
