"""The largest batch that fits a device's memory, and ways to make a step fit that does not."""

from __future__ import annotations

from dataclasses import replace

from common.perfmodel.memory import predict_memory
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.workload import Workload


def largest_batch(
    workload: Workload, capacity_bytes: float, sharding: Sharding | None = None
) -> int:
    """Finds the largest batch size with a predicted peak within ``capacity_bytes``; 0 if none."""

    def fits(batch_size: int) -> bool:
        sized = replace(workload, batch_size=batch_size)
        return predict_memory(sized, sharding).peak_bytes <= capacity_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_would_fit(workload: Workload, capacity_bytes: float) -> str:
    """Says how to make a step fit: the largest batch, as it is and with what saves memory."""
    ways = {
        "": workload,
        " with --loss_chunks 8": replace(workload, loss_chunks=8),
        " with --activation_checkpointing": replace(workload, activation_checkpointing=True),
        " with both": replace(workload, loss_chunks=8, activation_checkpointing=True),
    }
    fits = {way: largest_batch(changed, capacity_bytes) for way, changed in ways.items()}
    if not fits[" with both"]:
        return "no batch is predicted to fit; use a smaller model, or shard it over several devices"
    found = [f"{batch}{way}" for way, batch in fits.items() if batch]
    return f"largest batch predicted to fit: {', '.join(found)}"
