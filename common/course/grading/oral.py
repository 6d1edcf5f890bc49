"""The sheet of an oral check: questions on a student's own code, tables and answers.

Code that is right may be anybody's. Whoever wrote it can say in a minute what a line is for. The
questions are drawn by a seed, and none has an answer that could be looked up.
"""

from __future__ import annotations

import ast
import csv
import html
import io
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course.answers import NUMBER, read_answers, read_questions
from common.course.grading.reading import STYLE, html_page
from common.course.hand_ins.tarball import ANSWERS, RUN
from common.course.markers import student_source
from common.course.submission import Submission
from common.course.tasks import read_tasks
from common.errors import UserError

QUESTIONS = 6
STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.With)
"""Statements that a function still parses without."""
LEAST = 3
"""New statements of a function that is worth a question."""
MOST_LETTERS = 10**5
"""Longest file of code that is read."""
MOST_BYTES, MOST_COLUMNS, MOST_ROWS = 2**20, 50, 2000
"""Largest table that is read, and the part of it that numbers are drawn from."""


@dataclass(frozen=True)
class Asked:
    """A question of the sheet.

    Attributes:
        words: the question.
        where: file, and lines or row.
        quote: code or row that it is about.
    """

    words: str
    where: str
    quote: str = ""


@dataclass(frozen=True)
class Written:
    """A function that a student wrote or completed.

    Attributes:
        file: file name of the exercise.
        lines: all lines of the file.
        node: the function.
        begun: what the student began with, node by node.
    """

    file: str
    lines: tuple[str, ...]
    node: ast.FunctionDef
    begun: frozenset[str]

    def quote(self, node: ast.AST) -> str:
        """Returns the text of the function without its docstring, or of a node in it, by lines."""
        numbers = set(range(node.lineno, node.end_lineno + 1))
        if node is self.node and ast.get_docstring(self.node):
            first = self.node.body[0]
            numbers -= set(range(first.lineno, first.end_lineno + 1))
        return "\n".join(f"{number:4}  {self.lines[number - 1]}" for number in sorted(numbers))

    def is_new(self, node: ast.AST) -> bool:
        """Returns True for a node that the student did not begin with."""
        return ast.dump(node) not in self.begun

    def where(self, node: ast.AST) -> str:
        """Returns the file and the line of a statement."""
        return f"{self.file}, line {node.lineno}"

    def statements(self, kinds: tuple[type, ...]) -> list[ast.stmt]:
        """Returns its new statements of some kinds, without those that stand alone in a block."""
        blocks = (
            block
            for node in ast.walk(self.node)
            for name in ("body", "orelse")
            if isinstance(block := getattr(node, name, None), list) and len(block) > 1
        )
        return [
            statement
            for block in blocks
            for statement in block
            if isinstance(statement, kinds) and self.is_new(statement)
        ]


def draw(submission: Submission, root: Path, seed: int) -> list[Asked]:
    """Draws questions of each kind in turn, as many as ``QUESTIONS`` where there are so many.

    Args:
        submission: what was handed in.
        root: the project.
        seed: seed of the draw, into which the name of the hand-in goes as well.

    Raises:
        UserError: nothing in it is the student's.
    """
    drawn = random.Random(f"{seed} {submission.of.stem}")
    functions = list(written_functions(submission, root))
    kinds = [
        [on_function(function) for function in functions],
        [question for function in functions for question in on_lines(function)],
        list(on_tables(submission, drawn)),
        [question for function in functions for question in on_conditions(function)],
        list(on_answers(submission, root)),
    ]
    for questions in kinds:
        drawn.shuffle(questions)
    turns = [question for turn in itertools.zip_longest(*kinds) for question in turn if question]
    if not turns:
        raise UserError(f"{submission.of.stem}: neither code nor numbers to ask about")
    return turns[:QUESTIONS]


def written_functions(submission: Submission, root: Path) -> Iterator[Written]:
    """Yields the functions that differ from those that a student begins with."""
    for task in submission.of.tasks(read_tasks(root)).values():
        text = submission.exercises().get(task.file, "")
        begun = student_source((root / task.path).read_text(), task.file, ())
        lines, bodies = tuple(text.split("\n")), frozenset(nodes_of(begun))
        for body, node in nodes_of(text).items():
            if isinstance(node, ast.FunctionDef) and body not in bodies:
                function = Written(task.file, lines, node, bodies)
                if len(function.statements((ast.stmt,))) >= LEAST:
                    yield function


