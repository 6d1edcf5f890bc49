"""A1.1: sums on a ring. The group of the ranks offers messages only, and counts their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from judging import on_so_many_ranks

pytestmark = pytest.mark.two_ranks
OFFERS = ("send", "recv", "barrier")
SIZES = ((1,), (2,), (3, 5), (7,), (1000,), (0,))


def check_sums(together, members, generator: np.random.Generator, group=None) -> None:
    """Checks the sums of tensors of any shape and dtype over the ranks of a group."""
    shapes, count = [*SIZES, (int(generator.integers(10**4, 10**5)),)], len(members)
    tensors = []
    for factor in range(1, count + 1):
        floats = [torch.from_numpy(generator.standard_normal(shape)).float() for shape in shapes]
        numbers = torch.from_numpy(generator.integers(-99, 99, 10))
        crossed = torch.from_numpy(generator.random((3, 4))) * factor
        tensors.append([*floats, numbers, crossed])
    expected = [sum(tensor.double() for tensor in same) for same in zip(*tensors, strict=True)]
    expected[-1] = expected[-1].T
    given = [
        (tensors[members.index(rank)] if rank in members else [], group)
        for rank in range(together.world_size)
    ]
    summed = together.call_each("ring", given)
    for rank in members:
        for one, other in zip(summed[rank], expected, strict=True):
            size, where = tuple(one.shape), f"on {count} ranks, rank {rank}"
            assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5), (
                f"{where}: the sums of a tensor of {size}, {one.dtype}, are wrong"
            )


@on_so_many_ranks(2, graded=(3, 4, 5))
def test_sums_of_any_size(on_ranks, ranks: int, generator: np.random.Generator) -> None:
    check_sums(on_ranks(ranks, OFFERS), list(range(ranks)), generator)


def test_sums_of_a_group_of_some_ranks(on_ranks, generator: np.random.Generator) -> None:
    check_sums(on_ranks(4, OFFERS), [1, 2, 3], generator, [1, 2, 3])


@on_so_many_ranks(2, graded=(3, 4))
def test_large_messages_send_what_the_ring_promises(on_ranks, ranks: int) -> None:
    count = 10**5 + 1
    tensors = list(torch.randn(ranks, count, dtype=torch.float64))
    together = on_ranks(ranks, OFFERS)
    together.call_each("ring", [([tensor, torch.ones(1, 1)],) for tensor in tensors])
    promised = 2 * (ranks - 1) / ranks * 8 * count  # of a rank; a chunk may have an element more
    for rank in range(ranks):
        where = f"on {ranks} ranks, rank {rank}"
        messages = together.exchange.sent(rank, "send")
        receivers = {message.ranks[1] for message in messages}
        assert receivers == {(rank + 1) % ranks}, (
            f"{where} sends to others than its right neighbour"
        )
        sent = sum(message.nbytes for message in messages)
        assert abs(sent - promised) <= 4 * 8 * ranks, (
            f"{where} sends {sent / promised:.2f} times what a ring does"
        )
        # Whatever else the ranks could tell each other by: sums that have come from the left, of
        # which zeros may fill up the last chunk.
        sums = [sum(tensors[rank - left] for left in range(term + 1)) for term in range(ranks)]
        sums = [torch.nn.functional.pad(each, (0, ranks - 1)) for each in sums]
        for data in (tensor.flatten() for message in messages for tensor in message.tensors):
            is_sum = len(data) < ranks or any(is_part(data, whole) for whole in sums)
            assert is_sum, f"{where} sends what is no sum of chunks of its left neighbours"


def is_part(data: torch.Tensor, whole: torch.Tensor) -> bool:
    """Returns True if data are elements of a tensor in a row."""
    start = (whole - data[0]).abs().argmin().item()
    part = whole[start : start + len(data)]
    return len(part) == len(data) and torch.allclose(data, part)


@on_so_many_ranks(3, graded=(2,))
def test_messages_in_order_do_not_deadlock(on_ranks, ranks: int) -> None:
    for sums in on_ranks(ranks, OFFERS).call("ring_in_order", 1000):
        assert torch.equal(sums, torch.full((1000,), float(ranks)))
