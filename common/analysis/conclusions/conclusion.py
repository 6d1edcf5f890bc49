"""A conclusion from measurements: a predicate, and what a run says of it.

An answer of the staff explains; what it concludes from numbers is evaluated here, on the recorded
run and on the reader's. Students do not get this package (``assignments/course.yaml``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import pandas as pd

from common.analysis.findings.collect import machine_states
from common.analysis.findings.finding import UNREADABLE, unreadable
from common.analysis.runs import choose_folder, is_recorded, recorded_assignment
from common.analysis.show import Table
from common.errors import UserError
from common.judged import DISTURBED, Judged, Verdict, fastest, rival_of

MODULES = {
    "assignment0": "one_device",
    "assignment1": "data_parallel",
    "assignment2": "buckets",
    "assignment2_part3_evaluation": "bucket_evaluation",
    "assignment2_emulated_hosts": "bucket_evaluation",
    "assignment2_part4_scale": "clusters",
    "assignment3": "micro_batches",
    "assignment4_synthetic_scaling": "synthetic_scaling",
    "assignment4_text_scaling": "text_scaling",
}
"""Module of this package by notebook, or by assignment; its ``CONCLUSIONS`` are by notebook, each
the arguments of a ``Conclusion``."""
TABLES = False
"""Last of these arguments for a sentence about published or recorded tables, whatever the run."""
SAME_DATA = "the same data"


class Status(StrEnum):
    """What a run says of a conclusion."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not settled"
    ABSENT = "not measured"


@dataclass(frozen=True)
class Seen:
    """What one run says of a conclusion.

    Attributes:
        number: what it rests on, with its interval or noise; or why there is no such number.
    """

    status: Status
    number: str

    def __str__(self) -> str:
        return f"**{self.status}**: {self.number}"


Look = Callable[[str], Seen]
"""Says what the run directory that it gets says of a conclusion."""


@dataclass(frozen=True)
class Conclusion:
    """A sentence that a run confirms or contradicts.

    Attributes:
        question: number of the question in the notebook.
        of_run: TABLES, or else True.
    """

    question: int
    statement: str
    look: Look
    of_run: bool = True


def counted(holds: bool, number: str) -> Seen:
    """Returns what a number without noise says: one that was counted or predicted."""
    return Seen(Status.HOLDS if holds else Status.FAILS, number)


def by_prediction(holds: bool, number: str) -> Seen:
    """Returns what a prediction says, which nothing was measured of."""
    return counted(holds, f"{number}, predicted")


def published(holds: bool, number: str) -> Seen:
    """Returns what a published table without rounds says: nobody knows its noise."""
    return counted(holds, f"{number}, judged by nothing but its source")


def unsettled(number: str) -> Seen:
    """Returns what noise hides."""
    return Seen(Status.OPEN, number)


def above(judged: Judged, form: str = "{:.2f}") -> Seen:
    """Returns whether a measured number lies above its null; not settled where noise hides it.

    ``form`` is the format of the number and of the ends of its interval.
    """
    return _judged(judged, form, judged.estimate > (judged.null or 0.0))


def below(judged: Judged, form: str = "{:.2f}") -> Seen:
    """Returns whether a measured number lies below its null, as ``above``."""
    return _judged(judged, form, judged.estimate < (judged.null or 0.0))


def within(judged: Judged, most: float, form: str = "{:+.1%}") -> Seen:
    """Returns whether a measured number is at most ``most`` off zero; open where ends disagree."""
    nulls = [replace(judged, null=null) for null in (most, -most)]
    return every([below(nulls[0], form), above(nulls[1], form)])


def every(sides: Iterable[Seen]) -> Seen:
    """Returns whether all hold: one that fails decides, then one that is open."""
    sides = [*sides]
    for status in (Status.FAILS, Status.OPEN, Status.ABSENT):
        if of_status := [side for side in sides if side.status is status]:
            return of_status[0]
    return sides[0]


def opposite(outcome: Seen) -> Seen:
    """Returns what is said of the sentence that denies another one."""
    swapped = {Status.HOLDS: Status.FAILS, Status.FAILS: Status.HOLDS}
    return replace(outcome, status=swapped.get(outcome.status, outcome.status))


