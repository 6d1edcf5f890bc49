"""``ddplab course``: a student's tree, its check, a student's progress, and grades."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from common.cli.help import Subcommands
from common.cli.printed import print_grid
from common.errors import RunFailed, UserError, naming_os_errors
from common.runtime.wording import counted

POOLED = (1, 2, 3, 4)
"""Assignments whose runs have quantities that a class can pool."""
WIDTH = 132
"""Least number of columns of a printed table."""
Visibility = Literal["visible", "after_due_date", "after_published", "hidden"]
STAFFS = "this is a student's tree; it is exported, checked and graded where the staff works"


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
    """Folder of the staff's files, laid out as in the project; they replace its own."""

    def run(self) -> None:
        """Writes the tree and says what is solved in it."""
        from common.runtime.paths import project_root

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
    """Folder of the staff's files, laid out as in the project; they replace its own."""

    def run(self) -> None:
        """Prints what was looked at; raises RunFailed with what was found."""
        from common.runtime.paths import project_root

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
        from common.runtime.paths import project_root

        print("\n".join(lines_of(progress(project_root(), self.task))))


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
    """Deadline with its zone, like 2027-10-01T23:59+02:00."""
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
    """Folder of the staff's files, laid out as in the project; they replace its own."""

    def run(self) -> None:
        """Grades, and prints a line for each submission."""
        from common.runtime.paths import project_root

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
    """Folder of the staff's files, laid out as in the project; they replace its own."""

    def run(self) -> None:
        """Writes the sheet and says where it is."""
        from common.runtime.paths import project_root

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
        from common.runtime.paths import project_root

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
    """Folder of the staff's files, laid out as in the project; they replace its own."""

    def run(self) -> None:
        """Writes the bundle; says what is in it, and what points to set on Gradescope."""
        from common.runtime.paths import project_root

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


@contextmanager
def staffs() -> Iterator[None]:
    """Says that a student's tree has not what is imported inside the block."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("common."):
            raise UserError(STAFFS) from None
        raise


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
