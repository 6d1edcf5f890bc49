"""Writes every answer of the project as text, and compares two such trees."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
SHOWN_LINES = 8
"""Differing lines that are shown of a file."""
PARTS = ("notebooks", "predict", "help", "headers")
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
ALIKE = 2e-5
"""Relative difference that is none: numbers are written with six digits."""
NOTHING = 1e-14
"""Difference that is what rounding leaves of 0."""


def main() -> None:
    """Runs one of the two commands; the exit status of ``compare`` is 1 where trees differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write the tree of answers")
    write.add_argument("folder", type=Path)
    write.add_argument("--only", nargs="+", default=[], help="parts to write, such as help predict")
    compare = commands.add_parser("compare", help="say what differs between two trees")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write_tree(arguments.folder, arguments.only)
        return
    for folder in (arguments.before, arguments.after):
        if not any((folder / name).is_dir() for name in PARTS):
            parser.error(f"{folder}: no tree of answers (parts {', '.join(PARTS)}); see write")
    differences = compare_trees(arguments.before, arguments.after)
    print("\n".join(differences) if differences else "Every answer is the same.")
    sys.exit(1 if differences else 0)


def write_tree(folder: Path, only: list[str]) -> None:
    """Writes the parts that were asked for; a part that is there is replaced as a whole."""
    for name, answers_of in parts().items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        answers = answers_of()
        shutil.rmtree(folder / name, ignore_errors=True)
        for path, text in answers.items():
            target = folder / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.rstrip("\n") + "\n")
        print(f"{name}: {len(answers)} files, {time.perf_counter() - began:.0f} s", flush=True)


def parts() -> dict[str, Callable[[], Mapping[str, str]]]:
    """Returns, by part of the tree, the function that answers with file name → text."""
    # Imported here: comparing two trees needs nothing of the project.
    from command_answers import csv_headers, help_answers, predict_answers
    from notebook_answers import notebook_answers

    answers = notebook_answers, predict_answers, help_answers, csv_headers
    return dict(zip(PARTS, answers, strict=True))


def compare_trees(before: Path, after: Path) -> list[str]:
    """Returns what differs, some lines per file; parts that one side lacks are left out."""
    shared = {path.name for path in before.iterdir()} & {path.name for path in after.iterdir()}
    sides = [
        {path.relative_to(root) for part in shared for path in (root / part).rglob("*.txt")}
        for root in (before, after)
    ]
    lines = [f"only in {before}: {path}" for path in sorted(sides[0] - sides[1])]
    lines += [f"only in {after}: {path}" for path in sorted(sides[1] - sides[0])]
    for path in sorted(sides[0] & sides[1]):
        texts = [(root / path).read_text().splitlines() for root in (before, after)]
        if len(texts[0]) == len(texts[1]):
            # Lines that agree but for the last digits are one line: processors round differently.
            pairs = zip(*texts, strict=True)
            texts[1] = [one if same_line(one, other) else other for one, other in pairs]
        if texts[0] == texts[1]:
            continue
        changes = [
            line
            for line in difflib.unified_diff(*texts, lineterm="", n=0)
            if not line.startswith(("---", "+++"))
        ]
        lines += [f"{path}:", *(f"    {line[:200]}" for line in changes[:SHOWN_LINES])]
        if len(changes) > SHOWN_LINES:
            lines.append(f"    and {len(changes) - SHOWN_LINES} more lines")
    return lines


def same_line(one: str, other: str) -> bool:
    """Returns whether two lines have the same words, and numbers that agree to ``ALIKE``."""
    if one == other:
        return True
    parts = NUMBER.split(one), NUMBER.split(other)
    return len(parts[0]) == len(parts[1]) and all(
        math.isclose(float(a), float(b), rel_tol=ALIKE, abs_tol=NOTHING) if index % 2 else a == b
        for index, (a, b) in enumerate(zip(*parts, strict=True))
    )


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    main()
