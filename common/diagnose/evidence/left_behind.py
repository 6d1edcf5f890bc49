"""Reads what a job left behind: traces, dumps, its ranks' output, logs, tables, in any mixture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from common.analysis.step_parts import flags
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.measured_surroundings import named_ranks
from common.diagnose.evidence.named_files import named_files, of_one_job
from common.errors import UserError
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.printed.collectives import CollectiveTables, PrintedCollective
from common.runtime.wording import counted
from common.traces.flight_recorder import Dump, is_dump, read_dump
from common.traces.logs.ddp_log import DdpLog
from common.traces.logs.job_output import JobOutput
from common.traces.logs.nccl_log import NcclLog
from common.traces.logs.nvidia_smi import NvidiaSmi
from common.traces.logs.profile_tables import ProfileTables
from common.traces.logs.py_spy import PySpy
from common.traces.logs.text_lines import encoding_of, head_of, lines_of, looks_like
from common.traces.profiler_trace import KINDS, events_of
from common.traces.rank_trace import UNORDERED, Who, who_of
from common.traces.step_overlap import activity, step_operations, step_overlap, step_windows
from common.traces.trace_stream import CutOff, records_of

RESULT = "diagnosis.json"
"""Result of an earlier diagnosis of the same folder, which is no trace."""
OF_A_TRACE = re.compile(
    rb'\s*(?:\{[^\0]*"(?:traceEvents|schemaVersion|deviceProperties)"|\[\s*\{[^\0]*"ph")'
)
WHAT_IS_READ = (
    "profiler traces, flight recorders' dumps, the output of ranks and torchrun, logs of NCCL and "
    "DDP, nvidia-smi's topo -m, -q and dmon, py-spy's dumps, tables of HTA and TraceLens, what "
    "nccl-tests, all_reduce_bench.py and NCCL Inspector print"
)
ANOTHER_JOBS = "rank {} has another file for the same; of another job? Read each job by itself"
TOO_MUCH = (RecursionError, OverflowError, MemoryError)
MOST_NAMED = 5
"""Files that a refusal names."""


@dataclass
class Printed:
    """What is read line by line: a reader per format, and the files that each found lines in."""

    output: JobOutput = field(default_factory=JobOutput)
    ddp: DdpLog = field(default_factory=DdpLog)
    nccl: NcclLog = field(default_factory=NcclLog)
    smi: NvidiaSmi = field(default_factory=NvidiaSmi)
    stacks: PySpy = field(default_factory=PySpy)
    tables: ProfileTables = field(default_factory=ProfileTables)
    collectives: CollectiveTables = field(default_factory=lambda: CollectiveTables(strict=False))

    def take_file(self, path: Path, name: str, notes: list[str]) -> bool:
        """Reads a text; returns True if any reader found a line of its format in it."""
        readers = (self.output, self.ddp, self.nccl, self.smi, self.stacks, self.tables)
        is_taken = False
        for line in lines_of(path, name, notes):
            if self.collectives.take(line.number, line.text, line.file):
                is_taken = True
            for reader in readers:
                if reader.take(line):
                    is_taken = True
        return is_taken

    def kinds(self) -> list[str]:
        """Returns what was read, in words."""
        log, smi, tables = self.nccl, self.smi, self.tables
        names = [
            (self.output.says_anything, "the output of ranks or torchrun"),
            (self.ddp.records, f"DDP's log of {counted(len(self.ddp.records), 'rank')}"),
            (log.lines, f"NCCL's log ({_ranks_of(log)})"),
            (smi.topologies, "nvidia-smi topo -m"),
            (any(state.values for state in smi.states), "nvidia-smi -q"),
            (smi.samples, "nvidia-smi dmon"),
            (self.stacks.stacks, f"py-spy's dumps of {len(self.stacks.stacks)} processes"),
            *((rows, f"a table ({table})") for table, rows in tables.rows.items()),
        ]
        return [name for content, name in names if content]


def _ranks_of(log: NcclLog) -> str:
    hosts = log.largest.hosts
    return counted(len(hosts), "rank") if hosts else "which names no ranks"


@dataclass(frozen=True, eq=False)
class Traces:
    """Steps of profiler traces, and what they communicate.

    Attributes:
        steps: row per rank and step, with the columns of ``read_step_overlap``, rank and
            on_device (True if the rank's trace has kernels of a GPU); empty without traces.
        operations: row per rank, step and operation (``step_operations``).
        notes: files that could not be read, a sentence each.
        world_size: ranks of the job, by the traces; 0 where none says.
    """

    steps: pd.DataFrame
    operations: pd.DataFrame
    notes: tuple[str, ...] = ()
    world_size: int = 0


@dataclass(frozen=True, eq=False)
class LeftBehind:
    """The files of a job, as read.

    Attributes:
        steps, operations: tables of the profiler's traces, as in ``Traces``.
        printed: what was read line by line.
        dumps: dumps of flight recorders, one a rank.
        notes: files that could not be read, a sentence each.
        collectives: tables of collectives that benchmarks have printed.
        hardware: cluster that the job ran on, where the user has named it.
    """

    steps: pd.DataFrame
    operations: pd.DataFrame
    printed: Printed = field(default_factory=Printed)
    dumps: tuple[Dump, ...] = ()
    notes: tuple[str, ...] = ()
    collectives: tuple[PrintedCollective, ...] = ()
    hardware: Cluster | None = None

    @property
    def gpu(self) -> str:
        """Returns the name of the GPUs by nvidia-smi -q; empty where it names none, or several."""
        states = self.printed.smi.states
        names = {name for state in states for name in state.find("Product Name").values()}
        return names.pop() if len(names) == 1 else ""

    @property
    def world_size(self) -> int:
        """Returns the number of the job's ranks; 0 where nothing tells it."""
        printed = self.printed
        worlds = [record.number("world_size") or 0 for record in printed.ddp.records.values()]
        return int(max(printed.output.world_size, printed.nccl.largest.size, *worlds, 0))

    def kinds(self) -> list[str]:
        """Returns what was read, in words."""
        kinds = []
        if len(self.steps):
            ranks = counted(self.steps["rank"].nunique(), "rank")
            kinds.append(f"profiler traces of {ranks}, {self.common_steps} steps")
        if self.dumps:
            kinds.append(f"flight recorders' dumps of {counted(len(self.dumps), 'rank')}")
        if self.collectives:
            names = dict.fromkeys(table.collective for table in self.collectives)
            kinds.append(f"{counted(len(self.collectives), 'table')} of {', '.join(names)}")
        return [*kinds, *self.printed.kinds()]

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


def read_left_behind(paths: Sequence[Path], hardware: Cluster | None = None) -> LeftBehind:
    """Reads all that paths hold of a job, whatever it is.

    Args:
        paths: files, folders and ``-``.
        hardware: cluster that the job ran on, where that is known.

    Raises:
        UserError: a path cannot be read, or nothing in any of them.
    """
    printed, notes = Printed(), []
    dumps: list[tuple[Path, Dump]] = []
    traces: list[Path] = []
    with named_files(paths, left_out=(RESULT,)) as files:
        for path, name in files.items():
            for note in _read_file(path, name, printed, dumps, traces):
                notes.append(note)
        read = read_traces(traces)
        notes += [_with_name(note, files) for note in read.notes]
        ranks = set(read.steps["rank"]) if len(read.steps) else set()
        if missing := [rank for rank in range(read.world_size) if rank not in ranks]:
            few = f"{named_ranks(missing[:MOST_NAMED])}{' …' * (len(missing) > MOST_NAMED)}"
            notes.append(
                f"profiler traces: {few[0].lower()}{few[1:]} of {read.world_size} left none"
            )
        chosen, foreign = of_one_job([(path, {dump.rank}) for path, dump in dumps])
        notes += [f"{files[dumps[i][0]]}: {ANOTHER_JOBS.format(dumps[i][1].rank)}" for i in foreign]
    if printed.nccl.other_jobs:
        notes.append(
            "NCCL's log: communicators of other processes, as large as the one that is judged: "
            "the job was begun again, or there are two"
        )
    collectives = tuple(printed.collectives.tables())
    notes += printed.collectives.notes
    job = LeftBehind(
        steps=read.steps,
        operations=read.operations,
        printed=printed,
        dumps=tuple(dumps[i][1] for i in chosen),
        notes=tuple(notes),
        collectives=collectives,
        hardware=hardware,
    )
    if not job.kinds():
        raise UserError(_nothing_read(paths, len(files), notes))
    return job


def _read_file(
    path: Path,
    name: str,
    printed: Printed,
    dumps: list[tuple[Path, Dump]],
    traces: list[Path],
) -> list[str]:
    """Reads a file, or puts it among the traces; returns sentences on what was not read."""
    notes: list[str] = []
    try:
        if not path.is_file():
            return [f"{name}: a device, a pipe, or a link to nothing"]
        head = head_of(path)
        if is_dump(head):
            dumps.append((path, read_dump(path)))
        elif OF_A_TRACE.match(head):
            traces.append(path)
        elif encoding_of(head) is None or not printed.take_file(path, name, notes):
            notes = [f"{name}: {looks_like(head)}"]
    except UserError as error:
        notes.append(_with_name(str(error), {path: name}))
    except TOO_MUCH:
        notes.append(f"{name}: nested too deep, or too large")
    return notes


def _with_name(note: str, files: Mapping[Path, str]) -> str:
    """Returns a sentence on a file that calls it by its name in messages."""
    for path, name in files.items():
        if note.startswith(f"{path}: "):
            return f"{name}{note[len(str(path)) :]}"
    return note


def _nothing_read(paths: Sequence[Path], files: int, notes: Sequence[str]) -> str:
    named = " ".join(map(str, paths))
    if not files:
        return f"{named}: no file in it; what is read: {WHAT_IS_READ}"
    few = "; ".join(notes[:MOST_NAMED]) + (" …" if len(notes) > MOST_NAMED else "")
    return f"{named}: nothing that can be read ({few}); what is read: {WHAT_IS_READ}"


def read_traces(paths: Sequence[Path]) -> Traces:
    """Reads traces of torch.profiler; one that cannot be read is noted.

    A rank has one, or one for each cycle of its schedule.
    """
    notes: list[str] = []
    parts: list[tuple[Path, Who, tuple[pd.DataFrame, pd.DataFrame]]] = []
    for path in paths:
        try:
            parts.append((path, who_of(path), _steps_of(path, notes)))
        except UserError as error:
            notes.append(str(error))
        except TOO_MUCH:
            notes.append(f"{path}: nested too deep, or too large")
        except (KeyError, TypeError, AttributeError, ValueError):
            notes.append(f"{path}: JSON that is not a trace of torch.profiler")
    steps_of = [{(who.rank, step) for step in tables[0]["step"]} for _, who, tables in parts]
    ranks = [who.rank for _, who, _ in parts]
    if len(set().union(*steps_of)) < sum(map(len, steps_of)):
        if all(who.is_named for _, who, _ in parts):
            paths_and_steps = [
                (part[0], steps) for part, steps in zip(parts, steps_of, strict=True)
            ]
            chosen, foreign = of_one_job(paths_and_steps)
            notes += [f"{parts[i][0]}: {ANOTHER_JOBS.format(ranks[i])}" for i in foreign]
            parts, ranks = [parts[i] for i in chosen], [ranks[i] for i in chosen]
        else:  # of one process each, or names without a rank
            ranks = list(range(len(parts)))
    tables = [
        [table.assign(rank=rank) for table in part[2]]
        for rank, part in zip(ranks, parts, strict=True)
    ]
    steps, operations = (
        (pd.concat(frames, ignore_index=True) for frames in zip(*tables, strict=True))
        if tables
        else (pd.DataFrame(), pd.DataFrame())
    )
    world_size = max((who.world_size for _, who, _ in parts), default=0)
    return Traces(steps, operations, tuple(notes), world_size)


def _steps_of(path: Path, notes: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Reads the steps of one rank's trace, and what they communicate."""
    records: list[dict] = []
    cut = ""
    try:
        records.extend(record for record in records_of(path) if record.get("cat") in KINDS)
    except CutOff as error:
        cut = str(error)
    events = events_of(records)
    on_device = any(event.kind in ("kernel", "launch") for event in events)
    if cut and (on_device or who_of(path).has_device):
        raise UserError(f"{cut}, {UNORDERED}")
    try:
        windows = step_windows(events)
    except UserError as error:
        raise UserError(cut or f"{path}: {error}") from None
    if cut:
        end_us = max((e.end_us for e in events if e.kind == "operator"), default=0.0)
        windows = [window for window in windows if window.end_us <= end_us]
        if not windows:
            raise UserError(f"{cut}, before the end of a step")
        notes.append(f"{cut}; {counted(len(windows), 'step')} before that are judged")
    intervals = activity(events)
    on_device = any(event.kind == "kernel" for event in events)
    steps = step_overlap(windows, intervals).assign(on_device=on_device)
    operations = step_operations(events, windows, intervals)
    return steps, operations
