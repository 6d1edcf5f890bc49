"""A class of made hand-ins, graded as a class is: in time, late, again, and whatever is not right.

They are drawn from the references and the wrong solutions. What must come of each is known, so that
the study says what was lost. Every code has a line of its own: no outcome is another's by chance.
"""

from __future__ import annotations

import gzip
import io
import itertools
import shutil
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import yaml

from common.course.answers import LEVELS, TEXT, questions_path, read_questions
from common.course.grading.classes import CACHE, Class
from common.course.grading.grade import Grader
from common.course.grading.matrix import parts_of, reference_of
from common.course.grading.people.roster import read_roster
from common.course.hand_ins.tarball import ANSWERS, UNPACKED_BYTES
from common.course.submission import HandedIn, handed_in, pack
from common.course.tasks import read_tasks
from common.runtime.paths import project_root
from common.runtime.records.run_directory import RunDirectory
from common.runtime.stage_progress import StageProgress

RIGHT, WRONG, LATE, REGRADED = "right", "wrong", "late", "regraded"
HOSTILE, MISNAMED, DOUBLED, COPIED = "hostile", "misnamed", "doubled", "copied"
KINDS = {RIGHT: 17, WRONG: 17, LATE: 6, REGRADED: 4, HOSTILE: 6, MISNAMED: 4, DOUBLED: 3, COPIED: 3}
"""Kind → number of students of the class whose hand-in is of it: 60."""
ASSIGNMENT = 3
FAMILIES = ("Doe", "O'Brien", "Müller", "Иванова", "王", "सिंह", "Smith-Jones", "علی", "Roe", "Li")
FIRST = ("Jane", "Max", "Anna", "小明", "Zoë", "Ivan")
DUE = datetime(2027, 10, 1, 22, tzinfo=UTC)


@dataclass(frozen=True)
class Made:
    """A student of the class with what is handed in.

    Attributes:
        kind: one of ``KINDS``.
        of: student, assignment and part.
        check: check that a wrong solution must lose; empty otherwise.
        files: tarballs in the order in which they are handed in.
    """

    kind: str
    of: HandedIn
    check: str
    files: tuple[Path, ...]


def grade_made_class(
    kinds: Sequence[str],
    mutants: Sequence,
    variant: int,
    continues: str,
    run: RunDirectory,
    progress: StageProgress,
) -> pd.DataFrame:
    """Makes and grades the class, in four steps; writes class.csv and class-steps.csv.

    Args:
        kinds: kinds of hand-ins, one student each; empty for the class of 60.
        mutants: wrong solutions of all assignments.
        variant: seed of the numbers that checks draw.
        continues: run directory of a study that was cut, whose outcomes are taken over.
        run: run directory; the hand-ins and grades lie in it.
        progress: says what is being done.

    Returns:
        a row for each step: step, minutes, files, rows, changed_rows, lost_rows, lost_levels.
    """
    folder = run.path / "class"
    grades = folder / "grades"
    if continues and (Path(continues) / "class" / "grades" / CACHE).is_dir():
        shutil.copytree(Path(continues) / "class" / "grades" / CACHE, grades / CACHE)
    made = make_class(folder / "submissions", kinds, mutants)
    people = folder / "roster.csv"
    people.write_text(
        "name,id,email\n" + "".join(f"{m.of.name},{m.of.id},{m.of.email}\n" for m in made)
    )
    roster, grader = read_roster(people), Grader(project_root(), variant)
    first = [m.files[0] for m in made if m.kind != LATE]
    first += [m.files[1] for m in made if m.kind == DOUBLED]
    again = [m.files[1] for m in made if m.kind == REGRADED]
    steps = {
        "in time": first,
        "texts read": [],
        "late": [m.files[0] for m in made if m.kind == LATE],
        "regrades": again[1:],
        "a regrade of one": again[:1],
        "a broken one": [broken(made[0].files[0])],
    }
    rows: list[dict[str, object]] = []
    for name, files in steps.items():
        if not files and name not in ("in time", "texts read"):
            continue
        before = (rows_of(grades / "grades.csv"), rows_of(grades / "levels.csv"))
        with progress.stage(f"class of {len(made)}: {name}"):
            if name == "texts read":
                read_texts(grades / "levels.csv")
            began = time.monotonic()
            Class(grader, files, roster, due=DUE).grade(grades, print)
        after = (rows_of(grades / "grades.csv"), rows_of(grades / "levels.csv"))
        minutes = (time.monotonic() - began) / 60
        rows.append({"step": name, "minutes": minutes, "files": len(files)} | lost(before, after))
        run.write_table("class-steps.csv", pd.DataFrame(rows))
    outcomes = pd.DataFrame(outcome_of(m, grades) for m in made)
    run.write_table("class.csv", outcomes)
    progress.say(f"{outcomes['as_it_must_be'].sum()} of {len(made)} students have what they must")
    return pd.DataFrame(rows)


