"""What the commands answer: predictions from recorded runs, flags, headers of tables."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

PROJECT = Path(__file__).resolve().parents[2]
CLUSTERED = ("gpt2", "gpt2-large")
OTHER = ("llama-3.1-8b", "a100-roce")
GPUS = "8..4096"


def predict_answers() -> dict[str, str]:
    """Returns what ``ddplab predict`` prints for recorded runs, published tables and clusters."""
    from common.perfmodel.cluster.clusters import COURSE_CLUSTERS

    answers = {}
    for path in sorted(PROJECT.glob("data/*-2-cores/assignment2/**/gradient-ready-times.csv")):
        folder = path.parents[1].relative_to(PROJECT)
        name = "-".join(folder.parts[1:])
        answers[f"{name}.txt"] = printed("predict", "--run-dir", str(folder))
    for model, cluster in (*itertools.product(CLUSTERED, COURSE_CLUSTERS), OTHER):
        flags = ("--model", model, "--cluster", cluster, "--gpus", GPUS)
        answers[f"cluster-{cluster}-{model}.txt"] = printed("predict", *flags)
    return answers


def help_answers() -> dict[str, str]:
    """Returns what ``--help`` prints of every subcommand and of every script."""
    from common.cli.main import PAGES, PROGRAM, SUBCOMMANDS

    asked = [(), *((name,) for name in SUBCOMMANDS.classes)]
    for command, page in PAGES.items():
        if command != PROGRAM:
            # All studies have one set of flags.
            names = list(page.classes) if page.noun == "subcommand" else list(page.classes)[:1]
            asked += [(*command.split()[1:], name) for name in names]
    answers = {"-".join([PROGRAM, *words]) + ".txt": printed(*words, "--help") for words in asked}
    for path in sorted(PROJECT.glob("assignments/*/*.py")):
        name = f"{path.parent.name}-{path.stem}.txt"
        answers[name] = _printed([str(path), "--help"], lambda path=path: _as_script(path))
    return answers


def _as_script(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


def csv_headers() -> dict[str, str]:
    """Returns a line for each distinct header of a recorded table: file name, then columns."""
    lines = set()
    for path in PROJECT.glob("data/**/*.csv"):
        with path.open() as file:
            lines.add(f"{path.name}: {file.readline().strip()}")
    return {"recorded.txt": "\n".join(sorted(lines))}


def printed(*arguments: str) -> str:
    """Returns what ``ddplab`` prints with these arguments, on a terminal of 120 columns."""
    from common.cli.main import main

    return _printed(["ddplab", *arguments], main)


def _printed(argv: Sequence[str], action: object) -> str:
    """Returns the standard output of ``action`` under a command line, errors at its end."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    plain = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        mock.patch.object(sys, "argv", list(argv)),
        mock.patch.dict(os.environ, plain),
        contextlib.chdir(PROJECT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            action()
        except SystemExit as ended:
            status = ended.code
    text = out.getvalue() + err.getvalue()
    lines = [line.rstrip() for line in text.replace(f"{PROJECT}{os.sep}", "").splitlines()]
    return "\n".join([*lines, f"exit status {status or 0}"])
