"""``ddplab course``: grades, sheets of questions, the autograder, and what a class measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from common.cli.printed import print_grid
from common.errors import UserError, naming_os_errors
from common.runtime.paths import project_root
from common.runtime.wording import counted

POOLED = (1, 2, 3, 4)
"""Assignments whose runs have quantities that a class can pool."""
WIDTH = 132
"""Least number of columns of a printed table."""
Visibility = Literal["visible", "after_due_date", "after_published", "hidden"]
STAFFS = "this is a student's tree; it is exported, checked and graded where the staff works"


@contextmanager
def staffs() -> Iterator[None]:
    """Says that a student's tree has not what is imported inside the block."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("common."):
            raise UserError(STAFFS) from None
        raise


@dataclass(frozen=True)
class Grade:
    """Grade submissions of one assignment; student code runs in a sandbox.

    OUTPUT_DIR gets grades.csv, history.csv, NAME.json in Gradescope's format for each student, and
    reading.html and levels.csv for the texts that somebody has to read. What is there already
    stays: late hand-ins, regrades and levels are merged. Without submissions only levels are.
    """

    submissions: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Tarballs of ddplab handin under any name, or folders of them."""
    output_dir: Path = Path("grades")
    """Folder of the results."""
    roster: Path | None = None
    """CSV of the class: name, and email or id; also extension_days and handed_in."""
    assignment: int | None = None
    """Assignment to grade; by default that of most submissions."""
    part: int = 0
    """Part 1 or 2 of assignment 1."""
    due: str | None = None
    """Deadline with its zone, like 2027-10-01T23:59+02:00: grades.csv then says how many days
    late a hand-in is; no points are taken for it."""
    file_times: bool = False
    """Count by the time of change of each file, not by that which the student's machine claims."""
    lms: Literal["canvas", "moodle", "gradescope"] | None = None
    """Also write the CSV that this platform imports."""
    jobs: int = 1
    """Submissions graded at once; what is timed is graded by itself."""
    json: Path | None = None
    """File that a single submission's result is also written to."""
    levels: Path | None = None
    """Levels of texts besides OUTPUT_DIR/levels.csv."""
    variant: int = 0
    """Seed of the numbers that checks draw; take another one each term."""
    without: tuple[str, ...] = ()
    """Tasks that the course leaves out: they leave score and maximum."""
    overlay: Path | None = None
    """Folder of the staff's files, laid out as in the project; they replace the project's."""

    def run(self) -> None:
        """Grades, and prints a line for each submission."""
        with staffs():
            from common.course.grading.classes import Class
            from common.course.grading.grade import Grader, write_json
            from common.course.grading.people.identify import files_of
            from common.course.grading.people.roster import moment_of, read_roster
            from common.course.overlay import with_overlay
        if not self.submissions and not (self.output_dir / "class.json").is_file():
            raise UserError("no submission was given")
        if self.json and len(files_of(self.submissions)) != 1:
            raise UserError("--json is for one submission; of several see --output-dir")
        if self.jobs < 1:
            raise UserError(f"--jobs {self.jobs}: at least 1")
        with with_overlay(project_root(), self.overlay, self.without) as root:
            grades = Class(
                Grader(root, self.variant),
                self.submissions,
                read_roster(self.roster) if self.roster else None,
                self.assignment,
                self.part,
                moment_of(self.due, "--due") if self.due else None,
                self.file_times,
                self.jobs,
                [self.lms] if self.lms else [],
            ).grade(self.output_dir, print, self.levels)
        if self.json:
            write_json(grades[0], self.json)
        print(f"{self.output_dir}: {self.output_dir / 'grades.csv'}")


