"""Packs and reads back a submission: a tarball of exercises, answers, report and tables.

::

    doe-jane-assign2/exercises/bucket_assignment.py …   files of the assignment's tasks
                     answers.yaml                       where the assignment asks questions
                     report.pdf                         of the run
                     run/…                              the run's tables, settings and environment
                     manifest.json                      SHA-256 of each file

Whoever reads one believes nothing of it: neither names, sizes nor kinds of its members.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import tarfile
import unicodedata
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.course.tasks import Task
from common.errors import UserError

PACKED_BYTES, UNPACKED_BYTES, MEMBERS = 20 * 2**20, 200 * 2**20, 1000
TEXT_BYTES = 2**20
"""Most bytes of an exercise or the manifest, which take many times their size when they are
parsed."""
NAME_BYTES, PART_BYTES, PATH_BYTES = 200, 250, 1000
"""Most bytes of a student's name, of a part of a path, and of a path: less than file systems
take."""
MANIFEST, ANSWERS, REPORT, EXERCISES, RUN = (
    "manifest.json",
    "answers.yaml",
    "report.pdf",
    "exercises",
    "run",
)
KINDS_OF_TABLES = (".csv", ".yaml", ".json")
PARTS = {1: (("A1.1", "A1.2", "A1.3"), ("A1.4", "A1.5", "A1.6"))}
"""Assignments that are handed in in parts. Questions are answered with the last."""
SHOWN = 100
"""Characters of a name in a message."""
STEM = re.compile(r"(?P<name>.+)-assign(?P<number>\d)(-part(?P<part>[12]))?")


@dataclass(frozen=True)
class HandedIn:
    """Student, assignment and part of a submission.

    Attributes:
        name: lastname-firstname.
        assignment: number of the assignment.
        part: 1 or 2; 0 where an assignment has no parts.
    """

    name: str
    assignment: int
    part: int = 0

    @property
    def stem(self) -> str:
        """Returns the name of the tarball and of the folder in it."""
        part = f"-part{self.part}" if self.part else ""
        return f"{self.name}-assign{self.assignment}{part}"

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
    """

    of: HandedIn
    files: Mapping[str, bytes]

    def exercises(self) -> dict[str, bytes]:
        """Returns the exercises by their file names."""
        return {
            name.removeprefix(f"{EXERCISES}/"): content
            for name, content in self.files.items()
            if name.startswith(f"{EXERCISES}/")
        }

    def write_run(self, folder: Path) -> None:
        """Writes the run's tables below ``folder``. Raises UserError where one cannot be."""
        for name, content in self.files.items():
            if name.startswith(f"{RUN}/"):
                path = folder / name.removeprefix(f"{RUN}/")
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                except OSError as error:
                    raise UserError(f"{printable(name)}: {error.strerror}") from None


def handed_in(name: str, assignment: int, part: int = 0) -> HandedIn:
    """Returns what is handed in. Raises UserError for a name or a part that cannot be."""
    name = unicodedata.normalize("NFC", name)
    if not is_name(name):
        raise UserError(f"name {name!r}: expected lastname-firstname in lower-case letters")
    if assignment in PARTS and not part:
        raise UserError(f"assignment {assignment} is handed in in two parts: --part 1 or 2")
    if part and (assignment not in PARTS or part not in (1, 2)):
        raise UserError(f"assignment {assignment} has no part {part}")
    return HandedIn(name, assignment, part)


def is_name(text: str) -> bool:
    """Returns True for lastname-firstname: lower-case letters of any script, and their marks."""
    words = text.split("-")
    if len(words) < 2 or len(text.encode(errors="replace")) > NAME_BYTES:
        return False
    return all(
        word
        and word == word.lower()
        and all(unicodedata.category(letter)[0] in "LM" for letter in word)
        for word in words
    )


def pack(path: Path, of: HandedIn, files: Mapping[str, bytes]) -> None:
    """Writes a tarball, whole or not at all, with a manifest; reads it back.

    Raises:
        UserError: it would be too large, or cannot be written.
    """
    manifest = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
    beside = path.with_name(f".{path.name}.partial")
    try:
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
        read_files(beside, of)
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):  # of a folder that is none
            beside.unlink()


def read_submission(path: Path) -> Submission:
    """Reads a tarball, whose name says whose and of what it is.

    Raises:
        UserError: it is not one that ``pack`` wrote, or was changed afterwards.
    """
    of = read_name(path)
    return Submission(of, read_files(path, of))


