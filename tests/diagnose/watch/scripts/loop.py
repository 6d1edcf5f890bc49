"""A training as anybody writes it; what it computed goes to a file, to the last bit.

loop.py OUT [--steps 20] [--accumulation 1] [--no_sync 1] [--batch_size 8] [--evaluate 0] ...
"""

import argparse
import json
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEFAULTS = {
    "steps": 20,
    "samples": 480,
    "accumulation": 1,
    "no_sync": 1,
    "batch_size": 8,
    "slow_data_s": 0.0,
    "slow_rank_s": 0.0,
    "slow_update_s": 0.0,
    "slow_loss_s": 0.0,
    "unwatched_rank": -1,
    "set_epoch": 1,
}
"""Flags that are a number of their own if they are not given."""
SWITCHES = (
    "workers shrinking_memory short_trials own_noise slow_after evaluate find_unused hook "
    "autocast_inside sharded compiled profiles_itself host_waits synchronised_norm gathers "
    "averages checkpointed two_losses loads_ahead loads_in_thread new_loaders hides_objects "
    "compiled_inside passes_of_rank_1 copies_of_rank_1_fail failing_pass local_steps "
    "own_exchange opponent left_on"
)
"""Flags that are 0 if they are not given."""
parser = argparse.ArgumentParser()
parser.add_argument("out")
for name, default in (DEFAULTS | dict.fromkeys(SWITCHES.split(), 0)).items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
arguments = parser.parse_args()

if "RANK" in __import__("os").environ:
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
ranks = dist.get_world_size() if dist.is_initialized() else 1
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(7 + rank)


if arguments.host_waits:  # a GPU is pretended, whose every wait torch warns of in this way
    import ctypes

    from ddplab_watch import host_waits

    mode = [0]
    host_waits.can_be_counted = lambda device: True
    torch.cuda.get_sync_debug_mode = lambda: mode[0]
    torch.cuda.set_sync_debug_mode = lambda text: mode.__setitem__(
        0, ["default", "warn"].index(text)
    )
    WAITS = b"called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"

    def wait_for_the_gpu():
        ctypes.pythonapi.PyErr_WarnEx(ctypes.py_object(UserWarning), WAITS, ctypes.c_ssize_t(1))


if arguments.own_exchange:  # with a class in the place of torch's, as apex once had it

    class DistributedDataParallel(nn.Module):
        def __init__(self, module, **_):
            super().__init__()
            self.module = module

        def forward(self, values):
            return self.module(values)

    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel


class Samples(TensorDataset):
    """Samples that may take a while, and that may be changed by random numbers of their own."""

    noise = None

    def __getitem__(self, index):
        if arguments.slow_data_s:
            time.sleep(arguments.slow_data_s / arguments.batch_size)
        values, target = super().__getitem__(index)
        return (values + self.noise.random() if self.noise else values), target


class FailingInBackward(torch.autograd.Function):
    """Fails where half of the gradients are computed."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("out of memory")


class Model(nn.Module):
    """Has all that a probe could change: dropout, BatchNorm's buffers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
        )
        self.passes = 0
        self.original = id(self)
        if arguments.averages:  # a second encoder that follows the first, as contrastive learning's
            self.follower = nn.Parameter(torch.zeros(64, 32), requires_grad=False)
            self.register_buffer("mean", torch.zeros(64, 32))
            self.moving = torch.zeros(64, 32)

    def follow(self):
        weight = self.layers[0].weight.detach()
        self.follower.data = 0.9 * self.follower.data + 0.1 * weight
        self.mean = 0.8 * self.mean + 0.2 * weight
        self.moving = 0.7 * self.moving + 0.3 * weight
        return self.follower.sum() + self.mean.sum() + self.moving.sum() + self.passes

    def forward(self, values):
        if arguments.averages or arguments.passes_of_rank_1:
            self.passes += 1
        if rank == 1 and self.passes > arguments.passes_of_rank_1 > 0:
            raise RuntimeError("out of memory")
        if arguments.copies_of_rank_1_fail and rank == 1 and self.original != id(self):
            raise RuntimeError("out of memory")
        fails = False
        if arguments.failing_pass and rank == 1 and self.original != id(self):
            self.passes += 1
            fails = self.passes == arguments.failing_pass
        if arguments.gathers:
            everyone = [torch.empty_like(values) for _ in range(ranks)]
            dist.all_gather(everyone, values)
        if arguments.averages:
            values = values + 1e-3 * self.follow()
        if arguments.checkpointed:
            from torch.utils.checkpoint import checkpoint

            for part in (self.layers[:2], self.layers[2:]):
                values = checkpoint(part, values.requires_grad_(), use_reentrant=True)
            return values
        is_slow = rank == 1 and step >= arguments.slow_after and torch.is_grad_enabled()
        if arguments.slow_rank_s and is_slow:
            time.sleep(arguments.slow_rank_s)
        for _ in range(arguments.host_waits and arguments.host_waits * mode[0]):
            wait_for_the_gpu()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(arguments.autocast_inside)):
            if fails:
                return self.layers[2:](FailingInBackward.apply(self.layers[:2](values)))
            return self.layers(values).float()


class ExchangingNorm(nn.SyncBatchNorm):
    """Exchanges in its forward pass, as SyncBatchNorm does on GPUs only."""

    def forward(self, values):
        if self.training:
            dist.all_reduce(values.detach().mean(0))
        return nn.BatchNorm1d.forward(self, values)

    def _check_input_dim(self, values):
        pass


