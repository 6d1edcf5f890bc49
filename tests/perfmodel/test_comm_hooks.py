"""What hooks send, against what PyTorch's own hooks hand to all_reduce in this process."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from perfmodel_support import MIB, make_profile, refused
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.comm_hooks import CastHook
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.model import DdpModel

CAP_MIB = 0.004


@pytest.fixture(scope="module")
def group():
    """Opens a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


class Net(nn.Module):
    """Matrices, a convolution, vectors, and a last layer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 128)
        self.thin = nn.Linear(128, 3)
        self.convolution = nn.Conv1d(3, 40, 9)
        self.last = nn.Linear(40, 50, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.thin(self.wide(x)).T[None]
        return self.last(self.convolution(x)[0].T.to(self.last.weight.dtype)).mean()


def run_ddp(hook=None, **options) -> tuple[list, list[str], nn.Module]:
    """Returns bytes of each all-reduce of the last step, and names in the order they were ready."""
    torch.manual_seed(0)
    model = Net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MIB, **options)
    if hook:
        ddp.register_comm_hook(None, hook)
    sent: list[int] = []
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    real = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        for _ in range(3):
            sent.clear()
            ready.clear()
            ddp.zero_grad()
            ddp(torch.randn(12, 64)).backward()
    finally:
        dist.all_reduce = real
    return sent, list(ready), model


def profile_of(model: nn.Module, ready: list[str]) -> BackwardProfile:
    parameters = dict(model.named_parameters())
    names = list(parameters)
    return make_profile(
        [parameters[name].nbytes for name in ready],
        np.arange(1.0, 1 + len(ready)),
        kinds=[str(parameters[name].dtype) for name in ready],
        registration=[names.index(name) for name in ready],
    )


@pytest.mark.parametrize(
    ("name", "hook"),
    [("fp16", default_hooks.fp16_compress_hook), ("bf16", default_hooks.bf16_compress_hook)],
)
def test_a_cast_sends_what_pytorchs_hook_sends(group, name, hook):
    sent, ready, model = run_ddp(hook)
    profile = profile_of(model, ready)
    buckets = profile_buckets(profile, DdpOptions(CAP_MIB))
    assert len(buckets) > 2  # and the double ones have a bucket of their own
    assert CastHook(name).message_bytes(profile, buckets).tolist() == sent


@pytest.mark.parametrize("view", [False, True])
def test_a_bucket_view_saves_the_copy_back_and_not_the_copy_in(group, view):
    # Gradients set to None are made anew outside of the buckets, and copied in with division.
    with torch.profiler.profile(record_shapes=True) as profiler:
        run_ddp(gradient_as_bucket_view=view)
    names = [event.name for event in profiler.events()]
    copies_back = sum("copy_bucket_to_grad" in name for name in names)
    divisions = sum(name == "aten::mul" for name in names)
    assert (copies_back == 0) == view
    assert divisions >= 3 * 8  # each of the eight gradients in every step
    costs = DdpCosts(copy_in_s_per_byte=1.0, copy_out_s_per_byte=2.0)
    assert costs.as_bucket_view() == DdpCosts(copy_in_s_per_byte=1.0)


def test_half_the_bytes_take_half_the_time_and_the_casts_are_paid():
    # Two buckets of 8 bytes, a byte a second: 4 s each on the wire. Compressing takes 1 s of each
    # from computation before it is sent, decompressing 2 s of each after that.
    profile = make_profile([8, 8], [10.0, 20.0])
    hook = CastHook("fp16", compress_s_per_byte=1 / 8, decompress_s_per_byte=2 / 8)
    timeline = DdpModel(profile, AlphaBeta(0.0, 1.0)).backward(DdpOptions(8 / MIB), hook=hook)
    first, second = timeline.events
    assert (first.ready_s, first.start_s, first.end_s) == (10, 11, 15)
    assert (second.ready_s, second.start_s, second.end_s) == (21, 22, 26)
    assert timeline.compute_end_s == 22
    assert timeline.total_s == 28
    assert [event.size_bytes for event in timeline.events] == [8, 8]


def test_contention_follows_the_bytes_on_the_wire():
    # Each all-reduce of 4 bytes beside computation takes 1 s of it; one of 8 bytes would take 3.
    profile = make_profile([8, 8], [1.0, 9.0], tail_s=10.0)
    costs = DdpCosts(lost_compute=((4.0, 8.0), (1.0, 3.0)))
    timeline = DdpModel(profile, AlphaBeta(0.0, 1.0), costs=costs).backward(
        DdpOptions(8 / MIB), hook=CastHook("bf16")
    )
    assert timeline.compute_end_s == pytest.approx(19 + 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CastHook("fp17"), ["fp17", "fp16", "bf16"]),
        (lambda: CastHook("fp16", compress_s_per_byte=-1), ["less than no time"]),
        (
            lambda: CastHook("fp16").message_bytes(make_profile([4], [1.0], kinds=["int8"]), [[0]]),
            ["dtype", "int8"],
        ),
    ],
)
def test_an_impossible_hook_or_dtype_is_refused(make, words):
    with refused(*words):
        make()
