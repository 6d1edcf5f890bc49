"""One number of a run's first page, and how it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.runs import Run

MEASURED, PREDICTED = "measured", "predicted"
UNREADABLE = (LookupError, ValueError, TypeError, ArithmeticError)
"""Errors of tables that are cut or are others than their names say. They cost a finding, never the
run whose page is made."""


@dataclass(frozen=True)
class Answer:
    """A number that was found in a run.

    Attributes:
        value: the number with its unit.
        spread: its interval, quartiles or range, and of what; or what it is compared with.
        kind: MEASURED or PREDICTED.
        runs: the runs that the number comes from.
        hidden: what noise hides, by the verdict of the number's section; empty where it hides
            nothing. It is said in place of the number.
        doubt: another reason not to rely on the number; empty where there is none.
    """

    value: str
    spread: str
    kind: str
    runs: tuple[Run, ...]
    hidden: str = ""
    doubt: str = ""

    @property
    def text(self) -> str:
        """Returns the number, or what noise hides in its place."""
        return hidden_by_noise(self.hidden) if self.hidden else self.value


@dataclass(frozen=True)
class Question:
    """A number that the first page asks for.

    Attributes:
        title: title of the finding.
        meaning: one fixed sentence that says what the number means.
        anchor: anchor of the report's section with the evidence: notebook, then heading.
        find: looks for the number in a run directory; raises UserError where it is not there.
    """

    title: str
    meaning: str
    anchor: str
    find: Callable[[Path], Answer]


@dataclass(frozen=True)
class Finding:
    """A question and its answer in one run.

    Attributes:
        answer: the number; None where the run has none.
        missing: why there is no answer; empty where there is one.
    """

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
        if any(run.recorded for run in self.answer.runs):
            marks.append("recorded data, not measured here")
        return (*marks, self.answer.doubt) if self.answer.doubt else tuple(marks)

    @property
    def source(self) -> str:
        """Returns the hardware that the number comes from; empty where there is none."""
        if self.answer is None:
            return ""
        return "; ".join(dict.fromkeys(run.environment["hardware"] for run in self.answer.runs))


def hidden_by_noise(what: str) -> str:
    """Returns the words of the first page for what noise hides."""
    return f"hidden by noise: {what}"


def span(low: float, high: float, form: str = "{:.2f}") -> str:
    """Returns an interval as text, ``1.02 to 1.07``; a dash where it is not known."""
    if pd.isna(low) or pd.isna(high):
        return "–"
    return f"{form.format(low)} to {form.format(high)}"
