"""What fits a device's memory: the largest batch, and what makes a step fit that does not."""

from __future__ import annotations

from dataclasses import replace

from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.moments import MemoryPrediction, largest_that_fits
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.training_memory import Passes, predict_training_memory
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


def largest_micro_batch(
    passes: Passes, capacity_bytes: float, sharding: Sharding | None = None
) -> int:
    """Returns the most samples of a micro-batch whose peak fits; 0 if not even one does."""

    def peak_bytes(samples: int) -> int:
        sized = replace(passes, batch_size=samples)
        return predict_training_memory(sized, sharding).peak_bytes

    return largest_that_fits(peak_bytes, capacity_bytes)


def reserved_bytes(passes: Passes, prediction: MemoryPrediction) -> float:
    """Estimates what CUDA's caching allocator holds of the driver at the peak.

    Blocks that are freed whole are used again, but what outlives a step (moments that are made in
    the first one, gradients) splits one of the largest, which is then asked for anew. So about one
    largest tensor comes on top: 0.3 to 1.0 of one in six steps on an H100
    (data/h100-1/one-gpu/assignment0). It is no bound: on an H200 it was up to 8 where that tensor
    is small (data/h200-1/study-models).
    """
    numerics, samples = passes.numerics, passes.batch_size
    head = passes.architecture.layers[-1].activations
    tables = [
        *head.kept,
        *(piece for layer in passes.architecture.layers for piece in layer.activations.entering),
    ]
    return prediction.peak_bytes + samples * max(
        (piece.bytes_in(numerics) for piece in tables), default=0.0
    )
