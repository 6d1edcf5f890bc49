"""A1.4: ZeRO-1 beside the unsharded optimizer: groups, a late one, a schedule, a closure."""

from __future__ import annotations

import pytest
import torch
from judging import assert_states_equal, on_so_many_ranks
from probes.models import groups, layers

pytestmark = pytest.mark.two_ranks
STEPS, AFTER = 6, 2


def expected(seed: int, inputs: torch.Tensor) -> tuple[list[float], list[dict], int]:
    """Returns losses and states of the unsharded optimizer, and the bytes of the largest tensor."""
    twin = layers(5, 9, seed)
    optimizer = torch.optim.AdamW(groups(twin), lr=0.02)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = twin(inputs).square().mean()
        loss.backward()
        return loss

    losses, states = [], []
    for step in range(STEPS + AFTER):
        if step == 2:
            optimizer.add_param_group({"params": twin[4].parameters(), "lr": 0.03})
        if step == 4:
            optimizer.param_groups[0]["lr"] = 0.1
        losses.append(optimizer.step(closure).item())
        states.append({name: value.clone() for name, value in twin.state_dict().items()})
    return losses[:STEPS], states, max(parameter.nbytes for parameter in twin.parameters())


@on_so_many_ranks(1, 2, 3, graded=(4,))
def test_it_is_the_unsharded_optimizer_with_divided_states(
    on_ranks, ranks: int, variant: int
) -> None:
    torch.manual_seed(variant)
    inputs = torch.randn(4, 9, dtype=torch.float64)
    losses, states, largest = expected(variant + 5, inputs)
    for found in on_ranks(ranks).call("sharded", variant + 5, STEPS, inputs):
        assert found["losses"] == pytest.approx(losses, rel=1e-12)
        assert len(found["states"]) == len(states)
        for one, other in zip(found["states"], states, strict=True):
            assert_states_equal(one, other)
        shares = [0] * ranks
        for nbytes, owner in found["owners"]:
            shares[owner] += nbytes
        assert max(shares) - min(shares) <= largest
        assert found["kept"] == 2 * shares[found["rank"]]
