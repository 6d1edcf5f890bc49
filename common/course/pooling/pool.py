"""Pools the estimates of a class: a student is the unit, of however many rounds.

A student's rounds share a machine, a day and whoever else used it, so rounds of many students are
no repetitions of each other. Each student's ratio counts once, and the interval is Student's over
their logarithms (``samples.student``). Whether a student differs from the class is asked of the
others alone: the interval in which a further student of theirs would be expected, wider for one
who has fewer rounds than they.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.course.pooling.estimates import REGRET, Estimate, estimates_of, worded
from common.course.pooling.hand_ins import HandIn, LeftOut, find_hand_ins
from common.errors import UserError
from common.judged import DISTURBED, Judged, Verdict
from common.runtime.wording import counted
from common.samples import LEAST_ROUNDS, Interval, student, student_quantile

LEAST_STUDENTS = LEAST_ROUNDS
"""Number of students below which nothing is settled, as of rounds."""


@dataclass(frozen=True)
class Pooled:
    """A quantity of a class.

    Attributes:
        estimates: the estimate of each student.
        ratio: the pooled ratio over students; ``rounds`` of it is their number.
        expected: by student, the interval in which the others lead to expect them, of the ratio.
    """

    estimates: Mapping[str, Estimate]
    ratio: Judged
    expected: Mapping[str, Interval]

    @property
    def first(self) -> Estimate:
        """Returns an estimate, which has what all have in common."""
        return next(iter(self.estimates.values()))

    @property
    def differing(self) -> list[str]:
        """Returns the students outside of what the others lead to expect."""
        return [
            name
            for name, estimate in self.estimates.items()
            if not np.isnan((span := self.expected[name]).low)
            and not span.low <= estimate.ratio.estimate <= span.high
        ]

    @property
    def opposite(self) -> list[str] | None:
        """Returns the students whose own estimate has the other order; None if there is no order.

        The class has one where the pooled interval leaves out 1.
        """
        if not self.ratio.is_settled:
            return None
        is_above = self.ratio.estimate > 1
        return [
            name
            for name, estimate in self.estimates.items()
            if (estimate.ratio.estimate > 1) != is_above
        ]

    @property
    def verdict(self) -> str:
        """Returns what the pooled number is worth, in words."""
        verdict, count = self.ratio.verdict, len(self.estimates)
        if verdict is Verdict.OPEN:
            return f"{verdict}: {counted(LEAST_STUDENTS - count, 'more student')}"
        return f"{verdict} over {count} students" if verdict is Verdict.HIDDEN else str(verdict)

    def row(self) -> dict[str, object]:
        """Returns the row of ``Pool.quantities``.

        ``above`` and ``below`` count students whose own number is above no difference or below;
        ``opposite`` those on the other side than the class, ``settled_opposite`` those whose own
        interval says so; blank where the class does not tell. ``differ`` names those who differ.
        """
        first, opposite = self.first, self.opposite
        null = worded(first.wording, 1.0)
        values = [
            worded(first.wording, estimate.ratio.estimate) for estimate in self.estimates.values()
        ]
        settled = [name for name in opposite or () if self.estimates[name].ratio.is_settled]
        return {
            "assignment": first.assignment,
            "quantity": first.quantity,
            "wording": first.wording,
            "students": len(self.estimates),
            **in_words(first.wording, self.ratio.interval),
            "verdict": self.verdict,
            "above": sum(value > null for value in values),
            "below": sum(value < null for value in values),
            "opposite": np.nan if opposite is None else len(opposite),
            "settled_opposite": np.nan if opposite is None else len(settled),
            "differ": ", ".join(self.differing),
        }

    def rows(self) -> list[dict[str, object]]:
        """Returns the rows of ``Pool.students``, the smallest ratio first.

        ``value``, ``low`` and ``high`` are the student's own, ``differs`` says whether it lies
        outside of ``expected_low`` to ``expected_high``, which the others lead to, and ``opposite``
        whether it lies on the other side of no difference than the class.
        """
        differing, opposite = set(self.differing), self.opposite
        rows = []
        order = sorted(self.estimates.items(), key=lambda pair: pair[1].ratio.estimate)
        for name, estimate in order:
            expected = in_words(estimate.wording, self.expected[name])
            rows.append(
                {
                    "assignment": estimate.assignment,
                    "quantity": estimate.quantity,
                    "student": name,
                    **in_words(estimate.wording, estimate.ratio.interval),
                    "rounds": estimate.ratio.rounds,
                    "verdict": estimate.ratio.said,
                    "differs": name in differing,
                    "opposite": None if opposite is None else name in opposite,
                    "expected_low": expected["low"],
                    "expected_high": expected["high"],
                    "hardware": estimate.hardware,
                    "run": estimate.stage,
                }
            )
        return rows


@dataclass(frozen=True)
class Pool:
    """What a class measured, and what of it is not pooled."""

    pooled: tuple[Pooled, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def quantities(self) -> pd.DataFrame:
        """Returns a row per quantity."""
        return pd.DataFrame([pooled.row() for pooled in self.pooled])

    @property
    def students(self) -> pd.DataFrame:
        """Returns a row per quantity and student."""
        return pd.DataFrame([row for pooled in self.pooled for row in pooled.rows()])

    @property
    def hardware(self) -> pd.Series:
        """Returns the hardware of each student, by name."""
        names: dict[str, dict[str, None]] = {}
        for pooled in self.pooled:
            for name, estimate in pooled.estimates.items():
                names.setdefault(name, {})[estimate.hardware] = None
        return pd.Series({name: "; ".join(names[name]) for name in sorted(names)}, dtype=object)


def in_words(wording: str, ratio: Interval) -> dict[str, float]:
    """Returns value, low and high of a ratio as its quantity is worded."""
    interval = ratio.map(lambda value: worded(wording, value))
    return {"value": interval.estimate, "low": interval.low, "high": interval.high}


def pool_folders(folders: Sequence[Path], assignment: int | None = None) -> Pool:
    """Pools the runs of a class.

    Args:
        folders: each a hand-in, a run directory, or a folder of many.
        assignment: number of the assignment whose quantities are pooled; by default all.

    Raises UserError for a folder that does not exist, and where nothing at all can be pooled.
    """
    left_out: list[LeftOut] = []
    estimates: list[tuple[str, Estimate]] = []
    for hand_in in find_hand_ins([*folders], left_out):
        estimates += _read(hand_in, assignment, left_out)
    kept = _counted_once(estimates, left_out)
    if not kept:
        reasons = "; ".join(f"{line.student}: {line.reason}" for line in left_out[:3])
        raise UserError(f"nothing to pool: {reasons or 'no run was given'}")
    return Pool(tuple(pooled_of(kept, left_out)), tuple(dict.fromkeys(left_out)))


def _read(
    hand_in: HandIn, assignment: int | None, left_out: list[LeftOut]
) -> list[tuple[str, Estimate]]:
    """Returns the estimates of a hand-in that may be pooled, with the student's name."""
    name, where = hand_in.student, hand_in.path.name
    if assignment is not None and hand_in.assignment not in (0, assignment):
        reason = f"of assignment {hand_in.assignment}, not {assignment}"
        left_out.append(LeftOut(name, where, reason))
        return []
    problems: list[str] = []
    try:
        with hand_in.opened() as folder:
            estimates = estimates_of(folder, problems)
            problems = [problem.replace(f"{folder}/", "") for problem in problems]
    except UserError as error:
        left_out.append(LeftOut(name, where, str(error)))
        return []
    left_out += [LeftOut(name, where, problem) for problem in problems]
    if not estimates and not problems:
        left_out.append(LeftOut(name, where, "it measured nothing that is pooled"))
    of = assignment or hand_in.assignment
    if foreign := sorted({estimate.assignment for estimate in estimates} - {of}) if of else []:
        reason = f"a run of assignment {foreign[0]}, not {of}"
        left_out.append(LeftOut(name, where, reason))
    usable = []
    for estimate in estimates:
        if of and estimate.assignment != of:
            continue
        if reason := _unusable(estimate):
            left_out.append(LeftOut(name, estimate.quantity, reason))
        else:
            usable.append((name, estimate))
    return usable


