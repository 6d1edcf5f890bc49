"""``ddplab study bookkeeping``: what timing, progress and recording add to a training step.

Blocks of steps run in a bare loop, twice, and in the loop that the benchmarks use, in rotated
order. The step is small, which makes the share an upper bound: what is added does not grow with
the step. The bare loop beside itself shows the noise. Besides, the benchmarks' loop runs around a
step that does nothing, which gives the bookkeeping's own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from common.benchmarks.rounds import rotated
from common.data.batches import BatchStream
from common.perfmodel.one_device.workload import Workload
from common.report.progress import StageProgress
from common.runtime.progress import Progress
from common.runtime.recorder import require_positive
from common.runtime.run_directory import SampleStream
from common.studies.study import study_run, with_verdicts
from common.training.loop import time_steps
from common.training.step import TrainingStep

BARE, AGAIN, RECORDED = "bare", "bare again", "recorded"
ALLOWED_SHARE = 0.01


@dataclass(frozen=True)
class BookkeepingStudy(Workload):
    """Settings of the study: the step that runs in the loops, and how often."""

    model: str = "gpt2-nano"
    batch_size: int = 4
    seq_len: int = 64
    optimizer_implementation: str = "fused"
    rounds: int = 60
    steps: int = 5
    """Steps of a block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "rounds", "steps")


class NoStep:
    """A step that does nothing, so that only the loop around it takes time."""

    device = torch.device("cpu")

    def run(self, batches: object) -> None:
        """Does nothing."""


def run_study(study: BookkeepingStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures and judges; returns the run directory."""
    with study_run("bookkeeping", study, output_dir, progress, backend=None, ranks=1) as run:
        recorded = run.stream("step-samples.csv", ("iteration", "step_time_ms"))
        with progress.stage(f"{3 * study.rounds} blocks of {study.steps} steps") as update:
            blocks = measure(study, recorded, update)
        run.write_table("block-times.csv", blocks)
        own_us = bookkeeping_us(study, recorded)
        verdicts = judge(blocks, own_us)
        run.write_table("verdicts.csv", verdicts)
    progress.say(verdicts.to_string(index=False, float_format="%.5f"))
    return run.path


def measure(
    study: BookkeepingStudy, recorded: SampleStream, update: Callable[[str], None]
) -> pd.DataFrame:
    """Times blocks of steps in each loop, in rotated rounds; returns a row per block.

    Columns: loop, round and step_time_ms, the mean over the block's steps, by a clock around it.
    """
    device = torch.device("cpu")
    step = TrainingStep(study, device)
    batches = BatchStream(study.batch_size, study.seq_len, study.config.vocab_size, device)
    counter = Progress(study.rounds * study.steps)

    def bare() -> None:
        for _ in range(study.steps):
            step.run(batches)

    def with_records() -> None:
        record(study, step, batches, counter, recorded)

    loops = {BARE: bare, RECORDED: with_records, AGAIN: bare}
    rows = []
    for _ in range(2):
        bare()
    for round_ in range(study.rounds):
        for name in rotated(loops, round_):
            start = time.perf_counter()
            loops[name]()
            took_ms = (time.perf_counter() - start) * 1e3
            rows.append({"loop": name, "round": round_, "step_time_ms": took_ms / study.steps})
        update(f"round {round_ + 1} of {study.rounds}")
    return pd.DataFrame(rows)


def record(study: BookkeepingStudy, step, batches, counter: Progress, recorded) -> None:
    """Runs a block as the benchmarks do: with times and progress; writes its samples at its end."""
    times_s = time_steps(step, batches, study.steps, lambda: counter.step("measured step"))
    recorded.write(
        {"iteration": index, "step_time_ms": time_s * 1e3} for index, time_s in enumerate(times_s)
    )


def bookkeeping_us(study: BookkeepingStudy, recorded: SampleStream, blocks: int = 200) -> float:
    """Measures the loop around a step that does nothing; returns microseconds per step.

    The median over many blocks.
    """
    counter = Progress(blocks * study.steps)
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        record(study, NoStep(), (), counter, recorded)
        times.append((time.perf_counter() - start) * 1e6 / study.steps)
    return float(pd.Series(times).median())


def judge(blocks: pd.DataFrame, own_us: float) -> pd.DataFrame:
    """Compares the bookkeeping with what was promised of it; returns a row per promise.

    Columns: promise, at_most, found and held. A round's bare time is the mean of its two bare
    blocks; their difference is the noise.
    """
    wide = blocks.pivot(index="round", columns="loop", values="step_time_ms")
    bare = (wide[BARE] + wide[AGAIN]) / 2
    added = (wide[RECORDED] / bare - 1).median()
    noise = (wide[AGAIN] / wide[BARE] - 1).median()
    share = own_us / 1e3 / bare.median()
    rows = [
        ("share that the recording loop adds to a step", ALLOWED_SHARE, added),
        ("share of the bookkeeping by itself", ALLOWED_SHARE, share),
        ("noise: the bare loop beside itself", None, noise),
    ]
    found = pd.DataFrame(rows, columns=["promise", "at_most", "found"])
    return with_verdicts(found)
