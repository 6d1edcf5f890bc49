"""What ranks send each other, passed on by the check: the only way from one rank to another.

A rank's process is a student's, so nothing that it says of itself is proof. What it sends is: every
collective comes here, with its data, is matched with the other ranks', computed, and returned. The
check reads who sent what, in which order, and before which moment. A state that depends on other
ranks' data can come about in no other way.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LONGEST_S = 15.0
"""Longest wait for another rank; below ``sandbox.ANSWER_S``, so that the reason arrives."""
LARGEST_BYTES = 2**20
"""Most bytes of an operation whose data are kept; of larger ones their number is."""
HELD_BYTES = 2**29
"""Most bytes that are held for ranks: what they launched and have not waited for, and the log."""
LAUNCH_BYTES = 2**10
"""Bytes that a launch counts for, besides its data."""
POINT_TO_POINT = ("send", "recv")
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda parts: parts.sum(0),
    "AVG": lambda parts: parts.mean(0),
    "PRODUCT": lambda parts: parts.prod(0),
    "MIN": lambda parts: parts.amin(0),
    "MAX": lambda parts: parts.amax(0),
}
"""Name of ``torch.distributed.ReduceOp`` → function of the ranks' tensors, stacked."""


class Unmatched(Exception):
    """Ranks that do not launch the same, or that do not launch at all."""


@dataclass(frozen=True)
class Sent:
    """What one rank contributed to one operation.

    A rank that only receives, such as from the root of a broadcast, contributes nothing.

    Attributes:
        rank: number of the rank that sent it, among all ranks.
        operation: name such as ``all_reduce``; ``send`` for a message.
        ranks: ranks of the group, in its order; of a message, its sender and its receiver.
        tensors: what the rank sent; none of more than ``LARGEST_BYTES`` are kept.
        nbytes: bytes of what it sent.
        moment: how many moments the rank had passed (``Exchange.mark``).
    """

    rank: int
    operation: str
    ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    nbytes: int
    moment: int


@dataclass
class Meeting:
    """An operation that ranks of a group launch, one after another.

    Attributes:
        ranks: ranks that have to come.
        came: rank → operation, settings, tensors.
        results: rank → tensors that it receives; None until all have come.
        problem: reason why there are no results; empty where there are.
    """

    ranks: tuple[int, ...]
    came: dict[int, tuple[str, tuple, tuple[Tensor, ...]]] = field(default_factory=dict)
    results: dict[int, list[Tensor]] | None = None
    problem: str = ""


class Exchange:
    """Passes on what ranks send each other.

    Args:
        offers: operations that are passed on; None for all.
    """

    def __init__(self, offers: Collection[str] | None = None) -> None:
        self.offers = offers
        self.log: list[Sent] = []
        self.moments: Counter[int] = Counter()
        self.launched: Counter[tuple] = Counter()
        self.groups: dict[str, tuple[int, ...]] = {}
        self.meetings: dict[tuple, Meeting] = {}
        self.tickets: dict[tuple[int, int], tuple[Meeting, int]] = {}
        self.held_bytes = 0
        self.numbers = itertools.count()
        self.changed = threading.Condition()
        self.abandoned = False

    def sent(self, rank: int | None = None, operation: str = "") -> list[Sent]:
        """Returns what a rank sent, or all ranks did; of one kind of operation, or of all."""
        with self.changed:
            return [
                entry
                for entry in self.log
                if rank in (None, entry.rank) and operation in ("", entry.operation)
            ]

    def mark(self, rank: int) -> None:
        """Notes that a rank has come to the next moment."""
        with self.changed:
            self.moments[rank] += 1

    def launch(
        self,
        rank: int,
        group: str,
        ranks: Sequence[int],
        operation: str,
        settings: Sequence,
        tensors: Sequence[Tensor],
    ) -> int:
        """Takes a rank's part in an operation; does not wait for others.

        Args:
            rank: who launches it, among all ranks.
            group: name of the group.
            ranks: the group's, in its order.
            operation: such as ``all_reduce``.
            settings: what all ranks must launch alike: name of the reduction, root, and the like;
                for a message sender, receiver and tag.
            tensors: what the rank contributes; what it receives has its shape and dtype.

        Returns:
            the ticket for ``wait``.

        Raises:
            PermissionError: the operation is not offered.
            Unmatched: ranks say differently who is in the group, or launch more than is held.
        """
        if self.offers is not None and operation not in self.offers:
            raise PermissionError(f"{operation} is not offered to this exercise")
        tensors, nbytes = tuple(tensors), sum(tensor.nbytes for tensor in tensors)
        is_message = operation in POINT_TO_POINT
        path = (group, *settings) if is_message else (group,)
        members = tuple(settings[:2]) if is_message else tuple(ranks)
        # A rank counts what it sends to another apart from what it receives of it.
        counted = (rank, path, operation if is_message else "")
        with self.changed:
            if self.held_bytes + nbytes > HELD_BYTES:
                raise Unmatched(
                    f"rank {rank}'s {operation} makes more than {HELD_BYTES >> 20} MiB that ranks "
                    "launched and did not wait for"
                )
            if self.groups.setdefault(group, tuple(ranks)) != tuple(ranks):
                raise Unmatched(f"rank {rank} has other ranks in group {group} than another rank")
            number = self.launched[counted]
            self.launched[counted] += 1
            is_sender = operation != "broadcast" or ranks[settings[0]] == rank
            if is_sender and operation != "recv":
                kept = tensors if nbytes <= LARGEST_BYTES else ()
                moment = self.moments[rank]
                self.log.append(Sent(rank, operation, members, kept, nbytes, moment))
                self.held_bytes += LAUNCH_BYTES + sum(tensor.nbytes for tensor in kept)
            meeting = self.meetings.setdefault((path, number), Meeting(members))
            meeting.came[rank] = (operation, tuple(settings), tensors)
            if set(meeting.came) == set(meeting.ranks):
                settle(meeting)
                del self.meetings[path, number]
                self.changed.notify_all()
            ticket = next(self.numbers)
            self.tickets[rank, ticket] = meeting, nbytes
            self.held_bytes += nbytes
            return ticket

    def wait(self, rank: int, ticket: int) -> list[Tensor]:
        """Returns what a rank receives, once all have launched their part.

        Raises:
            Unmatched: ranks launched different operations, or one of them nothing.
        """
        until = time.monotonic() + LONGEST_S
        with self.changed:
            meeting, nbytes = self.tickets.pop((rank, ticket))
            self.held_bytes -= nbytes
            while meeting.results is None and not meeting.problem:
                remaining = until - time.monotonic()
                if self.abandoned or remaining <= 0 or not self.changed.wait(remaining):
                    meeting.problem = meeting.problem or missing(meeting)
            if meeting.problem:
                self.changed.notify_all()
                raise Unmatched(meeting.problem)
            return meeting.results[rank]

    def has_come(self, rank: int, ticket: int) -> bool:
        """Returns True if ``wait`` would not wait."""
        with self.changed:
            meeting, _ = self.tickets[rank, ticket]
            return meeting.results is not None or bool(meeting.problem)

    def abandon(self) -> None:
        """Lets nobody wait any more."""
        with self.changed:
            self.abandoned = True
            self.changed.notify_all()