def _unusable(estimate: Estimate) -> str:
    """Returns why an estimate says nothing; empty where it does."""
    if estimate.ratio.machine == DISTURBED:
        return "the machine had other work meanwhile"
    if not estimate.ratio.rounds:
        return "no round has times above 0 on either side"
    if np.isnan(estimate.ratio.estimate):
        return f"not known from {counted(estimate.ratio.rounds, 'round')}"
    if not 0 < estimate.ratio.estimate < np.inf:
        return "its times give no ratio above 0"
    return ""


def _counted_once(
    estimates: Iterable[tuple[str, Estimate]], left_out: list[LeftOut]
) -> dict[str, dict[str, Estimate]]:
    """Returns quantity → student → estimate, each measurement once and of a student the newest.

    A measurement is the same if its table is, or if it says that it was made by the same process
    at the same time.
    """
    kept: dict[str, dict[str, Estimate]] = {}
    whose: dict[tuple, str] = {}
    newest_first = sorted(estimates, key=lambda pair: pair[1].start_time, reverse=True)
    # Of the same table in two hand-ins the name that comes first in the alphabet keeps it.
    for name, estimate in sorted(newest_first, key=lambda pair: pair[0]):
        keys = [(estimate.quantity, estimate.digest)]
        if estimate.identity:
            keys.append((estimate.quantity, estimate.identity))
        twin = next((whose[key] for key in keys if key in whose), None)
        stage = estimate.stage
        if twin is not None:
            reason = f"the same measurement as {twin}'s: counted once"
            left_out.append(LeftOut(name, stage, reason))
            continue
        students = kept.setdefault(estimate.quantity, {})
        if name in students:
            reason = "an earlier run of the same student: the newest counts"
            left_out.append(LeftOut(name, stage, reason))
        else:
            students[name] = estimate
            whose |= dict.fromkeys(keys, name)
    return kept