@dataclass(frozen=True)
class Oral:
    """Write a sheet of six questions on what a student handed in: his functions, lines, numbers.

    For example: ddplab course oral doe-jane-assign2.tar.gz
    """

    submission: Annotated[Path, tyro.conf.Positional]
    """Tarball of ddplab handin."""
    output: Path | None = None
    """Page to write; by default NAME-oral.html."""
    seed: int = 0
    """Seed of the draw; another one gives other questions."""
    overlay: Path | None = None
    """Folder of the staff's files, laid out as in the project; they replace the project's."""

    def run(self) -> None:
        """Writes the sheet and says where it is."""
        with staffs():
            from common.course.grading.limited import limited_submission
            from common.course.grading.oral import draw, sheet
            from common.course.overlay import with_overlay
        from common.runtime.records.run_directory import write_atomically

        submission = limited_submission(self.submission)
        path = self.output or Path(f"{submission.of.stem}-oral.html")
        with with_overlay(project_root(), self.overlay) as root:
            questions = draw(submission, root, self.seed)
        with naming_os_errors(path):
            write_atomically(path, sheet(submission, questions))
        print(f"{path}: {counted(len(questions), 'question')}")


@dataclass(frozen=True)
class Autograder:
    """Write a bundle for Gradescope: setup.sh, run_autograder and what they need."""

    out: Annotated[Path, tyro.conf.Positional]
    """Zip file to write; it must not exist yet."""
    assignment: int
    """Assignment that it grades. A hand-in of another one gets nothing."""
    part: int = 0
    """Part 1 or 2 of assignment 1."""
    variant: int = 0
    """Seed of the numbers that checks draw; take another one each term."""
    without: tuple[str, ...] = ()
    """Tasks that the course leaves out: they leave score and maximum."""
    visibility: Visibility = "after_published"
    """When students see checks and what they say. What was handed in they see at once."""
    overlay: Path | None = None
    """Folder of the staff's files, laid out as in the project; they replace the project's."""

    def run(self) -> None:
        """Writes the bundle; says what is in it, and what points to set on Gradescope."""
        with staffs():
            from common.course.autograder import bundle, points_by_hand_in
            from common.course.overlay import with_overlay
        count = bundle(
            project_root(),
            self.out,
            (self.assignment, self.part),
            self.variant,
            self.overlay,
            without=self.without,
            visibility=self.visibility,
        )
        print(f"{self.out}: {count} files")
        with with_overlay(project_root(), self.overlay, self.without) as root:
            points, by_hand = points_by_hand_in(root)[self.assignment, self.part]
            print(f"autograder points {points}, graded by hand {by_hand}")


@dataclass(frozen=True)
class Pool:
    """Pool what the students of a class measured: one interval for each quantity, over students.

    Half of a class with two rounds each finds the opposite order; together they tell. It also says
    which student differs from the others, and who would have named the opposite order. It writes
    pool.md, pool.csv, students.csv, left-out.csv and a figure for each quantity. For example:
    ddplab course pool submissions
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Hand-ins (tarballs, or unpacked), run directories of ddplab run, or folders of many. A
    student is the name of the hand-in, else that of the folder around the runs."""
    assignment: int | None = None
    """Assignment whose quantities are pooled, 1 to 4; by default all that were measured."""
    output: Path = Path("outputs/pool")
    """Folder of the tables and figures."""

    def run(self) -> None:
        """Pools, prints the table and what was left out, and says where the files are."""
        with staffs():
            from common.course.pooling.page import left_out_lines, tabulate, write_pool
            from common.course.pooling.pool import pool_folders
        if not self.folders:
            raise UserError("no folder was given; like ddplab course pool submissions")
        if self.assignment not in (None, *POOLED):
            raise UserError(
                f"--assignment {self.assignment}: nothing of it is pooled; one of "
                f"{', '.join(map(str, POOLED))}"
            )
        pool = pool_folders(self.folders, self.assignment)
        names = write_pool(pool, self.output)
        print_grid(tabulate(pool), WIDTH)
        for line in left_out_lines(pool):
            print(f"not pooled: {line}")
        print(f"{self.output}: {counted(len(names), 'file')}; {self.output / 'pool.md'}")
