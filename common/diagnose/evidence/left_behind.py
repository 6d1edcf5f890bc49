"""Reads what a job left behind: profiler traces, NCCL's log, flight recorders' dumps."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pandas as pd

from common.analysis.step_parts import flags
from common.diagnose.evidence.evidence import NotJudged
from common.errors import UserError
from common.traces.flight_recorder import Dump, is_dump, read_dump
from common.traces.nccl_log import NcclLog, is_nccl_log, read_nccl_logs
from common.traces.profiler_trace import read_trace
from common.traces.step_operations import step_operations
from common.traces.step_overlap import activity, step_overlap, step_windows

Read = TypeVar("Read")
TRACES = (".json", ".json.gz")
RESULT = "diagnosis.json"
"""Result of an earlier diagnosis of the same folder, which is no trace."""
HEAD_BYTES = 2**18
"""Kineto writes who a rank is before the events."""
RANK_INSIDE = re.compile(rb'"distributedInfo":\s*\{[^}]*?"rank":\s*(\d+)')
RANK_IN_NAME = re.compile(r"(\d+)(?=\D*$)")


@dataclass(frozen=True, eq=False)
class Traces:
    """Steps of profiler traces, and what they communicate.

    Attributes:
        steps: row per rank and step, with the columns of ``read_step_overlap``, rank and
            on_device (True if the rank's trace has kernels of a GPU); empty without traces.
        operations: row per rank, step and operation (``step_operations``).
        notes: files that could not be read, a sentence each.
    """

    steps: pd.DataFrame
    operations: pd.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class LeftBehind:
    """The files of a job, as read.

    Attributes:
        folder: folder of the files.
        steps, operations: tables of the profiler's traces, as in ``Traces``.
        log: NCCL's log; None without one.
        dumps: dumps of flight recorders, one a rank.
        notes: files that could not be read, a sentence each.
    """

    folder: Path
    steps: pd.DataFrame
    operations: pd.DataFrame
    log: NcclLog | None = None
    dumps: tuple[Dump, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def on_device(self) -> bool:
        """Returns True if the traces have kernels of a GPU."""
        return len(self.steps) > 0 and bool(flags(self.steps["on_device"]).any())

    @property
    def common_steps(self) -> int:
        """Returns the number of steps that all ranks have."""
        if self.steps.empty:
            return 0
        by_step = self.steps.groupby("step")["rank"].nunique()
        return int((by_step == self.steps["rank"].nunique()).sum())

    def by_step(self, column: str) -> pd.DataFrame:
        """Returns a column of the traces: a row per step that all ranks have, a column per rank.

        Raises NotJudged where there are no traces, or no such step.
        """
        if self.steps.empty:
            raise NotJudged("no profiler trace with steps")
        table = self.steps.pivot_table(index="step", columns="rank", values=column).dropna()
        if table.empty:
            raise NotJudged("the traces have no step that all ranks have")
        return table

    @property
    def slowest_ms(self) -> pd.Series:
        """Returns the slowest rank's time of each step that all ranks have."""
        return self.by_step("step_ms").max(axis=1)


def read_left_behind(folder: Path | str) -> LeftBehind:
    """Reads all that a folder, and those below it, hold of a job.

    Raises:
        UserError: there is no such folder, or nothing in it that can be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"--traces {folder}: no such folder")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != RESULT)
    notes: list[str] = []
    dumps = _read_all(read_dump, [path for path in files if is_dump(path)], notes)
    traces = [p for p in files if p.name.endswith(TRACES) and not is_dump(p)]
    read = read_traces(traces)
    notes += read.notes
    logs = [p for p in files if p not in traces and not is_dump(p) and is_nccl_log(p)]
    if not (dumps or len(read.steps) or logs):
        reason = f" ({notes[0]})" if notes else ""
        raise UserError(
            f"--traces {folder}: no profiler trace (.json, .json.gz), no NCCL log "
            f"(NCCL_DEBUG=INFO) and no flight recorder's dump in it{reason}"
        )
    return LeftBehind(
        folder=folder,
        steps=read.steps,
        operations=read.operations,
        log=read_nccl_logs(logs) if logs else None,
        dumps=tuple(dumps),
        notes=tuple(notes),
    )


def read_traces(paths: Sequence[Path]) -> Traces:
    """Reads traces of torch.profiler; one that cannot be read is noted.

    A rank has one, or one for each cycle of its schedule.
    """
    notes: list[str] = []
    parts = _read_all(_steps_of, paths, notes)
    ranks = [rank for rank, *_ in parts]
    named = [(rank, step) for rank, steps, _ in parts for step in steps["step"].unique()]
    if len(set(named)) < len(named):  # of one process each, or names without a rank
        ranks = list(range(len(parts)))
    tables = [
        [table.assign(rank=rank) for table in frames]
        for rank, (_, *frames) in zip(ranks, parts, strict=True)
    ]
    steps, operations = (
        (pd.concat(frames, ignore_index=True) for frames in zip(*tables, strict=True))
        if tables
        else (pd.DataFrame(), pd.DataFrame())
    )
    return Traces(steps, operations, tuple(notes))


def _read_all(read: Callable[[Path], Read], paths: Sequence[Path], notes: list[str]) -> list[Read]:
    """Reads files; one that cannot be read is noted."""
    contents = []
    for path in paths:
        try:
            contents.append(read(path))
        except UserError as error:
            notes.append(str(error))
    return contents


def _steps_of(path: Path) -> tuple[int, pd.DataFrame, pd.DataFrame]:
    """Reads one rank's trace: its rank, its steps, and what they communicate."""
    events = read_trace(path)
    try:
        windows = step_windows(events)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    match = RANK_INSIDE.search(head) or RANK_IN_NAME.search(path.name)
    intervals = activity(events)
    on_device = any(event.kind == "kernel" for event in events)
    steps = step_overlap(windows, intervals).assign(on_device=on_device)
    return int(match.group(1)) if match else 0, steps, step_operations(events, windows, intervals)
