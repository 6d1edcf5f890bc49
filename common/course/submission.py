"""Packs and reads back a submission: a tarball of exercises, answers, report and tables.

::

    doe-jane-assign2/exercises/bucket_assignment.py …   files of the assignment's tasks
                     answers.yaml                       where the assignment asks questions
                     report.pdf                         of the run
                     run/…                              the run's tables, settings and environment
                     manifest.json                      who, what, when; SHA-256 of each file

Whose it is stands in the manifest. The tarball's own name, which browsers and learning platforms
change, is asked only where it cannot be read. All of this is what a student says: a roster tells
who it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.course.hand_ins.names import is_name, slug
from common.course.hand_ins.tarball import (
    EXERCISES,
    FILES,
    MANIFEST,
    PACKED_BYTES,
    RUN,
    Tarball,
    normal,
    printable,
    read_tarball,
)
from common.course.tasks import Task
from common.errors import UserError, naming, naming_os_errors
from common.runtime.records.run_directory import written_beside

PARTS = {1: (("A1.1", "A1.2", "A1.3"), ("A1.4", "A1.5", "A1.6"))}
"""Assignments that are handed in in parts. Questions are answered with the last."""
OF = r"-assign(?P<number>\d)(?!\d)(-part(?P<part>[12]))?"
STEM = re.compile(rf"(?P<name>.+){OF}")
RENAMED = re.compile(rf"(?P<name>[^\s_/()]+){OF}", re.IGNORECASE)
"""Where a stem stands in a name that a browser, Canvas or Moodle has put more into."""
EMAIL = re.compile(r"[\w.+%-]+@[\w-]+(\.[\w-]+)+")
ID = re.compile(r"\w[\w.-]{0,63}")


@dataclass(frozen=True)
class HandedIn:
    """Student, assignment and part of a submission.

    Attributes:
        name: the student's name, in letters of any script.
        assignment: number of the assignment.
        part: 1 or 2; 0 where an assignment has no parts.
        email, id: e-mail and student id; empty where the student gave none.
    """

    name: str
    assignment: int
    part: int = 0
    email: str = ""
    id: str = ""

    @property
    def suffix(self) -> str:
        """Returns the assignment and the part as file names end with them."""
        return f"-assign{self.assignment}" + (f"-part{self.part}" if self.part else "")

    @property
    def stem(self) -> str:
        """Returns the name of the tarball and of the folder in it."""
        return slug(self.name) + self.suffix

    @property
    def has_answers(self) -> bool:
        """Returns True if answers and a run belong to it."""
        return self.part in (0, 2)

    def tasks(self, tasks: Mapping[str, Task]) -> dict[str, Task]:
        """Returns its tasks among those of the course."""
        assigned = {
            name: task
            for name, task in tasks.items()
            if task.assignment == self.assignment and not task.omitted
        }
        if not self.part:
            return assigned
        return {
            name: assigned[name]
            for name in PARTS[self.assignment][self.part - 1]
            if name in assigned
        }


@dataclass(frozen=True)
class Submission:
    """A submission, read.

    Attributes:
        of: student, assignment and part.
        files: contents by their path below the tarball's folder.
        packed_at: time at which the student's machine says that it was packed; None without one.
    """

    of: HandedIn
    files: Mapping[str, bytes]
    packed_at: datetime | None = None

    def exercises(self) -> dict[str, str]:
        """Returns the exercises' texts by their file names, decoded as Python does."""
        return {
            name.removeprefix(f"{EXERCISES}/"): content.decode("utf-8-sig", errors="replace")
            for name, content in self.files.items()
            if name.startswith(f"{EXERCISES}/")
        }

    def write_run(self, folder: Path) -> None:
        """Writes the run's tables below ``folder``. Raises UserError where one cannot be."""
        for name, content in self.files.items():
            if name.startswith(f"{RUN}/"):
                path = folder / name.removeprefix(f"{RUN}/")
                with naming_os_errors(printable(name)):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)


