"""Counts what the redesign is about, so that before and after come from the same commands.

    uv run python tests/guard/counts.py [CHECKOUT …]

A column per checkout, by default this one. The counts are symptoms: a file merged, a word put in
front of a docstring or a line joined for the sake of a count is a defect.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
QUESTIONS = ("What", "Whether", "How", "Which", "Where", "When", "Who", "Why")
SQUEEZED = re.compile(r"^\s*(\*\(|\*\*\{).*\),?$|^\s*(\*\(|\*\*\{).*\},?$")
"""A line that unpacks a tuple or a dict written on that line: arguments or entries on one line."""
RECURRENCES = (
    "advance",
    "advance_several",
    "many_cases",
    "one_after_another",
    "overlap",
    "simulate_step",
)
STEP_PREDICTORS = re.compile(
    r"def (predict_step|step_times?_s|predict|cluster_steps?|scaled_step)\("
)
BENCHMARK = "overlap_benchmark"
"""The benchmark whose mentions stand for the edits that a new one takes."""


def sources(root: Path, below: str = "common") -> Iterator[tuple[Path, str]]:
    """Yields each Python file below a folder of a checkout, with its text."""
    for path in sorted((root / below).rglob("*.py")):
        yield path, path.read_text()


def functions(root: Path, below: str = "common") -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Yields each function and method below a folder."""
    for path, text in sources(root, below):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def matching_lines(root: Path, pattern: str, below: str = "common") -> int:
    """Returns the lines that a pattern is found in."""
    found = re.compile(pattern)
    return sum(
        bool(found.search(line)) for _, text in sources(root, below) for line in text.splitlines()
    )


def recurrences(root: Path) -> int:
    """Returns the functions that push buckets through a link one after another."""
    rooms = ("common/perfmodel", "common/exercises")
    return sum(node.name in RECURRENCES for room in rooms for _, node in functions(root, room))


def step_predictors(root: Path) -> int:
    """Returns the functions that predict a whole step."""
    return sum(len(STEP_PREDICTORS.findall(text)) for _, text in sources(root, "common/perfmodel"))


def ddp_sites(root: Path) -> int:
    """Returns the places that wrap a model in DistributedDataParallel."""
    return matching_lines(root, r"(= |return )DistributedDataParallel\(")


def step_classes(root: Path) -> int:
    """Returns the classes that run a training step: named so, and with methods."""
    return sum(
        node.name.endswith("Step")
        and any(isinstance(inner, ast.FunctionDef) for inner in node.body)
        for below in ("training", "benchmarks", "tuning", "studies", "scheduling")
        for _, text in sources(root, f"common/{below}")
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    )


def trainers(root: Path) -> int:
    """Returns the functions that run a training from beginning to end."""
    names = re.compile(r"train(_\w+)?")
    return sum(bool(names.fullmatch(node.name)) for _, node in functions(root, "common/training"))


def analysis_entries(root: Path) -> int:
    """Returns the files and folders at the top of common/analysis."""
    found = (path for path in (root / "common" / "analysis").iterdir())
    return sum(path.name not in ("__init__.py", "__pycache__") for path in found)


def modules(root: Path) -> int:
    """Returns the modules in common/."""
    return sum(path.name != "__init__.py" for path, _ in sources(root))


def prose_functions(root: Path) -> int:
    """Returns the functions of analysis and tuning that return a sentence made of numbers.

    A sentence is text of at least four words in a row that is part of an f-string or of a string
    put together, in a function that returns ``str``.
    """
    return sum(
        _returns_text(node) and _has_sentence(node)
        for below in ("common/analysis", "common/tuning")
        for _, node in functions(root, below)
    )


def _returns_text(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).startswith(("str", "list[str]"))


def _has_sentence(node: ast.FunctionDef) -> bool:
    joined = (inner for inner in ast.walk(node) if isinstance(inner, ast.JoinedStr))
    for string in joined:
        texts = (part.value for part in string.values if isinstance(part, ast.Constant))
        if any(len(re.findall(r"[a-zäöü]{2,}", str(text))) >= 4 for text in texts):
            return True
    return False


