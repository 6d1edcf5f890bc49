"""``ddplab course``: a student's tree, its check, and a student's progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from common.errors import RunFailed, UserError

STAFFS = "this is a student's tree; it is exported and checked where the staff works"


@dataclass(frozen=True)
class Export:
    """Write the tree that students of an assignment get, where its tasks are to be written.

    Later tasks are open, too, and earlier ones solved. It has the files of the last commit, but for
    the staff's. For example: ddplab course export ../students --assignment 2 --solved A2.1
    """

    out: Annotated[Path, tyro.conf.Positional]
    """A folder that is not there yet."""
    assignment: int
    """0 to 4."""
    solved: tuple[str, ...] = ()
    """Tasks that are solved all the same, such as A1.3."""

    def run(self) -> None:
        """Writes the tree and says what is solved in it."""
        from common.runtime.paths import project_root

        try:
            from common.course.export import export
        except ModuleNotFoundError:
            raise UserError(STAFFS) from None
        solved = export(project_root(), self.out, self.assignment, self.solved)
        print(f"{self.out}: solved are {', '.join(solved) or 'none'}")


@dataclass(frozen=True)
class Check:
    """Prove that a student's tree shows no solution, imports, and has commands that start."""

    out: Annotated[Path, tyro.conf.Positional]
    """The tree."""

    def run(self) -> None:
        """Prints what was looked at; raises RunFailed with what was found."""
        from common.runtime.paths import project_root

        try:
            from common.course.check import check
        except ModuleNotFoundError:
            raise UserError(STAFFS) from None
        found = check(project_root(), self.out)
        for problem in found.problems:
            print(problem)
        if found.problems:
            count = len(found.problems)
            raise RunFailed(f"{self.out}: {count} problem{'s' if count > 1 else ''}")
        print(
            f"{self.out}: no piece of {', '.join(found.unwritten)} in {found.files:,} files; "
            f"{found.modules} modules import, ddplab --help works"
        )


@dataclass(frozen=True)
class Test:
    """Run the public tests of the tree that you are in, and show how far it has come."""

    task: Annotated[str, tyro.conf.Positional] = ""
    """Such as A1.4; by default all."""

    def run(self) -> None:
        """Prints a table of tasks, and the first failure."""
        from common.course.progress import lines_of, progress
        from common.runtime.paths import project_root

        print("\n".join(lines_of(progress(project_root(), self.task))))


@dataclass(frozen=True)
class Course:
    """The course: a student's tree, the proof that it leaks nothing, and a student's progress."""

    what: Annotated[
        Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Test, tyro.conf.subcommand("test")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> None:
        """Runs what was asked for."""
        self.what.run()
