"""What several checks need to judge by."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from numbers import Real

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from probes.models import values_of
from torch import Tensor, nn

from common.course.sandbox.exchange import Exchange

MOST_PUT_BY_MIB = 8
IS_GRADED = "DDPLAB_GRADED" in os.environ
DRAWN = settings(
    max_examples=100 if IS_GRADED else settings().max_examples,
    phases=Phase if IS_GRADED else (Phase.explicit, Phase.generate),
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Of checks that draw cases: the student's process is the same for all of them, and a case that
fails is made smaller only for a student, who is told."""


def on_so_many_ranks(*numbers: int, graded: tuple[int, ...]) -> pytest.MarkDecorator:
    """Returns the mark of a check on these numbers of ranks, and on others only to grade."""
    more = [pytest.param(number, marks=pytest.mark.grading) for number in graded]
    return pytest.mark.parametrize("ranks", [*numbers, *more])


def drawn_values(make: Callable[[], nn.Module], ranks: int) -> list[dict[str, Tensor]]:
    """Draws each rank's values of a model's parameters and buffers.

    They are no function of the variant, so that no rank can know what another one has.
    """
    torch.manual_seed(secrets.randbits(62))
    return [values_of(make()) for _ in range(ranks)]


def drawn_tokens(ranks: int, steps: int, parts: int = 1) -> list[list[list[Tensor]]]:
    """Draws tokens: rank → step → micro-batch → [6] of 0 to 10."""
    torch.manual_seed(secrets.randbits(62))
    return [
        [[torch.randint(11, (6,)) for _ in range(parts)] for _ in range(steps)]
        for _ in range(ranks)
    ]


def shuffled(items: Iterable, draw: np.random.Generator) -> list:
    """Returns items in any order, so that none can be told by its number."""
    items = list(items)
    return [items[place] for place in draw.permutation(len(items))]


def assert_close(value: object, expected: float, words: str, rel: float = 1e-6) -> None:
    """Raises unless a value is a number, and the expected one but for rounding.

    An array without elements is equal to whatever ``pytest.approx`` expects of a number.
    """
    assert isinstance(value, Real), f"{words}: no number"
    assert value == pytest.approx(expected, rel=rel), words


def assert_nothing_put_by(nbytes: int, processes: int = 1) -> None:
    """Raises if processes begin with memory that they could give back while they are measured."""
    mib = nbytes / processes / 2**20
    assert mib < MOST_PUT_BY_MIB, f"{mib:.0f} MiB are taken before anything is computed"


def assert_states_equal(
    states: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str
) -> None:
    """Raises unless every tensor is the expected one, but for rounding.

    Args:
        states, expected: name → tensor.
        where: rank and moment, for the message.
    """
    if list(states) != list(expected):
        raise AssertionError(f"{where}: names of parameters and buffers have changed")
    for name, value in states.items():
        tolerance = 1e-6 if value.dtype == torch.float32 else 1e-10
        wanted = expected[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise AssertionError(f"{where}: {name} has another shape or dtype")
        if not torch.allclose(value, wanted, rtol=tolerance, atol=tolerance):
            off = (value - wanted).abs().max().item()
            raise AssertionError(f"{where}: {name} is off by up to {off:.2g}")


def assert_sent(exchange: Exchange, rank: int, gradients: Iterable[Tensor], ranks: int) -> None:
    """Raises unless a rank's all-reduces had each of its gradients once, and nothing else.

    In whatever order, together or apart, and divided by the number of ranks or not.
    """
    expected = torch.cat([each.flatten().double() for each in gradients]).sort().values
    launched = [one for one in exchange.sent(rank, "all_reduce") if len(one.ranks) == ranks]
    tensors = [tensor for one in launched for tensor in one.tensors]
    sent = torch.cat([torch.zeros(0), *(t.flatten().double() for t in tensors)]).sort().values
    if len(sent) != len(expected):
        raise AssertionError(
            f"on {ranks} ranks, rank {rank} exchanges {len(sent)} elements for {len(expected)}"
        )
    for scale in (1.0, 1.0 / ranks):
        if torch.allclose(sent, expected * scale, rtol=1e-6, atol=1e-8):
            return
    raise AssertionError(f"on {ranks} ranks, rank {rank} exchanges other values than its gradients")