def nodes_of(text: str) -> dict[str, ast.AST]:
    """Returns a module's statements and expressions; none of one that is too long or no Python."""
    if len(text) > MOST_LETTERS:
        return {}
    try:
        nodes = ast.walk(ast.parse(text))
        return {ast.dump(n): n for n in nodes if isinstance(n, ast.stmt | ast.expr)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


def on_function(function: Written) -> Asked:
    """Asks what a function is for, on an input that the student chooses."""
    words = (
        f"Explain {function.node.name}: choose a small input, and say what each line makes of it."
    )
    return Asked(words, function.where(function.node), function.quote(function.node))


def on_lines(function: Written) -> Iterator[Asked]:
    """Asks what would happen without a statement."""
    for statement in function.statements(STATEMENTS):
        words = (
            f"What would happen if this were left out of {function.node.name}? Which result is "
            "wrong first, and would a test that you know notice?"
        )
        yield Asked(words, function.where(statement), function.quote(statement))


def on_conditions(function: Written) -> Iterator[Asked]:
    """Asks for inputs of either side of a condition."""
    text = "\n".join(function.lines)
    for node in ast.walk(function.node):
        if isinstance(node, ast.If | ast.While | ast.IfExp) and function.is_new(node.test):
            condition = " ".join(ast.get_source_segment(text, node.test).split())
            words = (
                f"In {function.node.name}: give a case in which the condition {condition} is true, "
                "and one in which it is not. What goes wrong if it is turned round?"
            )
            yield Asked(words, function.where(node.test), function.quote(node.test))


def on_tables(submission: Submission, drawn: random.Random) -> Iterator[Asked]:
    """Asks about a number of each table of the student's run."""
    for name, content in sorted(submission.files.items()):
        if name.startswith(f"{RUN}/") and name.endswith(".csv") and len(content) <= MOST_BYTES:
            rows = itertools.islice(read_rows(content), MOST_ROWS)
            cells = [(line, c) for line, row in rows for c in row if is_number(row[c])]
            if cells:
                line, column = drawn.choice(cells)
                row = dict(next(row for number, row in read_rows(content) if number == line))
                words = (
                    f"{column} is {row[column]} in this row. What was measured, from when to when, "
                    "and in which unit? What would make it half as large?"
                )
                quote = ", ".join(f"{key} = {value}" for key, value in row.items())
                yield Asked(words, f"{name}, line {line}", quote)


def read_rows(content: bytes) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yields the number of each row's line, and its first cells by their columns."""
    reader = csv.reader(io.StringIO(content.decode(errors="replace")))
    try:
        header = next(reader, [])[:MOST_COLUMNS]
        for row in reader:
            yield reader.line_num, dict(zip(header, row, strict=False))
    except csv.Error:  # no rows from here on
        return


def is_number(text: str) -> bool:
    """Returns True for a number that was measured: finite, and no count or index."""
    try:
        return "." in text and math.isfinite(float(text))
    except ValueError:
        return False


def on_answers(submission: Submission, root: Path) -> Iterator[Asked]:
    """Asks how the student's answers that are numbers came about."""
    if not submission.of.has_answers:
        return
    questions = read_questions(root, submission.of.assignment)
    try:
        answers = read_answers(submission.files.get(ANSWERS, b"{}"), questions)
    except UserError:  # its grade says so
        return
    for name, question in questions.items():
        if question.kind == NUMBER and answers[name] is not None:
            words = (
                f"You answered {answers[name]:.6g} {question.unit}. Show the rows that it comes "
                "from and compute it again. How sure are you of its last digit?"
            )
            yield Asked(words, f"{name}: {question.about}")


def sheet(submission: Submission, questions: Sequence[Asked]) -> str:
    """Returns the page of HTML that whoever asks prints: questions, and room for notes."""
    parts = [
        f"<h3>{number}. {html.escape(question.words)}</h3><p class='staff'>"
        f"{html.escape(question.where)}</p><pre>{html.escape(question.quote)}</pre><p>Notes:</p>"
        for number, question in enumerate(questions, start=1)
    ]
    style = f"{STYLE}pre {{ overflow-x: auto; border-left: 3px solid #8888; padding: 0 1rem }}"
    return html_page(f"{submission.of.stem}: oral check", "".join(parts), style)
