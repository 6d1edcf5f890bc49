"""Checks an exercise's imports and its use of forbidden names, by its syntax alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from common.course.grading.confinement import WITHHELD

STANDARD = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "logging",
        "math",
        "numbers",
        "operator",
        "os",
        "pathlib",
        "random",
        "re",
        "shutil",
        "statistics",
        "string",
        "struct",
        "tempfile",
        "textwrap",
        "time",
        "types",
        "typing",
        "warnings",
        "weakref",
        "zlib",
    }
)
"""Parts of the standard library that do not lead out of Python."""
FORBIDDEN = frozenset(name for names in WITHHELD.values() for name in names) | {
    "__import__",
    "__subclasses__",
    "__globals__",
    "__builtins__",
    "__loader__",
    "eval",
    "exec",
    "compile",
}


def violations(source: str, reference: str, others: Iterable[str]) -> list[str]:
    """Returns a line for each import or name that an exercise may not use.

    Args:
        source: the student's.
        reference: the solution, whose packages are allowed, too.
        others: exercises that it may import, without ``.py``.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return [f"line {line}: {getattr(error, 'msg', None) or 'it cannot be parsed'}"]
    own = {"common.errors", *(f"common.exercises.{name}" for name in others)}
    packages = {name.partition(".")[0] for _, name in imported(ast.parse(reference))} - {"common"}
    found = []
    for line, name in imported(tree):
        first = name.partition(".")[0]
        if not (name in own if first == "common" else first in STANDARD | packages):
            found.append(f"line {line}: it imports {name}, which is not among what it may")
    for node in ast.walk(tree):
        name = used_name(node)
        if name in FORBIDDEN:
            found.append(f"line {node.lineno}: {name} is not for exercises")
    return found


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def used_name(node: ast.AST) -> str:
    """Returns the name that a node uses, also as an attribute or as what it imports."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    return ""
