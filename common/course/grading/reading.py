"""The reading sheet: the text answers of a whole class, a page a question, with its levels."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.course.answers import LEVELS, TEXT, Question
from common.errors import UserError

HEADER = ("submission", "question", "level")
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


def reading_sheet(
    title: str,
    questions: Mapping[str, Question],
    key: Mapping[str, Mapping],
    answers: Mapping[str, Mapping[str, object]],
) -> str:
    """Returns a page of HTML: for each question its levels, what to look for, and all answers.

    Args:
        title: title of the page.
        questions, key: question and key by the question's name; only texts are read.
        answers: submission → question → answer; submissions stand in the same order everywhere.
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
            f"<h3>{html.escape(stem)}</h3><blockquote>{html.escape(str(texts.get(name) or '—'))}"
            "</blockquote>"
            for stem, texts in answers.items()
        )
        parts.append(
            f"<section><h2>{name} ({question.points} points)</h2>"
            f"<p>{html.escape(question.about)}</p><table>{rows}</table>"
            f"<ul class='staff'>{facts}</ul>{quotes}</section>"
        )
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    view = "<meta name='viewport' content='width=device-width'>"
    body = f"<h1>{html.escape(title)}</h1>{''.join(parts)}"
    return f"<!doctype html><html lang='en'><head>{head}{view}</head><body>{body}</body></html>\n"


def blank_levels(stems: Sequence[str], questions: Mapping[str, Question]) -> str:
    """Returns the CSV in which a reader fills in a level for each text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(
        (stem, name, "") for name, q in questions.items() if q.kind == TEXT for stem in stems
    )
    return text.getvalue()


def read_levels(path: Path) -> dict[str, dict[str, str]]:
    """Reads what a reader filled in: submission → question → level; lines without one are left out.

    Raises:
        UserError: it cannot be read, or a level is none.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'not a text'}") from None
    levels: dict[str, dict[str, str]] = {}
    for number, row in enumerate(rows, start=2):
        if not set(HEADER) <= row.keys():
            raise UserError(f"{path}: expected the columns {', '.join(HEADER)}")
        level = (row["level"] or "").strip()
        if level and level not in LEVELS:
            raise UserError(f"{path}:{number}: level {level!r}; known: {', '.join(LEVELS)}")
        if level:
            levels.setdefault(row["submission"], {})[row["question"]] = level
    return levels
