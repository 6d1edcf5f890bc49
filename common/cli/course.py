"""``ddplab course``: a student's tree, its check, a student's progress, and grades."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from common.cli.grading import Autograder, Grade, Oral, Pool, staffs
from common.cli.help import Subcommands
from common.errors import RunFailed
from common.runtime.paths import project_root
from common.runtime.wording import counted


@dataclass(frozen=True)
class Export:
    """Write the tree that students of an assignment get, where its tasks are to be written.

    Later tasks are open, too, and earlier ones solved. It has the files of the last commit, but for
    the staff's. For example: ddplab course export ../students --assignment 2 --solved A2.1
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Folder to write; it must not exist yet."""
    assignment: int
    """0 to 4."""
    solved: tuple[str, ...] = ()
    """Tasks that are solved all the same, such as A1.3."""
    without: tuple[str, ...] = ()
    """Tasks that the course leaves out; the tree has them solved, and its handout not at all."""
    overlay: Path | None = None
    """Folder of the staff's files, laid out as in the project; they replace the project's."""

    def run(self) -> None:
        """Writes the tree and says what is solved in it."""
        with staffs():
            from common.course.export import export
        solved = export(
            project_root(),
            self.out,
            self.assignment,
            self.solved,
            overlay=self.overlay,
            without=self.without,
        )
        print(f"{self.out}: solved are {', '.join(solved) or 'none'}")


@dataclass(frozen=True)
class Check:
    """Prove that a student's tree shows no solution, imports, and has commands that start."""

    out: Annotated[Path, tyro.conf.Positional]
    """The tree."""
    isolation: bool = False
    """Also leave out each of the assignment's tasks by itself: it alone loses points (minutes)."""
    overlay: Path | None = None
    """Folder of the staff's files, laid out as in the project; the tree is held against a copy of
    the project in which they replace the project's."""

    def run(self) -> None:
        """Prints what was looked at; raises RunFailed with what was found."""
        with staffs():
            from common.course.check import check
            from common.course.grading.matrix import isolation_problems
            from common.course.overlay import with_overlay
        with with_overlay(project_root(), self.overlay) as root:
            tree = check(root, self.out)
            problems = list(tree.problems)
            pieces = [name for name in tree.unwritten if name[:2] == tree.unwritten[0][:2]]
            if self.isolation:
                problems += isolation_problems(root, pieces, print)
        for problem in problems:
            print(problem)
        if problems:
            raise RunFailed(f"{self.out}: {counted(len(problems), 'problem')}")
        print(
            f"{self.out}: no piece of {', '.join(tree.unwritten)} in {tree.files:,} files; "
            f"{tree.modules} modules import, ddplab --help works"
        )
        if self.isolation:
            print(f"{', '.join(pieces)}: each that is left out loses its own points, and no others")


@dataclass(frozen=True)
class Test:
    """Run the public tests of the tree that you are in, and show how far it has come."""

    task: Annotated[str, tyro.conf.Positional] = ""
    """Such as A1.4; by default all."""

    def run(self) -> None:
        """Prints a table of tasks, and the first failure."""
        from common.course.progress import lines_of, progress

        print("\n".join(lines_of(progress(project_root(), self.task))))


@dataclass(frozen=True)
class Split:
    """Write a public project without solutions, hidden tests and keys, and an overlay with them.

    With --overlay, export, check, grade and autograder of the public project do what they do here.
    For example: ddplab course split ../course-public ../course-private
    """

    public: Annotated[Path, tyro.conf.Positional]
    """Folder of the public project to write; it must not exist yet."""
    private: Annotated[Path, tyro.conf.Positional]
    """Folder of the overlay to write; it must not exist yet."""

    def run(self) -> None:
        """Writes both and says how many files they have."""
        with staffs():
            from common.course.split import split
        public, private = split(project_root(), self.public, self.private)
        print(f"{self.public}: {public:,} files; {self.private}: {private:,}, never publish these")


@dataclass(frozen=True)
class Faults:
    """Plant fresh faults for A4.4, measure them on this machine, and write a set of runs.

    It takes about 15 minutes. Put the set into an overlay, as data/fault-runs-graded.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Folder to write; it must not exist yet."""
    seed: int
    """Seed of the faults' sizes and the folders' names."""
    only: tuple[str, ...] = ()
    """Causes, or cases of ddplab study diagnosis; by default all."""

    def run(self) -> None:
        """Runs the cases and says where the set is."""
        with staffs():
            from common.course.fresh_faults import plant
        from common.runtime.stage_progress import StageProgress

        plant(self.out, self.seed, StageProgress(), self.only)
        print(f"{self.out}: runs with faults, and causes.csv")


SUBCOMMANDS = Subcommands(
    about="A student's tree, the proof that it leaks nothing, progress, and grades.",
    groups={
        "Students": {
            "test": (Test, "run the public tests of the tree you are in, and show progress"),
        },
        "Staff": {
            "export": (Export, "write the tree that students of an assignment get"),
            "check": (Check, "prove that such a tree shows no solution, imports, and starts"),
            "grade": (Grade, "grade submissions of an assignment, in a sandbox"),
            "pool": (Pool, "pool what a class measured into one interval over students"),
            "oral": (Oral, "write a sheet of questions on what a student handed in"),
            "split": (Split, "write a public project, and a private overlay with the solutions"),
            "faults": (Faults, "plant fresh faults for A4.4 and measure them on this machine"),
            "autograder": (Autograder, "write the bundle for Gradescope"),
        },
    },
)


@dataclass(frozen=True)
class Course:
    """The course: a student's tree, the proof that it leaks nothing, progress, and grades."""

    what: Annotated[SUBCOMMANDS.union, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Runs what was asked for."""
        self.what.run()
