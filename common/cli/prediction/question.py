"""What ``ddplab predict`` is asked of measured tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableQuestion:
    """The tables that a prediction is made from, and what it is to say."""

    layer_sizes: str | None = None
    """Path of a table like layer-sizes.csv of assignment 2: parameters of each layer."""
    layer_times: str | None = None
    """Path of a table like layer-times.csv of assignment 2: seconds of each layer's part of the
    backward pass, whose median counts."""
    ready_times: str | None = None
    """Path of a gradient-ready-times.csv, in place of the two layer tables."""
    allreduce: str | None = None
    """Path of an allreduce-times.csv or allreduce-samples.csv, or of what nccl-tests'
    all_reduce_perf, all_reduce_bench.py or NCCL Inspector have printed. With --cluster it stands
    in place of the model of NCCL."""
    overlap: str | None = None
    """Path of an overlap-times.csv (overlap_benchmark.py writes it): DDP's bookkeeping and
    contention, left out without it."""
    bucket_cap_mb: tuple[str, ...] = ()
    """Caps in MiB (None is DDP's default); by default a few from 0.25 MiB to the whole model."""
    measured: str | None = None
    """Path of a ddp-times.csv to compare with."""
    run_dir: str | None = None
    """Run directory whose tables are used where no other table is given."""
    alpha_us: float | None = None
    """Give b* a second time, with this latency of an all-reduce, in microseconds, in place of the
    measured one; the table keeps the measured one."""
    trace: str | None = None
    """Write the step at one cap, predicted and (where the run watched its buckets) measured, to
    this file, as a trace for https://ui.perfetto.dev."""