def read_name(path: Path) -> HandedIn:
    """Returns what a tarball is of, by its name alone. Raises UserError if it does not say so."""
    stem = unicodedata.normalize("NFC", path.name.removesuffix(".tar.gz"))
    match = STEM.fullmatch(stem) if path.name.endswith(".tar.gz") else None
    if not match:
        raise UserError(f"{path.name}: expected lastname-firstname-assignN.tar.gz")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        return handed_in(match["name"], int(match["number"]), int(match["part"] or 0))
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None


def read_files(path: Path, of: HandedIn) -> dict[str, bytes]:
    """Reads the files of a tarball, in memory, and compares them with its manifest."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(unpacked(path))) as tar:
            for count, member in enumerate(tar, start=1):
                if count > MEMBERS:
                    raise UserError(f"{path.name}: it has more than {MEMBERS} members")
                if not member.isdir():
                    inside = checked_path(path, of, member, files)
                    files[inside] = read_member(path, tar, member, inside)
    except UserError:
        raise
    except Exception as error:  # of a header that is none, tarfile raises anything
        raise UserError(f"{path.name}: no whole tarball: {printable(str(error))}") from None
    check_manifest(path.name, files)
    return {name: content for name, content in files.items() if name != MANIFEST}


def checked_path(
    path: Path, of: HandedIn, member: tarfile.TarInfo, files: Mapping[str, bytes]
) -> str:
    """Returns a member's path below the tarball's folder.

    Raises:
        UserError: it is no plain file, may not be there, or stands in the way of one before it.
    """
    name = unicodedata.normalize("NFC", member.name)
    if not member.isreg() or member.issparse():  # a sparse one may claim any size
        raise UserError(f"{path.name}: {printable(name)} is no file")
    inside = path_inside(name, of)
    if inside is None:
        raise UserError(f"{path.name}: {printable(name)} does not belong in it")
    if inside in files:
        raise UserError(f"{path.name}: {name} is in it twice")
    if any(inside.startswith(f"{o}/") or o.startswith(f"{inside}/") for o in files):
        raise UserError(f"{path.name}: {name} is a file and a folder")
    return inside


def read_member(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, inside: str) -> bytes:
    """Reads a member. Raises UserError for a text that is too long, before it is read."""
    is_text = inside == MANIFEST or inside.startswith(f"{EXERCISES}/")
    most = TEXT_BYTES if is_text else UNPACKED_BYTES
    content = tar.extractfile(member).read(most + 1)
    if len(content) > most:
        raise UserError(f"{path.name}: {inside} has more than {most / 2**20:.0f} MB")
    return content


def unpacked(path: Path) -> bytes:
    """Returns the bytes of a .gz file. Raises UserError if they are too many or cut off."""
    try:
        if path.stat().st_size > PACKED_BYTES:
            raise UserError(f"{path.name}: more than {PACKED_BYTES / 2**20:.0f} MB")
        with gzip.open(path) as file:
            content = file.read(UNPACKED_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path.name}: no whole tarball: it is cut off or damaged") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if len(content) > UNPACKED_BYTES:
        raise UserError(f"{path.name}: it unpacks to more than {UNPACKED_BYTES / 2**20:.0f} MB")
    return content


def path_inside(name: str, of: HandedIn) -> str | None:
    """Returns a member's path below the tarball's folder; None for one that may not be there."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or path.parts[:1] != (of.stem,):
        return None
    if not name.isprintable():  # not UTF-8, or several lines
        return None
    if max(len(part.encode()) for part in path.parts) > PART_BYTES:
        return None
    if len(name.encode()) > PATH_BYTES:
        return None
    inside = "/".join(path.parts[1:])
    folder, _, file = inside.partition("/")
    belongs = (
        inside in (MANIFEST, ANSWERS, REPORT)
        or (folder == EXERCISES and re.fullmatch(r"\w+\.py", file))
        or (folder == RUN and path.suffix in KINDS_OF_TABLES)
    )
    return inside if belongs else None


def check_manifest(name: str, files: Mapping[str, bytes]) -> None:
    """Raises UserError unless the manifest lists these files with their checksums."""
    try:
        listed = json.loads(files[MANIFEST])
        pairs = dict(listed.items())
    except KeyError:
        raise UserError(f"{name}: {MANIFEST} is missing") from None
    except (ValueError, AttributeError, RecursionError):
        raise UserError(f"{name}: {MANIFEST} cannot be read") from None
    for file, content in files.items():
        if file != MANIFEST and pairs.pop(file, "") != hashlib.sha256(content).hexdigest():
            raise UserError(f"{name}: {file} is not what {MANIFEST} says")
    if pairs:
        raise UserError(f"{name}: {printable(min(pairs))} is missing")


def printable(name: str) -> str:
    """Returns a name of somebody else's for a message: in a line, and in letters that there are."""
    short = name if len(name) <= SHOWN else f"{name[:SHOWN]}…"
    return short if short.isprintable() else ascii(short)
