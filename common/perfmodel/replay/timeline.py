"""A program that was seen or run as boxes on lanes, for a trace and for a figure."""

from __future__ import annotations

from collections.abc import Sequence

from common.perfmodel.perfetto_trace import Box
from common.perfmodel.replay.engine import Replayed
from common.perfmodel.replay.program import DEVICE, EXCHANGE, HOST, Program

COMPUTES, LAUNCHES, KERNEL, WAITS = "computes", "launches", "kernel", "waits for the last rank"
JOINED_S = 2e-6
"""Boxes of one name that are no further apart are drawn as one."""


def seen_boxes(program: Program) -> list[Box]:
    """Returns what the traces show."""
    return _boxes(program, [program.seen_s.get(index) for index in range(len(program.lane))])


def replayed_boxes(replayed: Replayed) -> list[Box]:
    """Returns what the replay gives."""
    times = zip(replayed.start_s.tolist(), replayed.end_s.tolist(), strict=True)
    return _boxes(replayed.program, list(times))


def _boxes(program: Program, times: Sequence[tuple[float, float] | None]) -> list[Box]:
    on_device = any(lane.kind == DEVICE for lane in program.lanes)
    usual = {HOST: LAUNCHES if on_device else COMPUTES, DEVICE: KERNEL, EXCHANGE: "sends"}
    call_of = {member: call for call in program.calls for member in call.members}
    counts: dict[tuple[int, str], int] = {}
    boxes: list[Box] = []
    for lane in program.lanes:
        counts[lane.rank, lane.kind] = number = counts.get((lane.rank, lane.kind), 0) + 1
        title = f"rank {lane.rank} {lane.kind}" + (f" {number}" if number > 1 else "")
        free_s: list[float] = []  # when each of the boxes that may be under way at once has ended
        for operation in lane.operations:
            if (at := times[operation]) is None:
                continue
            start_s, end_s = at
            index = next((i for i, free in enumerate(free_s) if free <= start_s), len(free_s))
            free_s[index : index + 1] = [end_s]
            name = title if index == 0 else f"{title}, at once {index + 1}"
            call = call_of.get(operation)
            if call is None:
                label = program.label[operation] or usual[lane.kind]
                boxes.append(Box(name, label, start_s, end_s))
                continue
            arrived = [times[member] for member in call.members]
            last_s = max((other[0] for other in arrived if other), default=start_s)
            last_s = min(max(last_s, start_s), end_s)
            boxes += [Box(name, WAITS, start_s, last_s), Box(name, call.operation, last_s, end_s)]
    return _joined([box for box in boxes if box.end_s > box.start_s])


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Joins boxes of one name that follow each other on a lane."""
    joined: list[Box] = []
    last_of: dict[str, int] = {}
    for box in sorted(boxes, key=lambda box: box.start_s):
        before = joined[last_of[box.lane]] if box.lane in last_of else None
        if before and before.name == box.name and box.start_s - before.end_s < JOINED_S:
            end_s = max(before.end_s, box.end_s)
            joined[last_of[box.lane]] = Box(box.lane, box.name, before.start_s, end_s)
            continue
        last_of[box.lane] = len(joined)
        joined.append(box)
    return joined