def missing(meeting: Meeting) -> str:
    """Returns who waits in an operation, and for whom."""
    absent = sorted(set(meeting.ranks) - set(meeting.came))
    rank, (operation, *_) = next(iter(sorted(meeting.came.items())))
    return f"rank {rank} waits in {operation}, which rank {absent[0]} does not launch"


def settle(meeting: Meeting) -> None:
    """Computes what the ranks of a meeting receive, or says why they do not match."""
    meeting.problem = mismatch(meeting)
    if meeting.problem:
        return
    operation, settings, _ = meeting.came[meeting.ranks[0]]
    parts = [meeting.came[rank][2] for rank in meeting.ranks]
    received = RESULTS[operation if operation not in POINT_TO_POINT else "send"](parts, settings)
    meeting.results = dict(zip(meeting.ranks, received, strict=True))


def mismatch(meeting: Meeting) -> str:
    """Returns in what two ranks' parts of an operation differ, or nothing."""
    first = meeting.ranks[0]
    for rank in meeting.ranks[1:]:
        parts = [described(*meeting.came[member]) for member in (first, rank)]
        if parts[0] != parts[1]:
            return f"rank {first} launches {parts[0]} where rank {rank} launches {parts[1]}"
    return ""


def described(operation: str, settings: tuple, tensors: tuple[Tensor, ...]) -> str:
    """Returns what ranks must launch alike, in words."""
    of = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors
    )
    name = "a message" if operation in POINT_TO_POINT else operation
    return f"{name} of {of or 'nothing'}{f' {settings}' if settings else ''}"


def reduced(parts: list, settings: tuple) -> list[list[Tensor]]:
    """Returns the ranks' tensors, reduced, for each rank."""
    stacked = [torch.stack(tensors) for tensors in zip(*parts, strict=True)]
    results = [REDUCTIONS[settings[0]](tensors).to(tensors.dtype) for tensors in stacked]
    return [results for _ in parts]


def reduced_and_scattered(parts: list, settings: tuple) -> list[list[Tensor]]:
    """Returns a rank's own of the reduced tensors; each rank sends one for every rank."""
    [results, *_] = reduced(parts, settings)
    return [[tensor] for tensor in results]


RESULTS: dict[str, Callable[[list, tuple], list[list[Tensor]]]] = {
    "all_reduce": reduced,
    "broadcast": lambda parts, settings: [list(parts[settings[0]]) for _ in parts],
    "all_gather": lambda parts, _: [list(itertools.chain(*parts)) for _ in parts],
    "reduce_scatter": reduced_and_scattered,
    "all_to_all": lambda parts, _: [[part[n] for part in parts] for n in range(len(parts))],
    "barrier": lambda parts, _: [[] for _ in parts],
    "send": lambda parts, _: [[], list(parts[0])],
}
"""Operation → function of all ranks' tensors and the settings, which returns what each receives.
``reduce``, ``gather`` and ``scatter`` are made of the others (``judged_group``)."""
