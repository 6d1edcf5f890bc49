"""Whether ranks of a job wait for each other, and for whom.

By flight recorders' dumps, by what watchdogs, barriers and ``TORCH_DISTRIBUTED_DEBUG=DETAIL``
print, and by py-spy's dumps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from common.diagnose.causes.job.failures import NO_OUTPUT
from common.diagnose.evidence.case import VALIDITY, Verdict
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind
from common.diagnose.evidence.measured_surroundings import named_ranks
from common.runtime.wording import counted
from common.traces.flight_recorder import Call, Stop, stops
from common.traces.logs.job_output import JobOutput, Timeout
from common.traces.logs.py_spy import Stack

DEFAULT_GROUP = "0"
LOOK_INSTEAD = (
    "Look at what they do instead: a branch on the rank, an exception, data that end earlier than "
    "the others'."
)


def hang(job: LeftBehind) -> Verdict | None:
    """Judges whether ranks wait for each other in a collective that not all of them called."""
    output = job.printed.output
    if not (job.dumps or output.timeouts or output.absent):
        raise NotJudged(
            "no flight recorder's dump (TORCH_FR_BUFFER_SIZE=2000, and a timeout) and no line of a "
            "watchdog"
        )
    hangs = stops(job.dumps) or [*_stops_of_output(output, job.world_size)]
    if not hangs:
        return None
    stop = next((stop for stop in hangs if _late_in(stop)), hangs[0])
    late = _late_in(stop)
    title = "all ranks that are heard of hang in one collective"
    change = (
        "Look for ranks that say nothing, then at the network and the devices; py-spy dump --pid "
        "shows where a process is."
    )
    is_sure = bool(stop.behind or stop.mismatched)
    if late and {call.number for call in stop.mismatched.values()} - {stop.number}:
        title, change, is_sure = "ranks wait in different collectives", LOOK_INSTEAD, False
    elif late:
        title, change = f"{named_ranks(late)} did not come to a collective", LOOK_INSTEAD
    reason = "collectives are counted" if stop.waiting else "ranks that waited say so"
    unsure = "no rank with a record is behind"
    if stop.mismatched:
        unsure = "ranks count collectives of a group alike, and the lines may be of two groups"
    hosts = job.printed.nccl.largest.hosts
    at = [f"Rank {rank} runs on {hosts[rank]}." for rank in late if rank in hosts]
    return Verdict(
        cause="hang",
        title=title[0].lower() + title[1:],
        evidence=(*_stop_sentences(stop), *_reports(output, late), *at),
        lost_share=None,
        confidence="high" if is_sure else "medium",
        reason=reason if is_sure else unsure,
        change=change,
        group=VALIDITY,
    )


def _late_in(stop: Stop) -> list[int]:
    """Returns the ranks that did not come to the collective in which the others wait."""
    return sorted({*stop.behind, *stop.mismatched, *stop.silent})


def _stops_of_output(output: JobOutput, world_size: int) -> Iterator[Stop]:
    """Yields where groups stopped, by what watchdogs and barriers print."""
    by_group: dict[str, dict[int, Timeout]] = {}
    for timeout in output.timeouts:
        group = timeout.group or _group_of(timeout, output) or DEFAULT_GROUP
        first = by_group.setdefault(group, {})
        if timeout.rank not in first or timeout.number < first[timeout.rank].number:
            first[timeout.rank] = timeout
    for group, timeouts in by_group.items():
        yield _stop_of_timeouts(group, timeouts, output, world_size)
    if not by_group and output.absent:
        behind = dict.fromkeys(sorted(output.absent))
        yield Stop(DEFAULT_GROUP, 0, waiting={}, behind=behind, mismatched={}, silent=())


def _group_of(timeout: Timeout, output: JobOutput) -> str:
    """Returns the group of a collective by what its rank says of its progress: it is in it."""
    for progress in output.progress:
        if progress.rank == timeout.rank and (
            progress.completed < timeout.number <= progress.enqueued
        ):
            return progress.group
    return ""


def _stop_of_timeouts(
    group: str, timeouts: Mapping[int, Timeout], output: JobOutput, world_size: int
) -> Stop:
    number = min(timeout.number for timeout in timeouts.values())
    calls = {rank: _call_of(timeout) for rank, timeout in sorted(timeouts.items())}
    kinds = [call.what for call in calls.values() if call.number == number]
    usual = max(dict.fromkeys(kinds), key=kinds.count)
    behind: dict[int, Call | None] = {
        p.rank: Call(p.enqueued, "", "", p.completed >= p.enqueued, "", p.where)
        for p in output.progress
        if p.rank not in timeouts and p.group in ("", group) and p.enqueued < number
    }
    behind |= {rank: behind.get(rank) for rank in output.absent if rank not in timeouts}
    world_size = max([world_size, *(rank + 1 for rank in timeouts)])
    heard = {*timeouts, *behind, *(p.rank for p in output.progress if p.group in ("", group))}
    return Stop(
        group=group,
        number=number,
        waiting={r: c for r, c in calls.items() if c.number == number and c.what == usual},
        behind=dict(sorted(behind.items())),
        mismatched={r: c for r, c in calls.items() if c.number != number or c.what != usual},
        # Of other groups nobody knows the members.
        silent=tuple(r for r in range(world_size) if r not in heard and group == DEFAULT_GROUP),
    )


def _call_of(timeout: Timeout) -> Call:
    elements = timeout.elements
    sizes = f"of {counted(int(elements), 'element')}" if elements.isdigit() else ""
    limit = f"(given up after {timeout.limit_s:g} s) " if timeout.limit_s else ""
    where = limit + timeout.where
    return Call(timeout.number, timeout.operation, sizes, is_done=False, caller="", where=where)


def _stop_sentences(stop: Stop) -> Iterator[str]:
    """Yields sentences on who waits in which collective, and where the others are."""
    if stop.waiting:
        yield (
            f"{named_ranks(list(stop.waiting))}: in collective {stop.number} of group "
            f"{stop.group}, {_called(next(iter(stop.waiting.values())))}."
        )
    for rank, call in stop.behind.items():
        if call is None and stop.waiting:
            yield f"Rank {rank} has called none."
        elif call is not None:
            state = "ended" if call.is_done else "is still in"
            what = f", {call.what}" if call.what else ""
            yield (
                f"Rank {rank} {state} collective {call.number}{what}{_origin(call)}, and has "
                "called none since."
            )
    for rank, call in stop.mismatched.items():
        number = "" if call.number == stop.number else f" as number {call.number}"
        yield f"Rank {rank} called something else{number}: {_called(call)}."
    if stop.silent:
        yield (
            f"{named_ranks(list(stop.silent))}: no dump and no line; ended, or stuck outside of "
            "PyTorch."
        )


def _called(call: Call) -> str:
    return f"{call.what}{_origin(call)}"


def _origin(call: Call) -> str:
    return f", called at {call.caller}" if call.caller else f" {call.where}" if call.where else ""


def _reports(output: JobOutput, late: Sequence[int]) -> Iterator[str]:
    """Yields what PyTorch itself says of ranks that did not come, and whom torchrun blames."""
    for rank, (what, where) in sorted(output.absent.items()):
        yield f"Rank {rank} {what}, says a rank that waited {where}."
    waited = {timeout.rank for timeout in output.timeouts} - set(late)
    for failure in output.failures:
        if failure.is_root and failure.rank in waited and failure.label == "rank":
            yield (
                f"torchrun names {failure.name} as the first failure: its watchdog ended it while "
                f"it waited {failure.where}."
            )


def mismatched_collectives(job: LeftBehind) -> Verdict | None:
    """Judges whether ranks called different collectives, by TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    output = job.printed.output
    if not output.says_anything:
        raise NotJudged(NO_OUTPUT)
    if not output.mismatches:
        return None
    mismatch = output.mismatches[0]
    calls = [f"Rank {rank} calls {what}" for rank, what in sorted(mismatch.calls.items())]
    return Verdict(
        cause="mismatched-collectives",
        title="ranks call different collectives at the same time",
        evidence=(f"{'; '.join(calls)} {mismatch.where}.",),
        lost_share=None,
        confidence="high",
        reason="PyTorch compared them before they began",
        change="Let all ranks take the same way through the script: no collective in a branch on "
        "the rank or on its data, models with the same parameters in the same order.",
        group=VALIDITY,
    )


