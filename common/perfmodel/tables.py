"""Readers of measured tables: all-reduces, gradient-ready times, DDP's costs.

Every reader refuses a table that cannot be right with one line that names the file. The course's
layer tables are read in ``layer_tables``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.csv_tables import numbers, read_table
from common.errors import UserError, naming
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import StepParts
from common.perfmodel.printed.collectives import is_printed, read_printed
from common.perfmodel.samples import AllReduceSamples, OverlapSamples, ReadySamples
from common.samples import slowest_rank


@dataclass(frozen=True)
class AllReduceTable:
    """Measured all-reduces.

    Attributes:
        curve: one after another, as buckets are reduced.
        crowded: the time of each while several are in flight; None where that was not measured.
    """

    curve: MeasuredAllReduce
    crowded: MeasuredAllReduce | None
    world_size: int | None
    source: str


def read_all_reduce(path: Path | str) -> AllReduceTable:
    """Reads ``allreduce-times.csv`` (seconds) or this project's raw ``allreduce-samples.csv``.

    From raw samples a point is the median over samples of the slowest rank. The file may also be
    what nccl-tests, all_reduce_bench.py or NCCL Inspector have printed (``printed``).
    """
    if Path(path).exists() and not Path(path).is_file():
        raise UserError(f"{path}: a folder or a device; the file of a table is needed")
    if is_printed(path):
        printed = read_printed(path, "all_reduce")
        return AllReduceTable(printed.curve, None, printed.ranks, str(path))
    if has_samples(path):
        samples = read_all_reduce_samples(path)
        crowded = crowded_samples(path)
        with naming(path):
            return AllReduceTable(
                curve=samples.curve(),
                crowded=crowded.curve() if crowded else None,
                world_size=samples.world_size,
                source=str(path),
            )
    table = read_table(path, ["world_size", "total_bytes", "average_time"])
    sizes = numbers(table, "total_bytes", path, above=0).to_numpy(float)
    times = numbers(table, "average_time", path, above=0).to_numpy(float)
    sizes_of_world = set(numbers(table, "world_size", path, above=0))
    if len(sizes_of_world) > 1:
        raise UserError(f"{path}: several world sizes {sorted(map(int, sizes_of_world))}")
    with naming(path):
        curve = MeasuredAllReduce(sizes, times)
    return AllReduceTable(curve, None, int(sizes_of_world.pop()), str(path))


def has_samples(path: Path | str) -> bool:
    """Returns True if a table of all-reduces is this project's, with raw samples."""
    return not is_printed(path) and "time_ms" in read_table(path, []).columns


def read_all_reduce_samples(path: Path | str, mode: str = "sequential") -> AllReduceSamples:
    """Reads the samples of one mode from this project's raw ``allreduce-samples.csv``."""
    table = read_table(path, ["mode", "total_bytes", "rank", "time_ms", "round", "iteration"])
    for column in ("time_ms", "total_bytes"):
        table[column] = numbers(table, column, path, above=0)
    table["rank"] = numbers(table, "rank", path, at_least=0)
    chosen = table[table["mode"] == mode]
    if chosen.empty:
        raise UserError(f"{path}: no samples of mode {mode!r}; has {set(table['mode'])}")
    return AllReduceSamples.of(chosen)


def crowded_samples(path: Path | str) -> AllReduceSamples | None:
    """Returns the samples with several all-reduces in flight, of two sizes or more; else None."""
    table = read_table(path, ["mode", "total_bytes"])
    sizes = table.loc[table["mode"] == "in_flight", "total_bytes"]
    return read_all_reduce_samples(path, "in_flight") if sizes.nunique() > 1 else None


def read_ready_times(path: Path | str) -> BackwardProfile:
    """Reads the profile from raw ``gradient-ready-times.csv``: medians of the slowest rank.

    The order is that in which gradients came on rank 0, which is the one DDP goes by
    (``ready_index``; in a table without it, the order of the times).
    """
    return read_ready_samples(path).profile()


def read_ready_samples(path: Path | str) -> ReadySamples:
    """Reads all samples from raw ``gradient-ready-times.csv``."""
    columns = ["rank", "iteration", "parameter", "registration_index", "dtype", "size_bytes"]
    table = read_table(path, [*columns, "ready_time_ms"])
    for column in ("ready_time_ms", "size_bytes"):
        table[column] = numbers(table, column, path, above=0)
    for column in ("registration_index", "rank"):
        table[column] = numbers(table, column, path, at_least=0).astype(int)
    if table[["parameter", "dtype"]].isna().any(axis=None):
        raise UserError(f"{path}: every row needs a parameter and a dtype")
    if "ready_index" in table.columns:
        table["ready_index"] = numbers(table, "ready_index", path, at_least=0)
    with naming(path):
        return ReadySamples.of(table)


def read_costs(path: Path | str, backend: str | None = None) -> DdpCosts:
    """Reads DDP's copies and contention from ``overlap-times.csv`` (``OverlapSamples.costs``)."""
    return read_overlap_samples(path, backend).costs()


def read_overlap_samples(path: Path | str, backend: str | None = None) -> OverlapSamples:
    """Reads all samples from raw ``overlap-times.csv``, which was measured over ``backend``."""
    counts = ["message_bytes", "messages", "messages_done"]
    columns = [*counts, "backward_time_ms", "all_reduce_time_ms"]
    table = read_table(path, ["arm", "round", "iteration", *columns, "gradient_bytes"])
    for column in columns:
        table[column] = numbers(table, column, path, at_least=0)
    if "copy_out_time_ms" in table:  # not in older runs; empty where DDP recorded nothing
        recorded = table[table["copy_out_time_ms"].notna()]
        table["copy_out_time_ms"] = numbers(recorded, "copy_out_time_ms", path, at_least=0)
    numbers(table, "gradient_bytes", path, above=0)
    counted = table["arm"].isin(["launched", "continuous", "buckets"])
    numbers(table[counted], "messages", path, above=0)
    missing = {"local", "bookkeeping"} - set(table["arm"])
    if missing:
        raise UserError(f"{path}: no samples of {', '.join(sorted(missing))}")
    with naming(path):
        return OverlapSamples.of(table, backend)


def read_step_parts(path: Path | str) -> StepParts:
    """Reads the parts of a step from steps that were timed without DDP.

    Reads ``local-step-times.csv`` (with the optimizer's own time) or ``local-times.csv`` (where
    the update is the step without both passes, waits included). A part is the median over steps
    of the slowest rank's.
    """
    table = read_table(path, ["iteration", "rank", "forward_time_ms", "backward_time_ms"])
    last = "optimizer_time_ms" if "optimizer_time_ms" in table.columns else "step_time_ms"
    if last not in table.columns:
        raise UserError(f"{path}: no column 'optimizer_time_ms' or 'step_time_ms'")
    columns = ["forward_time_ms", "backward_time_ms", last]
    for column in columns:
        table[column] = numbers(table, column, path, at_least=0)
    keys = [key for key in ("round", "iteration") if key in table.columns]
    slowest = slowest_rank(table, columns, by=keys) / 1e3
    update = slowest[last]
    if last == "step_time_ms":
        update = (update - slowest["forward_time_ms"] - slowest["backward_time_ms"]).clip(lower=0)
    return StepParts(
        forward_s=float(slowest["forward_time_ms"].median()),
        update_s=float(update.median()),
        local_backward_s=float(slowest["backward_time_ms"].median()),
    )
