"""The ranks of ``ddplab study watching``: steps without a watch, with one, in rotated order."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ddplab_watch
import torch
from ddplab_watch.watch import Watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.benchmarks.rounds import rotated
from common.runtime.process_group import Worker, process_group
from common.runtime.recorder import record_run
from common.runtime.run_options import RankOptions
from common.runtime.script import run_script
from common.training.ddp import make_ddp

BARE, AGAIN, PLAIN, BUCKETS = "bare", "bare again", "plain window", "bucket window"
SETTLING_STEPS = 4
"""Steps before those that are timed: DDP's buckets settle, or the watch opens its record."""
COLUMNS = ("rank", "width", "arm", "round", "step", "step_time_ms", "hooks_time_ms")
WINDOWS = {
    PLAIN: {"window": 10**6, "bucket_steps": 0},
    BUCKETS: {"window": 1, "bucket_steps": 10**6},
}
"""Settings of the watch in each arm that has one; none of these windows ends by itself."""


@dataclass(frozen=True)
class Watching(RankOptions):
    """Times steps with and without a watch."""

    widths: tuple[int, ...] = (16, 448)
    """Of the model's layers: a step takes about 5 and 65 ms on two cores."""
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
        in_hooks_s = time_hooks()
        for width in settings.widths:
            for round_ in range(settings.rounds):
                training = Training(settings, width, worker, in_hooks_s)  # for all its arms
                for arm in rotated((BARE, PLAIN, BUCKETS, AGAIN), round_):
                    keys = {"width": width, "arm": arm, "round": round_}
                    rows = training.visit(arm)
                    stream.write([keys | {"step": step} | row for step, row in enumerate(rows)])
                training.close()
                if worker.is_main:
                    print(f"width {width}, round {round_ + 1} of {settings.rounds}", flush=True)


def time_hooks() -> list[float]:
    """Makes each hook of the watch note its seconds; returns the list that they are added to."""
    spent_s: list[float] = []
    plain = Watch.guarded

    def timed(self: Watch, function: Callable) -> Callable:
        guarded = plain(self, function)

        def call(*arguments: object) -> object:
            began = time.perf_counter()
            try:
                return guarded(*arguments)
            finally:
                spent_s.append(time.perf_counter() - began)

        return call

    Watch.guarded = timed
    return spent_s


class Training:
    """A model under DDP, its optimizer and its loader, which the arms of a round share."""

    def __init__(
        self, settings: Watching, width: int, worker: Worker, in_hooks_s: list[float]
    ) -> None:
        self.in_hooks_s = in_hooks_s
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(settings.layers)]
        self.settings, self.worker = settings, worker
        self.model = make_ddp(nn.Sequential(*layers), worker.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        samples = torch.randn(settings.batch_size * 16, width)
        self.loader = DataLoader(TensorDataset(samples), settings.batch_size)
        self.batches = iter(self.loader)
        for _ in range(SETTLING_STEPS):
            self.step()

    def visit(self, arm: str) -> list[dict[str, float]]:
        """Makes a visit's steps; returns what those after settling took, in ms."""
        with tempfile.TemporaryDirectory() as folder:
            if arm in WINDOWS:
                path = str(Path(folder) / "bundle")
                ddplab_watch.start(path, warmup=1, probe=False, **WINDOWS[arm])
            rows = [self.step() for _ in range(SETTLING_STEPS + self.settings.steps)]
            ddplab_watch.stop()
            self.worker.barrier()  # a folder that is gone must not be written to
        return rows[SETTLING_STEPS:]

    def step(self) -> dict[str, float]:
        """Makes a step that all ranks begin together; returns its time and that of the hooks."""
        self.worker.barrier()
        self.in_hooks_s.clear()
        began = time.perf_counter()
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        step_s = time.perf_counter() - began
        hooks_s = sum(self.in_hooks_s)
        return {"step_time_ms": step_s * 1e3, "hooks_time_ms": hooks_s * 1e3}

    def close(self) -> None:
        """Takes DDP off, and frees its buckets before there are new ones."""
        self.model._remove_autograd_hooks()
        del self.model, self.optimizer
        gc.collect()


if __name__ == "__main__":
    run_script(main, Watching)
