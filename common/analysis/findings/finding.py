"""One number of a run's first page, and how it is found."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.analysis.runs import Run
from common.judged import MOST_ROUNDS, Judged, Verdict
from common.runtime.wording import counted

MEASURED, PREDICTED = "measured", "predicted"
SCRIPTS = "assignments/"
UNREADABLE = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError)
"""Errors of tables that are cut or are others than their names say. They cost a finding, never the
run whose page is made."""


def stage_of(run: Run) -> str:
    """Returns the name of a stage: its folder below the run directory."""
    is_stage = run.folder != run.source
    return run.folder.relative_to(run.source).as_posix() if is_stage else run.folder.name


def unreadable(error: Exception) -> str:
    """Returns that tables cannot be read, and why."""
    return f"its tables cannot be read ({type(error).__name__}: {error})"


@dataclass(frozen=True)
class Answer:
    """A number that was found in a run.

    Attributes:
        spread: interval of the number and of what; or what it is compared with.
        judged: the same number as its section judges it; None for a prediction.
        hidden: what is open where the number is not settled; it is said in place of the number.
        doubt: another reason not to rely on the number; empty where there is none.
        option: option for the number of rounds of the command that measured.
        in_rounds: share of the run's time that its rounds take; the rest does not grow with them.
    """

    value: str
    spread: str
    run: Run
    judged: Judged | None = None
    hidden: str = ""
    doubt: str = ""
    option: str = "--rounds"
    in_rounds: float = 1.0

    @property
    def kind(self) -> str:
        """Returns MEASURED or PREDICTED."""
        return PREDICTED if self.judged is None else MEASURED

    @property
    def is_settled(self) -> bool:
        """Returns True if the number may be said."""
        return self.judged is None or self.judged.is_settled

    @property
    def text(self) -> str:
        """Returns the number, or in its place what is open, and how many more rounds it needs."""
        if self.is_settled:
            return self.value
        lacks = f"; {self.judged.reason}" if self.judged.verdict is Verdict.OPEN else ""
        return f"{self.judged.verdict}: {self.hidden}{lacks}"

    @property
    def to_settle(self) -> str:
        """Returns how the number could be settled, in words; empty where it is, or nobody knows."""
        command = "" if self.is_settled else repeated(self.run, self.option)
        if not command:
            return ""
        if self.judged.verdict is Verdict.DISTURBED:
            return f"measure again while the machine is quiet: {command}"
        if rounds := self.judged.rounds_to_settle:
            return f"about {self._effort(rounds)} would settle it: {command} {self.option} {rounds}"
        if self.judged.rounds < (least := self.judged.least_rounds):
            return f"{self._effort(least)} may settle it: {command} {self.option} {least}"
        return f"more than {MOST_ROUNDS} rounds would be needed: the difference is that small"

    def _effort(self, rounds: int) -> str:
        """Returns so many rounds, with the minutes that they take where the run tells them."""
        record = self.run.environment
        times = [record.get(name) for name in ("start_time", "end_time")]
        if not all(times) or not self.judged.rounds:
            return counted(rounds, "round")
        start, end = map(datetime.datetime.fromisoformat, times)
        longer = 1 + self.in_rounds * (rounds / self.judged.rounds - 1)
        minutes = (end - start).total_seconds() / 60 * longer
        return f"{rounds} rounds ({counted(max(1, round(minutes)), 'minute')})"


@dataclass(frozen=True)
class Question:
    """A number that the first page asks for.

    Attributes:
        meaning: one fixed sentence that says what the number means.
        anchor: anchor of the report's section with the evidence: notebook, then heading.
        find: looks for the number in a run directory; raises UserError where it is not there.
        priority: order among settled findings, of which the first page has room for a few; the
            lowest comes first.
    """

    title: str
    meaning: str
    anchor: str
    find: Callable[[Path], Answer]
    priority: int = 9


@dataclass(frozen=True)
class Finding:
    """A question and its answer in one run; without one, ``missing`` says why."""

    assignment: str
    question: Question
    answer: Answer | None
    missing: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns what a reader has to be told beside the number."""
        if self.answer is None:
            return ()
        marks = [PREDICTED] if self.answer.kind == PREDICTED else []
        if self.answer.run.recorded:
            marks.append("recorded data, not measured here")
        return (*marks, self.answer.doubt) if self.answer.doubt else tuple(marks)


def repeated(run: Run, option: str) -> str:
    """Returns the command that makes a run again, on as many ranks and hosts, without its rounds.

    Empty where its record does not say, or names several real hosts. ``option`` is the command's
    for the number of rounds.
    """
    environment = run.environment
    words = str(environment.get("command", "")).removeprefix("python ")
    if not words.startswith(SCRIPTS):
        return ""
    words = re.sub(rf" (?:{re.escape(option)}|--run[_-]id)[ =]\S+", "", words)
    if environment.get("hosts", 1) > 1 and not _emulated(environment):
        return ""  # how a job starts ranks on several hosts, its own file says
    ranks = int(environment.get("world_size") or 1)
    if emulated := _emulated(environment):
        rates = [f"{rate / 1e6:g}mbit" for rate in emulated["rates_bit_per_s"]]
        listed = " ".join(rates if len(set(rates)) > 1 else rates[:1])
        per_host = ranks // len(rates)
        some = f" --nproc_per_host {per_host}" if per_host > 1 else ""
        return f"uv run ddplab emulate --hosts {len(rates)} --rate {listed}{some} -- {words}"
    launcher = "python" if ranks == 1 else f"torchrun --nproc_per_node={ranks}"
    return f"uv run {launcher} {words}"


def _emulated(environment: Mapping) -> Mapping | None:
    """Returns the record of the emulated network between the hosts; None where there is none."""
    return (environment.get("interconnect") or {}).get("emulated")


def with_interval(judged: Judged, form: str, unit: str = "round") -> str:
    """Returns the 95 % interval, its ends in a format, and its rounds; or that it is not told."""
    rounds = f", {counted(judged.rounds, unit)}" if judged.interval.is_told else ""
    return f"95 % interval {judged.interval.text(form, unit)}{rounds}"