def stuck_stacks(job: LeftBehind) -> Verdict | None:
    """Judges by py-spy's dumps which rank is not where the others are."""
    stacks = _with_ranks(job)
    if not stacks:
        raise NotJudged("no dump of py-spy (py-spy dump --pid, for each rank)")
    outside = [stack for stack in stacks if stack.activity in ("code", "loader")]
    inside = [stack for stack in stacks if stack not in outside]
    title = "all ranks that were looked at wait in the exchange"
    change = "Look at ranks that have no dump, then at the network and the devices."
    if outside and inside:
        names = ", ".join(stack.name for stack in outside)
        title = f"{names} {'are' if len(outside) > 1 else 'is'} not where the others wait"
        change = LOOK_INSTEAD
    elif outside:
        title, change = "no rank is in the exchange", "Look at the line where they are."
    return Verdict(
        cause="stuck-stacks",
        title=title,
        evidence=map(_stack_sentence, [*outside, *inside]),
        lost_share=None,
        confidence="medium" if outside and inside else "low",
        reason="a look at one moment; a second dump, some seconds later, shows whether they move",
        change=change,
        group=VALIDITY,
    )


def _with_ranks(job: LeftBehind) -> list[Stack]:
    """Returns stacks with their ranks, which other files tell by the number of the process."""
    ranks = {failure.pid: failure.rank for failure in job.printed.output.failures}
    processes = job.printed.nccl.largest.processes
    ranks |= {int(process): rank for rank, process in processes.items()}
    return [
        replace(stack, rank=ranks.get(stack.pid)) if stack.rank is None else stack
        for stack in job.printed.stacks.stacks
        if stack.frames
    ]


def _stack_sentence(stack: Stack) -> str:
    where = {
        "exchange": "waits in the exchange",
        "device": "waits for the device",
        "backward": "is in its backward pass",
        "loader": "waits for its loader",
        "code": f"is in {stack.frames[0].text}",
    }[stack.activity]
    caller = stack.caller
    called = f", called at {caller.text}" if caller and caller != stack.frames[0] else ""
    return f"{stack.name[0].upper()}{stack.name[1:]} {where}{called} {stack.where}."
