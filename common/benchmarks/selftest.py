"""The self-test before class: whether everything works here, on every rank and device at hand.

Recipe: ``ddplab doctor --selftest``, or on a cluster ``sbatch sbatch/selftest.sbatch``. All checks
run in one process group; each is agreed on by all ranks, and after one that breaks the group the
rest is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.benchmarks.selftest_checks import CHECKS, Check, LeftOut
from common.errors import NotYetWritten, RunFailed
from common.runtime.group.process_group import Worker, is_lost_peer, process_group
from common.runtime.records.run_directory import new_run_id
from common.runtime.script import run_script

TIMEOUT_S = 60
"""Limit of a collective of tensors; ranks wait longer for the programs that a host runs alone."""
LOST = "a rank was lost"
COLUMNS = {"check": 25, "": 8, "detail": 36, "remedy": 32}
COLOURS = {"passed": "green", "failed": "red"}


@dataclass(frozen=True)
class Selftest:
    """Run the scripts that compute at their smallest; check devices, network, output folder.

    Prints a table of what passed and what failed, with a remedy; exit status 1 if any failed.
    """

    output_dir: str = "outputs"
    """Folder of the results; the self-test writes below selftest/ in it."""
    device: str | None = None
    """cpu or cuda; by default CUDA where it is."""
    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""
    results: str = ""
    """Write each result to this file too, as it comes, one JSON object a line."""


@dataclass(frozen=True)
class Result:
    """The outcome of a check: ``passed``, ``failed``, ``left out`` or ``not run``."""

    name: str
    outcome: str
    detail: str
    remedy: str = ""

    @property
    def is_bad(self) -> bool:
        """Returns True if the check failed, or could not be tried any more."""
        return self.outcome in ("failed", "not run")


def main(settings: Selftest) -> None:
    """Runs all checks. Raises RunFailed when one failed."""
    logging.getLogger().setLevel(logging.WARNING)
    with process_group(settings.device, settings.backend, TIMEOUT_S) as worker:
        folder = Path(settings.output_dir) / "selftest"
        folder = folder / str(worker.broadcast(new_run_id("selftest")))
        results = []
        if worker.is_main:
            print_header()
        for check in CHECKS:
            # It is reported as failed before it runs, in case it ends this process.
            ended = Result(check.name, "failed", "ended the process", check.remedy)
            report(settings, worker, ended)
            results.append(attempt(check, worker, folder, results))
            report(settings, worker, results[-1])
            if worker.is_main:
                print_row(results[-1])
        if worker.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        failed = [result.name for result in results if result.is_bad]
        if failed:
            raise RunFailed(f"self-test: {', '.join(failed)}")


def attempt(check: Check, worker: Worker, folder: Path, before: Sequence[Result]) -> Result:
    """Runs one check on all ranks; it passes when it passed on each."""
    if any(LOST in result.detail or result.outcome == "not run" for result in before):
        return Result(check.name, "not run", "the ranks no longer reach each other", check.remedy)
    start = time.monotonic()
    detail, outcome, message = "", "passed", ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            detail = check.run(worker, folder)
    except (LeftOut, NotYetWritten) as reason:  # a student's tree lacks tasks' solutions
        outcome, message = "left out", str(reason)
    except Exception as raised:  # whatever it is belongs in the table
        lines = str(raised).splitlines() or [type(raised).__name__]
        outcome, message = "failed", f"{socket.gethostname()}: {lines[0]}"
        if is_lost_peer(raised):  # what other ranks raised says more
            outcome = LOST
    try:
        everywhere = worker.gather((outcome, message))
    except Exception:  # this group is broken, too
        everywhere = [(outcome, message), (LOST, "")]
    said_of = dict(reversed(everywhere))  # the lowest rank's word of each kind
    if LOST in said_of:
        reason = said_of.get("failed") or said_of[LOST]
        detail = f"{LOST}; {reason}" if reason else LOST
        return Result(check.name, "failed", detail, check.remedy)
    for outcome in ("failed", "left out"):
        if outcome in said_of:
            return Result(check.name, outcome, said_of[outcome], check.remedy)
    took = f"{time.monotonic() - start:.1f} s"
    return Result(check.name, "passed", f"{detail}, {took}" if detail else took)


def report(settings: Selftest, worker: Worker, result: Result) -> None:
    if settings.results and worker.is_main:
        with Path(settings.results).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read_results(path: Path) -> list[Result]:
    """Returns the last result of each check, in order; none where there is no file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    results = [Result(**json.loads(line)) for line in lines]
    return list({result.name: result for result in results}.values())


def print_results(results: Sequence[Result]) -> None:
    """Prints the table of passed and failed checks."""
    print_header()
    for result in results:
        print_row(result)


def print_header() -> None:
    """Prints the table's title and head."""
    print("Self-test")
    _print_cells()


def print_row(result: Result) -> None:
    """Prints a row of the table; widths are fixed, so that it need not wait for later rows."""
    colour = COLOURS.get(result.outcome, "yellow")
    outcome = f"[{colour}]{result.outcome}[/{colour}]"
    remedy = result.remedy if result.is_bad else ""
    _print_cells(result.name, outcome, escape(result.detail), escape(remedy))


def _print_cells(*cells: str) -> None:
    """Prints a row of the table; without cells its head."""
    table = Table(box=SIMPLE_HEAD, show_header=not cells, show_edge=False)
    for name, width in COLUMNS.items():
        table.add_column(name, width=width, overflow="fold")
    if cells:
        table.add_row(*cells)
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    console.print(table)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.argv[0] = "selftest"
    run_script(main, Selftest)
