"""Solutions between markers, and the file that a student gets in their place.

::

    # BEGIN SOLUTION A2.2
    return max(ready_s)
    # END SOLUTION

In a student's file ``raise NotYetWritten("A2.2")`` stands there, if the block lies in a function;
one outside of functions goes without a trace. Lines behind an optional ``# ELSE``, each a comment,
stand there instead, without their ``# ``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from common.errors import UserError

BEGIN = re.compile(r"( *)# BEGIN SOLUTION ([A-Z]\d\.\d)")
ELSE = re.compile(r" *# ELSE")
END = re.compile(r" *# END SOLUTION")
ANY = re.compile(r"\s*#\s*(BEGIN|END)\s+SOLUTION.*", re.IGNORECASE)
EXCEPTION = "NotYetWritten"


@dataclass(frozen=True)
class Block:
    """A solution in a file, by the numbers of its lines from 0.

    Attributes:
        task: such as A2.2.
        begin, end: lines of the two markers.
        otherwise: line of ``# ELSE``; ``end`` where there is none.
        indent: indent of the markers, in spaces.
        in_function: whether something has to stand in its place.
    """

    task: str
    begin: int
    otherwise: int
    end: int
    indent: int
    in_function: bool


def blocks_of(source: str, name: str) -> list[Block]:
    """Finds the solutions in the source of a module.

    Args:
        source: the text.
        name: name of the module in an error.

    Raises:
        UserError: markers that nest, do not close, or are not spelled as above.
    """
    lines = source.split("\n")
    spans = list(_functions(source, name))
    blocks: list[Block] = []
    opened: tuple[str, int, int] | None = None
    otherwise = None
    for number, line in enumerate(lines):
        if begin := BEGIN.fullmatch(line):
            if opened:
                raise UserError(f"{name}:{number + 1}: a solution begins inside of {opened[0]}")
            opened, otherwise = (begin[2], number, len(begin[1])), None
        elif END.fullmatch(line):
            if not opened:
                raise UserError(f"{name}:{number + 1}: a solution ends that has not begun")
            task, start, indent = opened
            in_function = any(first <= start <= last for first, last in spans)
            last = number if otherwise is None else otherwise
            blocks.append(Block(task, start, last, number, indent, in_function))
            opened = None
        elif ELSE.fullmatch(line) and opened:
            otherwise = number
        elif ANY.fullmatch(line):
            raise UserError(f"{name}:{number + 1}: no marker of a solution: {line.strip()}")
    if opened:
        raise UserError(f"{name}:{opened[1] + 1}: the solution of {opened[0]} does not end")
    return blocks


def student_source(source: str, name: str, solved: Collection[str]) -> str:
    """Returns a module as a student gets it: with the solutions of ``solved`` tasks only.

    Raises:
        UserError: markers as for ``blocks_of``; an alternative that is not made of comments.
    """
    blocks = blocks_of(source, name)
    if not blocks:
        return source
    lines = source.split("\n")
    kept: list[str] = []
    position = 0
    raises = False
    for block in blocks:
        kept += lines[position : block.begin]
        position = block.end + 1
        if block.task in solved:
            kept += lines[block.begin + 1 : block.otherwise]
        elif block.otherwise < block.end:
            kept += [
                _uncommented(line, name, block) for line in lines[block.otherwise + 1 : block.end]
            ]
        elif block.in_function:
            kept.append(f'{" " * block.indent}raise {EXCEPTION}("{block.task}")')
            raises = True
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept + lines[position:])).rstrip("\n") + "\n"
    return _with_import(text) if raises else text


def solution_pieces(source: str, name: str) -> list[tuple[str, str]]:
    """Returns the task and the text of each solution in a module, in order; no alternatives."""
    lines = source.split("\n")
    return [
        (block.task, "\n".join(lines[block.begin + 1 : block.otherwise]))
        for block in blocks_of(source, name)
    ]


def _functions(source: str, name: str) -> Iterator[tuple[int, int]]:
    """Yields the first and last line of each function, from 0."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"{name}:{error.lineno}: {error.msg}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno - 1, node.end_lineno - 1


def _uncommented(line: str, name: str, block: Block) -> str:
    match = re.fullmatch(r"( *)#(?: (.*))?", line)
    if not match:
        raise UserError(
            f"{name}: the alternative to {block.task} has a line that is no comment: {line.strip()}"
        )
    return f"{match[1]}{match[2] or ''}".rstrip()


def _with_import(source: str) -> str:
    """Adds the import of the exception that unwritten solutions raise."""
    line = re.compile(r"^from common\.errors import ([^(\n]+)$", re.MULTILINE)
    if match := line.search(source):
        names = sorted({*match[1].split(", "), EXCEPTION})
        return source.replace(match[0], f"from common.errors import {', '.join(names)}", 1)
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [node for node in imports if getattr(node, "module", None) and "common" in node.module]
    lines = source.split("\n")
    added = f"from common.errors import {EXCEPTION}"
    if ours:
        lines.insert(ours[0].lineno - 1, added)
    elif imports:
        at = imports[-1].end_lineno
        lines[at:at] = ["", added]
    else:
        lines[:0] = [added, "", ""]
    return "\n".join(lines)
