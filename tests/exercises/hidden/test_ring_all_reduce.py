"""A1.1: sums on a ring, and what is sent for them, as the network interface counts it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from judging import on_so_many_ranks

pytestmark = pytest.mark.two_ranks
SIZES = ((1,), (2,), (3, 5), (7,), (1000,), (0,))


@on_so_many_ranks(2, 3, graded=(4, 5))
def test_sums_of_any_size(on_ranks, ranks: int, generator: np.random.Generator) -> None:
    shapes = [*SIZES, (int(generator.integers(10**4, 10**5)),)]
    floats = [
        [torch.from_numpy(generator.standard_normal(shape)).float() for shape in shapes]
        for _ in range(ranks)
    ]
    numbers = [torch.from_numpy(generator.integers(-99, 99, 10)) for _ in range(ranks)]
    crossed = [torch.arange(12.0).view(3, 4) * factor for factor in range(1, ranks + 1)]
    tensors = [[*floats[rank], numbers[rank], crossed[rank]] for rank in range(ranks)]
    expected = [sum(tensor.double() for tensor in same) for same in zip(*tensors, strict=True)]
    expected[-1] = expected[-1].T
    for found in on_ranks(ranks).call("ring", tensors):
        assert found["calls"] == 0, "torch's all_reduce was called"
        for one, other in zip(found["sums"], expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@on_so_many_ranks(2, 3, graded=(4,))
def test_large_messages_send_what_the_ring_promises(on_ranks, ranks: int) -> None:
    together, count = on_ranks(ranks), 4 * 2**20 + 1  # 16 MiB
    together.call("ring_once", count)  # connections are there from now on
    before = together.sent_when_quiet()
    together.call("ring_once", count)
    sent = together.sent_when_quiet() - before
    promised = 2 * (ranks - 1) * 4 * count  # of all ranks; headers are below a thousandth
    # On a busy machine TCP sends a few per cent again that were only late.
    assert 0.99 * promised < sent < 1.15 * promised


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_in_order_do_not_deadlock(on_ranks, ranks: int) -> None:
    for found in on_ranks(ranks).call("ring_in_order", 1000):
        assert torch.equal(found, torch.full((1000,), float(ranks)))
