"""The traces of a job's ranks as one program: clocks set alike, collectives joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.analysis.replay.device_lanes import device_lanes
from common.analysis.replay.lanes import Joinable, RankLanes, host_lanes, numbered_steps
from common.errors import UserError
from common.perfmodel.replay.engine import link_works
from common.perfmodel.replay.program import Call, Program, Step
from common.runtime.wording import counted
from common.traces.rank_trace import RankTrace, read_rank_trace

SUFFIXES = (".json", ".json.gz")
CLOCKS_DIFFER_US = 1e3
"""Collectives that end by so much apart on two ranks show that their clocks differ."""


@dataclass(eq=False)
class Job:
    """A job's traces, as a program.

    Attributes:
        program: the graph.
        lanes: lanes and calls of each rank.
        world_size: ranks of the job, as traces say; at least those that are there.
        notes: files that were not read, and what had to be assumed, a sentence each.
        clocks_us: how far each rank's clock is ahead of the first one's.
    """

    program: Program
    lanes: list[RankLanes]
    world_size: int
    notes: list[str] = field(default_factory=list)
    clocks_us: dict[int, float] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Returns True if the traces of all ranks are there."""
        return len(self.lanes) >= self.world_size

    @property
    def on_device(self) -> bool:
        """Returns True if the ranks compute on GPUs."""
        return self.lanes[0].trace.on_device


def read_job(folder: Path | str) -> Job:
    """Reads the traces of a folder, and of those below it, or one trace.

    Raises UserError where there is none that can be read, or the traces are of several jobs.
    """
    folder = Path(folder)
    if not folder.exists():
        raise UserError(f"--from-traces {folder}: no such folder")
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    files = [path for path in files if path.is_file() and path.name.endswith(SUFFIXES)]
    notes, traces = [], {}
    for path in files:
        try:
            trace = read_rank_trace(path)
        except UserError as error:
            notes.append(str(error))
            continue
        if trace.rank in traces:
            other = traces[trace.rank].path
            notes.append(f"{path}: not taken: rank {trace.rank} is in {other.name} already")
            continue
        traces[trace.rank] = trace
        if trace.note:
            notes.append(trace.note)
    if not traces:
        reason = f" ({notes[0]})" if notes else ""
        raise UserError(
            f"--from-traces {folder}: no profiler trace (.json, .json.gz) in it{reason}"
        )
    job = job_of([traces[rank] for rank in sorted(traces)])
    job.notes[:0] = notes
    return job


def job_of(traces: Sequence[RankTrace]) -> Job:
    """Makes the program of a job from its ranks' traces.

    Raises UserError where traces have no step in common, or do not fit together.
    """
    kinds = {trace.on_device for trace in traces}
    if len(kinds) > 1:
        raise UserError("some traces have kernels of a GPU and some have none: of two jobs")
    worlds = {trace.world_size for trace in traces if trace.world_size}
    if len(worlds) > 1:
        sizes = " and ".join(map(str, sorted(worlds)))
        raise UserError(f"the traces are of jobs of {sizes} ranks: give a folder of one job")
    numbers = [{number for number, _ in numbered_steps(trace)} for trace in traces]
    steps = sorted(set.intersection(*numbers))
    if not steps:
        raise UserError("the ranks' traces have no step in common")
    program = Program()
    make = device_lanes if kinds.pop() else host_lanes
    lanes = [make(program, trace, steps) for trace in traces]
    world = max([len(traces), *worlds])
    job = Job(program, lanes, world, [note for trace in traces if (note := trace.unlaunched())])
    groups = _joined(job)
    _set_clocks(job, groups)
    origin_us = min(part.first[0][1] - job.clocks_us[part.trace.rank] for part in lanes)
    for part in lanes:
        clock_us = job.clocks_us[part.trace.rank] + origin_us
        for operation, at_us in part.first:
            program.not_before_s[operation] = max(0.0, (at_us - clock_us) / 1e6)
        program.seen_s |= {
            operation: ((start_us - clock_us) / 1e6, (end_us - clock_us) / 1e6)
            for operation, (start_us, end_us) in part.seen_us.items()
        }
        program.steps += _steps(part)
    _add_calls(job, groups)
    return job


def _steps(part: RankLanes) -> list[Step]:
    """Returns the steps of one rank."""
    rows = sorted(part.boundaries, key=lambda row: row[3])
    return [
        Step(part.trace.rank, number, first, last, until_end, (end_us - start_us) / 1e6)
        for (number, first, _, start_us), (_, last, until_end, end_us) in pairwise(rows)
    ]


