"""``ddplab``: parse the subcommand and run it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from dataclasses import replace
from typing import Annotated, Union

import tyro

from common.cli.course import Course
from common.cli.data import Data
from common.cli.diagnose import Diagnose, split_script
from common.cli.doctor import Doctor
from common.cli.emulate import Emulate
from common.cli.explore import Explore
from common.cli.handin import Handin
from common.cli.help import asked_page, print_page
from common.cli.predict import Predict
from common.cli.run import Run
from common.cli.study import Study
from common.cli.tune import Tune
from common.errors import UserError
from common.runtime.script import exit_status, one_line

SUBCOMMANDS = {
    "run": Run,
    "explore": Explore,
    "predict": Predict,
    "tune": Tune,
    "diagnose": Diagnose,
    "doctor": Doctor,
    "emulate": Emulate,
    "course": Course,
    "handin": Handin,
    "study": Study,
    "data": Data,
}
"""Subcommand → its class. Its line in ``ddplab --help`` stands in ``help.py``."""
Command = Union[  # noqa: UP007 – of as many as there are
    tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in SUBCOMMANDS.items())
]


def main() -> None:
    """Runs the subcommand that the console script was called with."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with exit_status():
        words = sys.argv[1:]
        try:
            if asked := asked_page(words, SUBCOMMANDS):
                print_page(*asked)
            else:
                _parse(words).run()
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads any more, as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
            sys.exit(1)  # as rich does


def _parse(arguments: list[str]) -> Command:
    """Parses the subcommand; the programs that it runs have flags of their own.

    That of ``ddplab emulate`` follows ``--``; that of ``ddplab diagnose`` is its first argument.
    """
    if arguments[:1] == ["diagnose"]:
        own, program = split_script(arguments[1:])
        if program:
            return replace(_parse_words(["diagnose", *own]), program=tuple(program))
    if "--" in arguments:
        own, program = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
        command = _parse(own)
        if not isinstance(command, Emulate):
            raise UserError("only ddplab emulate takes a program after --")
        return replace(command, program=tuple(program))
    return _parse_words(arguments)


def _parse_words(arguments: list[str]) -> Command:
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(
                Command,
                args=arguments,
                prog="ddplab",
                description="Measure, predict, verify and explain data-parallel training.",
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(captured.getvalue())) from None


if __name__ == "__main__":  # torchrun -m common.cli.main doctor
    main()
