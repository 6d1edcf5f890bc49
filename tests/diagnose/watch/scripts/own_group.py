"""Trains over a process group in Python: own_group.py [--waits 1] [--name NAME].

An all-reduce is gloo's, after it has been on its way for a while in a thread of the group, one at
a time as over NCCL. Where ``--waits``, its future is given only when it is over, so that no
gradient is computed meanwhile. Passes sleep: nothing competes for cores.
"""

import argparse
import datetime
import queue
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--waits", type=int, default=0)
parser.add_argument("--name", default="OwnGroup")
arguments = parser.parse_args()
LAYERS, WIDTH, LAYER_S, ALPHA_S = 6, 256, 0.01, 0.002
CAP_MB, STEPS = 0.2, 30
BYTES_PER_S = 30e6
"""A layer's gradients, 257 KiB, take 9 ms."""


class Work(dist._Work):
    """An all-reduce on its way."""

    def __init__(self):
        super().__init__()
        self.over, self.future = threading.Event(), torch.futures.Future()

    def wait(self, timeout=None):
        return self.over.wait()

    def is_completed(self):
        return self.over.is_set()

    def get_future(self):
        if arguments.waits:
            self.over.wait()
        return self.future


class OwnGroup(dist.ProcessGroup):
    """Sends what is added up through a thread, and all else through gloo at once.

    It calls gloo's methods itself: those of its base class hold the interpreter's lock as they
    wait for gloo's threads, which may wait for that lock.
    """

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self.works = queue.SimpleQueue()
        threading.Thread(target=self.serve, daemon=True).start()

    def getBackendName(self):
        return "own"

    def allreduce(self, tensors, options=None):
        self.works.put((tensors, work := Work()))
        return work

    def broadcast(self, *words):
        return self.gloo.broadcast(*words)

    def allgather(self, *words):
        return self.gloo.allgather(*words)

    def _allgather_base(self, *words):
        return self.gloo._allgather_base(*words)

    all_gather_single = _allgather_base
    """The same name in torch 2.15."""

    def serve(self):
        while True:
            tensors, work = self.works.get()
            time.sleep(ALPHA_S + sum(t.nbytes for t in tensors) / BYTES_PER_S)
            self.gloo.allreduce(tensors).wait()
            work.over.set()
            work.future.set_result(tensors)


class Slow(torch.autograd.Function):
    """Computes nothing for a while, in both directions."""

    @staticmethod
    def forward(context, values):
        time.sleep(LAYER_S / 2)
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(LAYER_S)
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        return self.linear(Slow.apply(values))


torch.set_num_threads(1)
kind = type(arguments.name, (OwnGroup,), {})
dist.Backend.register_backend("own", kind, devices=["cpu"])
dist.init_process_group("own", timeout=datetime.timedelta(seconds=60))
torch.manual_seed(dist.get_rank())
data = TensorDataset(torch.randn(2000, WIDTH))
loader = DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data))
model = DistributedDataParallel(
    nn.Sequential(*(Layer() for _ in range(LAYERS))), bucket_cap_mb=CAP_MB
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step, (values,) in enumerate(loader):
    if step == STEPS:
        break
    model(values).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
