"""Counts what the house's shape is judged by, so that before and after come from the same commands.

    uv run python tests/guard/counts.py [CHECKOUT …]

A column per checkout, by default this one. The counts are symptoms: a file merged, a word put in
front of a docstring or a line joined for the sake of a count is a defect.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
HOUSES = {
    "diagnose": ("common/diagnose/", "common/watch/", "common/analysis/diagnosis/"),
    "course": ("common/course/",),
}
"""House → its folders, and those that it had before it was one; the rest of common is the lab."""
MOST_FILES, MANY_ARGUMENTS = 15, 8
POINTING = re.compile(r"(Of|Those|In which|From here|By how|As for|Likewise)\b")
"""How a docstring begins that points at what is beside it, and does not name it."""
PRONOUNS = {
    *("found", "own", "one", "place", "known", "each", "left", "said", "shown", "others", "done"),
    *("whole", "both", "given", "rest", "told", "asked", "seen", "here", "alike"),
}
PRESENTED = re.compile(r".*_(shown|facts|table|text)$")
SLOWEST_RANK = re.compile(r"groupby\([^()]*(iteration|step|keys|by)[^()]*\)(\[[^\]]*\])?\s*\.max\(")
RESAMPLED = re.compile(r"\.(choice|integers)\([^\n]*(size=|DRAWS|draws|\(\w+, \w+\))")
PREDICTORS = {"predict", "step", "predict_fsdp_step", "simulate_step", "ClusterSteps"}


class Checkout:
    """The git-tracked Python of a checkout, read once."""

    def __init__(self, root: Path) -> None:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "common", "tests"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        self.paths = [name for name in listed if (root / name).is_file()]
        self.text = {
            name: (root / name).read_text() for name in self.paths if name.endswith((".py", ".txt"))
        }

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Returns the syntax tree of each module of common."""
        return {name: ast.parse(self.text[name]) for name in self.modules()}

    def modules(self, house: str = "") -> list[str]:
        """Returns the modules of a house; of common as a whole without a name."""
        names = [name for name in self.text if name.startswith("common/") and name[-3:] == ".py"]
        return [name for name in names if house in ("", house_of(name))]

    def lines(self, names: list[str]) -> int:
        """Returns the lines of files."""
        return sum(self.text[name].count("\n") for name in names)

    @cached_property
    def by_kind(self) -> dict[type, list[ast.AST]]:
        """Returns the nodes of common by their kind."""
        nodes: dict[type, list[ast.AST]] = defaultdict(list)
        for tree in self.trees.values():
            for node in ast.walk(tree):
                nodes[type(node)].append(node)
        return nodes

    def nodes(self, kind: type) -> list[ast.AST]:
        """Returns the nodes of a kind in common."""
        return self.by_kind[kind]

    def matches(self, pattern: re.Pattern) -> int:
        """Returns how often a pattern is found in common."""
        return sum(len(pattern.findall(self.text[name])) for name in self.modules())

    def docstrings(self) -> Iterator[str]:
        """Yields each docstring of common, those of attributes included."""
        for node in self.nodes(ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.value

    def named(self) -> Counter:
        """Returns how often each name is assigned or is a parameter."""
        stored = (n.id for n in self.nodes(ast.Name) if isinstance(n.ctx, ast.Store))
        return Counter([*stored, *(node.arg for node in self.nodes(ast.arg))])

    def circles(self) -> int:
        """Returns the sets of modules that import each other, imports for types included."""
        modules = {name[:-3].replace("/", ".").removesuffix(".__init__") for name in self.trees}
        modules |= {
            name[name.index("ddplab_watch") :] for name in modules if "ddplab_watch" in name
        }
        arrows: dict[str, set[str]] = defaultdict(set)
        for name, tree in self.trees.items():
            source = name[:-3].replace("/", ".").removesuffix(".__init__")
            source = source[source.index("ddplab_watch") :] if "ddplab_watch" in source else source
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    taken = {f"{node.module}.{alias.name}" for alias in node.names} & modules
                    arrows[source] |= (taken or {node.module}) & modules - {source}
        while closed := {name for name in arrows if not arrows[name] & set(arrows)}:
            for name in closed:  # what imports nothing that is left is in no circle
                del arrows[name]
        return len(circles_among(arrows))


def circles_among(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Returns the strongly connected sets of two or more."""

    def reached(start: str) -> set[str]:
        seen, open_ = set(), [start]
        while open_:
            for name in arrows.get(open_.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    open_.append(name)
        return seen

    reach = {name: reached(name) for name in arrows}
    left, circles = set(arrows), []
    while left:
        name = left.pop()
        circle = {name} | {other for other in reach[name] if name in reach.get(other, ())}
        left -= circle
        if len(circle) > 1:
            circles.append(circle)
    return circles


def house_of(name: str) -> str:
    """Returns the house that a module of common stands in."""
    for house, folders in HOUSES.items():
        if name.startswith(folders):
            return house
    return "lab"


def arguments_of(node: ast.FunctionDef) -> int:
    """Returns the number of a function's arguments without ``self``."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def counts(root: Path) -> dict[str, object]:
    """Returns each count of a checkout by its name."""
    house = Checkout(root)
    functions = [node for node in house.nodes(ast.FunctionDef) if isinstance(node, ast.FunctionDef)]
    files = Counter(str(Path(name).parent) for name in house.modules())
    tests = [name for name in house.text if name.startswith("tests/")]
    names = house.named()
    called = [node.func for node in house.nodes(ast.Call)]
    models = [f for f in called if isinstance(f, ast.Name) and f.id == "DdpModel"]
    rows: dict[str, object] = {
        f"{name}: lines, modules": f"{house.lines(m)}, {len(m)}"
        for name in ("lab", "diagnose", "course", "")
        for m in [house.modules(name)]
    }
    rows["common: lines, modules"] = rows.pop(": lines, modules")
    return rows | {
        "tests: lines": house.lines([name for name in tests if name.endswith(".py")]),
        "golden text: lines": house.lines([name for name in tests if name.endswith(".txt")]),
        f"packages over {MOST_FILES} files": sum(n > MOST_FILES for n in files.values()),
        "circles of modules": house.circles(),
        "group-bys of the slowest rank": house.matches(SLOWEST_RANK),
        "resamplings by hand": house.matches(RESAMPLED),
        "DdpModel( sites": len(models),
        f"functions of {MANY_ARGUMENTS} arguments or more": sum(
            arguments_of(node) >= MANY_ARGUMENTS for node in functions
        ),
        "functions …_shown, _facts, _table, _text": sum(
            bool(PRESENTED.match(node.name)) for node in functions
        ),
        "docstrings that point": sum(bool(POINTING.match(t.strip())) for t in house.docstrings()),
        "pronouns as names": sum(names[name] for name in PRONOUNS),
    }


def main() -> None:
    """Prints a Markdown table of the counts of each checkout named."""
    columns = [counts(Path(name)) for name in sys.argv[1:] or [PROJECT]]
    print("| |" + " |" * len(columns) + "\n| :-- |" + " --: |" * len(columns))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(str(column[name]) for column in columns) + " |")


if __name__ == "__main__":
    main()
