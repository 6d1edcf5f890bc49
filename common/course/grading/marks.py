"""Marks of one submission: what was judged, and Gradescope's file of results.

The format is that of https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A check's or an answer's.

    Attributes:
        of: task or question.
        name: the check or answer in words.
        points: points of a right check or answer.
        score: points that were given; None where it was not judged.
        why: reason why it gets no more, or was not judged.
    """

    of: str
    name: str
    points: float
    score: float | None
    why: str = ""


@dataclass(frozen=True)
class Grade:
    """The marks of a submission.

    Attributes:
        stem: student and assignment, as in the tarball's name.
        marks: mark of each check and question, whatever happened.
        isolation: kind of sandbox that the code ran in; empty if it was not run.
        variant: seed of the numbers in checks.
        remark: sentence on the submission, such as why it could not be read.
        seconds: duration of the grading.
    """

    stem: str
    marks: Sequence[Mark]
    isolation: str
    variant: int
    remark: str = ""
    seconds: float = 0.0

    @property
    def score(self) -> float:
        """Returns the points that it gets."""
        return sum(mark.score or 0.0 for mark in self.marks)

    @property
    def maximum(self) -> float:
        """Returns the points that could be had; what was not judged is not among them."""
        return sum(mark.points for mark in self.marks if mark.score is not None)

    def results(self) -> dict:
        """Returns Gradescope's results."""
        isolation = f"Student code ran in: {self.isolation}." if self.isolation else ""
        return {
            "score": self.score,
            "execution_time": round(self.seconds, 1),
            "output": " ".join(filter(None, (self.remark, isolation))),
            "tests": [entry(mark, number) for number, mark in enumerate(self.marks, start=1)],
            "extra_data": {
                "submission": self.stem,
                "maximum": self.maximum,
                "isolation": self.isolation,
                "variant": self.variant,
                "not_judged": [mark.name for mark in self.marks if mark.score is None],
            },
        }


def entry(mark: Mark, number: int) -> dict:
    """Returns one of Gradescope's tests."""
    judged = mark.score is not None
    full = judged and mark.score >= mark.points
    return {
        "number": str(number),
        "name": f"{mark.of}: {mark.name}" + ("" if judged else " (not judged)"),
        "score": mark.score if judged else 0.0,
        "max_score": float(mark.points) if judged else 0.0,
        "status": "passed" if full or not judged else "failed",
        "output": mark.why,
        "tags": [mark.of],
    }
