"""``ddplab handin``: the tarball that is handed in, checked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from common.errors import UserError
from common.runtime.paths import project_root

if TYPE_CHECKING:
    from common.course.submission import HandedIn

SMALL_BYTES = 1000
"""A table of less may be like a recorded one by chance."""


@dataclass(frozen=True)
class Handin:
    """Build and check NAME-assignN.tar.gz: exercises, answers, report and tables.

    The name, e-mail and id go into its manifest: the file may be renamed.
    """

    assignment: Annotated[str, tyro.conf.Positional]
    """Assignment to hand in, such as assignment2."""
    name: str
    """Your name, as your course has it: doe-jane or "Jane O'Brien", in any script."""
    email: str = ""
    """Your e-mail, as your course has it; it tells you from somebody of the same name."""
    id: str = ""
    """Your student id, likewise."""
    part: int = 0
    """Part 1 or 2 of assignment 1; the answers and the run go with part 2."""
    run_dir: str | None = None
    """Run directory to hand in; by default that of the newest complete run."""
    output_dir: str = "."
    """Folder that the tarball is written to; it must exist."""

    def run(self) -> None:
        """Builds the tarball and says what is in it."""
        path, files, open_questions = build(self)
        exercises = sum(name.startswith("exercises/") for name in files)
        contents = [f"{exercises} exercises"]
        if "report.pdf" in files:
            tables = sum(name.endswith(".csv") for name in files)
            contents += [f"report.pdf, {pages(files['report.pdf'])} pages", f"{tables} tables"]
        if open_questions:
            contents.append(f"without answers to {', '.join(open_questions)}")
        print(f"{path}: {'; '.join(contents)}")


def build(handin: Handin) -> tuple[Path, dict[str, bytes], list[str]]:
    """Writes the tarball, whole or not at all, and checks it by reading it back.

    Returns:
        its path, its files, and the questions that are not answered.

    Raises:
        UserError: a name, an assignment or a part that is not one, a run without a report or with
            recorded tables, or answers that cannot be read.
    """
    from common.course.hand_ins.tarball import ANSWERS
    from common.course.submission import handed_in, pack

    number = re.fullmatch(r"assignment(\d)", handin.assignment)
    if not number or not (project_root() / "assignments" / handin.assignment).is_dir():
        raise UserError(f"unknown assignment {handin.assignment!r}; like assignment2")
    of = handed_in(handin.name, int(number[1]), handin.part, handin.email, handin.id)
    files = dict(exercises(of))
    open_questions: list[str] = []
    if of.has_answers:
        report = find_report(handin.assignment, handin.run_dir)
        files["report.pdf"] = check_report(report)
        files |= tables(report.parent)
        files[ANSWERS], open_questions = answers(of)
    path = Path(handin.output_dir) / f"{of.stem}.tar.gz"
    pack(path, of, files)
    return path, files, open_questions


def exercises(of: HandedIn) -> Iterator[tuple[str, bytes]]:
    """Yields the files of the assignment's tasks."""
    from common.course.tasks import read_tasks

    for task in of.tasks(read_tasks()).values():
        path = project_root() / task.path
        if not path.is_file():
            raise UserError(f"{task.path}: no such file; task {task.name} is written there")
        yield f"exercises/{task.file}", path.read_bytes()


def answers(of: HandedIn) -> tuple[bytes, list[str]]:
    """Returns the file of answers, and the questions without one."""
    from common.course.answers import questions_path, read_answers, read_questions

    path = questions_path(project_root(), of.assignment)
    if not path.is_file():
        raise UserError(f"{path}: no such file; the answers are written there")
    content = path.read_bytes()
    by_question = read_answers(content, read_questions(project_root(), of.assignment), str(path))
    return content, [name for name, answer in by_question.items() if answer is None]


def tables(run: Path) -> dict[str, bytes]:
    """Returns the tables, settings and environment of a run.

    Raises:
        UserError: a table was recorded by somebody else and came with the project.
    """
    from common.course.hand_ins.tarball import KINDS_OF_TABLES, RUN

    recorded = {
        hashlib.sha256(path.read_bytes()).digest(): path
        for path in (project_root() / "data").rglob("*.csv")
        if path.stat().st_size > SMALL_BYTES
    }
    files = {}
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.suffix in KINDS_OF_TABLES and "traces" not in path.parts:
            content = path.read_bytes()
            name = path.relative_to(run)
            if source := recorded.get(hashlib.sha256(content).digest()):
                where = source.relative_to(project_root())
                raise UserError(f"{run}: {name} is recorded data, {where}; hand in a run of yours")
            files[f"{RUN}/{name}"] = content
    return files


def find_report(assignment: str, run_dir: str | None) -> Path:
    """Returns the report of the given run, or of the assignment's newest complete run.

    Raises UserError where there is none.
    """
    from common.runtime.records.run_directory import newest_complete_run, read_environment

    if run_dir is None:
        folder = newest_complete_run(project_root() / "outputs" / assignment, ["report.pdf"])
        if folder is None:
            raise UserError(
                f"no complete run of {assignment} with a report.pdf; first: ddplab run {assignment}"
            )
        return folder / "report.pdf"
    report = Path(run_dir) / "report.pdf"
    if not report.is_file():
        raise UserError(f"{report}: no such file; first: ddplab run {assignment}")
    record = report.parent / "environment.json"
    if record.is_file() and read_environment(report.parent)["status"] != "complete":
        raise UserError(f"{run_dir} is not a complete run")
    return report


def check_report(path: Path) -> bytes:
    """Returns a report. Raises UserError unless it is a PDF."""
    content = path.read_bytes()
    if not content.startswith(b"%PDF-") or pages(content) < 1:
        raise UserError(f"{path}: report.pdf is not a PDF")
    return content


def pages(pdf: bytes) -> int:
    """Returns the number of pages of a PDF whose page tree is not compressed away."""
    # Every inner node of the page tree counts the pages below it, the root all of them.
    counts = [int(count) for count in re.findall(rb"/Count (\d+)", pdf)]
    return max(counts, default=len(re.findall(rb"/Type\s*/Page\b", pdf)))
