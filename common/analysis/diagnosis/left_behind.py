"""Reads what a job left behind: profiler traces, NCCL's log, flight recorders' dumps."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pandas as pd

from common.analysis.diagnosis.evidence import NotJudged
from common.errors import UserError
from common.traces.flight_recorder import Dump, is_dump, read_dump
from common.traces.nccl_log import NcclLog, is_nccl_log, read_nccl_logs
from common.traces.step_overlap import read_step_overlap

Read = TypeVar("Read")
TRACES = (".json", ".json.gz")
RESULT = "diagnosis.json"
"""Of an earlier look at the same folder; no trace."""
HEAD_BYTES = 2**18
"""Kineto writes who a rank is before the events."""
RANK_INSIDE = re.compile(rb'"distributedInfo":\s*\{[^}]*?"rank":\s*(\d+)')
RANK_IN_NAME = re.compile(r"(\d+)(?=\D*$)")
KERNEL = re.compile(rb'"cat":\s*"kernel"')


@dataclass(frozen=True, eq=False)
class LeftBehind:
    """The files of a job, as read.

    Attributes:
        folder: where the files lie.
        steps: a row per rank and step of the profiler's traces, with the columns of
            ``read_step_overlap`` and rank; empty without traces.
        on_device: the traces have kernels of a GPU.
        log: NCCL's, None without one.
        dumps: flight recorders', one a rank.
        notes: files that could not be read, a sentence each.
    """

    folder: Path
    steps: pd.DataFrame
    on_device: bool = False
    log: NcclLog | None = None
    dumps: tuple[Dump, ...] = ()
    notes: tuple[str, ...] = ()

    def by_step(self, column: str) -> pd.DataFrame:
        """Returns a column of the traces: a row per step that all ranks have, a column per rank.

        Raises NotJudged where there are no traces.
        """
        if self.steps.empty:
            raise NotJudged("no profiler trace with steps")
        return self.steps.pivot_table(index="step", columns="rank", values=column).dropna()


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
    parts = _read_all(_steps_of, traces, notes)
    logs = [p for p in files if p not in traces and not is_dump(p) and is_nccl_log(p)]
    if not (dumps or parts or logs):
        said = f" ({notes[0]})" if notes else ""
        raise UserError(
            f"--traces {folder}: no profiler trace (.json, .json.gz), no NCCL log "
            f"(NCCL_DEBUG=INFO) and no flight recorder's dump in it{said}"
        )
    ranks = [rank for rank, _, _ in parts]
    if len(set(ranks)) < len(ranks):  # of one process each, or names without a rank
        ranks = list(range(len(parts)))
    steps = [table.assign(rank=rank) for rank, (_, table, _) in zip(ranks, parts, strict=True)]
    return LeftBehind(
        folder=folder,
        steps=pd.concat(steps, ignore_index=True) if steps else pd.DataFrame(),
        on_device=any(on_device for _, _, on_device in parts),
        log=read_nccl_logs(logs) if logs else None,
        dumps=tuple(dumps),
        notes=tuple(notes),
    )


def _read_all(read: Callable[[Path], Read], paths: Sequence[Path], notes: list[str]) -> list[Read]:
    """Reads files; one that cannot be read is noted."""
    found = []
    for path in paths:
        try:
            found.append(read(path))
        except UserError as error:
            notes.append(str(error))
    return found


def _steps_of(path: Path) -> tuple[int, pd.DataFrame, bool]:
    """Reads the steps of one rank's trace; returns its rank, too, and whether a GPU is in it."""
    table = read_step_overlap(path)
    octets = path.read_bytes()
    if path.suffix == ".gz":
        octets = gzip.decompress(octets)
    found = RANK_INSIDE.search(octets[:HEAD_BYTES]) or RANK_IN_NAME.search(path.name)
    return int(found.group(1)) if found else 0, table, KERNEL.search(octets) is not None
