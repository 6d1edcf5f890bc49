"""How many messages outlast a backward pass: on made-up networks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from ddplab_watch.marks import HostClock

from common.benchmarks.buckets import lasting_messages, overlap_lab
from common.benchmarks.buckets.lasting_messages import LastingMessages, gradient_dtype
from common.benchmarks.buckets.overlap_lab import OverlapArm, OverlapLab
from common.benchmarks.steps import FixedBatchStep
from common.perfmodel.collectives import AlphaBeta
from common.runtime.group.process_group import process_group

MIB, GIB = 2**20, 2**30
NVLINK = AlphaBeta(30e-6, 230e9)
ETHERNET = AlphaBeta(200e-6, 1e9)
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@dataclass
class Network:
    """Stands in for all-reduces: what so many take, launched at once."""

    link: AlphaBeta
    most_bytes: int = 0

    def time(self, messages: list[torch.Tensor], worker: object) -> float:
        different = {id(message): message.nbytes for message in messages}
        self.most_bytes = max(self.most_bytes, sum(different.values()))
        return sum(float(self.link.time_s(message.nbytes)) for message in messages)


def messages_on(
    network: Network, device: torch.device, memory_bytes: int, patch: pytest.MonkeyPatch
) -> LastingMessages:
    """Makes messages without memory, on a rank of a network that does not exist."""
    zeros = torch.zeros
    patch.setattr(lasting_messages, "time_in_flight", network.time)
    patch.setattr(torch, "zeros", lambda numel, dtype, device: zeros(numel, device="meta"))
    worker = SimpleNamespace(device=device, is_main=True, gather=lambda item: [item])
    return LastingMessages(worker, memory_bytes)


@pytest.mark.parametrize("pass_s", [0.03, 0.3, 0.6])
@pytest.mark.parametrize("size", [64 * 1024, 8 * MIB, 256 * MIB])
def test_so_many_outlast_the_pass_or_there_are_a_thousand(monkeypatch, pass_s, size):
    network = Network(NVLINK)
    count = messages_on(network, GPU, 3 * GIB, monkeypatch).lasting(size, 2 * pass_s)
    assert count * NVLINK.time_s(size) >= 2 * pass_s or count == 1000
    assert count <= 1000
    assert network.most_bytes <= 3 * GIB


def test_of_slow_ones_there_are_not_many_more_than_last(monkeypatch):
    network = Network(ETHERNET)
    count = messages_on(network, CPU, GIB, monkeypatch).lasting(8 * MIB, 0.6)
    assert 0.6 <= count * ETHERNET.time_s(8 * MIB) <= 2 * 0.6


def test_messages_take_turns_in_eight_buffers():
    worker = SimpleNamespace(device=CPU)
    made = LastingMessages(worker, GIB).make(1024, 20)
    assert len(made) == 20
    assert len({id(message) for message in made}) == 8
    assert all(made[i] is made[i + 8] for i in range(12))
    assert {message.nbytes for message in made} == {1024}
    assert len({id(message) for message in LastingMessages(worker, 3000).make(1024, 20)}) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_messages_have_the_dtype_and_the_bytes_that_were_asked_for(dtype):
    made = LastingMessages(SimpleNamespace(device=CPU), GIB, dtype).make(1024, 3)
    assert {message.dtype for message in made} == {dtype}
    assert {message.nbytes for message in made} == {1024}


def test_gradients_are_sent_in_the_dtype_of_most_of_their_bytes():
    # Nine norms in float32 have 36 bytes, one matrix in bfloat16 has 200.
    norms = [torch.nn.Parameter(torch.zeros(1)) for _ in range(9)]
    matrix = torch.nn.Parameter(torch.zeros(10, 10, dtype=torch.bfloat16))
    assert gradient_dtype([*norms, matrix]) == torch.bfloat16
    wide = torch.nn.Parameter(torch.zeros(100))
    assert gradient_dtype([*norms, matrix, wide]) == torch.float32


def test_messages_larger_than_all_gradients_are_not_launched_by_them():
    lab = OverlapLab.__new__(OverlapLab)  # its ranks and passes have no part in the plan
    lab.gradient_bytes, lab.backward_s = 1000, 1.0
    lab.clock, lab.ready_order = HostClock(), [None] * 4
    lab.messages = SimpleNamespace(dtype=torch.float32, lasting=lambda size, duration_s: 7)
    arms = lab.arms([300, 1000, 1001])
    launched = {arm.size_bytes: arm.messages for arm in arms if arm.kind == "launched"}
    assert launched == {300: 3, 1000: 1}  # of 1001 bytes none is ever full
    for kind in ("continuous", "all_reduce"):
        assert OverlapArm(kind, 1001, 7) in arms
    assert lab.arms([300, 300]) == lab.arms([300])


@pytest.mark.parametrize(("runs_ahead", "buckets"), [(True, [1, 6]), (False, [6])])
def test_a_gpu_is_held_equally_long_in_all_arms_but_those_that_count_buckets(
    monkeypatch, runs_ahead, buckets
):
    """Every arm runs here, on one rank of a CPU."""
    held: dict[str, set[int]] = {}

    def start(worker: object, clock: object, launches: int, *, launch_included: bool = False):
        held.setdefault(kind, set()).add(0 if launch_included else launches)

    monkeypatch.setattr(overlap_lab, "start_together", start)
    kind = ""
    with process_group("cpu") as worker:
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        step = FixedBatchStep(model, lambda module: module(torch.ones(1, 8)).sum(), worker)
        lab = OverlapLab(step)
        lab.clock.runs_ahead = runs_ahead
        arms = lab.arms([100])
        for arm in arms:
            kind = arm.kind
            lab.visit(arm, 0, passes=1)
    assert [arm.messages for arm in arms if arm.kind == "buckets"] == buckets
    assert held.pop("buckets") == {0}
    assert len(set.union(*held.values())) == 1
    assert {"local", "bookkeeping", "launched", "continuous"} < set(held)
