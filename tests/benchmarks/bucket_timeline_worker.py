"""One rank whose backward passes are watched: replays, whose gradients are ready at known times.

Prints for each arm the rows of one watched pass, and when each gradient was handed over in it.
"""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.benchmarks.buckets.bucket_timeline import BucketMarks, marked_pass, watch
from common.benchmarks.buckets.latency_hook import added_latency
from common.models.replay import ReplayModel
from common.perfmodel.ddp.profile import BackwardProfile
from common.runtime.group.process_group import Worker, process_group

SMALL, LARGE = 64 * 2**10, 8 * 2**20
APART_S = (0.04, 0.08, 0.12)
TOGETHER_S = (0.01, 0.0101, 0.0102, 0.0103)
QUICK_S = (0.002, 0.004, 0.006)
LATENCY_MS = 12.0
CAP_MIB = 0.01
OPTIONS = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


class ReplayedStep:
    """The part of a benchmark's step that watching needs."""

    def __init__(self, worker: Worker, ready_s: tuple[float, ...], size_bytes: int) -> None:
        self.worker, self.device = worker, worker.device
        count = len(ready_s)
        self.model = ReplayModel(
            BackwardProfile(
                names=tuple(f"p{i}" for i in range(count)),
                sizes_bytes=np.full(count, size_bytes),
                ready_s=np.array(ready_s),
                backward_s=ready_s[-1] + 0.001,
                kinds=("float32",) * count,
            )
        )

    def forward(self, model: torch.nn.Module) -> torch.Tensor:
        return model()

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def optimize(self) -> None:
        """Does nothing."""


def watched(
    worker: Worker, ready_s: tuple[float, ...], size: int, latency_ms: float = 0, **options
):
    """Returns the rows of one pass, and when each gradient was handed over in it, in ms."""
    step = ReplayedStep(worker, ready_s, size)
    ddp = DistributedDataParallel(step.model, bucket_cap_mb=CAP_MIB, **options)
    with added_latency(latency_ms, worker.device) as hook:
        rows = watch(ddp, ddp, step, passes=1, warmup_steps=3, hook=hook)
    return {"rows": rows, "handed_ms": [1e3 * seconds for seconds in step.model.handed_s]}


def marked(worker: Worker) -> dict:
    """Watches the same by the marks of a hook, as on a GPU."""
    step = ReplayedStep(worker, APART_S, SMALL)
    ddp = DistributedDataParallel(step.model, bucket_cap_mb=CAP_MIB)
    marks = BucketMarks(ddp, worker)
    marks.register_comm_hook(None, marks.average)
    for _ in range(4):
        rows = marked_pass(marks, ddp, step)
    averages = [float(parameter.grad[0]) for parameter in step.model.parameters()]
    handed_ms = [1e3 * seconds for seconds in step.model.handed_s]
    return {"rows": rows, "handed_ms": handed_ms, "gradients": averages}


def main() -> None:
    """Watches every arm and prints what was seen."""
    torch.set_num_threads(1)
    with process_group("cpu") as worker:
        result = {
            "apart": watched(worker, APART_S, SMALL),
            "together": watched(worker, TOGETHER_S, LARGE),
            "latency": watched(worker, QUICK_S, SMALL, LATENCY_MS),
            "marked": marked(worker),
            "threads": dist.ProcessGroupGloo._Options()._threads,
        }
        for name, options in OPTIONS.items():
            result[name] = watched(worker, QUICK_S, SMALL, **options)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
