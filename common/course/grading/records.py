"""What a folder of results keeps of a class: a record per student, and what was before.

All tables are written from ``class.json``: a late hand-in, a regrade or levels are merged into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path

from common.course.grading.marks import NO_ANSWER, Grade, Mark
from common.course.grading.people.identify import BY_ROSTER, HandIn
from common.course.grading.people.roster import Person
from common.course.hand_ins.tarball import printable
from common.course.submission import named
from common.errors import UserError, naming_os_errors

STATE, LOCK = "class.json", ".lock"
OVERWRITTEN = ("grades.csv", "levels.csv")
"""Tables that a first grading would overwrite: another program's, or those of a folder whose
``class.json`` is gone."""


@dataclass(frozen=True)
class Record:
    """A hand-in with its marks.

    Attributes:
        submission: what its files are called: student and assignment. A hand-in that counts for
            nobody has its file's name.
        name, email, id: the student.
        file, sha256: name of the file that was handed in, and the SHA-256 of its content.
        handed_in, time_from: when, in ISO format, and by whose clock.
        stamp: time that the file itself has, in ISO format.
        extension_days: days that this student has beyond the deadline.
        marks: mark of each check and question.
        texts: question → text that somebody reads.
        isolation, variant, seconds: of the grading.
        remark: what is to be known of it.
        problem: reason why it counts for nobody; empty where it does count.
        addresses: all e-mail addresses that the student has handed in with.
    """

    submission: str
    name: str = ""
    email: str = ""
    id: str = ""
    file: str = ""
    sha256: str = ""
    handed_in: str = ""
    time_from: str = ""
    extension_days: float = 0.0
    marks: tuple[Mark, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    isolation: str = ""
    variant: int = 0
    seconds: float = 0.0
    remark: str = ""
    problem: str = ""
    stamp: str = ""
    addresses: tuple[str, ...] = ()

    @classmethod
    def of(cls, submission: str, hand_in: HandIn, grade: Grade) -> Record:
        """Makes the record of a grading."""
        person = hand_in.person
        return cls(
            submission,
            person.name or (hand_in.of.name if hand_in.of else ""),
            person.email,
            person.id,
            printable(hand_in.path.name),
            hand_in.sha256,
            hand_in.handed_in.isoformat(timespec="seconds") if hand_in.handed_in else "",
            hand_in.time_from,
            person.extension_days,
            tuple(grade.marks),
            dict(grade.texts),
            grade.isolation,
            grade.variant,
            grade.seconds,
            "; ".join(filter(None, (grade.remark, hand_in.remark))),
            hand_in.problem,
            hand_in.stamp.isoformat() if hand_in.stamp else "",
            person.addresses,
        )

    def is_newer_than(self, hand_in: HandIn) -> bool:
        """Returns True if this one counts, not another file of the student's, as in ``newest``.

        A record without a stamp has the file's own time all the same, but for a roster's.
        """
        stamp = self.stamp or (self.handed_in if self.time_from != BY_ROSTER else "")
        if not (stamp and hand_in.stamp) or hand_in.sha256 == self.sha256:
            return False
        theirs = (hand_in.stamp, printable(hand_in.path.name))
        return theirs < (datetime.fromisoformat(stamp), self.file)

    @property
    def person(self) -> Person:
        """Returns the student."""
        return Person(self.name, self.email, self.id, self.extension_days, addresses=self.addresses)

    def completed(self, person: Person) -> Record:
        """Returns the record with what is known besides of the same person."""
        email, number = self.email or person.email, self.id or person.id
        return replace(self, email=email, id=number, addresses=person.addresses)

    @property
    def grade(self) -> Grade:
        """Returns the grade as Gradescope's file has it."""
        return Grade(
            self.submission, self.marks, self.isolation, self.variant, self.remark, self.seconds
        )

    def code(self, question: str) -> str:
        """Returns what a text is called where it is read: not by its author.

        It begins with a letter that no number has: a spreadsheet changes numbers.
        """
        text = f"{self.submission}\0{question}\0{self.texts[question]}"
        return f"t{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class What:
    """What a folder has results of; nothing else may come into it.

    Attributes:
        assignment, part: of the hand-ins.
        variant: seed of the numbers in checks.
        course: SHA-256 of the hidden tests, references, points and keys.
    """

    assignment: int
    part: int
    variant: int
    course: str


