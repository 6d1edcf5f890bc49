"""What one submission says of how it came about: its run, its samples, its code, its texts.

It is read in a limited process, and comes back as plain data that ``plausibility`` compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.course.answers import TEXT, read_answers, read_questions
from common.course.check import COMMENT, DOCSTRING, VARIABLE, pattern, tokens_of
from common.course.hand_ins.tarball import ANSWERS, EXERCISES, REPORT, RUN
from common.course.limits import (
    RECORD,
    SETTINGS,
    SettingsLoader,
    check_run,
    read_json,
    read_yaml,
)
from common.course.tasks import read_tasks
from common.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

STRONG, SOME, WEAK = "strong", "some", "weak"
PASSES = {"round": "rounds", "iteration": "num_steps"}
COUNTED = {
    "strategy-times": PASSES,
    "options-times": PASSES,
    "ddp-times": PASSES,
    "overlap-times": PASSES,
    "allreduce-samples": {"round": "rounds", "iteration": "iterations"},
    "throughput-times": {"iteration": "num_steps"},
    "profile-phases": {"step": "active_steps"},
    "training-steps": {"step": "num_steps"},
    "mode-times": {"step": "steps"},
    "epochs": {"epoch": "epochs"},
    "steps": {},
}
"""Tables → columns, and the setting that says how many values a column has. The record has the
number of ranks. Where a setting is missing, the table is of another program."""
RANK, RANKS = "rank", "world_size"
RESUMED = "resumed_from_step"
FEWEST_ROWS = 4
"""Rows of a counted table from which on it may be measured."""
STEP_MS = "step_time_ms"
TIMED = re.compile(r"(.*_)?time|.*(_ms|_us|_s)|(average|median|mean)_time")
"""Columns of measured times."""
CALCULATED = ("simulate", "predict")
"""Beginnings of the names of stages that measure little."""
DIGITS = 4
"""A measured time has more digits; one that has no more may be equal by chance."""
SLACK_S = 2.0
REPEATED = 0.2
"""Share of measured steps from which on values that occur again were not measured."""
REPORT_BYTES = 2_000
SKETCH, PROFILE = 256, 33
"""Samples kept of a column, those with the smallest hashes; quantiles of its profile."""
COLUMNS, PROBLEMS = 500, 20
"""Most columns of a run that are compared, and most of its problems that are listed."""
SHINGLE, TOKENS, WORDS = 8, 20_000, 5
"""Tokens in a row that are compared, and most of a file; words in a row."""


def evidence(folder: str, root: str, assignment: int) -> dict[str, Any]:
    """Returns what is compared of a submission that lies in ``folder``.

    Returns:
        ``run``: [strength, evidence] of what does not go together in the run; ``end``: when its
        last stage ended; ``samples``: table: column → hashes; ``profiles``: table: column →
        quantiles over the median; ``code``: exercise → hashes; ``texts``: question → hashes.
    """
    base = Path(folder)
    texts = {}
    problems: list[tuple[str, str]] = list(of_report(base / REPORT))
    try:
        questions = read_questions(Path(root), assignment)
        path = base / ANSWERS
        answers = read_answers(path.read_bytes() if path.is_file() else b"{}", questions)
        for name, question in questions.items():
            if question.kind == TEXT and answers[name]:
                texts[name] = words_of(str(answers[name]))
    except UserError as error:
        problems.append((WEAK, str(error)))
    samples: dict[str, list[int]] = {}
    profiles: dict[str, list[float]] = {}
    end = ""
    try:
        check_run(base / RUN)
        stages = list(stages_of(base / RUN))
        problems += [p for stage in stages for p in stage.problems()]
        problems += together(stages)
        end = max((stage.end.isoformat() for stage in stages if stage.end), default="")
        columns = (pair for stage in stages for pair in stage.measured())
        for name, column in islice(columns, COLUMNS):
            samples[name], profiles[name] = sketch(column), profile(column)
    except UserError as error:
        problems.append((SOME, f"the run cannot be read: {error}"))
    files = [t.file for t in read_tasks(Path(root)).values() if t.assignment == assignment]
    code = {
        name: shingles((base / EXERCISES / name).read_text(errors="replace"))
        for name in files
        if (base / EXERCISES / name).is_file()
    }
    if len(problems) > PROBLEMS:
        problems = [*problems[:PROBLEMS], (SOME, f"{len(problems) - PROBLEMS} more")]
    return {
        "run": problems,
        "end": end,
        "samples": samples,
        "profiles": profiles,
        "code": code,
        "texts": texts,
    }


class Stage:
    """A folder of a run with tables: its settings, its record, its clock."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.folder = folder
        self.name = str(folder.relative_to(run))
        self.tables = {path.stem: path for path in sorted(folder.glob("*.csv"))}
        self.settings = read_mapping(folder / SETTINGS)
        self.record = read_mapping(folder / RECORD)
        self.start, self.end = (clock(self.record.get(f"{w}_time")) for w in ("start", "end"))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields what does not go together within the stage."""
        counted = [name for name in COUNTED if name in self.tables]
        for name, content in ((RECORD, self.record), (SETTINGS, self.settings)):
            if counted and not content:
                yield SOME, f"{self.name}: {counted[0]}.csv without {name}"
        if self.record and not (self.start and self.end and self.start <= self.end):
            yield SOME, f"{self.name}: no start before an end"
        for name in counted:
            for strength, words in self.of_rows(name, read_csv_within(self.tables[name])):
                yield strength, f"{self.name}: {name}.csv: {words}"

    def of_rows(self, name: str, table: pd.DataFrame) -> Iterator[tuple[str, str]]:
        """Yields what does not go together in a counted table."""
        missing = self.missing(name, table)
        if len(table) < FEWEST_ROWS:
            yield SOME if missing or not self.settings else WEAK, f"{len(table)} rows"
        elif missing:
            yield SOME, missing
        for column, values in numeric(table):
            measured = precise(values)
            if len(values) >= FEWEST_ROWS and not len(measured):
                yield SOME, f"{column} has {DIGITS} digits at most"
            again = len(measured) - len(np.unique(measured))
            if column == STEP_MS and again > REPEATED * len(measured):
                yield SOME, f"{again} of {len(measured)} values of {column} occur again"
            if column == STEP_MS and self.start and self.end:
                steps = table[column].groupby(table[RANK] if RANK in table else 0 * table.index)
                steps_s, lasted_s = steps.sum().max() / 1e3, (self.end - self.start).total_seconds()
                if steps_s > lasted_s + SLACK_S:
                    yield (
                        STRONG,
                        f"steps of {steps_s:.0f} s in a stage that lasted {lasted_s:.0f} s",
                    )

    def missing(self, name: str, table: pd.DataFrame) -> str:
        """Returns what a table has too few of; empty where it has what the settings ask for."""
        wanted = {RANK: self.record.get(RANKS)} if RANK in table else {}
        by_settings = {c: self.settings.get(of) for c, of in COUNTED[name].items()}
        if all(type(most) is int for most in by_settings.values()) and not self.is_resumed:
            wanted |= {column: most for column, most in by_settings.items() if column in table}
        wanted = {column: most for column, most in wanted.items() if type(most) is int}
        for column, most in wanted.items():
            count = table[column].nunique()
            if count < most:
                return f"{count} of {most} {column}s"
        if not wanted:
            return ""
        rows, most = len(table.drop_duplicates([*wanted])), math.prod(wanted.values())
        return f"{rows} of {most} rows by {', '.join(wanted)}" if rows < most else ""

    @property
    def is_resumed(self) -> bool:
        """Returns True for the rest of a training that was taken up again."""
        return bool(self.settings.get(RESUMED))

    def measured(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields table: column and the precise values of each column of measured times."""
        if self.folder.name.startswith(CALCULATED):
            return
        for name, path in self.tables.items():
            for column, values in numeric(read_csv_within(path)):
                values = precise(values)
                if len(values) >= FEWEST_ROWS:
                    yield f"{self.name}/{name}.csv: {column}", values