def make_class(folder: Path, kinds: Sequence[str], mutants: Sequence) -> list[Made]:
    """Writes the tarballs of a class."""
    folder.mkdir(parents=True)
    listed = list(kinds) or [kind for kind, count in KINDS.items() for _ in range(count)]
    what = parts_of(ASSIGNMENT, "a")[-1]
    tasks = what.tasks(read_tasks()).values()
    right = {task.file: reference_of(task, project_root()) for task in tasks}
    checks = {check for task in tasks for check in task.checks}
    wrong = itertools.cycle([m for m in mutants if m.check in checks])
    names = itertools.cycle(f"{first} {family}" for first in FIRST for family in FAMILIES)
    made: list[Made] = []
    for number, (kind, name) in enumerate(zip(listed, names, strict=False)):
        if kind == DOUBLED and made:  # also the name of somebody else
            name = made[0].of.name
        of = handed_in(name, what.assignment, what.part, f"s{number}@x.org", f"s{number}")
        mutant = next(wrong) if kind in (WRONG, REGRADED, DOUBLED) else None
        texts = right | ({f"{mutant.exercise}.py": mutant.source()} if mutant else {})
        files = []
        for attempt, code in enumerate((texts, right) if kind in (REGRADED, DOUBLED) else (texts,)):
            author = 0 if kind == COPIED else number
            path = folder / file_name(kind, of, attempt)
            pack(path, of, contents(code, f"# {author}.{attempt}\n", f"Of {author}."))
            if kind == HOSTILE:
                spoil(path, of, number)
            files.append(path)
        check = mutant.check if mutant and kind == WRONG else ""
        made.append(Made(kind, of, check, tuple(files)))
    return made


def file_name(kind: str, of: HandedIn, attempt: int) -> str:
    """Returns a name of a file as browsers, platforms and students make them."""
    number = int(of.id[1:])
    if kind == MISNAMED:
        return (f"homework ({number}).TAR.GZ", f"roe-max_{number}_17_1.tar.gz")[number % 2]
    again = f" ({attempt})" if attempt else ""
    return f"{of.id}_{of.stem}{again}.tar.gz"


def contents(texts: dict[str, str], line: str, text: str) -> dict[str, bytes]:
    """Returns the files of a hand-in: code that ends with a line, and a text for each question."""
    files = {f"exercises/{name}": (code + line).encode() for name, code in texts.items()}
    answers = yaml.safe_load(questions_path(project_root(), ASSIGNMENT).read_text())
    for name, question in read_questions(project_root(), ASSIGNMENT).items():
        if question.kind == TEXT:
            answers[name]["answer"] = text
    return {**files, ANSWERS: yaml.safe_dump(answers).encode()}


def spoil(path: Path, of: HandedIn, number: int) -> None:
    """Makes of a tarball one that is broken, hostile or of another assignment."""
    content = path.read_bytes()
    with io.BytesIO() as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
        link = tarfile.TarInfo(f"{of.stem}/answers.yaml")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.close()
        linked = file.getvalue()
    kinds = (
        content[: len(content) // 2],
        b"not a tarball",
        b"",
        linked,
        gzip.compress(bytes(UNPACKED_BYTES + 1), compresslevel=1),
    )
    if number % (len(kinds) + 1) == len(kinds):
        pack(path, replace(of, assignment=ASSIGNMENT - 1), {ANSWERS: b"{}"})
    else:
        path.write_bytes(kinds[number % (len(kinds) + 1)])


def broken(path: Path) -> Path:
    """Returns a hand-in that was cut off when it was sent again."""
    again = path.with_name(f"{path.name.removesuffix('.tar.gz')} (9).tar.gz")
    again.write_bytes(path.read_bytes()[:100])
    return again


def read_texts(path: Path) -> None:
    """Fills in a level for each text, as a reader does."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table["level"] = [LEVELS[number % len(LEVELS)] for number in range(len(table))]
    path.write_text(table.to_csv(index=False))


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    """Reads a table as text, by its first column and, of levels, its second."""
    if not path.is_file():
        return {}
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    keys = table.columns[:2] if "level" in table else table.columns[:1]
    return {" ".join(row[key] for key in keys): row for row in table.to_dict("records")}


def lost(
    before: tuple[dict, dict],
    after: tuple[dict, dict],
) -> dict[str, int]:
    """Returns what a step did to the rows that were there before it.

    Args:
        before, after: rows of grades.csv, and rows of levels.csv.
    """
    grades, levels = zip(before, after, strict=True)
    return {
        "rows": len(grades[1]),
        "changed_rows": sum(
            key in grades[1] and row != grades[1][key] for key, row in grades[0].items()
        ),
        "lost_rows": len(grades[0].keys() - grades[1].keys()),
        "lost_levels": sum(
            levels[1].get(key, {}).get("level") != row["level"]
            for key, row in levels[0].items()
            if row["level"]
        ),
    }


def outcome_of(made: Made, folder: Path) -> dict[str, object]:
    """Returns what came of a student's hand-in, and whether that is what must."""
    rows = rows_of(folder / "grades.csv").values()
    tasks = list(made.of.tasks(read_tasks()))
    row = next((row for row in rows if row["id"] == made.of.id), None)
    reason = next((r["remark"] for r in rows if r["submission"] == made.files[-1].name), "")
    score = sum(float(row[task]) for task in tasks) if row else 0.0
    points = sum(read_tasks()[task].points for task in tasks)
    as_meant: dict[str, Callable[[], bool]] = {
        HOSTILE: lambda: row is None and bool(reason),
        WRONG: lambda: row is not None and score < points,
    }
    is_right = as_meant.get(made.kind, lambda: row is not None and score == points)()
    return {
        "kind": made.kind,
        "name": made.of.name,
        "id": made.of.id,
        "file": made.files[-1].name,
        "check": made.check,
        "points_for_code": score,
        "reason": reason or (row or {}).get("remark", ""),
        "as_it_must_be": is_right,
    }
