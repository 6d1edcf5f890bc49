"""A wrong solution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXERCISES = Path(__file__).resolve().parents[3] / "common" / "exercises"


@dataclass(frozen=True)
class Mutant:
    """A solution with a mistake.

    Attributes:
        name: the mistake, in words.
        exercise: the module below ``common/exercises``.
        right, wrong: the text that is replaced, which is there once, and what replaces it.
        check: what fails, ``test_….py::test_…`` of the hidden tests.
    """

    name: str
    exercise: str
    right: str
    wrong: str
    check: str

    def source(self) -> str:
        """Returns the module with the mistake."""
        text = (EXERCISES / f"{self.exercise}.py").read_text()
        assert text.count(self.right) == 1, (self.name, text.count(self.right))
        return text.replace(self.right, self.wrong)


def mutants(exercise: str, check: str, *mistakes: tuple[str, str, str]) -> list[Mutant]:
    """Returns the mistakes of an exercise that one check finds: name, right and wrong text."""
    return [Mutant(name, exercise, right, wrong, check) for name, right, wrong in mistakes]


@dataclass(frozen=True)
class Forgery:
    """A solution that is none.

    Attributes:
        name: in words.
        exercise: the module below ``common/exercises``.
        source: what stands after the reference, and replaces it.
        check: file of hidden tests and function.
        words: of the failure.
        is_quick: whether it takes a second, without a sandbox.
    """

    name: str
    exercise: str
    source: str
    check: str
    words: str
    is_quick: bool = False