def of_report(path: Path) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the report."""
    head = path.read_bytes()[:5] if path.is_file() else b""
    if path.is_file() and (head != b"%PDF-" or path.stat().st_size < REPORT_BYTES):
        yield SOME, f"{REPORT} of {path.stat().st_size} bytes is none"


def stages_of(run: Path) -> Iterator[Stage]:
    """Yields the folders of a run that have tables, settings or a record, in order."""
    folders = {path.parent for path in run.rglob("*.csv")}
    folders |= {path.parent for path in run.rglob(RECORD)}
    for folder in sorted(folders):
        if folder == run or (folder / RECORD).is_file() or folder.name != "metrics":
            yield Stage(folder, run)


def together(stages: Sequence[Stage]) -> Iterator[tuple[str, str]]:
    """Yields what does not go together among the stages of a run: machines, versions, clocks."""
    run_there = [s for s in stages if s.record and "copied_from" not in s.record]
    for words, read in {
        "the machine": lambda record: (record.get("cpu"), record.get("gpus")),
        "the versions": lambda record: (record.get("python"), record.get("packages")),
    }.items():
        kinds = {repr(read(stage.record)): stage.name for stage in reversed(run_there)}
        if len(kinds) > 1:
            yield WEAK, f"{words} of {' and of '.join(list(kinds.values())[:2])} differ"
    timed = sorted((s for s in run_there if s.tables and s.start and s.end), key=lambda s: s.start)
    for first, second in pairwise(timed):
        if (first.end - second.start).total_seconds() > SLACK_S and first.name != ".":
            yield WEAK, f"{first.name} and {second.name} ran at the same time"


def read_mapping(path: Path) -> dict:
    """Returns a record or settings; empty where there are none."""
    if not path.is_file():
        return {}
    content = path.read_bytes()
    if path.name == RECORD:
        entries = read_json(content, path.name)
    else:
        entries = read_yaml(content, path.name, SettingsLoader)
    return entries if isinstance(entries, dict) else {}


def read_csv_within(path: Path) -> pd.DataFrame:
    """Reads a table; empty where it is none."""
    import pandas as pd  # takes long, and a hand-in may have no table

    try:
        return pd.read_csv(path, low_memory=False)
    except (ValueError, OSError):  # pandas' own errors are such
        return pd.DataFrame()


def clock(value: object) -> datetime | None:
    """Returns a time of a record; None where it is none."""
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time.replace(tzinfo=time.tzinfo or UTC) if time else None


def numeric(table: pd.DataFrame) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the columns of measured times, each with its values that are finite and not 0."""
    for name in table:
        if TIMED.fullmatch(str(name)) and table[name].dtype.kind == "f":
            values = table[name].to_numpy()
            yield str(name), values[np.isfinite(values) & (values != 0)]


