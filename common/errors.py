"""Errors that a user can cause: one line that says what was wrong, where, and what is legal."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake of the user's. Shown as one line, without a traceback; exit status 2.

    ``this_rank_only`` marks an error that other ranks do not see, so that its own rank shows it;
    otherwise rank 0 speaks for all.
    """

    def __init__(self, message: str, *, this_rank_only: bool = False) -> None:
        super().__init__(message)
        self.this_rank_only = this_rank_only


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Puts the name of a file or a model before a mistake that is found in it inside the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


@contextmanager
def naming_os_errors(source: object) -> Iterator[None]:
    """Makes what the system refuses inside the block a mistake at that file, folder or flag."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from None


class NotYetWritten(UserError):
    """A task of the course whose solution is not there; a student writes it."""

    def __init__(self, task: str) -> None:
        super().__init__(f"task {task} is not written yet")
        self.task = task


def unwritten_task(message: str) -> str:
    """Finds the task that a message says is not written yet; empty where it names none.

    The error of another process arrives as text.
    """
    match = re.search(r"task (A\d\.\d) is not written yet", message)
    return match[1] if match else ""


class RunFailed(Exception):
    """Work that was started correctly but broke off (a rank died). One line; exit status 1."""


class Preempted(Exception):
    """Work that was told to stop and was saved: the same command goes on. One line; status 75.

    75 is what sysexits.h calls a temporary failure, after which to try again.
    """


def unknown_name(kind: str, name: str, names: Iterable[str]) -> str:
    """Words the refusal of a name that does not exist: the nearest known one, then all of them."""
    by_lower = {str(choice).lower(): choice for choice in names}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.4)
    hint = f"did you mean {by_lower[nearest[0]]!r}? " if nearest else ""
    return f"unknown {kind} {name!r}; {hint}known: {', '.join(by_lower.values())}"


def require_known(kind: str, name: str, names: Collection[str]) -> None:
    """Raises UserError, which lists the names, where ``name`` is none of them."""
    if name not in names:
        raise UserError(unknown_name(kind, name, names))
