"""``ddplab``: parse the subcommand and run it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import tyro

from common.cli import course, data, study
from common.cli.course import Course
from common.cli.data import Data
from common.cli.diagnose import Diagnose, split_script
from common.cli.doctor import Doctor
from common.cli.emulate import Emulate
from common.cli.explore import Explore
from common.cli.handin import Handin
from common.cli.help import Subcommands, asked_page, print_page
from common.cli.plan import Plan
from common.cli.predict import Predict
from common.cli.run import Run
from common.cli.study import Study
from common.cli.tune import Tune
from common.errors import UserError
from common.runtime.script import exit_status, one_line

PROGRAM = "ddplab"
SUBCOMMANDS = Subcommands(
    about="Measure, predict, verify and explain data-parallel training.",
    groups={
        "Run and read": {
            "run": (Run, "measure here, execute the notebooks, and write report.pdf"),
            "explore": (
                Explore,
                "a model to play with: sliders for the network, the ranks, the cap",
            ),
        },
        "Predict, tune and diagnose": {
            "predict": (Predict, "the best bucket cap from measurements, or a step on 16,384 GPUs"),
            "plan": (Plan, "how to train a model on what you have, by memory and time"),
            "tune": (Tune, "the best DDP settings for a model of yours, verified by real steps"),
            "diagnose": (
                Diagnose,
                "why a training script is slow, and what each change would gain",
            ),
        },
        "Machines": {
            "doctor": (Doctor, "what this machine has, what works here, and where ranks would run"),
            "emulate": (Emulate, "run a script on hosts whose links carry a stated rate (Linux)"),
        },
        "Course, evidence and data": {
            "course": (Course, "a student's tree, its tests and progress, and grades"),
            "handin": (Handin, "build and check the tarball that is handed in"),
            "study": (Study, "what the project's claims rest on, measured anew; minutes to hours"),
            "data": (Data, "keep a run for others, make token shards, measure lengths of texts"),
        },
    },
)
PAGES = {
    PROGRAM: SUBCOMMANDS,
    f"{PROGRAM} course": course.SUBCOMMANDS,
    f"{PROGRAM} study": study.SUBCOMMANDS,
    f"{PROGRAM} data": data.SUBCOMMANDS,
}
"""The commands that have subcommands."""
Command = SUBCOMMANDS.union


def main() -> None:
    """Runs the subcommand that the console script was called with."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with exit_status(), ended_as_by_ctrl_c():
        words = sys.argv[1:]
        try:
            if page := asked_page([PROGRAM, *words], PAGES):
                print_page(*page)
            else:
                _parse(words).run()
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads any more, as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
            sys.exit(1)  # as rich does


class Terminated(KeyboardInterrupt):
    """Ends a command as Ctrl-C does, where a time limit, ``kill`` or a closed terminal ends it."""


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end a command with its record and pages, as Ctrl-C does.

    Signals that are ignored (``nohup``) or that somebody handles stay as they are, and so do those
    of a rank of a job. Only the first one counts: Slurm and uv each pass it on.
    """
    taken: list[int] = []
    if threading.current_thread() is threading.main_thread() and "RANK" not in os.environ:
        numbers = signal.SIGTERM, signal.SIGHUP
        taken = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    terminals = [output for output in (1, 2) if os.isatty(output)]

    def end(number: int, _: object) -> None:
        for other in taken:  # not ignored, which children would inherit
            signal.signal(other, lambda *_: None)
        if number == signal.SIGHUP:  # nothing can be written to a terminal that is gone
            for output in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        raise Terminated(f"ended by {signal.Signals(number).name}")

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _parse(arguments: list[str]) -> Command:
    """Parses the subcommand; the programs that it runs have flags of their own.

    That of ``ddplab emulate`` follows ``--``; that of ``ddplab diagnose`` is its first argument.
    """
    if arguments[:1] == ["diagnose"]:
        words, program = split_script(arguments[1:])
        if program:
            return replace(_parse_words(["diagnose", *words]), program=tuple(program))
    if "--" in arguments:
        words, program = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
        command = _parse(words)
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
                prog=PROGRAM,
                description=SUBCOMMANDS.about,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(captured.getvalue())) from None


if __name__ == "__main__":  # torchrun -m common.cli.main doctor
    main()
