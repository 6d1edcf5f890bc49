"""A job as lanes of operations: the threads and streams of every rank, and what waits for what.

A lane does its operations in order. An operation begins when the one before it on its lane has
ended and all that it waits for has, and takes its work. A *call* is a collective: its operations,
one on each rank, begin when they may, and end together once the last has begun and the call's own
time has passed. So waiting is nowhere in a program: it comes out of running it (``engine``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

HOST, DEVICE, EXCHANGE = "host", "device", "exchange"
"""Kinds of lanes: a thread that computes or launches, a stream, and whatever sends."""


@dataclass
class Lane:
    """Operations that are done in order.

    Attributes:
        rank: the rank that it belongs to.
        kind: HOST, DEVICE or EXCHANGE.
        servers: number of operations that may be under way at once: gloo has two threads.
        operations: ids, in order.
    """

    rank: int
    kind: str
    servers: int = 1
    operations: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """A collective.

    Attributes:
        operation: such as ``all_reduce``.
        size_bytes: bytes of the message; 0 where they are not known.
        own_s: seconds that it takes from the arrival of its last rank, with the link to itself.
        members: ids of its operations, one of each rank whose trace is there.
        item_bytes: bytes of an element; 0 where they are not known.
        shares: whether it shares the link with the calls that are under way meanwhile.
    """

    operation: str
    size_bytes: float
    own_s: float
    members: tuple[int, ...]
    item_bytes: int = 0
    shares: bool = False


@dataclass(frozen=True)
class Step:
    """A step of one rank: from the beginning of one operation to that of another, or its end.

    Attributes:
        number: number in the trace.
        first: id of the operation that begins it.
        last: id of the operation whose beginning ends it.
        until_end: whether it is the end of ``last`` instead.
        measured_s: seconds that the trace shows.
    """

    rank: int
    number: int
    first: int
    last: int
    until_end: bool
    measured_s: float


@dataclass
class Program:
    """The operations of a job, in columns by id.

    Attributes:
        lanes: all lanes.
        lane: index of each operation's lane.
        work_s: seconds that each takes; of a call's operation, what its rank takes after the call.
        after: (id, seconds) of each: it begins so long after that operation ended, at the earliest.
        label: kind of each, such as ``loader``; operations with the same label are changed alike.
        not_before_s: id → earliest beginning, for what begins a lane.
        seen_s: id → beginning and end that the trace shows, on the program's clock.
        calls: all collectives.
        steps: all steps, of every rank.
    """

    lanes: list[Lane] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    after: list[list[tuple[int, float]]] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    not_before_s: dict[int, float] = field(default_factory=dict)
    seen_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add_lane(self, rank: int, kind: str, servers: int = 1) -> int:
        """Adds a lane and returns its index."""
        self.lanes.append(Lane(rank, kind, servers))
        return len(self.lanes) - 1

    def add(
        self, lane: int, work_s: float, after: Sequence[tuple[int, float]] = (), label: str = ""
    ) -> int:
        """Adds an operation at the end of a lane and returns its id."""
        self.lane.append(lane)
        self.work_s.append(work_s)
        self.after.append(list(after))
        self.label.append(label)
        self.lanes[lane].operations.append(len(self.lane) - 1)
        return len(self.lane) - 1

    @property
    def ranks(self) -> list[int]:
        """Returns the ranks whose lanes are there."""
        return sorted({lane.rank for lane in self.lanes})

    def changed(
        self, work_s: list[float] | None = None, calls: list[Call] | None = None
    ) -> Program:
        """Returns the same graph with other work or other calls."""
        return replace(
            self,
            work_s=self.work_s if work_s is None else work_s,
            calls=self.calls if calls is None else calls,
        )
