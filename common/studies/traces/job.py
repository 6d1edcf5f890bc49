"""A training job whose arms differ in one thing each, profiled in turns, in rounds.

    job.py FOLDER MODEL ROUNDS STEPS ARM…

Writes FOLDER/round-R/ARM/rank-N.json. Layers are small and sleep in each pass, as do a slow rank, a
slow loader and ranks with uneven work: that takes the same on a busy machine, and links have the
processor.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from common.samples import rotated

BASE, SLOW, LOADER, BF16, CAP = "base", "slow", "loader", "bf16", "cap-"
UNEVEN, EVEN = "uneven", "even"
SLOW_S, LOAD_S, LAYER_S, WARM_UP = 0.08, 0.08, 0.01, 4
"""Seconds of a slow rank and loader in each step, and of a layer's backward pass; its forward pass
takes half as long. Work beside the layers takes a rank ``SLOW_S`` a step in the arms ``EVEN`` and
``UNEVEN``: in the latter one rank has that of all, by turns."""
BATCH, WIDTH = 8, 256


class Batches(Dataset):
    """Batches that take some time to be read each."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds
        self.batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.batch


class _Sleep(torch.autograd.Function):
    """Passes on what it is given, after a while."""

    @staticmethod
    def forward(context: object, values: torch.Tensor) -> torch.Tensor:
        time.sleep(LAYER_S / 2)
        return values.view_as(values)

    @staticmethod
    def backward(context: object, gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(LAYER_S)
        return gradients


class Sleeps(nn.Module):
    """A layer that only takes time."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(values)


def model_of(name: str) -> nn.Module:
    """Returns a model of equal layers, or one whose layers differ."""
    torch.manual_seed(0)
    widths = (WIDTH,) * 9 if name == "equal" else (WIDTH, 768, 128, 128, 512, 64, 512, WIDTH)
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), Sleeps(), nn.GELU()]
    return nn.Sequential(*layers)


def pause_s(variant: str, rank: int, ranks: int, step: int) -> float:
    """Returns how long a rank sleeps between the passes of a step."""
    if variant == UNEVEN:
        return SLOW_S * ranks if step % ranks == rank else 0.0
    return SLOW_S if variant == EVEN or (variant == SLOW and rank == ranks - 1) else 0.0


def run_arm(variant: str, name: str, steps: int, folder: Path) -> None:
    """Trains a fresh instance, and writes the trace of its last steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cap = float(variant.removeprefix(CAP)) if variant.startswith(CAP) else None
    ddp = DistributedDataParallel(model_of(name), bucket_cap_mb=cap)
    if variant == BF16:
        ddp.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    batches = Batches(WARM_UP + 1 + steps, LOAD_S if variant == LOADER else 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=WARM_UP, warmup=1, active=steps),
        record_shapes=True,
        on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"rank-{rank}.json")),
    ) as profiler:
        for step, batch in enumerate(DataLoader(batches, batch_size=None)):
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            if pause := pause_s(variant, rank, ranks, step):
                time.sleep(pause)
            loss.backward()
            optimizer.step()
            profiler.step()


def main(folder: str, name: str, rounds: str, steps: str, *arms: str) -> None:
    """Runs all arms in every round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for round_ in range(int(rounds)):
        for variant in rotated(arms, round_):
            run_arm(variant, name, int(steps), Path(folder) / f"round-{round_}" / variant)
            if dist.get_rank() == 0:
                print(f"round {round_ + 1}: {variant}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
