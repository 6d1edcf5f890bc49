"""The runs of a class: tarballs that were handed in, unpacked ones, run directories, folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from common.course.grading.limited import limited_submission
from common.course.grading.people.identify import people_of, read_hand_in, why_unclear
from common.course.grading.people.roster import Person
from common.course.hand_ins.names import slug
from common.course.hand_ins.tarball import RUN
from common.course.limits import RECORD, TEXT_BYTES, beginning, check_run, read_json
from common.course.submission import STEM
from common.errors import UserError

ARCHIVES = (".zip", ".tgz", ".tar", ".7z", ".rar", ".gz")
DEPTH = 4
"""Levels of folders below a folder that hand-ins and runs are looked for in."""
RUN_ID = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{8}")
NAMELESS = re.compile(rf"{RUN_ID.pattern}|assignment\d|outputs|runs?|data")
"""Names of folders that say nothing of a student."""


@dataclass(frozen=True)
class HandIn:
    """A student's run, packed or not.

    Attributes:
        student: the student's name, or that of a folder.
        path: the tarball or the folder.
        assignment: number of the assignment that it says it is of; 0 where it says none.
        person: whose a tarball says that it is.
    """

    student: str
    path: Path
    assignment: int = 0
    person: Person | None = None

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yields the run directory.

        Raises:
            UserError: a tarball that is none or has no run, a file beyond a limit, or a table that
                is cut off.
        """
        if self.path.is_dir():
            _check_whole(self.path)
            yield self.path
            return
        submission = limited_submission(self.path)
        if not any(name.startswith(f"{RUN}/") for name in submission.files):
            raise UserError(f"{self.path.name}: no run in it")
        with TemporaryDirectory(prefix="ddplab-pool-") as folder:
            submission.write_run(Path(folder))
            _check_whole(Path(folder))
            yield Path(folder)


def _check_whole(run: Path) -> None:
    """Raises UserError for a file beyond a limit, and for a table whose last row has no end."""
    check_run(run)
    for path in sorted(run.rglob("*.csv")):
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            rows = content.count(b"\n")
            raise UserError(f"{path.relative_to(run)}:{rows + 1}: cut off within a row")


@dataclass(frozen=True)
class LeftOut:
    """What is not pooled.

    Attributes:
        student: the student's name, or that of the file or folder.
        what: the hand-in, the run or the quantity.
        reason: why not, in words.
    """

    student: str
    what: str
    reason: str

    def __post_init__(self) -> None:
        for name in ("student", "what", "reason"):
            object.__setattr__(self, name, in_a_line(getattr(self, name)))


