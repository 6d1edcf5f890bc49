"""Checks an exercise's imports and its use of forbidden names, by its syntax alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.course.sandbox.confinement import KERNELS, WITHHELD

EXERCISES = "common.exercises"
LETTERS = 2**17
"""Most letters of an exercise that is parsed: some texts take Python a time that grows with the
square of their length, such as a string of many fields."""
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
OF_TORCH = frozenset(name for names in WITHHELD.values() for name in names)
BUILTINS = frozenset({"eval", "exec", "compile"})
"""Refused by their bare names, and as attributes but for two uses that every student knows."""
NOWHERE = frozenset({"__import__", "__subclasses__", "__globals__", "__builtins__", "__loader__"})


def violations(source: str, reference: str, exercises: Iterable[str]) -> list[str]:
    """Returns a line for each import or name that an exercise may not use.

    Args:
        source: text of the student's exercise.
        reference: text of the solution, whose packages are allowed, too.
        exercises: names of the exercises that it may import, without ``.py``.
    """
    if len(source) > LETTERS:
        return [f"it has more than {LETTERS // 2**10} KB"]
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return [f"line {line}: {getattr(error, 'msg', None) or 'it cannot be parsed'}"]
    allowed = {"common.errors", *(f"{EXERCISES}.{name}" for name in exercises)}
    packages = {name.partition(".")[0] for _, name in imported(ast.parse(reference))} - {"common"}
    complaints = []
    for line, name in imported(tree):
        first = name.partition(".")[0]
        if not (name in allowed if first == "common" else first in STANDARD | packages):
            complaints.append(f"line {line}: it imports {name}, which is not among what it may")
    harmless = harmless_uses(tree)
    for node in ast.walk(tree):
        name = used_name(node)
        if name in NOWHERE or (is_refused(name) and id(node) not in harmless):
            complaints.append(f"line {node.lineno}: {name} is not for exercises")
    return complaints


def is_refused(name: str) -> bool:
    """Returns True for a builtin that executes text, and for what PyTorch has of the exercises."""
    return name in BUILTINS | OF_TORCH or any(part in name for part in KERNELS)


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


def harmless_uses(tree: ast.AST) -> set[int]:
    """Returns the ids of nodes whose name is refused, and means something else where they stand.

    ``model.eval()`` executes no text, ``re.compile`` makes a pattern, and a name that the student
    defines is his own: bare, where no ``import *`` may bring PyTorch's, or of ``self``.
    """
    nodes = list(ast.walk(tree))
    bound = Bound.of(nodes)
    harmless = set()
    for node in nodes:
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            if isinstance(node.func, ast.Attribute) and node.func.attr == "eval":
                harmless.add(id(node.func))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if is_pattern(node, bound) or is_own(node, bound):
                harmless.add(id(node))
        elif (
            isinstance(node, ast.Name) and node.id in bound.defined - BUILTINS and not bound.by_star
        ):
            harmless.add(id(node))
        elif isinstance(node, ast.ImportFrom) and is_exercise(node):
            harmless.update(id(alias) for alias in node.names)
    return harmless


def is_pattern(node: ast.Attribute, bound: Bound) -> bool:
    """Returns True for ``re.compile`` where ``re`` is that module."""
    return (node.value.id, node.attr) == ("re", "compile") and bound.has_only_re and is_read(node)


def is_own(node: ast.Attribute, bound: Bound) -> bool:
    """Returns True for an attribute of ``self`` that the student defines."""
    is_self = node.value.id in ("self", "cls") and node.value.id not in bound.by_itself
    return is_self and node.attr in bound.defined - BUILTINS


def is_exercise(node: ast.ImportFrom) -> bool:
    """Returns True for an import of what a student has written himself."""
    return (node.module or "").startswith(f"{EXERCISES}.")


def is_read(node: ast.Attribute) -> bool:
    """Returns True if an attribute is neither set nor deleted."""
    return isinstance(node.ctx, ast.Load)


@dataclass(frozen=True)
class Bound:
    """The names that a module binds, in whatever scope.

    Attributes:
        defined: functions, classes, variables, arguments and attributes of the student's.
        by_itself: names that are bound otherwise than as an argument.
        by_star: whether ``from … import *`` may bind any name.
        has_only_re: whether ``re`` is the module of that name, wherever it is used.
    """

    defined: frozenset[str]
    by_itself: frozenset[str]
    by_star: bool
    has_only_re: bool

    @classmethod
    def of(cls, nodes: Iterable[ast.AST]) -> Bound:
        """Collects them from all nodes of a module."""
        defined, arguments, modules, taken, from_exercises = set(), set(), set(), set(), set()
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and not is_read(node):
                defined.add(node.attr)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                defined.add(node.name)
            elif isinstance(node, ast.MatchMapping):
                defined.add(node.rest)
            elif isinstance(node, ast.arg):
                arguments.add(node.arg)
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names if not alias.asname}
                taken |= {alias.asname for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                names = {alias.asname or alias.name for alias in node.names}
                taken |= names
                from_exercises |= names if is_exercise(node) else set()
        firsts = {name.partition(".")[0] for name in modules}
        return cls(
            defined=frozenset(from_exercises | defined | arguments),
            by_itself=frozenset(defined | firsts | taken),
            by_star="*" in taken,
            has_only_re="re" in modules and not {"re", "*"} & (defined | arguments | taken),
        )
