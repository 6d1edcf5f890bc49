"""Tells whose the hand-ins of a class are, and which of them count."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from common.course.grading.limited import limited_submission
from common.course.grading.people.roster import BY_MORE, Person, Roster
from common.course.hand_ins.names import NAME_BYTES, slug, words_of
from common.course.hand_ins.tarball import printable
from common.course.submission import (
    PARTS,
    HandedIn,
    Submission,
    check_part,
    named,
    of_name,
)
from common.errors import UserError
from common.runtime.wording import counted

CLAIMED, BY_FILE, BY_ROSTER = "claimed", "file", "roster"
"""Where the time of a hand-in is from: the student's machine, which he can set; the file, as it was
downloaded; the roster, where a learning platform wrote it."""


@dataclass(frozen=True)
class HandIn:
    """A file that was handed in.

    Attributes:
        path: the file.
        sha256: of its content.
        of: student, assignment and part by what it says; None where it says none.
        problem: reason why it counts for nobody; empty where it does count.
        person: whose it is.
        handed_in, time_from: when, and by whose clock.
        stamp: time that the file itself has, by which a student's hand-ins are in order.
        remark: what else is to be known of it.
    """

    path: Path
    sha256: str
    of: HandedIn | None = None
    problem: str = ""
    person: Person = field(default_factory=lambda: Person(""))
    handed_in: datetime | None = None
    time_from: str = ""
    stamp: datetime | None = None
    remark: str = ""

    def read(self) -> Submission:
        """Reads it. Raises UserError where it cannot be, or is not what it was."""
        submission = limited_submission(self.path)
        if sha256_of_file(self.path) != self.sha256:
            raise UserError(f"{printable(self.path.name)}: changed meanwhile; grade it again")
        return submission


def files_of(paths: Iterable[Path], results: Path | None = None) -> list[Path]:
    """Returns the files among paths and below folders, as Moodle packs a class's hand-ins.

    Args:
        paths: files and folders.
        results: folder of results, which is none of hand-ins wherever it lies.

    Raises:
        UserError: no such file.
    """
    files: list[Path] = []
    for path in paths:
        if not (path.is_file() or path.is_dir()):
            raise UserError(f"{path}: no such file")
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [p for p in below if p.is_file() and (p is path or not p.name.startswith("."))]
    inside = results.resolve() if results else None
    return [path for path in dict.fromkeys(files) if inside not in path.resolve().parents]


def read_hand_in(path: Path, *, by_file_time: bool) -> HandIn:
    """Reads whose and of what a file is; whatever is wrong with it becomes its problem.

    Args:
        path: the file.
        by_file_time: True to take its time of change for that of the hand-in.
    """
    try:
        sha256 = sha256_of_file(path)
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        submission = limited_submission(path)
    except OSError as error:
        return HandIn(path, "", of_name(path.name), error.strerror or "it cannot be read")
    except UserError as error:
        problem = str(error).removeprefix(f"{printable(path.name)}: ")
        return HandIn(path, sha256, of_name(path.name), problem, handed_in=changed)
    is_claimed = submission.packed_at is not None and not by_file_time
    time, source = (submission.packed_at, CLAIMED) if is_claimed else (changed, BY_FILE)
    return HandIn(path, sha256, submission.of, handed_in=time, time_from=source, stamp=time)


def sha256_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def what_is_graded(
    hand_ins: Sequence[HandIn], assignment: int | None, part: int
) -> tuple[int, int]:
    """Returns the assignment and the part that most hand-ins are of.

    Args:
        hand_ins: all that were handed in.
        assignment: the assignment, if somebody named it.
        part: the part, if somebody named it; 0 otherwise.

    Raises:
        UserError: no more than half are of one, none says what it is of, or there is no such part.
    """
    if part:
        check_part(min(PARTS) if assignment is None else assignment, part)
    if assignment is not None and (part or assignment not in PARTS):
        return assignment, part
    counts = Counter(
        (hand_in.of.assignment, hand_in.of.part)
        for hand_in in hand_ins
        if hand_in.of
        and assignment in (None, hand_in.of.assignment)
        and part in (0, hand_in.of.part)
    )
    if not counts:
        raise UserError("no hand-in says of what it is; name it: --assignment 2, and --part 1 of 1")
    [(most, count), *_] = counts.most_common()
    if 2 * count <= counts.total():
        kinds = ", ".join(f"{n} of {named(*of)}" for of, n in sorted(counts.items()))
        raise UserError(f"hand-ins of several assignments ({kinds}); name one: --assignment")
    return most


def identified(hand_in: HandIn, what: tuple[int, int], roster: Roster | None) -> HandIn:
    """Returns a hand-in with its person, or with the reason why it counts for nobody."""
    if hand_in.problem or hand_in.of is None:
        return hand_in
    of = hand_in.of
    if (of.assignment, of.part) != what:
        problem = f"it is of {named(of.assignment, of.part)}, not {named(*what)}"
        return replace(hand_in, problem=problem)
    if roster is None:
        return replace(hand_in, person=Person(of.name, of.email, of.id))
    try:
        person = roster.person(of)
    except UserError as error:
        return replace(hand_in, problem=str(error))
    if person.handed_in:
        hand_in = replace(hand_in, handed_in=person.handed_in, time_from=BY_ROSTER)
    return replace(hand_in, person=person)


@dataclass(frozen=True)
class Claim:
    """What a hand-in says of whose it is, in small letters; what it does not say is empty."""

    number: str
    address: str
    name: str
    addresses: frozenset[str]

    @classmethod
    def of(cls, person: Person) -> Claim:
        """Returns what is compared of a person."""
        addresses = frozenset(a.casefold() for a in (person.email, *person.addresses) if a)
        name = " ".join(sorted(words_of(person.name)))
        return cls(person.id.casefold(), person.email.casefold(), name, addresses)


def people_of(persons: Iterable[Person]) -> list[tuple[str, str] | None]:
    """Returns whose each hand-in is; their order changes nothing.

    People are told apart by their ids, else by e-mail, else by name. Whoever has an id has all
    addresses that came with it. An address that came with no id belongs to the namesake who has an
    id and no address. It is of a person without an id where there is no such namesake, or where
    another address may be the namesake's, too.

    Args:
        persons: what each hand-in says.

    Returns:
        the id, e-mail or name of each one's person, with its kind; None for what may be of several.
    """
    claims = [Claim.of(person) for person in persons]
    numbered = [claim for claim in claims if claim.number]
    reached = {claim.number for claim in numbered if claim.addresses}

    def ids_of(address: str) -> set[str]:
        """Returns the ids that came with an address; for none, those of namesakes without one."""
        names = {c.name for c in claims if c.address == address}
        with_address = {c.number for c in numbered if address in c.addresses}
        return with_address or {c.number for c in numbered if c.name in names} - reached

    ids = {address: ids_of(address) for address in {c.address for c in claims if c.address}}
    rivals = Counter(number for numbers in ids.values() for number in numbers - reached)

    def person_of(claim: Claim) -> tuple[str, str] | None:
        if claim.number:
            return ("id", claim.number)
        if claim.address:
            may_be = [("id", number) for number in ids[claim.address]]
            if len(may_be) == 1 and rivals[may_be[0][1]] > 1:
                may_be = []
            may_be = may_be or [("email", claim.address)]
        else:
            same = (c for c in claims if c.name == claim.name and (c.number or c.address))
            may_be = [*{*map(person_of, same)}] or [("name", claim.name)]
        return may_be[0] if len(may_be) == 1 else None

    return [person_of(claim) for claim in claims]


def why_unclear(person: Person) -> str:
    """Returns why a hand-in counts for nobody that may be of several people."""
    return f"several are called {person.name}; {BY_MORE}"


def completed(hand_ins: Sequence[HandIn], graded: Iterable[Person]) -> list[HandIn]:
    """Returns a student's hand-ins with the id and addresses that some of them, or results, have.

    One without an e-mail gets that of the newest.
    """
    newest_first = sorted(hand_ins, key=place_in_time, reverse=True)
    people = [*(hand_in.person for hand_in in newest_first), *graded]
    addresses = [a for person in people for a in (person.email, *person.addresses) if a]
    email = next((person.email for person in people if person.email), "")
    number = next((person.id for person in people if person.id), "")
    result = []
    for hand_in in hand_ins:
        person = replace(
            hand_in.person,
            email=hand_in.person.email or email,
            id=hand_in.person.id or number,
            addresses=tuple(dict.fromkeys(addresses)),
        )
        result.append(replace(hand_in, person=person))
    return result


def slug_of(person: Person, roster: Roster | None, taken: Collection[str]) -> str:
    """Returns what a person's files are called, unlike those of another person."""
    plain = roster.slug(person) if roster else slug(person.name)
    more = slug(person.id or person.email.replace("@", "-"))
    names = [plain]
    if more and len(f"{plain}-{more}".encode()) <= NAME_BYTES:
        names.append(f"{plain}-{more}")
    names += [f"{plain}-{number}" for number in range(2, len(set(taken)) + 3)]
    return next(name for name in names if name not in set(taken))


def place_in_time(hand_in: HandIn) -> tuple[datetime, str]:
    """Returns what a student's hand-ins are in order by."""
    return (hand_in.stamp or datetime.min.replace(tzinfo=UTC), hand_in.path.name)


def newest(hand_ins: Sequence[HandIn], say: Callable[[str], None]) -> tuple[HandIn, list[HandIn]]:
    """Returns a person's hand-in that counts, and those before it."""
    *earlier, last = sorted(hand_ins, key=place_in_time)
    earlier = [hand_in for hand_in in earlier if hand_in.sha256 != last.sha256]
    if not earlier:
        return last, []
    name = printable(last.path.name)
    remark = f"{counted(len(earlier) + 1, 'hand-in')}; the newest counts: {name}"
    say(f"{last.person.name}: {remark}")
    return replace(last, remark=remark), earlier