def run_openers(root: Path) -> int:
    """Returns the modules of analysis that read environment.json or config.yaml themselves."""
    pattern = re.compile(r"read_environment\(|config\.yaml")
    return sum(bool(pattern.search(text)) for _, text in sources(root, "common/analysis"))


def captions(root: Path) -> int:
    """Returns the modules of analysis that put a caption together from hardware and date."""
    pattern = re.compile(r"\['hardware'\]\}; \{environment\['start_time'\]")
    return sum(bool(pattern.search(text)) for _, text in sources(root, "common/analysis"))


def refusals(root: Path) -> int:
    """Returns the functions of analysis that refuse a comparison."""
    names = re.compile(r"check_comparable|why_not_comparable|_refuse|require_same|_check_same")
    return len(
        {node.name for _, node in functions(root, "common/analysis") if names.fullmatch(node.name)}
    )


def question_docstrings(root: Path) -> str:
    """Returns the share of functions' docstrings that begin with a question word, in per cent."""
    documented = [ast.get_docstring(node) for _, node in functions(root)]
    documented = [text for text in documented if text]
    asking = sum(text.split()[0].strip(",;") in QUESTIONS for text in documented)
    return f"{asking / len(documented):.0%}"


def squeezed_lines(root: Path) -> int:
    """Returns the lines that unpack a tuple or dict written there, which only saves lines."""
    return sum(
        bool(SQUEEZED.match(line)) for _, text in sources(root) for line in text.splitlines()
    )


def benchmark_mentions(root: Path) -> int:
    """Returns the files that name one benchmark, beside its own module, script and results."""
    kinds = {".py", ".md", ".yaml", ".sbatch", ".sh", ".ipynb", ".toml"}
    own = {"overlap_benchmark.py", "overlap.py", "test_overlap.py"}
    paths = (
        path
        for folder in ("common", "assignments", "sbatch", "notebooks", "tests", ".ci")
        for path in (root / folder).rglob("*")
        if path.suffix in kinds and path.name not in own and "guard" not in path.parts
    )
    return sum(BENCHMARK in path.read_text() for path in paths)


def readme_kb(root: Path) -> str:
    """Returns the size of README.md in kB."""
    return f"{(root / 'README.md').stat().st_size / 1e3:.1f}"


def repeated_names(root: Path) -> int:
    """Returns the public functions and classes whose name means several things in common/."""
    homes: dict[str, set[Path]] = {}
    for path, text in sources(root):
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(path)
    return sum(len(paths) > 1 for name, paths in homes.items() if name != "main")


COUNTS: dict[str, Callable[[Path], object]] = {
    "bucket recurrences": recurrences,
    "predictors of a whole step": step_predictors,
    "DistributedDataParallel( sites": ddp_sites,
    "step classes": step_classes,
    "trainers": trainers,
    "entries at the top of analysis/": analysis_entries,
    "modules in common/": modules,
    "functions that return generated prose": prose_functions,
    "modules that open a run": run_openers,
    "modules that build a caption": captions,
    "functions that refuse a comparison": refusals,
    "docstrings that begin with a question word": question_docstrings,
    "lines that unpack only to save lines": squeezed_lines,
    "files that name one benchmark": benchmark_mentions,
    "public names with several meanings": repeated_names,
    "README.md (kB)": readme_kb,
}


def main() -> None:
    """Prints a row per count and a column per checkout."""
    roots = [Path(name).resolve() for name in sys.argv[1:]] or [PROJECT]
    print("| |" + "".join(f" {root.name} |" for root in roots))
    print("| :-- |" + " --: |" * len(roots))
    for name, count in COUNTS.items():
        print(f"| {name} |" + "".join(f" {count(root)} |" for root in roots))


if __name__ == "__main__":
    main()
