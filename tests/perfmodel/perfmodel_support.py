"""Helpers of the performance model's tests: GPT-2's gradients in order, profiles, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.models.gpt2 import GPT2, GPT2Config
from common.perfmodel.profile import BackwardProfile

MIB = 2**20


@contextmanager
def refused(*expected: object) -> Iterator[None]:
    """The block raises a UserError of one line that mentions every expected word."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in expected:
        assert str(word) in message


@cache
def gpt2_parameters(name: str) -> dict[str, int]:
    """Bytes of each float32 gradient of a published GPT-2, by name, in registration order."""
    with torch.device("meta"):
        model = GPT2(GPT2Config.named(name))
    return {name: parameter.nbytes for name, parameter in model.named_parameters()}


def gpt2_ready_order(names: Sequence[str]) -> list[str]:
    """The order in which GPT-2's gradients are final (ddp-facts.md, measured on real runs).

    The final norm, the blocks from the last to the first, the positions, and at the very end the
    tied token embedding, which is used first and last.
    """
    in_block = [
        *("mlp.c_proj.bias", "mlp.c_proj.weight", "mlp.c_fc.bias", "mlp.c_fc.weight"),
        *("ln_2.weight", "ln_2.bias"),
        *("attn.c_proj.bias", "attn.c_proj.weight", "attn.c_attn.bias", "attn.c_attn.weight"),
        *("ln_1.weight", "ln_1.bias"),
    ]
    blocks = 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blocks."))
    return [
        *("ln_f.weight", "ln_f.bias"),
        *(f"blocks.{i}.{part}" for i in reversed(range(blocks)) for part in in_block),
        *("wpe.weight", "wte.weight"),
    ]


def make_profile(
    sizes_bytes: Sequence[int],
    ready_s: Sequence[float],
    tail_s: float = 0.0,
    kinds: Sequence[str] = (),
    registration: Sequence[int] = (),
) -> BackwardProfile:
    """A profile of gradients that are ready at these times; computation ends ``tail_s`` later."""
    return BackwardProfile(
        names=tuple(f"p{i}" for i in range(len(sizes_bytes))),
        sizes_bytes=np.array(sizes_bytes, dtype=np.int64),
        ready_s=np.array(ready_s, dtype=float),
        backward_s=float(ready_s[-1]) + tail_s,
        kinds=tuple(kinds) or ("float32",) * len(sizes_bytes),
        registration=tuple(registration) or tuple(reversed(range(len(sizes_bytes)))),
    )


def gpt2_profile(name: str, seconds_per_gib: float = 1.0) -> BackwardProfile:
    """GPT-2's gradients, each taking time in proportion to its size; the embedding's is final
    when the backward pass ends."""
    parameters = gpt2_parameters(name)
    order = gpt2_ready_order(list(parameters))
    sizes = [parameters[key] for key in order]
    ready = np.cumsum(np.array(sizes, dtype=float)) / 2**30 * seconds_per_gib
    return make_profile(sizes, ready, registration=[list(parameters).index(key) for key in order])