def in_a_thread(batches):
    """Yields batches that another thread loads ahead."""
    loaded = Queue(maxsize=2)

    def load():
        for batch in batches:
            loaded.put(batch)
        loaded.put(None)

    Thread(target=load, daemon=True).start()
    return iter(loaded.get, None)


torch.manual_seed(3)
data = Samples(torch.randn(arguments.samples, 32), torch.randint(0, 10, (arguments.samples,)))
torch.manual_seed(7 + rank)
if arguments.own_noise:
    data.noise = random.Random(rank)
sampler = None
if dist.is_initialized():
    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=5)
loader = DataLoader(
    data, arguments.batch_size, sampler=sampler, shuffle=False, num_workers=arguments.workers
)
model = Model()
if arguments.compiled_inside:
    model = torch.compile(model, backend="eager")
if arguments.hides_objects:
    __import__("gc").freeze()
if arguments.sharded:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for part in (model.layers[0], model.layers[4], model):
        fully_shard(part, mesh=mesh)
elif dist.is_initialized():
    model = DistributedDataParallel(
        model,
        bucket_cap_mb=25 if arguments.compiled_inside else 0.002,
        find_unused_parameters=bool(arguments.find_unused),
    )
    if arguments.synchronised_norm:  # now, as DDP refuses SyncBatchNorm on a CPU
        model.module.layers[1].__class__ = ExchangingNorm
    if arguments.hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
if arguments.compiled:
    model.compile(backend="eager")
trained = dict(model.named_parameters())
if arguments.left_on:  # a hook on a layer that no optimizer updates
    getattr(model, "module", model).layers[0].register_forward_hook(lambda *_: None)
    trained = {name: p for name, p in trained.items() if "layers.0." not in name}
optimizer = torch.optim.SGD(trained.values(), lr=0.1, momentum=0.9)
if arguments.opponent:
    opponent = DistributedDataParallel(nn.Linear(32, 1))
    opponents_optimizer = torch.optim.SGD(opponent.parameters(), lr=0.1)
if arguments.shrinking_memory:
    from itertools import count

    from ddplab_watch import trials

    left = count(32 * 2**38, -(2**38))  # each time that it is read there is less
    trials.free_bytes = lambda device: next(left)
if arguments.short_trials:
    from ddplab_watch import changes, trials

    trials.ROUNDS = trials.LEAST_ROUNDS = 2
    changes.worker_counts = lambda now, cores: [2]
if arguments.unwatched_rank >= 0:  # the others wait for it, no matter how long
    import datetime

    import ddplab_watch
    from ddplab_watch import team

    team.HERE = datetime.timedelta(seconds=1)
    if arguments.unwatched_rank == rank:
        ddplab_watch.stop()
losses, indices, step, micro = [], [], 0, 0
epoch = 0
while step < arguments.steps:
    if sampler is not None:
        sampler.set_epoch(epoch if arguments.set_epoch else 0)
        indices.append(list(sampler))
    if arguments.new_loaders:
        loader = DataLoader(data, arguments.batch_size, sampler=sampler)
    batches = in_a_thread(loader) if arguments.loads_in_thread else iter(loader)
    batch = next(batches) if arguments.loads_ahead else None
    while True:
        if not arguments.loads_ahead:
            batch = next(batches, None)
        if batch is None:
            break
        values, targets = batch
        micro += 1
        last = micro % arguments.accumulation == 0
        skip = (not last and arguments.no_sync) or step < arguments.local_steps
        skip = skip and isinstance(model, DistributedDataParallel)
        with model.no_sync() if skip else nullcontext():
            loss = nn.functional.cross_entropy(model(values), targets) / arguments.accumulation
            if arguments.loads_ahead:
                batch = next(batches, None)
            time.sleep(arguments.slow_loss_s)
            if arguments.two_losses:
                (0.5 * loss).backward(retain_graph=True)
                (0.5 * loss).backward()
            else:
                loss.backward()
        losses.append(loss.item().hex())
        if not last:
            continue
        if arguments.slow_update_s and rank == 0:
            time.sleep(arguments.slow_update_s)
        for parameter in model.parameters() if arguments.own_exchange else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if arguments.opponent:
            opponent(values).square().mean().backward()
            opponents_optimizer.step()
            opponents_optimizer.zero_grad()
        step += 1
        if step == arguments.profiles_itself:
            own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            own.start()
        elif step == arguments.profiles_itself + 2 and arguments.profiles_itself:
            own.stop()
        if arguments.evaluate and step % arguments.evaluate == 0:
            model.eval()
            with torch.no_grad():
                for values, _ in DataLoader(data, 64):
                    model.module(values) if dist.is_initialized() else model(values)
            model.train()
        if step >= arguments.steps:
            break
    epoch += 1


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


found = {
    "losses": losses,
    "parameters": [whole(p).double().sum().item().hex() for p in model.parameters()],
    "buffers": [b.double().sum().item().hex() for b in model.buffers()],
    "random": [torch.rand(()).item().hex(), random.random().hex(), float(np.random.rand()).hex()],
    "indices": indices,
    "argv": sys.argv,
    "file": __file__,
}
if isinstance(model, torch.nn.parallel.distributed.DistributedDataParallel) and not arguments.hook:
    logged = model._get_ddp_logging_data()
    found["buckets"] = logged.get("rebuilt_bucket_sizes", logged.get("bucket_sizes"))
Path(f"{arguments.out}-{rank}.json").write_text(json.dumps(found))
