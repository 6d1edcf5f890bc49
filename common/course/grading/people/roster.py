"""Who is who: the people of a class, as a learning platform exports them.

A hand-in says whose it is: a name, and perhaps an e-mail or an id. The roster decides who that is.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from common.course.hand_ins.names import slug, words_of
from common.course.hand_ins.tarball import normal
from common.course.submission import HandedIn
from common.errors import UserError

COLUMNS = {
    "name": ("name", "full name", "student", "student name"),
    "first name": ("first name", "given name"),
    "last name": ("last name", "surname", "family name"),
    "email": ("email", "e mail", "email address", "sis login id"),
    "id": ("sis user id", "id number", "student id", "sid", "id"),
    "extension_days": ("extension days",),
    "handed_in": ("handed in", "submission time"),
}
"""What is read of a roster, and the columns that have it: ours, or those of Canvas, Moodle and
Gradescope. Of several the first that is there counts."""
BY_MORE = "handed in with --id or --email they can be told apart"
NOBODY = ("Points Possible", "Student, Test")
"""Beginnings of rows of Canvas's export that are no student's."""


@dataclass(frozen=True)
class Person:
    """Somebody of the class.

    Attributes:
        name, email, id: as the roster has them; e-mail or id may be empty.
        extension_days: days after the deadline that this student's hand-in is still in time.
        handed_in: time of the hand-in by the learning platform; None where the roster has none.
        row: all cells of the roster's row.
        addresses: all e-mail addresses that the person has handed in with.
    """

    name: str
    email: str = ""
    id: str = ""
    extension_days: float = 0.0
    handed_in: datetime | None = None
    row: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Returns True if the words of this name are the person's, in any order."""
        return sorted(words_of(self.name)) == sorted(words_of(name))


@dataclass(frozen=True)
class Roster:
    """The people of a class, no two with one id or e-mail."""

    people: Sequence[Person]

    def person(self, of: HandedIn) -> Person:
        """Returns whose a hand-in is. Raises UserError where that is nobody, or cannot be told."""
        by_id = self._with("id", of.id)
        by_email = self._with("email", of.email)
        namesakes = [person for person in self.people if person.is_called(of.name)]
        if by_id and by_email and by_id is not by_email:
            raise UserError(
                f"on the roster id {of.id} is {by_id.name}'s, and {of.email} {by_email.name}'s"
            )
        if person := by_id or by_email:
            if namesakes and person not in namesakes:
                claim = f"id {of.id}" if by_id else of.email
                raise UserError(f"on the roster {claim} is {person.name}'s, not {of.name}'s")
            return person
        if of.id or of.email:
            claims = " and ".join(filter(None, (of.id and f"id {of.id}", of.email)))
            if not self._lacks(of, namesakes):
                raise UserError(f"nobody on the roster has {claims}; its name is {of.name}")
        if not namesakes:
            raise UserError(f"nobody on the roster is called {of.name}")
        if len(namesakes) > 1:
            raise UserError(f"{len(namesakes)} on the roster are called {of.name}; {BY_MORE}")
        return namesakes[0]

    def slug(self, person: Person) -> str:
        """Returns what a person's files are called: the name, with the id where two have it."""
        same = [other for other in self.people if other.is_called(person.name)]
        more = slug(person.id or person.email.replace("@", "-")) if len(same) > 1 else ""
        return "-".join(filter(None, (slug(person.name), more)))

    def _with(self, attribute: str, value: str) -> Person | None:
        same = (p for p in self.people if getattr(p, attribute).casefold() == value.casefold())
        return next(same, None) if value else None

    def _lacks(self, of: HandedIn, namesakes: Sequence[Person]) -> bool:
        """Returns True if the roster does not have what a hand-in says besides its name."""
        return all(
            not (of.id and person.id) and not (of.email and person.email) for person in namesakes
        )


def read_roster(path: Path) -> Roster:
    """Reads a roster: CSV with a column for names, and one for e-mails, ids or both.

    Raises:
        UserError: it cannot be read, lacks a column, has an id or e-mail twice, or two people who
            cannot be told apart.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'no UTF-8'}") from None
    head = lines[0] if lines else ""
    rows = csv.DictReader(lines, delimiter=max(",;\t", key=head.count))
    columns = columns_of(rows.fieldnames or ())
    is_named = "name" in columns or {"first name", "last name"} <= columns.keys()
    if not is_named or not {"email", "id"} & columns.keys():
        raise UserError(f"{path}: expected the columns name, and email or id; got {head[:80]!r}")
    people: list[Person] = []
    for row in rows:
        where = f"{path}:{rows.line_num}"
        person = person_of(row, columns, where)
        if person is not None:
            check_is_another(person, people, where)
            people.append(person)
    if not people:
        raise UserError(f"{path}: nobody is on it")
    return Roster(people)


def columns_of(header: Sequence[str]) -> dict[str, str]:
    """Returns which column has what."""
    plain = {re.sub(r"[\s_-]+", " ", name.strip().lower()): name for name in header}
    return {
        what: next(plain[alias] for alias in aliases if alias in plain)
        for what, aliases in COLUMNS.items()
        if any(alias in plain for alias in aliases)
    }


def person_of(row: Mapping[str, str], columns: Mapping[str, str], where: str) -> Person | None:
    """Returns the person of a row; None for a row that is nobody's. Raises UserError."""
    cells = {what: normal((row[column] or "").strip()) for what, column in columns.items()}
    name = cells.get("name") or f"{cells.get('first name', '')} {cells.get('last name', '')}"
    name = name.strip()
    if not name or name.startswith(NOBODY):
        return None
    if not words_of(name):
        raise UserError(f"{where}: {name!r} is no name")
    days = number_of(cells.get("extension_days") or "0", where)
    moment = moment_of(cells["handed_in"], where) if cells.get("handed_in") else None
    return Person(name, cells.get("email", ""), cells.get("id", ""), days, moment, dict(row))


def number_of(text: str, where: str) -> float:
    """Returns a number of days. Raises UserError for none, or one below 0."""
    try:
        days = float(text.replace(",", "."))
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise UserError(f"{where}: extension_days {text!r}; expected a number of days, 0 or more")
    return days


def moment_of(text: str, where: str) -> datetime:
    """Returns a time with its zone. Raises UserError for another text."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UserError(f"{where}: time {text!r}; expected one like 2027-10-01T23:59+02:00")
    return moment


def check_is_another(person: Person, people: Sequence[Person], where: str) -> None:
    """Raises UserError if somebody before has the same id or e-mail, or cannot be told apart."""
    for other in people:
        for what, value, earlier in (
            ("id", person.id, other.id),
            ("e-mail", person.email, other.email),
        ):
            if value and value.casefold() == earlier.casefold():
                raise UserError(f"{where}: {what} {value} is there twice")
        if other.is_called(person.name) and not (
            (person.id and other.id) or (person.email and other.email)
        ):
            raise UserError(f"{where}: two are called {person.name}; each needs an id or e-mail")