def is_first(times: pd.DataFrame, arm: Hashable, form: str = "{:.2f}", **how: object) -> Seen:
    """Returns whether an arm that was named beforehand takes the least time of all.

    It does where it is told from each other arm, and does not where one of them is told to take
    less; else that is open. The number is its closest rival's time over the arm's.

    Args:
        times: a row per round, a column per arm; any unit.
        how: further arguments of ``judged.fastest`` and ``judged.rival_of``.
    """
    return above(_rival(times, arm, **how), form)


def is_behind(times: pd.DataFrame, arm: Hashable, form: str = "{:.2f}", **how: object) -> Seen:
    """Returns whether an arm takes more than the best of all: ``is_first`` denied.

    The number is the arm's time over its closest rival's.
    """
    return above(_rival(times, arm, **how).map(lambda ratio: 1 / ratio), form)


def _rival(times: pd.DataFrame, arm: Hashable, **how: object) -> Judged:
    """Judges the time of an arm's closest rival over that of the arm."""
    if arm not in times:
        raise UserError(f"{arm} was not measured")
    first = fastest(times, **how)
    if first is None:
        raise UserError(f"nothing was measured beside {arm}")
    return first.lead if first.arm == arm else rival_of(times, arm, **how)


def _judged(judged: Judged, form: str, holds: bool) -> Seen:
    if judged.verdict is Verdict.NOT_MEASURED:
        return Seen(Status.ABSENT, judged.reason)
    number = form.format(judged.estimate)
    if judged.interval.is_told:
        number += f" ({judged.interval.text(form)})"
    if not judged.is_settled:
        return unsettled(f"{number}, {judged.reason}")
    return counted(holds, number)


def seen(conclusion: Conclusion, run_dir: str | Path) -> Seen:
    """Asks a run. What it has not measured, or has in tables that cannot be read, is not there.

    Nothing is settled by a run with a stage in which the machine was disturbed: what is predicted
    rests on times as well.
    """
    try:
        outcome = conclusion.look(str(run_dir))
        states = machine_states(Path(run_dir)) if run_dir and conclusion.of_run else {}
        is_settled = outcome.status in (Status.HOLDS, Status.FAILS)
        if is_settled and any(state == DISTURBED for state, _ in states.values()):
            return unsettled(f"{outcome.number}, the machine was disturbed")
        return outcome
    except UserError as missing:
        return Seen(Status.ABSENT, str(missing))
    except UNREADABLE as error:
        return Seen(Status.ABSENT, unreadable(error))


def conclusions_of(notebook: str) -> tuple[Conclusion, ...]:
    """Returns the conclusions of a notebook's answers, in the order of its questions."""
    name = MODULES.get(notebook) or MODULES[notebook.partition("_")[0]]
    entries = importlib.import_module(f"{__package__}.{name}").CONCLUSIONS[notebook]
    return tuple(Conclusion(*entry) for entry in entries)


def conclusions(notebook: str, run_dir: str = "") -> Table:
    """Returns a row per conclusion: what the recorded run says of it, and what this run says.

    An empty ``run_dir`` takes what the notebook takes. Of a recorded one there is no second column.
    """
    assignment = notebook.partition("_")[0]
    recorded = recorded_assignment(assignment)
    listed = conclusions_of(notebook)
    run_dir = str(choose_folder(run_dir, assignment, (), must_exist=False))
    is_recorded_run = is_recorded(Path(run_dir))
    has_second = not is_recorded_run and any(conclusion.of_run for conclusion in listed)
    rows = []
    for conclusion in listed:
        row = {"question": str(conclusion.question), "conclusion": conclusion.statement}
        row["recorded run"] = str(seen(conclusion, recorded))
        if has_second:
            row["this run"] = str(seen(conclusion, run_dir)) if conclusion.of_run else SAME_DATA
        rows.append(row)
    return Table(pd.DataFrame(rows), left=("conclusion", "recorded run", "this run"))
