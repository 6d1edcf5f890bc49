"""Ranks that stay up from script to script, in several places at once."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from common.cluster.emulated import EmulatedCluster
from common.cluster.launch import Series, launch_series


@dataclass(frozen=True)
class Place:
    """A number of ranks, on this machine or on emulated hosts."""

    ranks: int
    hosts: EmulatedCluster | None = None


class KeptRanks:
    """The ranks of each place where a script has run. Where nothing runs they wait.

    Starting ranks takes ten seconds, and 25 on emulated hosts: torchrun and every rank import
    torch. Not for GPUs, whose state does not outlive the fork that runs a script.
    """

    def __init__(self) -> None:
        self._open: dict[Place, tuple[ExitStack, Series]] = {}

    def __enter__(self) -> KeptRanks:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends all ranks."""
        self._end(list(self._open), error)

    @contextmanager
    def series(self, place: Place) -> Iterator[Series]:
        """Yields the ranks of a place, started if they are not up. An exception ends them."""
        if place not in self._open:
            stack = ExitStack()
            series = stack.enter_context(launch_series(place.ranks, hosts=place.hosts))
            self._open[place] = stack, series
        _, series = self._open[place]
        try:
            yield series
        except BaseException:
            self._end([place], sys.exc_info())
            raise

    def end_all_but(self, places: Collection[Place]) -> None:
        """Ends the ranks of all other places."""
        self._end([place for place in self._open if place not in places])

    def _end(
        self, places: Collection[Place], error: tuple[object, ...] = (None, None, None)
    ) -> None:
        """Ends ranks; after an ``error`` without waiting for their scripts."""
        ending = ExitStack()
        for place in places:
            stack, _ = self._open.pop(place)
            ending.push(stack)
        ending.__exit__(*error)
