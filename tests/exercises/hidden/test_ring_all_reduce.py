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


@on_so_many_ranks(2, 3, graded=(4, 5))
def test_sums_of_any_size(on_ranks, ranks: int, generator: np.random.Generator) -> None:
    check_sums(on_ranks(ranks, OFFERS), list(range(ranks)), generator)


def test_sums_of_a_group_of_some_ranks(on_ranks, generator: np.random.Generator) -> None:
    check_sums(on_ranks(4, OFFERS), [1, 2, 3], generator, [1, 2, 3])


@on_so_many_ranks(2, 3, graded=(4,))
def test_large_messages_send_what_the_ring_promises(on_ranks, ranks: int) -> None:
    count = 10**5 + 1
    together = on_ranks(ranks, OFFERS)
    together.call("ring", [torch.ones(count), torch.ones(1, 1)])
    promised = 2 * (ranks - 1) / ranks * 4 * count  # of a rank; a chunk may have an element more
    for rank in range(ranks):
        sent = sum(one.nbytes for one in together.exchange.sent(rank, "send"))
        assert abs(sent - promised) <= 4 * 4 * ranks, (
            f"on {ranks} ranks, rank {rank} sends {sent / promised:.2f} times what a ring does"
        )


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_in_order_do_not_deadlock(on_ranks, ranks: int) -> None:
    for sums in on_ranks(ranks, OFFERS).call("ring_in_order", 1000):
        assert torch.equal(sums, torch.full((1000,), float(ranks)))
