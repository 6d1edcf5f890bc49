"""Numbers that assignment 2 asks for, recomputed from the tables of a run."""

from __future__ import annotations

from pathlib import Path

from common.course.numbers.tables import table
from common.perfmodel.calibration import read_calibration
from common.samples import slowest_rank


def bandwidth_mb_per_s(run: Path) -> float:
    """Returns β from the smallest and the largest all-reduce, in 10⁶ bytes per second."""
    samples = table(run, "allreduce-samples", "allreduce_benchmark")
    one_by_one = samples[samples["mode"] == "sequential"]
    slowest_ms = slowest_rank(one_by_one, "time_ms", by=["total_bytes", "round", "iteration"])
    by_size_ms = slowest_ms.groupby("total_bytes").median()
    smallest, largest = by_size_ms.index.min(), by_size_ms.index.max()
    longer_s = (by_size_ms[largest] - by_size_ms[smallest]) / 1e3
    return float((largest - smallest) / longer_s / 1e6)


def best_cap_mib(run: Path) -> float:
    """Returns b*, the cap with the shortest backward pass by the full model, in MiB."""
    backend = table(run, "allreduce-times", "allreduce_benchmark")["backend"].iloc[0]
    calibration = read_calibration(
        run / "train_benchmark" / "gradient-ready-times.csv",
        run / "allreduce_benchmark" / "allreduce-samples.csv",
        run / "overlap_benchmark" / "overlap-times.csv",
        backend=backend,
    )
    return calibration.model().best_cap().cap_mib


def one_bucket_ratio(run: Path) -> float:
    """Returns the median pass with one bucket over the one without DDP, of the slowest rank."""
    passes = table(run, "ddp-times", "ddp_benchmark")
    one_bucket = passes[passes["num_buckets"] == 1]
    step = ["round", "iteration"]
    with_ddp_ms = slowest_rank(one_bucket, "backward_time_ms", by=["bucket_cap_mib", *step])
    local = table(run, "local-times", "ddp_benchmark")
    without_ms = slowest_rank(local, "backward_time_ms", by=step)
    return float(with_ddp_ms.median() / without_ms.median())