def handed_in(
    name: str, assignment: int, part: int = 0, email: str = "", id_: str = ""
) -> HandedIn:
    """Returns what is handed in. Raises UserError for a name, e-mail, id or part that is none."""
    name = normal(name).strip()
    if not is_name(name):
        raise UserError(
            f"name {printable(name)!r}: expected letters of any script, with spaces, hyphens, "
            "apostrophes and points between them"
        )
    if email and not EMAIL.fullmatch(email):
        raise UserError(f"e-mail {printable(email)!r}: expected one like doe@example.org")
    if id_ and not ID.fullmatch(id_):
        raise UserError(f"id {printable(id_)!r}: expected letters, digits, points and hyphens")
    check_part(assignment, part)
    return HandedIn(name, assignment, part, email, id_)


def check_part(assignment: int, part: int) -> None:
    """Raises UserError for a part that an assignment has not, or that is missing."""
    if assignment in PARTS and not part:
        raise UserError(f"assignment {assignment} is handed in in two parts: --part 1 or 2")
    if part and (assignment not in PARTS or part not in (1, 2)):
        raise UserError(f"assignment {assignment} has no part {part}")


def named(assignment: int, part: int) -> str:
    """Returns an assignment and a part in words."""
    return f"assignment {assignment}" + (f", part {part}" if part else "")


def pack(path: Path, of: HandedIn, files: Mapping[str, bytes]) -> None:
    """Writes a tarball, whole or not at all, with a manifest; reads it back.

    Raises:
        UserError: it would be too large, or cannot be written.
    """
    manifest = {
        "name": of.name,
        "email": of.email,
        "id": of.id,
        "assignment": of.assignment,
        "part": of.part,
        "packed_at": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        FILES: {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
    with written_beside(path) as beside:
        with tarfile.open(beside, "w:gz") as tar:
            for name, content in {**files, MANIFEST: text.encode()}.items():
                member = tarfile.TarInfo(f"{of.stem}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        if beside.stat().st_size > PACKED_BYTES:
            largest = max(files, key=lambda name: len(files[name]))
            raise UserError(
                f"{path.name} would have {beside.stat().st_size / 2**20:.1f} MB, and at most "
                f"{PACKED_BYTES / 2**20:.0f} may be handed in; the largest file is {largest}"
            )
        read_submission(beside)


def read_submission(path: Path) -> Submission:
    """Reads a tarball of any name.

    Raises:
        UserError: it is not one that ``pack`` wrote, was changed afterwards, or does not say whose
            and of what it is.
    """
    tarball = read_tarball(path)
    with naming(printable(path.name)):
        of = said_in(tarball)
    return Submission(of, tarball.files, time_in(tarball))


def said_in(tarball: Tarball) -> HandedIn:
    """Returns what a tarball is of by its manifest.

    Raises:
        UserError: the manifest says what cannot be.
    """
    entries = tarball.manifest
    kinds = {"name": str, "email": str, "id": str, "assignment": int, "part": int}
    values = {"email": "", "id": "", "part": 0} | {n: entries[n] for n in kinds if n in entries}
    for name, kind in kinds.items():
        if type(values.get(name)) is not kind:
            raise UserError(f"{MANIFEST}: {name} is {'no text' if kind is str else 'no number'}")
    return handed_in(*(values[n] for n in ("name", "assignment", "part", "email", "id")))


def time_in(tarball: Tarball) -> datetime | None:
    """Returns the time that a manifest has, in UTC; None without one, or of one that is none."""
    try:
        moment = datetime.fromisoformat(str(tarball.manifest["packed_at"]))
        return moment.astimezone(UTC) if moment.tzinfo else None
    except (KeyError, ValueError, OverflowError):
        return None


def of_file_name(path: Path) -> HandedIn:
    """Returns what a file is of by its name alone. Raises UserError if that does not say it."""
    if of := of_name(path.name):
        return of
    raise UserError(f"{printable(path.name)}: neither it nor its name says whose it is")


def of_name(name: str) -> HandedIn | None:
    """Returns what is called doe-jane-assign2, with whatever around it; None for other names."""
    for match in (STEM.fullmatch(normal(name)), RENAMED.search(normal(name))):
        if match:
            with contextlib.suppress(UserError):  # a number that no assignment has
                return handed_in(match["name"], int(match["number"]), int(match["part"] or 0))
    return None
