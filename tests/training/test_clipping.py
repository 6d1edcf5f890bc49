"""Gradients are limited in few launches on a GPU; the oracle is their joint norm in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from common.training import step
from common.training.step import limit_in_few_launches

WORKER = Path(__file__).with_name("clipping_worker.py")
STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD")


def joint_norm(gradients: list[Tensor]) -> float:
    return torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()


def drawn() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(size) for size in ((7, 5), (11,), (3, 2, 4), ())]


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_whole_gradients_are_scaled_to_the_limit_and_never_up(limit: float) -> None:
    before, gradients = drawn(), drawn()
    norm = limit_in_few_launches(gradients, limit)
    assert norm.item() == pytest.approx(joint_norm(before), rel=1e-6)
    factor = min(1, limit / joint_norm(before))
    for one, other in zip(gradients, before, strict=True):
        torch.testing.assert_close(one, other * factor, rtol=1e-5, atol=0)


def test_without_a_limit_the_norm_is_measured_only() -> None:
    gradients = drawn()
    assert limit_in_few_launches(gradients, math.inf).item() == pytest.approx(joint_norm(drawn()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, drawn(), strict=True))


@pytest.mark.parametrize(("device", "few"), [("cpu", 0), ("meta", 2)])  # "meta" for a GPU
def test_gradients_on_a_gpu_are_limited_in_few_launches(monkeypatch, device: str, few: int) -> None:
    limited = []
    monkeypatch.setattr(
        step, "limit_in_few_launches", lambda gradients, limit: limited.extend(gradients)
    )
    model = nn.Linear(4, 3, device=device)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step.limit_gradients(model, 0.5)
    assert len(limited) == few


@pytest.fixture(scope="module")
def four_ranks(rank_server, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clipping")
    rank_server.succeed(WORKER, folder, *STRATEGIES, ranks=4)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_spread_gradients_are_scaled_by_the_norm_of_the_whole(four_ranks, strategy: str) -> None:
    found = torch.load(four_ranks / f"{strategy}.pt")
    expected = joint_norm(found["before"])
    assert expected > 1  # so that the limit of 0.5 is one
    assert found["norms of all ranks"] == pytest.approx([expected] * 4, rel=1e-5)
    for one, other in zip(found["after"], found["before"], strict=True):
        torch.testing.assert_close(one, other * (0.5 / expected), rtol=1e-4, atol=1e-9)
    # torch's own takes three for each gradient that is a DTensor.
    assert found["launches"] < len(found["before"])
