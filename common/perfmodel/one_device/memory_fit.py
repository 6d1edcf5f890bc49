"""The largest batch that fits a device's memory, and ways to make a step fit that does not."""

from __future__ import annotations

from dataclasses import replace

from common.perfmodel.one_device.memory import largest_that_fits, predict_memory
from common.perfmodel.one_device.workload import Workload


def largest_batch(workload: Workload, capacity_bytes: float) -> int:
    """Finds the largest batch size with a predicted peak within ``capacity_bytes``; 0 if none."""

    def peak_bytes(batch_size: int) -> int:
        # A small batch has fewer tokens than its loss may be in pieces.
        chunks = min(workload.loss_chunks, batch_size * workload.seq_len)
        sized = replace(workload, batch_size=batch_size, loss_chunks=chunks)
        return predict_memory(sized).peak_bytes

    return largest_that_fits(peak_bytes, capacity_bytes)


def more_loss_chunks(workload: Workload) -> int:
    """Returns a number of pieces of the loss that saves memory: at least 8, if there are tokens."""
    return min(max(8, workload.loss_chunks), workload.batch_size * workload.seq_len)


def what_would_fit(workload: Workload, capacity_bytes: float) -> str:
    """Says how to make a step fit: the largest batch, as it is and with what saves memory."""
    chunks = more_loss_chunks(workload)
    in_pieces = replace(workload, loss_chunks=chunks)
    ways = {
        "": workload,
        f" with --loss_chunks {chunks}": in_pieces,
        " with --activation_checkpointing": replace(workload, activation_checkpointing=True),
        " with both": replace(in_pieces, activation_checkpointing=True),
    }
    fits = {way: largest_batch(changed, capacity_bytes) for way, changed in ways.items()}
    if not fits[" with both"]:
        return "no batch is predicted to fit; use a smaller model, or shard it over several devices"
    batches = [f"{batch}{way}" for way, batch in fits.items() if batch]
    return f"largest batch predicted to fit: {', '.join(batches)}"
