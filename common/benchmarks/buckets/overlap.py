"""The benchmark of what DDP adds to a backward pass besides waiting: bookkeeping and contention.

The arms of ``overlap_lab`` in rotated rounds, all ranks at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pandas as pd

from common.benchmarks.buckets.ddp import medians
from common.benchmarks.buckets.overlap_lab import OVERLAP_TIME_COLUMNS, OverlapLab
from common.benchmarks.steps import FixedBatchStep, StepRunOptions, recorded_step
from common.errors import UserError
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder
from common.settings import NonNegative, Positive


@dataclass(frozen=True)
class OverlapBenchmark(StepRunOptions):
    """Measure DDP's bookkeeping, and how backward pass and all-reduce slow each other down.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment2/overlap_benchmark.py
    --model gpt2-nano --max_seq_len 64. Writes overlap-times.csv (raw).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    message_mib: tuple[float, ...] = ()
    """Sizes of the all-reduces beside the backward pass, in MiB; by default 1/512, 1/64 and 1/8 of
    all gradients."""
    rounds: Annotated[int, Positive] = 4
    """Rounds; each visits every kind of backward pass once."""
    num_steps: Annotated[int, Positive] = 4
    """Measured backward passes per message size and round."""
    warmup_steps: Annotated[int, NonNegative] = 2
    """Untimed steps before the timed ones of each visit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.message_mib:
            if not 1 / 2**20 <= size < float("inf"):
                raise UserError(f"message_mib {size}: a message has at least one byte, and an end")
        self.step_settings()


def main(settings: OverlapBenchmark) -> None:
    """Runs the benchmark and prints the medians."""
    with recorded_step(settings, "overlap_benchmark") as (step, recorder):
        samples = measure(settings, step, recorder)
        if recorder.run:
            keys = ("arm", "message_bytes", "messages")
            print(medians(samples, keys, ("backward_time_ms", "all_reduce_time_ms")))
            print(f"Written to {recorder.run.path}")


def measure(settings: OverlapBenchmark, step: FixedBatchStep, recorder: Recorder) -> pd.DataFrame:
    """Visits the arms in rotated rounds; returns the samples of all ranks, on rank 0."""
    stream = recorder.stream("overlap-times.csv", OVERLAP_TIME_COLUMNS)
    lab = OverlapLab(step)
    arms = lab.arms([int(size * 2**20) for size in settings.message_mib])
    progress = Progress(settings.rounds * len(arms), recorder.worker.is_main)
    for round_, arm in recorder.rounds(arms, settings.rounds, stage="arms"):
        rows = lab.visit(arm, round_, passes=settings.num_steps, warmup=settings.warmup_steps)
        stream.write(rows)
        progress.step(f"round {round_ + 1}, {arm.kind}")
    return stream.table()
