"""A1.4: ZeRO-1 beside the unsharded optimizer: groups, a late one, a schedule, a closure, a resume.

Which rank owns what is seen by what it sends, and that states are divided in the ranks' memory.
"""

from __future__ import annotations

import threading

import pytest
import torch
from judging import (
    assert_nothing_put_by,
    assert_states_equal,
    drawn_values,
    on_so_many_ranks,
)
from probes.models import Mixed, values_of, with_values
from torch import Tensor

pytestmark = pytest.mark.two_ranks
STEPS, AFTER = 6, 3
COUNT, WIDTH = 8, 724
MIB = 2**20


def expected(values: dict[str, Tensor], inputs: Tensor) -> tuple[list[float], list[dict]]:
    """Returns losses and states of the unsharded optimizer."""
    twin = with_values(Mixed(), values)
    optimizer = torch.optim.AdamW(twin.groups(), lr=0.02)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = twin(inputs)
        loss.backward()
        return loss

    losses, states = [], []
    for step in range(STEPS + AFTER):
        if step == 2:
            optimizer.add_param_group(twin.late_group())
        if step == 4:
            optimizer.param_groups[0]["lr"] = 0.1
        if step == STEPS + 1:
            optimizer.param_groups[2]["lr"] = 0.05
        losses.append(optimizer.step(closure).item())
        states.append(values_of(twin))
    return losses[:STEPS], states


class Merged:
    """The saved states of all ranks, of which each gets all.

    Args:
        exchange: of the ranks, whose log is noted when all have saved.
        ranks: number of ranks that save.
    """

    def __init__(self, exchange, ranks: int) -> None:
        self.states: dict[int, dict] = {}
        self.met = threading.Barrier(ranks, self.note, timeout=15)
        self.exchange, self.noted = exchange, 0

    def note(self) -> None:
        """Notes what was sent before."""
        self.noted = len(self.exchange.log)

    def __call__(self, states: dict[int, dict]) -> dict[int, dict]:
        self.states |= states
        self.met.wait()
        return self.states


def check_sharded(together, members: list[int], group: list[int] | None) -> None:
    """Checks that ranks of a group train as one, and that each owns its share."""
    count = len(members)
    [values] = drawn_values(Mixed, 1)
    inputs = torch.randn(4, Mixed.WIDTH, dtype=torch.float64)
    losses, states = expected(values, inputs)
    sizes = [tensor.nbytes for tensor in values.values()]
    merged = Merged(together.exchange, count)
    results = together.call("sharded", values, inputs, STEPS, merged, group)
    for place, rank in enumerate(members):
        one, where = results[rank], f"on {count} ranks, rank {rank}"
        assert one["losses"] == pytest.approx(losses, rel=1e-12), f"{where}: other losses"
        assert len(one["states"]) == len(states)
        for step, (state, wanted) in enumerate(zip(one["states"], states, strict=True)):
            moment = f"step {step}" if step < STEPS else f"step {step - STEPS} after a resume"
            assert_states_equal(state, wanted, f"{where}, {moment}")
        owners = one["owners"]
        assert set(owners) <= set(range(count)), f"{where}: a parameter has no owner in the group"
        shares = [0] * count
        for size, owner in zip(sizes, owners, strict=True):
            shares[owner] += size
        assert max(shares) - min(shares) <= max(sizes), f"{where}: shares in bytes are unequal"
        used = [number != Mixed.IDLE for number in range(len(owners))]
        kept = [owner == place and is_used for owner, is_used in zip(owners, used, strict=True)]
        assert one["kept"] == kept, f"{where}: after a resume it has other states than its share"
        assert owners == results[members[0]]["owners"], f"{where}: owners differ between ranks"
        if count > 1:  # as the others see it: each owner sends its share in each step
            later = [s for s in together.exchange.log[merged.noted :] if s.rank == rank]
            sent = sum(s.nbytes for s in later)
            share = AFTER * shares[place]
            least = AFTER * sum(size for size, is_kept in zip(sizes, kept, strict=True) if is_kept)
            assert least <= sent <= 1.5 * share, f"{where}: it sends {sent} bytes for {share}"


@on_so_many_ranks(1, 3, graded=(2, 4))
def test_it_is_the_unsharded_optimizer_with_divided_states(on_ranks, ranks: int) -> None:
    check_sharded(on_ranks(ranks), list(range(ranks)), None)


def test_a_group_of_some_ranks_shares_among_itself(on_ranks) -> None:
    check_sharded(on_ranks(3), [1, 2], [1, 2])


@on_so_many_ranks(2, graded=(3,))
def test_states_are_divided_in_memory(on_ranks, ranks: int) -> None:
    together = on_ranks(ranks)
    idle = together.idle_bytes()
    with together.meetings() as (meet, met):
        together.call("sharded_memory", meet, COUNT, WIDTH)
    before, after = (meeting.nbytes for meeting in met)
    states = 2 * COUNT * WIDTH**2 * 4
    assert_nothing_put_by(before - idle - ranks * states, ranks)  # weights and gradients
    assert after - before < 1.3 * states + 4 * MIB * ranks, (
        f"on {ranks} ranks, states take {(after - before) / states:.1f} times those of one"
    )
    assert after - before > 0.7 * states, "there are no states"
