"""The ranks of ``ddplab study watching``: steps without a watch, with one, in rotated order.

Where TraceML is installed, it is one more arm, in its mode ``auto`` with the interval that it has
by default. It samples in a thread, and so does the watch: a visit lasts long enough for several
samples.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import ddplab_watch
import torch
from ddplab_watch.watch import Watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.benchmarks.rounds import rotated
from common.runtime import private
from common.runtime.process_group import Worker, process_group
from common.runtime.recorder import record_run
from common.runtime.run_options import RankOptions
from common.runtime.script import run_script
from common.training.ddp import make_ddp

BARE, AGAIN, PLAIN, BUCKETS = "bare", "bare again", "plain window", "bucket window"
TRACEML = "TraceML"
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

    widths: tuple[int, ...] = (64, 448)
    """Of the model's layers: a step takes about 7 and 70 ms on two cores."""
    layers: int = 24
    batch_size: int = 64
    rounds: int = 10
    visit_s: float = 4.0
    """Of the timed steps of a visit. TraceML samples every 2 s."""
    output_dir: str = "outputs/studies"


def main(settings: Watching) -> None:
    """Visits every arm in every round, for each width, and writes a row per step."""
    with (
        process_group(settings.device, settings.backend) as worker,
        record_run(settings, "watching-ranks", worker) as recorder,
    ):
        stream = recorder.stream("step-samples.csv", COLUMNS)
        tools = Tools(worker)
        for width in settings.widths:
            steps = 0  # of a visit, the same for all rounds
            for round_ in range(settings.rounds):
                training = Training(settings, width, worker, tools)  # for all its arms
                steps = steps or training.steps_within(settings.visit_s)
                for arm in rotated(tools.arms, round_):
                    keys = {"width": width, "arm": arm, "round": round_}
                    rows = training.visit(arm, steps)
                    stream.write([keys | {"step": step} | row for step, row in enumerate(rows)])
                training.close()
                if worker.is_main:
                    print(f"width {width}, round {round_ + 1} of {settings.rounds}", flush=True)
        tools.close()


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


class Tools:
    """The arms: what watches the steps of a visit, and how long its calls take in a step.

    All ranks make it together. ``close`` ends what it has started.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.in_hooks_s = time_hooks()
        self.arms: tuple[str, ...] = (BARE, PLAIN, BUCKETS, AGAIN)
        self.traceml = None
        self.step: Callable[[nn.Module], AbstractContextManager] = _untraced
        if find_spec("traceml_ai") is not None:
            from common.studies.traceml import ForAWhile

            self.traceml = ForAWhile(worker)
            self.arms = (BARE, PLAIN, BUCKETS, TRACEML, AGAIN)

    @contextmanager
    def watching(self, arm: str) -> Iterator[None]:
        """Watches the steps of a block as an arm does."""
        if arm == TRACEML:
            assert self.traceml is not None
            with self.traceml.tracing() as self.step:
                yield
            self.step = _untraced
            return
        with tempfile.TemporaryDirectory() as folder:
            if arm in WINDOWS:
                path = str(Path(folder) / "bundle")
                ddplab_watch.start(path, warmup=1, probe=False, **WINDOWS[arm])
            yield
            ddplab_watch.stop()
            self.worker.barrier()  # a folder that is gone must not be written to

    def close(self) -> None:
        """Ends TraceML's aggregator, if there is one."""
        if self.traceml is not None:
            self.traceml.close()


def _untraced(model: nn.Module) -> AbstractContextManager:
    """Returns what stands around a step where nothing has to: a block that does nothing."""
    return nullcontext()


class Training:
    """A model under DDP, its optimizer and its loader, which the arms of a round share."""

    def __init__(self, settings: Watching, width: int, worker: Worker, tools: Tools) -> None:
        self.tools = tools
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(settings.layers)]
        self.worker = worker
        self.model = make_ddp(nn.Sequential(*layers), worker.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        samples = torch.randn(settings.batch_size * 16, width)
        self.loader = DataLoader(TensorDataset(samples), settings.batch_size)
        self.batches = iter(self.loader)
        self.settled = [self.step() for _ in range(SETTLING_STEPS)]

    def steps_within(self, seconds: float) -> int:
        """Returns how many steps take so long, the same on every rank: by its settling steps."""
        own_ms = min(row["step_time_ms"] for row in self.settled)
        return math.ceil(seconds * 1e3 / max(self.worker.gather(own_ms)))

    def visit(self, arm: str, steps: int) -> list[dict[str, float]]:
        """Makes a visit's steps; returns what those after settling took, in ms."""
        with self.tools.watching(arm):
            self.batches = iter(self.loader)  # tools replace what makes it
            rows = [self.step() for _ in range(SETTLING_STEPS + steps)]
        return rows[SETTLING_STEPS:]

    def step(self) -> dict[str, float]:
        """Makes a step that all ranks begin together; returns its time and that of the hooks."""
        self.worker.barrier()
        self.tools.in_hooks_s.clear()
        began = time.perf_counter()
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        with self.tools.step(self.model):
            loss = self.model(batch[0]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        step_s = time.perf_counter() - began
        hooks_s = sum(self.tools.in_hooks_s)
        return {"step_time_ms": step_s * 1e3, "hooks_time_ms": hooks_s * 1e3}

    def close(self) -> None:
        """Takes DDP off, and frees its buckets before there are new ones."""
        private.remove_hooks(self.model)
        del self.model, self.optimizer
        gc.collect()


if __name__ == "__main__":
    run_script(main, Watching)
