"""Helpers of the performance model's tests: refusals, GPT-2's gradients in order, generated
profiles, networks and caps, and a simulation in small steps of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from common.errors import UserError
from common.models.gpt2 import GPT2, GPT2Config
from common.perfmodel.collectives import AlphaBeta, MeasuredAllReduce
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.ddp.recurrence import Traffic

MIB = 2**20
STEPS = 300  # at least, of a whole backward pass
TINY = 1e-9


@contextmanager
def refused(*expected: object) -> Iterator[None]:
    """Asserts that the block raises a UserError of one line with every expected word."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert "np.float64" not in message  # a value is shown as the user wrote it
    for word in expected:
        assert str(word) in message


def write_csv(path: Path, header: str, rows: Iterable[Sequence]) -> Path:
    """Writes a table of these rows."""
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


@cache
def gpt2_parameters(name: str) -> dict[str, int]:
    """Returns bytes by name of a published GPT-2's float32 gradients, in registration order."""
    with torch.device("meta"):
        model = GPT2(GPT2Config.named(name))
    return {name: parameter.nbytes for name, parameter in model.named_parameters()}


def gpt2_ready_order(names: Sequence[str]) -> list[str]:
    """Orders GPT-2's gradients as they are final (ddp-facts.md, measured on real runs).

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
    """Makes a profile of gradients ready at these times; computation ends ``tail_s`` later."""
    return BackwardProfile(
        names=tuple(f"p{i}" for i in range(len(sizes_bytes))),
        sizes_bytes=np.array(sizes_bytes, dtype=np.int64),
        ready_s=np.array(ready_s, dtype=float),
        backward_s=float(ready_s[-1]) + tail_s,
        kinds=tuple(kinds) or ("float32",) * len(sizes_bytes),
        registration=tuple(registration) or tuple(reversed(range(len(sizes_bytes)))),
    )


def gpt2_profile(name: str, seconds_per_gib: float = 1.0) -> BackwardProfile:
    """Makes a profile of GPT-2's gradients, each taking time in proportion to its size; the
    embedding's is final when the backward pass ends."""
    parameters = gpt2_parameters(name)
    order = gpt2_ready_order(list(parameters))
    sizes = [parameters[key] for key in order]
    ready = np.cumsum(np.array(sizes, dtype=float)) / 2**30 * seconds_per_gib
    return make_profile(sizes, ready, registration=[list(parameters).index(key) for key in order])


def multiples(low: int, high: int) -> st.SearchStrategy[float]:
    """Draws numbers that add up without rounding, so that what is simultaneous stays so."""
    return st.integers(64 * low, 64 * high).map(lambda count: count / 64)


@st.composite
def profiles(draw, kinds=("float32",)):
    """Draws up to ten gradients of 1 to 60 bytes; some ready at once, computation may follow."""
    count = draw(st.integers(1, 10))
    gaps = draw(st.lists(st.just(0.0) | multiples(0, 3), min_size=count, max_size=count))
    return make_profile(
        draw(st.lists(st.integers(1, 60), min_size=count, max_size=count)),
        np.cumsum(gaps),
        tail_s=draw(st.just(0.0) | multiples(0, 2)),
        kinds=draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count)),
        registration=draw(st.permutations(range(count))),
    )


@st.composite
def networks(draw):
    """Draws a formula, or a measured curve with dips."""
    if draw(st.booleans()):
        return AlphaBeta(draw(multiples(0, 2)), draw(st.sampled_from([8.0, 64.0, 512.0])))
    sizes = sorted(draw(st.sets(st.integers(1, 300), min_size=2, max_size=6)))
    times = draw(st.lists(multiples(1, 200), min_size=len(sizes), max_size=len(sizes)))
    return MeasuredAllReduce(sizes, np.array(times) / 64)


CAPS_BYTES = st.integers(1, 250)


def greedy_groups(sizes: list[int], cap: int) -> list[list[int]]:
    """Groups gradients in ready order, a bucket closed as soon as it holds the cap."""
    groups: list[list[int]] = [[]]
    for index in range(len(sizes)):
        groups[-1].append(index)
        if sum(sizes[i] for i in groups[-1]) >= cap and index + 1 < len(sizes):
            groups.append([])
    return groups


def integrate(traffic: Traffic, in_flight: int, gain: np.ndarray) -> tuple[list, list, float]:
    """Simulates starts, ends and the end of computation, as a description and no more.

    At any moment the first buckets that are launched and not done are under way, up to the limit.
    Each has its part of the link; what they take from computation is taken at the speed at which
    they advance. A step is cut short where anything begins or ends.
    """
    count = len(traffic.alone_s)
    done = [0.0] * count
    starts: list = [None] * count
    ends: list = [None] * count
    now = work = 0.0
    compute_end = None
    dt = (traffic.total_work + traffic.beside_s.sum()) / STEPS
    while None in ends or compute_end is None:
        computing = traffic.total_work - work > TINY
        if not computing and compute_end is None:
            compute_end = now
        active = [i for i in range(count) if starts[i] is not None and ends[i] is None]
        for i in range(count):
            before = all(start is not None for start in starts[:i])
            launched = traffic.launched_work[i] - work < TINY
            if starts[i] is None and before and launched and len(active) < in_flight:
                starts[i] = now
                active.append(i)
        if None not in ends and not computing:
            break
        speed = {}
        for i in active:
            part = gain[i] / len(active) if len(active) > 1 else 1.0
            speed[i] = part / (traffic.beside_s[i] if computing else traffic.alone_s[i])
        taken = sum(speed[i] * (traffic.beside_s[i] - traffic.progress_s[i]) for i in active)
        rate = max(0.0, 1.0 - taken) if computing else 0.0
        step = dt
        for i in active:
            step = min(step, (1 - done[i]) / speed[i])
        if rate > TINY:
            upcoming = [i for i in range(count) if starts[i] is None][:1]
            marks = [traffic.total_work, *(traffic.launched_work[i] for i in upcoming)]
            ahead = [mark - work for mark in marks if mark - work > TINY]
            step = min([step, *(gap / rate for gap in ahead)])
        now += step
        work += rate * step
        for i in active:
            done[i] += speed[i] * step
            if done[i] > 1 - TINY:
                ends[i] = now
    return starts, ends, compute_end
