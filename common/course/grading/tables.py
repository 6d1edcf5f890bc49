"""The tables of a class: grades.csv, history.csv, and what learning platforms import."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta

from common.course.grading.people.identify import people_of
from common.course.grading.people.roster import Person, Roster
from common.course.grading.records import ClassResults, Record
from common.course.submission import named
from common.runtime.wording import counted

HISTORY = ("time", "submission", "score_before", "score", "why", "file", "sha256")
ABOUT = (
    *("submission", "name", "id", "email", "handed_in", "time_from", "days_late"),
    *("score", "maximum", "percent", "not_judged", "remark"),
)
CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that a spreadsheet computes."""
NAMED = 10
"""Most people without a hand-in that are named in a line."""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a CSV file; no cell of a student's is computed by a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([cell(value) for value in row])
    return text.getvalue()


def cell(value: object) -> object:
    """Returns a value as a cell."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return "" if value is None else value


def late_s(record: Record, due: str) -> float | None:
    """Returns the seconds by which a hand-in is late; None without a deadline or a time."""
    if not due or not record.handed_in:
        return None
    until = datetime.fromisoformat(due) + timedelta(days=record.extension_days)
    return max(0.0, (datetime.fromisoformat(record.handed_in) - until).total_seconds())


def days_late(record: Record, due: str) -> int | None:
    """Returns the days by which a hand-in is late, begun ones counted; None as for seconds."""
    seconds = late_s(record, due)
    return None if seconds is None else math.ceil(seconds / 86400)


def not_judged(record: Record) -> float:
    """Returns the points that nobody has judged yet."""
    return sum(mark.points for mark in record.marks if mark.score is None)


def as_grades(results: ClassResults, bonus: Collection[str]) -> str:
    """Returns grades.csv: a row a student, then one for each hand-in that counts for nobody.

    ``percent`` is of what was judged, so that it can be compared before all texts are read. At
    the end are the points by task and question.

    Args:
        results: the results of a class.
        bonus: tasks whose points come on top: they are not in the maximum.
    """
    records = [results.records[name] for name in sorted(results.records)]
    columns = list(dict.fromkeys(mark.of for record in records for mark in record.marks))
    rows = []
    for record in records:
        grade = record.grade
        by_task = [sum(m.score or 0.0 for m in record.marks if m.of == name) for name in columns]
        maximum = sum(m.points for m in record.marks if m.score is not None and m.of not in bonus)
        percent = 100.0 * grade.score / maximum if maximum else None
        points = [grade.score, maximum, percent, not_judged(record), record.remark]
        rows.append([*about(record, results.due), *points, *by_task])
    problems = sorted(results.problems.values(), key=lambda record: record.submission)
    rows += [[*about(r, results.due), None, None, None, None, r.problem] for r in problems]
    width = len(ABOUT) + len(columns)
    return table([*ABOUT, *columns], [row + [None] * (width - len(row)) for row in rows])


def about(record: Record, due: str) -> list[object]:
    """Returns whose a hand-in is, and when it came."""
    of = [record.submission, record.name, record.id, record.email]
    return [*of, record.handed_in, record.time_from, days_late(record, due)]


def as_history(results: ClassResults) -> str:
    """Returns history.csv: what a student's points were before, when they changed, and why."""
    return table(HISTORY, [[row[name] for name in HISTORY] for row in results.history])


def as_canvas(results: ClassResults, roster: Roster | None, possible: float) -> str:
    """Returns what Canvas imports into its gradebook.

    Its importer wants Student, ID and Section in the first columns, SIS User ID and SIS Login ID
    between them, then a column for each assignment, and a row of points possible
    (https://github.com/instructure/canvas-lms/blob/master/lib/gradebook_importer.rb). Students are
    found by ID, else by SIS User ID, by SIS Login ID or by name. A roster that Canvas exported has
    all of these, and they are taken from it.
    """
    rows: list[list[object]] = [["    Points Possible", "", "", "", "", possible]]
    for record, person in with_people(results, roster):
        row = person.row
        if "Student" in row:
            of = [row.get(name, "") for name in CANVAS]
        else:
            of = [record.name, "", record.id, record.email, ""]
        rows.append([*of, record.grade.score])
    return table([*CANVAS, title_of(results)], rows)


def as_moodle(results: ClassResults, roster: Roster | None, possible: float) -> str:
    """Returns what Moodle imports into its gradebook.

    The import asks which column identifies students (e-mail or ID number) and which has the points
    (https://docs.moodle.org/311/en/Grade_import). E-mails have the roster's capitals: Moodle tells
    them apart.
    """
    rows = [
        [person.id, person.email, person.name, record.grade.score]
        for record, person in with_people(results, roster)
    ]
    return table(["ID number", "Email address", "Full name", title_of(results)], rows)


def as_gradescope(results: ClassResults, roster: Roster | None, possible: float) -> str:
    """Returns points as Gradescope's "Download Grades" has them.

    Gradescope documents no import of points but an autograder's results.json. This is for what
    reads its download; people are named as on its rosters
    (https://guides.gradescope.com/hc/en-us/articles/21926598776333-Adding-Students-and-Staff).
    """
    header = [
        *("Name", "SID", "Email", "Total Score", "Max Points", "Status"),
        *("Submission ID", "Submission Time", "Lateness (H:M:S)"),
    ]
    rows: list[list[object]] = []
    for record, person in with_people(results, roster):
        minutes, seconds = divmod(round(late_s(record, results.due) or 0), 60)
        late = f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
        points = [record.grade.score, possible, "Graded"]
        rows.append([person.name, person.id, person.email, *points, "", record.handed_in, late])
    return table(header, rows)


PLATFORMS = {"canvas": as_canvas, "moodle": as_moodle, "gradescope": as_gradescope}
"""Learning platform → what makes its table, of the points possible among others."""


def with_people(results: ClassResults, roster: Roster | None) -> list[tuple[Record, Person]]:
    """Returns the records with their people as the roster has them, by name."""
    people = {(p.id, p.email, p.name): p for p in (roster.people if roster else ())}
    records = sorted(results.records.values(), key=lambda record: record.submission)
    return [(r, people.get((r.id, r.email, r.name), r.person)) for r in records]


def title_of(results: ClassResults) -> str:
    """Returns the assignment's name as a column's title."""
    return named(results.what.assignment, results.what.part).replace(",", "").capitalize()


def what_is_open(
    results: ClassResults, roster: Roster | None, platforms: Sequence[str]
) -> Iterator[str]:
    """Yields lines on who of the roster handed in nothing that counts, and on open points."""
    listed = roster.people if roster else ()
    people = people_of([*listed, *(record.person for record in results.records.values())])
    graded = set(people[len(listed) :])
    missing = [p.name for p, who in zip(listed, people, strict=False) if who not in graded]
    if missing:
        names = ", ".join(missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        yield f"nothing counts of {counted(len(missing), 'student')}: {names}{more}"
    waiting = sum(not_judged(record) > 0 for record in results.records.values())
    for name in platforms if waiting else ():
        yield f"{name}.csv: of {counted(waiting, 'student')} not all points have been judged yet"
