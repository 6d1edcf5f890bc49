"""Two runs of one training beside each other: how much slower, in which phase, by which cause.

Steps that follow each other are alike, so the unit of an interval is a block of them: a round in a
benchmark, and consecutive steps of a watched script. One run says nothing of how much the next one
would differ. Where each side has ``LEAST_ROUNDS`` runs or more, a run is the unit instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from ddplab_watch.change_points import BATCH

from common.analysis.comparable import difference
from common.analysis.step_parts import PARTS, STEP, TIMED
from common.diagnose.evidence.bundle import is_bundle
from common.diagnose.evidence.case import Verdict, differing_facts, percent
from common.diagnose.evidence.evidence import ALIKE, ELEMENTS, Evidence
from common.diagnose.opened import Opened
from common.errors import UserError
from common.judged import DISTURBED, DRIFTING, MOST_ROUNDS, NOT_WITNESSED, QUIET, Judged
from common.judged import Verdict as Worth
from common.samples import LEAST_ROUNDS, welch

PASSED, FAILED, NOT_SETTLED = 0, 1, 3
"""Exit statuses of the gate; 2 is a user's mistake."""
SAID = {PASSED: "passed", FAILED: "failed", NOT_SETTLED: "not settled"}
BLOCK, MOST_BLOCKS = 5, 20
"""Least steps of a block, and most blocks of a run: blocks of long runs are longer."""
STEADY = 0.8
"""Share of the steps that take as many samples as the usual one; an epoch's last may be smaller."""
SAME_WORK = 1.05
"""Most that the mean batches of two runs may differ by, of steps that are alike."""
WHOLE, MEAN = "step", "mean step"
"""The usual step, by medians of blocks, and what all steps take, the rare long ones, too. Both are
from the end of one step to the end of the next."""
OF_SCRIPTS = {
    "data": "data_time_ms",
    "forward": "forward_time_ms",
    "backward, exchange": "whole_backward_time_ms",
    "update": "optimizer_time_ms",
}
"""Phases of a script's plain steps, whose exchange is not seen apart."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two sides, each of one run or several, of the same training.

    Attributes:
        before, after: runs of the two sides.
    """

    before: Sequence[Opened]
    after: Sequence[Opened]

    @cached_property
    def times(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Returns ms of both sides: a row per block (or run), a column per phase."""
        sides = []
        mixed = any(opened.case.run.mixed for opened in (*self.before, *self.after))
        for side in (self.before, self.after):
            blocks = [blocks_of(opened.case.run, mixed=mixed) for opened in side]
            sides.append(
                pd.DataFrame([b.mean() for b in blocks]) if self.by_run else pd.concat(blocks)
            )
        shared = [name for name in sides[0] if name in sides[1] and name not in self._untold]
        return sides[0][shared], sides[1][shared]

    @property
    def _untold(self) -> set[str]:
        """Returns phases that the watches of the two sides have not timed alike."""
        lacks = [
            set(opened.case.run.opened.environment.get("not_timed", ()))
            for opened in (*self.before, *self.after)
        ]
        names = {"buffers_time_ms": "forward", "between_time_ms": "between"}
        return {names[name] for name in set.union(*lacks) - set.intersection(*lacks)}

    @property
    def scope(self) -> str:
        """Returns what an interval rests on."""
        runs = [len(side) for side in (self.before, self.after)]
        if self.by_run:
            return f"over {runs[0]} and {runs[1]} runs"
        blocks = " and ".join(str(len(side)) for side in self.times)
        return (
            f"over {blocks} blocks of steps within {runs[0]} and {runs[1]} runs; how much a run "
            f"differs from the next is in it only with {LEAST_ROUNDS} runs on each side"
        )

    @cached_property
    def machine(self) -> str:
        """Returns the state of the machine: a single run beside other jobs says nothing."""
        if self.by_run:  # what disturbs some runs is in their spread
            return NOT_WITNESSED
        runs = (opened.case.run for opened in (*self.before, *self.after))
        states = {run.opened.machine_state for run in runs}
        return next(s for s in (DISTURBED, NOT_WITNESSED, DRIFTING, QUIET) if s in states)

    @property
    def changes(self) -> list[str]:
        """Returns what changed while a run went on: only the steps before that are compared."""
        return [
            f"{opened.name}: {change.said()}; the steps from there on are not compared"
            for opened in (*self.before, *self.after)
            for change, _ in opened.later
        ]

    @property
    def by_run(self) -> bool:
        """Returns True where both sides have runs enough for an interval over them."""
        return len(self.before) >= LEAST_ROUNDS <= len(self.after)

    def slowdown(self, row: str, null: float = 1.0) -> Judged:
        """Judges the time after over the time before.

        Args:
            row: WHOLE or MEAN; their intervals hold both at once.
            null: ratio that it is told from.
        """
        logs = [np.log(side[row].to_numpy()) for side in reversed(self.times)]
        interval = welch(*logs, claims=2).map(math.exp)
        return Judged(interval, null, self.scope, machine=self.machine)

    def phases(self) -> dict[str, Judged]:
        """Judges by how much each phase has grown, as a share of the step before."""
        before, after = self.times
        names = [name for name in before if name not in (WHOLE, MEAN)]
        step_ms = float(before[WHOLE].mean())
        grown = {}
        for name in names:
            interval = welch(after[name], before[name], claims=len(names))
            share = interval.map(lambda ms: ms / step_ms)
            grown[name] = Judged(share, 0.0, self.scope, machine=self.machine)
        return grown

    def status(self, fail_above: float) -> int:
        """Returns the exit status of a gate that lets a slowdown of so many per cent pass.

        It fails where the whole interval of the usual step, or that of the mean step, lies above.
        It passes where that of the usual step lies below, and no run changed while it went on.
        """
        usual, mean = (self.slowdown(row, 1 + fail_above / 100) for row in (WHOLE, MEAN))
        if any(judged.is_settled and judged.estimate > judged.null for judged in (usual, mean)):
            return FAILED
        return PASSED if usual.is_settled and not self.changes else NOT_SETTLED

    def to_settle(self, fail_above: float) -> str:
        """Returns how many runs or steps would settle a limit if the estimate is right.

        Empty where it is settled.
        """
        if self.status(fail_above) != NOT_SETTLED:
            return ""
        usual = self.slowdown(WHOLE, 1 + fail_above / 100)
        if usual.machine == DISTURBED:
            return "Runs without other jobs beside them would settle it"
        if usual.is_settled:
            return "Runs that do not change while they go on would settle it"
        if usual.verdict is Worth.OPEN:
            return f"At least {LEAST_ROUNDS * BLOCK} steps that count are needed (--window)"
        needed, limit = usual.rounds_to_settle, f"settle {fail_above:g} %"
        if needed is None:
            unit = "runs a side" if self.by_run else "blocks of steps"
            return f"It is so near to the limit that {MOST_ROUNDS} {unit} would not {limit}"
        if self.by_run:
            more = needed - min(len(self.before), len(self.after))
            return f"{max(1, more)} more runs a side would {limit}"
        run = self.before[0].case.run
        steps = run.unwatched.groupby(STEP).ngroups * needed / usual.rounds
        return (
            f"Runs of {steps:.2g} steps would {limit}, if runs differ no more than blocks within "
            f"them; from {LEAST_ROUNDS} runs a side on, that is counted in"
        )

    def causes(self) -> list[str]:
        """Returns a sentence for each cause that has come, gone or changed, the largest first."""
        sides = [self._causes_ms(side) for side in (self.before, self.after)]
        any_settled = any(number.is_settled for number in self.judged.values())
        changes = []
        for cause in dict.fromkeys([*sides[0], *sides[1]]):
            (was, was_ms), (now, now_ms) = (side.get(cause, (None, 0.0)) for side in sides)
            word = "New" if was is None else "Gone" if now is None else "Changed"
            title = (now or was).title
            shares = [percent(v.lost_share) for v in (was, now) if v and v.lost_share]
            is_small = abs(now_ms - was_ms) < 0.01 * self.times[0][WHOLE].mean()
            if word == "Changed" and (is_small or not any_settled):
                continue
            takes = f" ({' → '.join(shares)} of the step)" if shares else ""
            changes.append((now_ms - was_ms, f"{word}: {title}{takes}."))
        ordered = sorted(changes, key=lambda change: -abs(change[0]))
        return [sentence for _, sentence in ordered] or ["The same causes were found in both."]

    def _causes_ms(self, side: Sequence[Opened]) -> dict[str, tuple[Verdict, float]]:
        """Returns the causes that most runs of a side show, with the ms that each takes."""
        listed: dict[str, list[tuple[Verdict, float]]] = {}
        for opened in side:
            for verdict in opened.diagnosis.verdicts:
                ms = (verdict.lost_share or 0.0) * opened.case.run.step_ms
                listed.setdefault(verdict.cause, []).append((verdict, ms))
        return {
            cause: (of_runs[0][0], sum(ms for _, ms in of_runs) / len(side))
            for cause, of_runs in listed.items()
            if len(of_runs) > len(side) / 2
        }

    @cached_property
    def judged(self) -> dict[str, Judged]:
        """Judges the step, the mean step and each phase, by name; of the steps time over time."""
        return {row: self.slowdown(row) for row in (WHOLE, MEAN)} | self.phases()

    def rows(self) -> list[dict[str, object]]:
        """Returns numbers of the step and its phases, for JSON: changes are shares.

        Ends of an interval that is not told are None.
        """
        before, after = self.times
        rows = []
        for name, number in self.judged.items():
            change = number.difference
            rows.append(
                {
                    "part": name,
                    "before_ms": float(before[name].mean()),
                    "after_ms": float(after[name].mean()),
                    "change": change.estimate,
                    "low": change.low if change.is_told else None,
                    "high": change.high if change.is_told else None,
                    "verdict": str(number.verdict),
                }
            )
        return rows

    def told(self) -> dict[str, float]:
        """Returns changes as shares, as far as their verdicts let them be told, by name.

        As in words: a settled one is under the part's own name, and its ends, or those that a
        hidden one lies between, are under ``<part>/low`` and ``<part>/high``.
        """
        numbers = {}
        for part, number in self.judged.items():
            change = number.difference
            if number.is_settled:
                numbers[part] = change.estimate
            if change.is_told and number.verdict in (Worth.SETTLED, Worth.HIDDEN):
                numbers |= {f"{part}/low": change.low, f"{part}/high": change.high}
        return numbers

    def verdicts(self) -> dict[str, str]:
        """Returns what each change is worth, by name of its part."""
        return {f"{part}/verdict": number.said for part, number in self.judged.items()}

    def lines(self, fail_above: float | None = None) -> list[str]:
        """Returns the comparison as text, its first line what came of it."""
        first = self._outcome()
        if fail_above is not None:
            first = f"{SAID[self.status(fail_above)].capitalize()} at {fail_above:g} %: {first}"
        first += "."
        if fail_above is not None and (more := self.to_settle(fail_above)):
            first += f" {more}."
        changes = [f"{change}." for change in self.changes]
        lines = [
            first,
            *changes,
            *self.causes(),
            "",
            f"{'':20}{'before':>10}{'after':>10}{'change':>10}",
        ]
        for name, number in self.judged.items():
            times = "".join(f"{side[name].mean():>10.3g}" for side in self.times)
            words = filter(None, (number.change("block"), number.said))
            lines.append(f"{name:20}{times}  {', '.join(words)}")
        lines.append(f"Times in ms; changes are shares of the step before, {self.scope}.")
        if self._untold:
            lines.append(f"Not timed alike by both watches: {', '.join(sorted(self._untold))}.")
        return lines

    def _outcome(self) -> str:
        """Returns how the usual step has changed, or the mean one, or that nothing is settled."""
        usual, mean = (self.judged[row] for row in (WHOLE, MEAN))
        ends, of_mean = (judged.change("block") for judged in (usual, mean))
        if usual.is_settled:
            return f"A step has changed by {ends}"
        why = f"no difference is settled, {usual.reason}" + f" ({ends})" * bool(ends)
        if mean.is_settled:
            return f"The mean step has changed by {of_mean}; of the usual one {why}"
        return f"{why[0].upper()}{why[1:]}"

    def as_json(self, fail_above: float | None) -> dict[str, object]:
        """Returns the comparison as JSON can hold it; ``status`` is None without a limit."""
        status = None if fail_above is None else self.status(fail_above)
        return {
            "before": [opened.name for opened in self.before],
            "after": [opened.name for opened in self.after],
            "fail_above_percent": fail_above,
            "status": status,
            "outcome": None if status is None else SAID[status],
            "to_settle": None if status is None else self.to_settle(fail_above),
            "scope": self.scope,
            "changes": self.changes,
            "rows": self.rows(),
            "causes": self.causes(),
        }


def compare(paths: tuple[str, str], open_one: Callable[[str], Opened]) -> Comparison:
    """Opens two sides, each a bundle, a run directory, or a folder of such; compares them.

    Args:
        paths: folders of the two sides.
        open_one: opens a bundle or a run directory.

    Raises:
        UserError: they cannot be compared, and why.
    """
    sides = [[open_one(str(path)) for path in _runs_in(Path(path))] for path in paths]
    every = [opened for side in sides for opened in side]
    for opened in every:
        _check_steps(opened)
    for opened in every[1:]:
        _require_alike(every[0], opened)
    return Comparison(*sides)


def _runs_in(path: Path) -> list[Path]:
    """Returns the runs that a path names: those below it where it is none itself."""
    if not path.is_dir() or is_bundle(path) or (path / "arms.csv").is_file():
        return [path]
    below = [run for run in sorted(path.iterdir()) if run.is_dir() and is_bundle(run)]
    return below or [path]


def _require_alike(first: Opened, second: Opened) -> None:
    """Raises UserError where two runs are not of the same work on the same hardware."""
    run, base = second.case.run, first.case.run
    pairs = differing_facts(run, base)
    for name in ("world_size", "batch_per_rank", "accumulation"):
        if getattr(run, name) != getattr(base, name):
            pairs[name] = (str(getattr(base, name)), str(getattr(run, name)))
    if base.watched and run.watched:
        pairs |= _differing_work(first, second)
    if pairs:
        name, (base_value, value) = next(iter(pairs.items()))
        raise UserError(
            f"{first.folder.name} and {second.folder.name} are not compared: {name} differs "
            f"({base_value or 'none'} and {value or 'none'})"
        )
    records = [
        (opened.folder.name, opened.case.run.opened.environment) for opened in (first, second)
    ]
    if sentence := difference(records):
        raise UserError(f"not compared: {sentence}")


def _differing_work(first: Opened, second: Opened) -> dict[str, tuple[str, str]]:
    """Returns in what the work of two watched scripts differs: of the jobs, of their batches."""
    runs = [opened.case.run for opened in (first, second)]
    sizes = [
        float(run.unwatched[ELEMENTS].mean()) if ELEMENTS in run.unwatched else math.nan
        for run in runs
    ]
    most = ALIKE if any(run.mixed for run in runs) else SAME_WORK
    # A record of all ranks may be on several disks, of which one was copied.
    jobs = [str(run.opened.environment.get("world_size", "")) for run in runs]
    numbers = [_numbers(run) for run in runs]
    pairs = {}
    if jobs[0] != jobs[1]:
        pairs["the job's world_size"] = (jobs[0], jobs[1])
    if max(sizes) > most * min(sizes):
        pairs["the number of elements in a batch"] = (f"{sizes[0]:.6g}", f"{sizes[1]:.6g}")
    if numbers[0] != numbers[1] and not (first.later or second.later):
        pairs["steps"] = (numbers[0], numbers[1])
    return pairs


def _numbers(run: Evidence) -> str:
    """Returns the first and the last number of the steps that count."""
    return f"{run.unwatched['step'].min():.0f} to {run.unwatched['step'].max():.0f}"


def _check_steps(opened: Opened) -> None:
    """Raises UserError for a run whose batch changes in the middle, or whose clock has jumped."""
    run = opened.case.run
    if batch := next((change for change, _ in opened.later if change.phase == BATCH), None):
        raise UserError(
            f"{opened.folder.name}: its batch changes at step {batch.step}, from "
            f"{batch.before:.6g} to {batch.after:.6g} elements; compare runs of one batch"
        )
    times = run.unwatched["step_time_ms"].astype(float)
    wrong = run.unwatched[~(np.isfinite(times) & (times > 0))]
    if len(wrong):
        row = wrong.iloc[0]
        raise UserError(
            f"{opened.folder.name}: step {row['step']:.0f} of rank {row['rank']:.0f} took "
            f"{row['step_time_ms']} ms: its clock has jumped; record the run again"
        )
    samples = run.unwatched.groupby(STEP)["samples"].sum()
    usual = samples.mode().iloc[0]
    if run.watched and not run.mixed and (samples == usual).mean() < STEADY:
        at = samples.index[(samples != samples.iloc[0]).argmax()]
        raise UserError(
            f"{opened.folder.name}: its batch changes at step {at[-1]:.0f}, from "
            f"{samples.iloc[0]:.0f} to {samples[at]:.0f} samples; compare runs of one batch"
        )


def blocks_of(run: Evidence, *, mixed: bool) -> pd.DataFrame:
    """Returns ms of the steps that a run's speed is taken from: a row per block of steps.

    Where batches are of ``mixed`` sizes, no median step stands for a block: means do.

    A phase is as long as its slowest rank's; the backward pass with the exchange as that of the
    rank which came last, and so waited for nobody.
    """
    rows = (run.unwatched if run.watched else run.measured).fillna(dict.fromkeys(STEP, 0))
    if not run.watched and (rows["kind"] == TIMED).any():
        rows = rows[rows["kind"] == TIMED]
    rows = rows.assign(between=pd.to_numeric(rows["between_time_ms"], errors="coerce").fillna(0))
    rows["whole"] = rows["step_time_ms"] + rows["between"]
    phases = (OF_SCRIPTS if run.watched else PARTS) | {"between": "between"}
    phases = {name: column for name, column in phases.items() if column in rows}
    by_step = rows.groupby(STEP)[["whole", *phases.values()]]
    slowest = by_step.max().rename(columns={column: name for name, column in phases.items()})
    if "backward, exchange" in phases:
        slowest["backward, exchange"] = by_step.min()[phases["backward, exchange"]]
    order = np.arange(len(slowest))
    blocks = slowest.index.get_level_values("round").to_numpy()
    if len(set(blocks)) < 2:
        count = min(MOST_BLOCKS, len(slowest) // BLOCK)
        blocks = order * max(1, count) // max(1, len(slowest))
    grouped = slowest.groupby(blocks)
    usual = grouped.mean() if mixed else grouped.median()
    usual = usual.rename(columns={"whole": WHOLE})
    usual.insert(1, MEAN, grouped["whole"].mean())
    return usual.dropna(axis=1, how="any")
