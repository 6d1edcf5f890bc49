"""One point of the throughput benchmark, in a process of its own.

Its settings come as JSON, and so does its outcome go. A process of its own starts with an empty
allocator, and its end, however it comes, is the end of this point only.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.data.batches import BatchStream
from common.errors import UserError
from common.perfmodel.one_device.workload import Workload
from common.runtime.machine.kept_memory import kept_memory
from common.runtime.machine.memory_limit import (
    is_out_of_memory,
    limit_memory,
    peak_resident_bytes,
    writable_bytes,
)
from common.runtime.progress import Progress
from common.runtime.records.run_directory import write_atomically
from common.training.recording.memory_watch import PeakMemory
from common.training.step import TrainingStep, time_steps

MEASURED, OUT_OF_MEMORY, REFUSED, FAILED = "measured", "out of memory", "refused", "failed"
"""Possible ends of a point; a refused one names a mistake in its settings."""


@dataclass(frozen=True)
class ThroughputPoint(Workload):
    """A workload to be timed on ``device``; ``memory_limit_bytes`` 0 is none."""

    num_steps: int = 20
    warmup_steps: int = 5
    device: str = "cpu"
    memory_limit_bytes: int = 0
    keep_memory: bool = False
    seed: int = 42


@dataclass(frozen=True)
class PointOutcome:
    """The end of a point. Times are of single steps, in ms; memory of a CPU is resident."""

    status: str
    reason: str = ""
    warmup_times_ms: tuple[float, ...] = ()
    step_times_ms: tuple[float, ...] = ()
    held_bytes: int = 0
    """Memory in use before there was a model: on a GPU by all, on a CPU by this process."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resident_bytes: int | None = None


def main() -> None:
    """Measures the point of the first argument; writes the outcome to the file of the second."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    point = ThroughputPoint(**json.loads(sys.argv[1]))
    write_atomically(Path(sys.argv[2]), json.dumps(asdict(outcome(point))))


def outcome(point: ThroughputPoint) -> PointOutcome:
    """Measures a point, or says that memory ran out or that the settings were refused."""
    held_bytes = _held_bytes(torch.device(point.device))
    try:
        with kept_memory() if point.keep_memory else nullcontext():
            return measure(point)
    except UserError as error:
        return PointOutcome(REFUSED, str(error))
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        # The first line says how much was asked for; around it are advice and a place in C++.
        reason = (str(error).splitlines() or ["MemoryError"])[0].rpartition("err == 0. ")[-1]
        return PointOutcome(OUT_OF_MEMORY, reason, held_bytes=held_bytes)


def measure(point: ThroughputPoint) -> PointOutcome:
    """Times the steps; the peak of memory is that of the measured ones."""
    device = torch.device(point.device)
    if point.memory_limit_bytes:
        limit_memory(point.memory_limit_bytes, point.device)
    step = TrainingStep(point, device, seed=point.seed)
    batches = BatchStream(
        batch_size=point.batch_size,
        seq_len=point.seq_len,
        vocab_size=point.unpadded.vocab_size,
        device=device,
        asynchronous=point.async_batches,
    )
    progress = Progress(point.warmup_steps + point.num_steps)
    print("Warming up...")
    warmup_s = time_steps(step, batches, point.warmup_steps, lambda: progress.step("warm-up step"))
    PeakMemory(device).start()
    print(f"Measuring throughput over {point.num_steps} steps...")
    steps_s = time_steps(step, batches, point.num_steps, lambda: progress.step("measured step"))
    on_gpu = device.type == "cuda"
    return PointOutcome(
        status=MEASURED,
        warmup_times_ms=tuple(time_s * 1e3 for time_s in warmup_s),
        step_times_ms=tuple(time_s * 1e3 for time_s in steps_s),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
        peak_resident_bytes=None if on_gpu else peak_resident_bytes(),
    )


def _held_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return writable_bytes()