@dataclass
class ClassResults:
    """The results of a class.

    Attributes:
        what: assignment, part and variant that were graded, and the course.
        due: deadline in ISO format; empty where there is none.
        records: record of each student, by its submission.
        problems: hand-ins that count for nobody, by their file's SHA-256 and name.
        retired: codes of texts that were replaced by later ones.
        history: rows of history.csv: what changed, when and why.
    """

    what: What
    due: str = ""
    records: dict[str, Record] = field(default_factory=dict)
    problems: dict[str, Record] = field(default_factory=dict)
    retired: list[str] = field(default_factory=list)
    history: list[dict[str, str | float]] = field(default_factory=list)

    def put_problem(self, record: Record) -> None:
        """Notes a hand-in that counts for nobody."""
        key = f"{record.sha256} {record.file}"
        if self.problems.get(key) != record:
            self.note(record, None, record.problem)
        self.problems[key] = record

    def put(self, record: Record) -> None:
        """Takes a student's record in place of the earlier one.

        Where the grader broke, an earlier record stays.
        """
        earlier = self.records.get(record.submission)
        self.problems = {k: r for k, r in self.problems.items() if r.sha256 != record.sha256}
        if earlier and not record.isolation:
            self.note(record, earlier, record.remark)
            self.records[record.submission] = replace(earlier, remark=record.remark)
            return
        if earlier:
            now = {record.code(question) for question in record.texts}
            before = {earlier.code(question) for question in earlier.texts}
            self.retired = sorted({*self.retired, *before} - now)
        self.records[record.submission] = record

    def note_changes(self, before: Mapping[str, Record]) -> None:
        """Adds to the history what is not as it was before a grading."""
        for name, record in self.records.items():
            earlier = before.get(name)
            if earlier is None:
                self.note(record, None, "first graded")
            elif earlier.sha256 != record.sha256:
                self.note(record, earlier, f"handed in again: {record.file}")
            elif earlier.grade.score != record.grade.score:
                is_code = scores_of_code(earlier) != scores_of_code(record)
                self.note(record, earlier, "graded again" if is_code else "texts read")

    def note(self, record: Record, earlier: Record | None, why: str) -> None:
        """Adds a row to the history."""
        self.history.append(
            {
                "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                "submission": record.submission,
                "score_before": earlier.grade.score if earlier else "",
                "score": "" if record.problem else record.grade.score,
                "why": why,
                "file": record.file,
                "sha256": record.sha256[:12],
            }
        )


def scores_of_code(record: Record) -> list[float | None]:
    """Returns the scores of all but texts."""
    marks = (mark for mark in record.marks if mark.of not in record.texts)
    return [mark.score for mark in marks if mark.why != NO_ANSWER]


def read_class_results(folder: Path) -> ClassResults | None:
    """Reads a class's results from ``class.json``; None of a new folder.

    Raises:
        UserError: it has results that cannot be merged, or tables of something else.
    """
    path = folder / STATE
    if not path.exists():
        for name in OVERWRITTEN:
            if (folder / name).exists():
                raise UserError(
                    f"{folder}: its {name} has no {STATE} beside it, so that it would be "
                    "overwritten, not merged; choose another --output-dir"
                )
        return None
    try:
        content = json.loads(path.read_text())
        content["what"] = What(**content["what"])
        for kind in ("records", "problems"):
            content[kind] = {key: record_from(r) for key, r in content[kind].items()}
        return ClassResults(**content)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: it cannot be read; choose another --output-dir") from None


def check_is_of(folder: Path, before: What, what: What) -> None:
    """Raises UserError if a folder's results are not of this assignment, variant and course."""
    of, now = (named(w.assignment, w.part) for w in (before, what))
    reason = ""
    if of != now:
        reason = f"results of {of}, and these hand-ins are of {now}"
    elif before.variant != what.variant:
        reason = f"results of --variant {before.variant}, not {what.variant}"
    elif before.course != what.course:
        reason = "results of another version of the course: hidden tests, references or points"
    if reason:
        raise UserError(f"{folder}: it has {reason}; choose another --output-dir")


def record_from(entries: Mapping[str, object]) -> Record:
    """Returns a record that was written as JSON."""
    allowed = {field.name for field in fields(Record)}
    values = {name: value for name, value in entries.items() if name in allowed}
    values["marks"] = tuple(Mark(**mark) for mark in values["marks"])
    values["addresses"] = tuple(values.get("addresses", ()))
    return Record(**values)


def state_of(results: ClassResults) -> str:
    """Returns the text of ``class.json``."""
    return json.dumps(asdict(results), indent=1) + "\n"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other gradings out of a folder. Raises UserError if one is in it."""
    is_new = not folder.exists()
    with naming_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another grading writes into it; wait for its end") from None
        try:
            yield
        finally:
            if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                shutil.rmtree(folder)  # nothing came of it


def write_together(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes files of a folder: all of them beside the old ones, and only then in their places.

    Raises:
        OSError: nothing can be written; the old files are whole.
    """
    mark = secrets.token_hex(4)
    beside = {name: folder / f".{name}.{mark}.partial" for name in texts}
    try:
        for name, text in texts.items():
            with beside[name].open("wb") as file:
                # A character that UTF-8 has not becomes JSON's escape of it.
                file.write(text.encode(errors="backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
        for name, path in beside.items():
            path.replace(folder / name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        for path in beside.values():
            path.unlink(missing_ok=True)
