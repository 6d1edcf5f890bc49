"""Faults that all ranks share: modes left on, needless work, exchanges of the script's own."""

from __future__ import annotations

import os
import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile
from torch.utils import data
from torch.utils.checkpoint import checkpoint
from torch.utils.data import dataloader

from common.diagnose.studies.planting import Fault, change_ddp, in_place_of, slow_forward


def tracker(bins: float) -> None:
    """Makes a histogram of so many bins of each module's output and of each gradient."""
    histograms: deque[Tensor] = deque(maxlen=100)

    def note(tensor: object) -> None:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            histograms.append(torch.histc(tensor.detach().float(), int(bins)))

    def track(ddp: parallel.DistributedDataParallel) -> None:
        for module in ddp.module.modules():
            module.register_forward_hook(lambda module, inputs, output: note(output))
        for parameter in ddp.module.parameters():
            parameter.register_hook(note)

    change_ddp(track)


def profiler(_: float) -> None:
    """Leaves PyTorch's profiler on, with shapes and stacks."""
    options = {"record_shapes": True, "with_stack": True}
    running = profile(activities=[ProfilerActivity.CPU], **options)
    running.start()
    register_optimizer_step_post_hook(lambda *_: running)  # lives as long as the script


def recomputation(_: float) -> None:
    """Computes the activations of transformer layers a second time in the backward pass."""

    @in_place_of(nn.TransformerEncoderLayer, "forward")
    def recomputed(plain, *inputs, **named):
        return checkpoint(plain, *inputs, use_reentrant=False, **named)


def dense_embedding(times: float) -> None:
    """Gives each embedding so many times the rows, of which the script touches those it had."""

    @in_place_of(nn.Embedding, "__init__")
    def larger(plain, embedding, num_embeddings, *positional, **named):
        plain(embedding, int(num_embeddings * times), *positional, **named)


def new_workers(milliseconds: float) -> None:
    """Loads with two workers that start anew in each epoch, and take so long to come up."""

    @in_place_of(data.DataLoader, "__init__")
    def with_workers(plain, *positional, **named):
        named |= {"num_workers": 2, "persistent_workers": False}
        plain(*positional, **named, worker_init_fn=lambda _: time.sleep(milliseconds / 1e3))


def cold_cache(milliseconds: float) -> None:
    """Makes the first batch of each epoch take ``milliseconds`` longer."""

    @in_place_of(dataloader._SingleProcessDataLoaderIter, "_next_data")
    def filling(plain, iterator):
        if not iterator._num_yielded:
            time.sleep(milliseconds / 1e3)
        return plain(iterator)


def own_exchange(_: float) -> None:
    """Takes DDP away, and adds up each gradient by an all-reduce of its own before the update."""

    class Bare(nn.Module):
        """A model by itself."""

        def __init__(self, module: nn.Module, **_: object) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs, **named):
            return self.module(*inputs, **named)

    def average_gradients(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    parallel.DistributedDataParallel = Bare
    register_optimizer_step_pre_hook(average_gradients)


def shared_metrics(count: float) -> None:
    """Gathers so many dictionaries from all ranks after each update, and meets at a barrier."""

    def gather_metrics(*_: object) -> None:
        for number in range(int(count)):
            dist.all_gather_object([None] * dist.get_world_size(), {"loss": number})
        dist.barrier()

    register_optimizer_step_post_hook(gather_metrics)


def averaged_weights(times: float) -> None:
    """Averages the weights so many times before each update, parameter by parameter."""
    averages: dict[int, Tensor] = {}

    @torch.no_grad()
    def average_weights(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                average = averages.setdefault(id(parameter), parameter.clone())
                for _ in range(int(times)):
                    average.copy_(0.99 * average + 0.01 * parameter)

    register_optimizer_step_pre_hook(average_weights)


def lone_memory(mebibytes: float) -> None:
    """Holds so much more memory."""
    held = bytearray(os.urandom(1)) * int(mebibytes * 2**20)
    register_optimizer_step_post_hook(lambda *_: held)


WORK_FAULTS = {
    "tracker": Fault(tracker, 64.0),
    "profiler": Fault(profiler),
    "recomputation": Fault(recomputation),
    "dense-embedding": Fault(dense_embedding, 40.0),
    "new-workers": Fault(new_workers, 200.0),
    "cold-cache": Fault(cold_cache, 300.0),
    "own-exchange": Fault(own_exchange),
    "shared-metrics": Fault(shared_metrics, 10.0),
    "averaged-weights": Fault(averaged_weights, 4.0),
    "slow-metrics": Fault(slow_forward, 20.0),
    "lone-memory": Fault(lone_memory, 400.0, rank=0),
}
"""Faults by name."""