def precise(values: np.ndarray) -> np.ndarray:
    """Returns the values with so many digits that they are not equal by chance."""
    return values[[float(f"{value:.{DIGITS}g}") != value for value in values]]


def sketch(values: np.ndarray) -> list[int]:
    """Returns the smallest hashes of values, by which the common share of two columns is told."""
    return sorted({number_of(f"{value:.9g}") for value in values})[:SKETCH]


def profile(values: np.ndarray) -> list[float]:
    """Returns quantiles over the median, which stay the same where all values are scaled."""
    quantiles = np.quantile(values, np.linspace(0, 1, PROFILE))
    return [float(value) for value in quantiles / np.median(values)]


def shingles(text: str) -> list[int]:
    """Returns a hash of all ``SHINGLE`` tokens in a row, whatever the names of variables."""
    bare = COMMENT.sub("", DOCSTRING.sub("", text))
    tokens = list(islice(tokens_of(bare), TOKENS))
    words = [VARIABLE if token.is_variable else token.text for token in tokens]
    hashes = {
        number_of(f"{words[at : at + SHINGLE]} {pattern(tokens[at : at + SHINGLE])}")
        for at in range(len(tokens) - SHINGLE + 1)
    }
    return sorted(hashes)


def words_of(text: str) -> list[int]:
    """Returns a hash of all ``WORDS`` words in a row of a text."""
    words = re.findall(r"\w+", text.lower())
    starts = range(len(words) - WORDS + 1)
    return sorted({number_of(" ".join(words[at : at + WORDS])) for at in starts})


def number_of(text: str) -> int:
    """Returns a hash of 53 bits, which JSON's numbers hold."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest()) >> 11