def in_a_line(text: str) -> str:
    """Returns words of somebody else's in a line of letters that a terminal only shows."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def find_hand_ins(folders: list[Path], left_out: list[LeftOut]) -> list[HandIn]:
    """Finds the hand-ins and run directories of a class, each once.

    Args:
        folders: each a hand-in, a run directory, or a folder of many.
        left_out: gets what is none, or cannot be read.

    Raises UserError for a folder that does not exist.
    """
    for folder in folders:
        if not folder.exists():
            raise UserError(f"{folder}: no such folder or hand-in")
    hand_ins: dict[Path, HandIn] = {}
    for folder in folders:
        path = folder.resolve()
        before = len(left_out)
        below = list(_below(path, DEPTH, left_out))
        if not below and len(left_out) == before:
            left_out.append(LeftOut(folder.name, str(folder), "no run in it"))
        for hand_in in below:
            hand_ins.setdefault(hand_in.path, hand_in)
    return list(_told_apart([*hand_ins.values()], left_out))


def _told_apart(hand_ins: list[HandIn], left_out: list[LeftOut]) -> Iterator[HandIn]:
    """Yields hand-ins; an assignment's namesakes are called by id or e-mail, too.

    What may be of several of them is left out.
    """
    namesakes: dict[tuple[str, int], list[HandIn]] = {}
    for hand_in in hand_ins:
        if hand_in.person:
            namesakes.setdefault((hand_in.student, hand_in.assignment), []).append(hand_in)
    several: dict[Path, tuple[str, str] | None] = {}
    for group in namesakes.values():
        people = people_of(hand_in.person for hand_in in group)
        if len(set(people)) > 1:
            several |= {hand_in.path: who for hand_in, who in zip(group, people, strict=True)}
    for hand_in in hand_ins:
        if hand_in.path not in several:
            yield hand_in
        elif who := several[hand_in.path]:
            yield replace(hand_in, student=f"{hand_in.student} ({who[1]})")
        else:
            reason = why_unclear(hand_in.person)
            left_out.append(LeftOut(hand_in.student, hand_in.path.name, reason))


def _below(path: Path, depth: int, left_out: list[LeftOut]) -> Iterator[HandIn]:
    """Yields what is handed in at a path or below it."""
    if path.is_file():
        yield from _packed(path, left_out)
    elif (path / RUN).is_dir() and not has_record_or_stages(path):  # an unpacked tarball
        yield _named(path / RUN)
    elif has_record_or_stages(path):
        yield HandIn(path.name, path) if RUN_ID.fullmatch(path.name) else _named(path)
    elif depth:
        try:
            children = sorted(path.iterdir())
        except OSError as error:  # such as a link to nowhere
            left_out.append(LeftOut(path.name, str(path), str(error.strerror)))
            return
        for child in children:
            if child.name.startswith(".") or (child.is_file() and child.suffix not in ARCHIVES):
                continue
            yield from _within(child, path, depth, left_out)


def _within(child: Path, path: Path, depth: int, left_out: list[LeftOut]) -> Iterator[HandIn]:
    """Yields what is handed in at or below a child of a folder of many."""
    before = len(left_out)
    hand_ins = list(_below(child, depth - 1, left_out))
    if not hand_ins and len(left_out) == before and depth == DEPTH:
        left_out.append(LeftOut(child.name, str(path / child.name), "no run in it"))
    for hand_in in hand_ins:
        yield _named(hand_in.path) if hand_in.path.is_dir() else hand_in


def _named(path: Path) -> HandIn:
    student, assignment = _student(path)
    return HandIn(student, path, assignment)


def _packed(path: Path, left_out: list[LeftOut]) -> Iterator[HandIn]:
    """Yields a tarball by what it says, or by its file's name where it cannot be read."""
    read = read_hand_in(path, by_file_time=False)
    if of := read.of:
        yield HandIn(slug(of.name), path, of.assignment, Person(of.name, of.email, of.id))
    else:
        left_out.append(LeftOut(path.name, "hand-in", read.problem))


def has_record_or_stages(folder: Path) -> bool:
    """Returns True for a run directory: one with a record, or with stages that have records.

    Runs beside each other are no stages: they have stages of their own or names of runs, or several
    of them are of one program.
    """
    if (folder / RECORD).is_file():
        return True
    stages = [path.parent for path in folder.glob(f"*/{RECORD}")]
    are_runs = any(
        RUN_ID.fullmatch(stage.name) or any(stage.glob(f"*/{RECORD}")) for stage in stages
    )
    programs = {_program(stage) for stage in stages}
    return bool(stages) and not are_runs and len(programs) == len(stages)


def _program(stage: Path) -> str:
    try:
        record = read_json(beginning(stage / RECORD, TEXT_BYTES), RECORD)
    except UserError:  # said when the run is opened
        return ""
    return str(record.get("label")) if isinstance(record, dict) else ""


def _student(path: Path) -> tuple[str, int]:
    """Returns the nearest name above a run that a student may have, and the assignment in it.

    A hand-in's name has both; of other folders the assignment is not known, 0.
    """
    for part in (path, *path.parents):
        if match := STEM.fullmatch(part.name):
            return match["name"], int(match["number"])
        if part.name and not NAMELESS.fullmatch(part.name):
            return part.name, 0
    return path.name, 0
