"""Assignment 0: small cases that can be done by hand."""

from __future__ import annotations

import pytest
import torch

from common.exercises.accumulated_step import accumulated_step
from common.exercises.step_flops import forward_flops, training_flops, utilisation
from common.exercises.step_memory import block_saves, loss_saves, norm_saves, state_bytes
from common.exercises.tiled_attention import TiledAttention


def test_a0_1_states_of_a_thousand_parameters() -> None:
    assert sum(state_bytes(1000).values()) == 16_000
    assert sum(state_bytes(1000, "sgd").values()) == 8_000


def test_a0_1_a_block_of_two_tokens_and_four_channels() -> None:
    assert block_saves(2, 2, 4, 1) == {
        "residual stream": 64,
        "norm outputs": 96,
        "attention": 128,
        "attention scores": 8,
        "feed-forward": 256,
    }
    assert block_saves(2, 2, 4, 1, fused_attention=False)["attention scores"] == 16
    assert norm_saves(2, 4) == 80
    assert loss_saves(2, 10) == 100


def test_a0_2_a_model_of_one_layer() -> None:
    # 12 · 4² weights in the block, 40 in the head; attention 4 · 4 · 8.
    assert forward_flops(1, 4, 10, 8) == 2 * (192 + 40) + 128
    assert training_flops(1, 4, 10, 8) == 3 * forward_flops(1, 4, 10, 8)
    assert utilisation(50.0, 10**9, 10**11) == pytest.approx(0.5)


def test_a0_3_two_halves_are_the_whole() -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 3)
    whole, model = (torch.nn.Linear(3, 1) for _ in range(2))
    model.load_state_dict(whole.state_dict())
    loss = whole(batch).square().mean()
    loss.backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean, _ = accumulated_step(
        model, optimizer, batch.split(3), lambda model, piece: model(piece).square().mean()
    )
    assert mean == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(model.weight, whole.weight)


def test_a0_3_unequal_pieces_are_clipped_together() -> None:
    torch.manual_seed(0)
    batch, sizes = torch.randn(6, 3), [1, 5]
    whole, model = (torch.nn.Linear(3, 1) for _ in range(2))
    model.load_state_dict(whole.state_dict())
    whole(batch).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    computed = []

    def loss_of(model: torch.nn.Module, piece: torch.Tensor) -> torch.Tensor:
        computed.append(len(piece))
        return model(piece).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, norm_before = accumulated_step(model, optimizer, batch.split(sizes), loss_of, 0.1)
    assert computed == sizes, "samples of each call of loss_of"
    assert norm_before == pytest.approx(norm.item(), rel=1e-5), "the norm before it was bounded"
    torch.testing.assert_close(model.weight, whole.weight, rtol=1e-4, atol=1e-5)


def test_a0_4_attention_of_five_tokens() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 5, 4, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    expected = (query @ key.mT / 2).softmax(-1) @ value
    result = TiledAttention.apply(query, key, value)
    torch.testing.assert_close(result, expected)
    weights = torch.randn(1, 5, 4)
    torch.testing.assert_close(
        torch.autograd.grad((result * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
    )
