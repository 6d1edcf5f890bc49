"""The ranks of ``ddplab study watching``: steps without a watch, with one, in rotated order."""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ddplab_watch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.benchmarks.rounds import rotated_rounds
from common.runtime.process_group import Worker, process_group
from common.runtime.recorder import record_run
from common.runtime.run_options import RankOptions
from common.runtime.script import run_script
from common.training.ddp import make_ddp

BARE, AGAIN, PLAIN, BUCKETS = "bare", "bare again", "plain window", "bucket window"
SETTLING_STEPS = 4
"""Steps before those that are timed: DDP's buckets settle, and the watch opens its record."""
COLUMNS = ("rank", "width", "arm", "round", "step", "step_time_ms")
WINDOWS = {
    PLAIN: {"window": 10**6, "bucket_steps": 0},
    BUCKETS: {"window": 1, "bucket_steps": 10**6},
}
"""Settings of the watch in each arm that has one; none of these windows ends by itself."""


@dataclass(frozen=True)
class Watching(RankOptions):
    """Times steps with and without a watch."""

    widths: tuple[int, ...] = (320, 448)
    """Of the model's layers: a step takes about 30 and 60 ms on two cores."""
    layers: int = 24
    batch_size: int = 64
    rounds: int = 40
    steps: int = 10
    """Timed steps of a visit."""
    output_dir: str = "outputs/studies"


def main(settings: Watching) -> None:
    """Visits every arm in every round, for each width, and writes a row per step."""
    with (
        process_group(settings.device, settings.backend) as worker,
        record_run(settings, "watching-ranks", worker) as recorder,
    ):
        stream = recorder.stream("step-samples.csv", COLUMNS)
        for width in settings.widths:
            for round_, arm in rotated_rounds((BARE, PLAIN, BUCKETS, AGAIN), settings.rounds):
                times_ms = visit(settings, width, arm, worker)
                keys = {"width": width, "arm": arm, "round": round_}
                stream.write(
                    [keys | {"step": step, "step_time_ms": ms} for step, ms in enumerate(times_ms)]
                )
                if worker.is_main:
                    print(f"width {width}, round {round_ + 1} of {settings.rounds}", flush=True)


def visit(settings: Watching, width: int, arm: str, worker: Worker) -> list[float]:
    """Trains a new model for a visit's steps; returns the times in ms of those after settling."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(settings.layers)]
    model = make_ddp(nn.Sequential(*layers), worker.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count = SETTLING_STEPS + settings.steps
    samples = torch.randn(settings.batch_size * count, width)
    loader = DataLoader(TensorDataset(samples), settings.batch_size)
    times_ms = []
    with tempfile.TemporaryDirectory() as folder:
        if arm in WINDOWS:
            path = str(Path(folder) / "bundle")
            ddplab_watch.start(path, warmup=1, probe=False, **WINDOWS[arm])
        batches = iter(loader)
        for _ in range(count):
            worker.barrier()
            began = time.perf_counter()
            [values] = next(batches)
            loss = model(values).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times_ms.append((time.perf_counter() - began) * 1e3)
        ddplab_watch.stop()
        worker.barrier()  # a folder that is gone must not be written to
    model._remove_autograd_hooks()
    del model, optimizer, loss
    gc.collect()
    return times_ms[SETTLING_STEPS:]


if __name__ == "__main__":
    run_script(main, Watching)
