"""The order of visits: arms take turns in rounds, so that a drift of the machine favours none."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def rotated(items: Collection[Item], round_: int) -> tuple[Item, ...]:
    """Returns the order of a round: rotated by one every two rounds, each second round backwards.

    Over two rounds every item has the same mean position, so a steady drift of the machine
    favours none, and over many no item always follows the same other.
    """
    items = tuple(items)
    shift = round_ // 2 % len(items)
    order = items[shift:] + items[:shift]
    return order[::-1] if round_ % 2 else order


def rotated_rounds(
    items: Collection[Item], rounds: int, *, first: int = 0
) -> Iterator[tuple[int, Item]]:
    """Yields ``(round_, item)`` for the rounds from ``first`` up to ``rounds``, in rotated order.

    Args:
        items: visited once a round, each.
        rounds: the number after the last round's.
        first: the first round's number, below 0 where rounds of warm-up come before.
    """
    for round_ in range(first, rounds):
        for item in rotated(items, round_):
            yield round_, item