def pooled_of(kept: Mapping[str, Mapping[str, Estimate]], left_out: list[LeftOut]) -> list[Pooled]:
    """Pools each quantity over students who measured it with the same settings.

    All pooled intervals hold at once with 95 %, and so do all that students are held against.

    Args:
        kept: quantity → student → estimate.
        left_out: gets the students whose settings are not those of most.
    """
    alike = [_most_alike(students, left_out) for _, students in sorted(kept.items())]
    alike.sort(key=lambda students: next(iter(students.values())).assignment)
    intervals = sum(len(students) > 1 for students in alike)
    comparisons = sum(len(students) for students in alike if len(students) > 2)
    return [pooled(students, max(1, intervals), max(1, comparisons)) for students in alike]


def _most_alike(students: Mapping[str, Estimate], left_out: list[LeftOut]) -> dict[str, Estimate]:
    """Returns the students with the settings that most have; of as many, those of the first."""
    groups: list[dict[str, Estimate]] = []
    for name, estimate in students.items():
        for group in groups:
            if not estimate.difference(next(iter(group.values()))):
                group[name] = estimate
                break
        else:
            groups.append({name: estimate})
    most = max(groups, key=len)
    first = next(iter(most.values()))
    for name, estimate in students.items():
        if difference := estimate.difference(first):
            left_out.append(LeftOut(name, estimate.quantity, f"other settings: {difference}"))
    return most


def pooled(students: Mapping[str, Estimate], intervals: int = 1, comparisons: int = 1) -> Pooled:
    """Pools one quantity. The interval of a regret, which is none below 0, is drawn out to it.

    Args:
        students: the estimate of each student.
        intervals: number of pooled intervals that hold at once.
        comparisons: number of students, over all quantities, who are held against others at once.
    """
    ratios = [estimate.ratio for estimate in students.values()]
    logs, noise = np.log([ratio.estimate for ratio in ratios]), noise_of(ratios)
    interval = student(logs, claims=intervals).map(np.exp)
    if next(iter(students.values())).quantity.startswith(REGRET):
        interval = replace(interval, high=max(interval.high, 1.0))  # NaN stays
    ratio = Judged(interval, least_rounds=LEAST_STUDENTS)
    expected = {}
    for number, name in enumerate(students):
        rivals = np.delete(logs, number)
        extra = noise[number] - np.delete(noise, number).mean() if len(rivals) else 0.0
        expected[name] = expected_of(rivals, max(0.0, extra), comparisons)
    return Pooled(dict(students), ratio, expected)


def noise_of(ratios: Sequence[Judged]) -> NDArray:
    """Returns the variance of each logarithm that its number of rounds leads to.

    A round is taken to be as noisy for all: the mean variance of those who have several, each as
    its own interval says. Zero where nobody has.
    """
    rounds = np.array([max(1, ratio.rounds) for ratio in ratios])
    per_round, weights = [], []
    for ratio in ratios:
        low, high = ratio.interval.low, ratio.interval.high
        freedom = ratio.rounds - 2 * (ratio.rounds // 10) - 1
        if freedom > 0 and low > 0 and np.isfinite(high):
            error = np.log(high / low) / 2 / student_quantile(freedom)
            per_round.append(error**2 * ratio.rounds)
            weights.append(freedom)
    return (np.average(per_round, weights=weights) if weights else 0.0) / rounds


def expected_of(logs: NDArray, extra: float = 0.0, comparisons: int = 1) -> Interval:
    """Returns the interval in which a further student is expected, as a ratio.

    Args:
        logs: logarithms of ratios [students], without the one that is held against them.
        extra: variance of that one's logarithm that theirs have not, as with fewer rounds.
        comparisons: number of students who are held against such intervals at once.

    Returns:
        Student's prediction interval; without ends from fewer than two students.
    """
    count = len(logs)
    mean = float(logs.mean()) if count else np.nan
    off = np.nan
    if count > 1:
        quantile = student_quantile(count - 1, claims=comparisons)
        off = quantile * np.sqrt(float(logs.var(ddof=1)) * (1 + 1 / count) + extra)
    return Interval(mean, mean - off, mean + off, rounds=count).map(np.exp)
