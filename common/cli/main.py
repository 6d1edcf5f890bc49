"""``ddplab``: parse the subcommand and run it."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from dataclasses import replace
from typing import Annotated

import tyro

from common.cli.course import Course
from common.cli.data import Data
from common.cli.diagnose import Diagnose, split_script
from common.cli.doctor import Doctor
from common.cli.emulate import Emulate
from common.cli.explore import Explore
from common.cli.handin import Handin
from common.cli.predict import Predict
from common.cli.run import Run
from common.cli.study import Study
from common.cli.tune import Tune
from common.errors import UserError
from common.runtime.script import exit_status, one_line

Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Diagnose, tyro.conf.subcommand("diagnose")]
    | Annotated[Emulate, tyro.conf.subcommand("emulate")]
    | Annotated[Explore, tyro.conf.subcommand("explore")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Study, tyro.conf.subcommand("study")]
    | Annotated[Course, tyro.conf.subcommand("course")]
    | Annotated[Handin, tyro.conf.subcommand("handin")]
)


def main() -> None:
    """Runs the subcommand that the console script was called with."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with exit_status():
        _parse(sys.argv[1:]).run()


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
                args=arguments or ["--help"],
                prog="ddplab",
                description="Measure, predict, verify and explain data-parallel training.",
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(captured.getvalue())) from None


if __name__ == "__main__":  # torchrun -m common.cli.main doctor
    main()
