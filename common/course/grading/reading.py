"""The reading of texts: a sheet of a class's answers without names, and the levels that come back.

A text is called by a code that is its own: another text of the same student has another one, and a
level is of the text that was read.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from common.course.answers import LEVELS, TEXT, Question
from common.course.grading.marks import NO_ANSWER, with_level
from common.course.grading.records import ClassResults, Record
from common.errors import UserError

HEADER = ("text", "question", "level")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
section { break-before: page }
table { border-collapse: collapse; width: 100% }
td, th { border: 1px solid #8888; padding: .3rem .6rem; text-align: left; vertical-align: top }
blockquote { white-space: pre-wrap; border-left: 3px solid #8888; margin: .3rem 0 1rem;
  padding: .1rem 1rem; overflow-wrap: anywhere }
.staff { color: #555 }
h3 { margin-bottom: 0 }
"""

Levels = dict[tuple[str, str], dict[str, str]]
"""(code of a text; question) → row of a table of levels."""


def texts_of(results: ClassResults, question: str) -> dict[str, str]:
    """Returns a question's texts by their codes, in the codes' order: nobody's place tells."""
    of = [record for record in results.records.values() if question in record.texts]
    return dict(sorted((record.code(question), record.texts[question]) for record in of))


def reading_sheet(
    title: str,
    questions: Mapping[str, Question],
    key: Mapping[str, Mapping],
    texts: Mapping[str, Mapping[str, str]],
) -> str:
    """Returns a page of HTML: for each question its levels, what to look for, and all texts.

    Args:
        title: title of the page.
        questions, key: question and key by the question's name; only texts are read.
        texts: question → code → text.
    """
    parts = []
    for name, question in questions.items():
        if question.kind != TEXT:
            continue
        rows = "".join(
            f"<tr><th>{level}</th><td>{html.escape(question.levels[level])}</td></tr>"
            for level in LEVELS
        )
        facts = "".join(
            f"<li>{html.escape(str(fact))}</li>" for fact in key.get(name, {}).get("look_for", ())
        )
        quotes = "".join(
            f"<h3>{html.escape(code)}</h3><blockquote>{html.escape(text)}</blockquote>"
            for code, text in texts.get(name, {}).items()
        )
        parts.append(
            f"<section><h2>{name} ({question.points} points)</h2>"
            f"<p>{html.escape(question.about)}</p><table>{rows}</table>"
            f"<ul class='staff'>{facts}</ul>{quotes}</section>"
        )
    return html_page(title, "".join(parts), STYLE)


def html_page(title: str, body: str, style: str) -> str:
    """Returns a page of HTML with a title, which is escaped, above a body, which is not."""
    title = html.escape(title)
    head = f"<meta charset='utf-8'><title>{title}</title><style>{style}</style>"
    head += "<meta name='viewport' content='width=device-width'>"
    body = f"<body><h1>{title}</h1>{body}</body>"
    return f"<!doctype html><html lang='en'><head>{head}</head>{body}</html>\n"


def read_levels(path: Path) -> Levels:
    """Reads what a reader filled in, with the lines that have no level yet.

    Raises:
        UserError: it cannot be read, or a level is none.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'not a text'}") from None
    levels: Levels = {}
    for number, row in enumerate(rows, start=2):
        if not {*HEADER} <= row.keys() or None in row:
            raise UserError(f"{path}:{number}: expected the columns {', '.join(HEADER)}")
        row["level"] = level = (row["level"] or "").strip()
        if level and level not in LEVELS:
            raise UserError(f"{path}:{number}: level {level!r}; known: {', '.join(LEVELS)}")
        levels[row["text"] or "", row["question"] or ""] = row
    return levels


def check_levels(
    levels: Levels, results: ClassResults, questions: Mapping[str, Question], path: Path
) -> None:
    """Raises UserError for a level of a text or a question that there is not."""
    texts = {name: texts_of(results, name) for name, q in questions.items() if q.kind == TEXT}
    for (name, question), row in levels.items():
        if not row["level"]:
            continue
        if question not in texts:
            raise UserError(f"{path}: {question!r} is no question with a text to read")
        if name not in {*texts[question], *results.retired}:
            raise UserError(f"{path}: nobody handed in {name!r}, of {question}")


def apply_levels(results: ClassResults, levels: Levels, questions: Mapping[str, Question]) -> None:
    """Gives the texts of all records their levels."""
    filled = {pair: row["level"] for pair, row in levels.items() if row["level"]}

    def level_of(record: Record, question: str) -> str | None:
        return filled.get((record.code(question), question))

    read = {q for r in results.records.values() for q in r.texts if level_of(r, q)}
    for record in list(results.records.values()):
        marks = [
            with_level(
                mark,
                questions[mark.of],
                level_of(record, mark.of) if mark.of in record.texts else None,
                is_read=mark.of in read,
            )
            if mark.of in record.texts or (mark.why == NO_ANSWER and is_text(mark.of, questions))
            else mark
            for mark in record.marks
        ]
        results.records[record.submission] = replace(record, marks=tuple(marks))


def is_text(name: str, questions: Mapping[str, Question]) -> bool:
    """Returns True for the name of a question whose answer is a text."""
    return name in questions and questions[name].kind == TEXT


def as_levels(results: ClassResults, levels: Levels, questions: Mapping[str, Question]) -> str:
    """Returns levels.csv: all texts of the class, and what a reader has filled in for them.

    Rows of texts that were replaced by later ones stand at the end.
    """
    rows: Levels = {}
    for question in (name for name in questions if is_text(name, questions)):
        for record in results.records.values():
            if question in record.texts:
                code = record.code(question)
                row = levels.get((code, question)) or {"level": ""}
                rows[code, question] = {**row, "text": code, "question": question}
    order = {name: number for number, name in enumerate(questions)}
    listed = sorted(rows.items(), key=lambda item: (order[item[0][1]], item[0][0]))
    retired = [row for pair, row in levels.items() if pair not in rows]
    table = [row for _, row in listed] + retired
    columns = [*HEADER, *(c for c in dict.fromkeys(c for row in table for c in row))]
    columns = [c for c in dict.fromkeys(columns) if c]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