def _joined(job: Job) -> list[list[tuple[int, Joinable]]]:
    """Joins collectives over ranks: by group and number, by their order in a step where old traces
    have no number. Each is a list of (rank, collective).

    What a rank sends another receives; among more than two, traces do not tell which.
    """
    groups: dict[tuple, list[tuple[int, Joinable]]] = defaultdict(list)
    for part in job.lanes:
        counts: dict[tuple, int] = defaultdict(int)
        for call in part.calls:
            group, is_pair = call.call.group, _what(call) == "send"
            key = (group, is_pair)
            if is_pair and (_group_size(group) or job.world_size) > 2:
                key = (*key, part.trace.rank)
            if call.call.sequence is not None:
                key = (*key, "number", call.call.sequence)
            else:
                if is_pair and job.world_size == len(job.lanes) == 2:  # which of the two sends
                    key = (*key, (part.trace.rank == 0) == (call.what == "send"))
                key = (*key, call.step)
                counts[key] += 1
                key = (*key, counts[key])
            groups[key].append((part.trace.rank, call))
    joined = list(groups.values())
    if len(job.lanes) > 1:
        _check(job, joined)
    return joined


def _what(call: Joinable) -> str:
    return "send" if call.what == "recv" else call.what


def _check(job: Job, joined: list[list[tuple[int, Joinable]]]) -> None:
    """Refuses collectives that do not fit together."""
    for members in joined:
        whats = {_what(call) for _, call in members}
        sizes = {call.call.size_bytes for _, call in members if call.call.size_bytes}
        equal = whats <= {"all_reduce", "broadcast"}
        if len(whats) > 1 or (equal and len(sizes) > 1):
            (rank, first), (other, second) = members[0], members[-1]
            raise UserError(
                f"collectives do not fit together: in step {first.step} rank {rank} calls "
                f"{first.what} of {first.call.size_bytes:.0f} bytes where rank {other} calls "
                f"{second.what} of {second.call.size_bytes:.0f}; traces of one job are needed"
            )
    alone = sum(
        len(members) < len(job.lanes) and (_what(call) == "send" or not call.call.group)
        for members in joined
        for _, call in members[:1]
    )
    if alone:
        job.notes.append(f"{counted(alone, 'collective')} could not be joined over all ranks")


def _set_clocks(job: Job, groups: list[list[tuple[int, Joinable]]]) -> None:
    """Finds how far clocks are apart: a collective ends on all ranks at about the same time."""
    reference = job.lanes[0].trace
    job.clocks_us[reference.rank] = 0.0
    for part in job.lanes[1:]:
        rank, apart, early = part.trace.rank, [], 0
        for members in groups:
            of_rank = dict(members)
            if rank in of_rank and reference.rank in of_rank:
                ours, theirs = of_rank[rank], of_rank[reference.rank]
                apart.append(ours.end_us - theirs.end_us)
                early += ours.end_us < theirs.start_us or theirs.end_us < ours.start_us
        offset_us = float(np.median(apart or [0.0]))
        spread_us = float(np.median(np.abs(np.array(apart or [0.0]) - offset_us)))
        is_sure = abs(offset_us) > max(CLOCKS_DIFFER_US, 10 * spread_us)
        differ = early > len(apart) / 20 or (
            is_sure and part.trace.host_name != reference.host_name
        )
        job.clocks_us[rank] = offset_us if differ else 0.0
        if differ:
            job.notes.append(
                f"rank {rank}'s clock is {abs(offset_us) / 1e3:.3g} ms "
                f"{'ahead of' if offset_us > 0 else 'behind'} rank {reference.rank}'s: set by the "
                "ends of their collectives"
            )


def _add_calls(job: Job, groups: list[list[tuple[int, Joinable]]]) -> None:
    """Adds collectives to the program, each with the time that it takes once all have come."""
    program = job.program
    spans = np.array([_span(job, members) for members in groups]).reshape(-1, 2)
    shares = np.array([members[0][1].shares for members in groups], dtype=bool)
    own_s: NDArray = (spans[:, 1] - spans[:, 0]) / 1e6
    if shares.any():
        own_s[shares] = link_works(spans[shares]) / 1e6
    for members, seconds in zip(groups, own_s, strict=True):
        first = members[0][1]
        program.calls.append(
            Call(
                operation=first.what,
                item_bytes=first.call.item_bytes,
                size_bytes=max(call.call.size_bytes for _, call in members),
                own_s=float(seconds),
                members=tuple(call.operation for _, call in members),
                shares=first.shares,
            )
        )


def _span(job: Job, members: list[tuple[int, Joinable]]) -> tuple[float, float]:
    """Returns when the last rank came to a collective, and when it ended on the last."""
    began = max(call.start_us - job.clocks_us[rank] for rank, call in members)
    ended = max(call.end_us - job.clocks_us[rank] for rank, call in members)
    return began, max(began, ended)


def _group_size(ranks: str) -> int:
    """Returns how many ranks a group has, by the text of its list; 0 where it is none."""
    return ranks.count(",") + 1 if ranks.startswith("[") and ranks != "[]" else 0
