"""Calls the command ddplab inside the tests' own process, where nothing has to be imported again.

What only a process of its own can show (its start, its warnings, how long it takes) is tested with
a process of its own instead.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from common.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
ONE_STAGE = """
import dataclasses, sys
from common.cli.main import main
from common.report import pipeline

whole = pipeline.load_preset

def first_stage(assignment, name):
    preset = whole(assignment, name)
    return dataclasses.replace(preset, stages=preset.stages[:1], notebooks=preset.notebooks[:1])

pipeline.load_preset = first_stage
sys.argv[0] = "ddplab"
main()
"""
"""``ddplab`` on presets of which only the first stage and notebook are left."""


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    status: int
    stdout: str
    stderr: str


def ddplab(*arguments: object) -> Ended:
    """Runs ``ddplab`` with these arguments, in the current folder."""
    with (
        mock.patch.object(sys, "argv", ["ddplab", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            main()
            status = 0
        except SystemExit as left:
            status = int(left.code or 0)
    return Ended(status, stdout.getvalue(), stderr.getvalue())


def answered(*arguments: object) -> str:
    """Returns what the command prints; fails where it refuses."""
    ended = ddplab(*arguments)
    assert ended.status == 0, ended.stderr
    return ended.stdout


def error_line(ended: Ended, progress: bool = False) -> str:
    """Returns the one line of a refusal, which has exit status 2.

    Nothing was printed before it, unless ``progress`` says that the command tells what it does.
    """
    assert ended.status == 2, ended.stderr
    assert progress or ended.stdout == ""
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def refused(*arguments: object, progress: bool = False) -> str:
    """Returns the one line with which the command refuses these arguments."""
    return error_line(ddplab(*arguments), progress)
