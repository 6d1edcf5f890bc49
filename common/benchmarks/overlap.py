"""The benchmark of what DDP adds to a backward pass besides waiting: bookkeeping and contention.

The arms of ``overlap_lab`` in rotated rounds, all ranks at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from common.benchmarks.overlap_lab import OVERLAP_TIME_COLUMNS, OverlapLab
from common.benchmarks.rounds import rotated_rounds
from common.benchmarks.steps import FixedBatchStep, StepSettings, make_step
from common.errors import UserError
from common.runtime.process_group import Worker, process_group
from common.runtime.progress import Progress
from common.runtime.recorder import Recorder, record_run, require_not_negative, require_positive
from common.runtime.run_options import RankOptions


@dataclass(frozen=True)
class OverlapBenchmark(RankOptions):
    """Measure DDP's bookkeeping, and how backward pass and all-reduce slow each other down.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment2/overlap_benchmark.py
    --model gpt2-nano --max_seq_len 64. Writes overlap-times.csv (raw).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    model: str = "gpt2-large"
    """gpt2-nano, gpt2, gpt2-medium, gpt2-large or gpt2-xl."""
    batch_size: int = 4
    max_seq_len: int = 1024
    dtype: str = "float32"
    replay: str = ""
    """Instead of training a model, sleep as this recorded backward pass computed: a system below
    data/, a run directory or a gradient-ready-times.csv. Model, batch, sequence, dtype and
    seed then mean nothing."""
    replay_factor: float = 1.0
    """Divide the recording's sizes by this; links as much slower then give the same picture."""
    replay_time_factor: float = 1.0
    """Divide the recording's times by this."""
    message_mib: tuple[float, ...] = ()
    """Sizes of the all-reduces beside the backward pass, in MiB; by default 1/512, 1/64 and 1/8 of
    all gradients."""
    rounds: int = 4
    num_steps: int = 4
    """Measured backward passes per arm and round."""
    warmup_steps: int = 2
    seed: int = 42
    output_dir: str = "outputs/assignment2"

    def __post_init__(self) -> None:
        require_not_negative(self, "warmup_steps")
        require_positive(self, "rounds", "num_steps")
        for size in self.message_mib:
            if not 1 / 2**20 <= size < float("inf"):
                raise UserError(f"message_mib {size}: a message has at least one byte, and an end")
        self.step_settings()

    def step_settings(self) -> StepSettings:
        """Returns the part of the settings that says what is trained."""
        return StepSettings(
            model=self.model,
            batch_size=self.batch_size,
            max_seq_len=self.max_seq_len,
            dtype=self.dtype,
            seed=self.seed,
            replay=self.replay,
            replay_factor=self.replay_factor,
            replay_time_factor=self.replay_time_factor,
        )


def main(settings: OverlapBenchmark) -> None:
    """Runs the benchmark and prints the medians."""
    with process_group(settings.device, settings.backend) as worker:
        step = make_step(settings.step_settings(), worker)
        with record_run(
            settings,
            "overlap_benchmark",
            worker,
            recorded_settings=step.recorded_settings,
            notes=(step.note,),
        ) as recorder:
            samples = measure(settings, step, worker, recorder)
            if recorder.run:
                keys = ["arm", "message_bytes", "messages"]
                times = ["backward_time_ms", "all_reduce_time_ms"]
                slowest = samples.groupby([*keys, "round", "iteration"], sort=False)[times].max()
                medians = slowest.groupby(keys, sort=False).median().reset_index()
                print(medians.to_string(index=False, float_format="%.4g"))
                print(f"Written to {recorder.run.path}")


def measure(
    settings: OverlapBenchmark, step: FixedBatchStep, worker: Worker, recorder: Recorder
) -> pd.DataFrame:
    """Visits the arms in rotated rounds; returns the samples of all ranks, on rank 0."""
    stream = recorder.stream("overlap-times.csv", OVERLAP_TIME_COLUMNS)
    lab = OverlapLab(step, worker)
    arms = lab.plan([int(size * 2**20) for size in settings.message_mib])
    progress = Progress(settings.rounds * len(arms), worker.is_main)
    for round_, arm in rotated_rounds(arms, settings.rounds):
        rows = lab.visit(arm, round_, passes=settings.num_steps, warmup=settings.warmup_steps)
        stream.write(rows)
        progress.step(f"round {round_ + 1}, {arm.kind}")
    return stream.table()
