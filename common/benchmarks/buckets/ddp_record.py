"""DDP's and a replay's own records of a step, as rows of the benchmark's tables."""

from __future__ import annotations

from common.benchmarks.steps import FixedBatchStep


def describe_buckets(record: dict, step: FixedBatchStep) -> list[dict]:
    """Returns the buckets that DDP used, in reduction order, from its logging data.

    Before the first rebuild, or when it never rebuilds, these are the initial buckets, for which
    DDP logs sizes but no parameters.
    """
    names = [name for name, _ in step.model.named_parameters()]
    members = (record.get("rebuilt_per_bucket_param_indices") or "").split(",")
    rows = []
    for index, size in enumerate(bucket_sizes(record)):
        indices = members[index].split() if record.get("rebuilt_bucket_sizes") else []
        rows.append(
            {
                "bucket": index,
                "size_bytes": size,
                "parameters": " ".join(names[int(i)] for i in indices),
            }
        )
    return rows


def bucket_sizes(record: dict) -> list[int]:
    """Returns the bytes of the buckets that DDP used, in reduction order, from its logging data."""
    sizes = record.get("rebuilt_bucket_sizes") or record["bucket_sizes"]
    return [int(size) for size in sizes.split(",")]


def bucket_columns(buckets: list[dict]) -> dict[str, int]:
    """Returns the number of buckets and the sizes of the first and the last, as columns."""
    return {
        "num_buckets": len(buckets),
        "first_bucket_bytes": buckets[0]["size_bytes"],
        "last_bucket_bytes": buckets[-1]["size_bytes"],
    }


def overlap_rows(records: list[dict], warmup_steps: int) -> list[dict]:
    """Returns DDP's timing of each measured step but the last: it is known one step later."""
    rows = []
    for iteration, record in enumerate(records[warmup_steps + 1 :]):
        if "backward_comm_time" not in record:
            continue
        rows.append(
            {
                "iteration": iteration,
                "backward_compute_time_ms": record["backward_compute_time"] / 1e6,
                "communication_time_ms": record["backward_comm_time"] / 1e6,
                "overlap_time_ms": record["backward_compute_comm_overlap_time"] / 1e6,
            }
        )
    return rows


def exposed_s(record: dict) -> float:
    """Returns the seconds that DDP needed after computation, of the step before; NaN if unknown."""
    if "backward_comm_time" not in record:
        return float("nan")
    return (record["backward_comm_time"] - record["backward_compute_comm_overlap_time"]) / 1e9


def lateness_rows(records: list[dict], warmup_steps: int) -> list[dict]:
    """Returns the delay of a replay behind its recording in each measured step, at worst."""
    return [
        {"iteration": iteration, "lateness_ms": record["replay_lateness_s"] * 1e3}
        for iteration, record in enumerate(records[warmup_steps:])
    ]
