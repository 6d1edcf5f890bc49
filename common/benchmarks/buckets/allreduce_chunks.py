"""One fixed total, all-reduced in ever larger chunks: what a call costs besides its bytes.

Figures 2a and 2b of Li et al., "PyTorch Distributed", VLDB 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pandas as pd
import torch

from common.benchmarks.buckets.allreduce import SIZES, course_table
from common.runtime.group.collective_timing import check_sum, time_in_flight, time_sequence
from common.runtime.group.process_group import process_group
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, record_run
from common.settings import OneOf, Positive, RankOptions
from common.training.precision import DTYPES


@dataclass(frozen=True)
class ChunkBenchmark(RankOptions):
    """Time one fixed total split into ever larger chunks (Figures 2a and 2b of Li et al. 2020).

    Chunks of 1,000, 10,000, … elements up to the total are reduced in two modes: sequential (the
    next starts when the last is done) and in_flight (all launched at once, as the course has it).
    The variable NUMEL sets the total. Writes allreduce-chunk-times.csv (the course's columns, in
    flight, seconds) and allreduce-chunk-samples.csv (raw, both modes).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    numel: Annotated[int, Positive] = 10_000_000
    """Elements of all chunks together."""
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Type of the elements: float32, float16 or bfloat16."""
    rounds: Annotated[int, Positive] = 4
    """Rounds; each visits every chunk size once."""
    iterations: Annotated[int, Positive] = 2
    """Samples per chunk size, mode and round."""
    output_dir: str = "outputs/assignment2"


CHUNK_COLUMNS = (
    "mode",
    "total_elements",
    "total_bytes",
    "chunk_elements",
    "chunk_bytes",
    "round",
    "iteration",
    "rank",
    "time_ms",
)


def main(settings: ChunkBenchmark) -> None:
    """Runs the chunk benchmark and prints its table."""
    with (
        process_group(settings.device, settings.backend) as worker,
        record_run(settings, "allreduce_chunk_benchmark", worker) as recorder,
    ):
        samples = measure(settings, recorder)
        if recorder.run:
            gpus = worker.world_size if worker.device.type == "cuda" else 0
            about = {"backend": worker.backend, "world_size": worker.world_size, "num_gpus": gpus}
            sizes = (*SIZES, "chunk_elements", "chunk_bytes")
            table = course_table(samples, "in_flight", sizes, about)
            recorder.run.write_table("allreduce-chunk-times.csv", table)
            print(table.to_string(index=False))
            print(f"Written to {recorder.run.path}")


def chunk_sizes(total: int) -> tuple[int, ...]:
    """Returns chunk sizes in elements: 1,000, 10,000, … below the total, then the total."""
    sizes = []
    size = 1000
    while size < total:
        sizes.append(size)
        size *= 10
    return (*sizes, total)


def measure(settings: ChunkBenchmark, recorder: Recorder) -> pd.DataFrame:
    """Visits the chunk sizes in rotated rounds; returns the samples of every rank, on rank 0."""
    worker = recorder.worker
    stream = recorder.stream("allreduce-chunk-samples.csv", CHUNK_COLUMNS)
    dtype = DTYPES[settings.dtype]
    buffer = torch.zeros(settings.numel, dtype=dtype, device=worker.device)
    check_sum(buffer, worker)
    sizes = chunk_sizes(settings.numel)
    progress = Progress(settings.rounds * len(sizes), worker.is_main)
    for round_, size in recorder.rounds(sizes, settings.rounds, stage="chunks"):
        chunks = list(buffer.split(size))
        keys = {
            "total_elements": settings.numel,
            "total_bytes": settings.numel * dtype.itemsize,
            "chunk_elements": size,
            "chunk_bytes": size * dtype.itemsize,
            "round": round_,
        }
        rows = []
        for mode in ("sequential", "in_flight"):
            for iteration in range(-1, settings.iterations):  # one warm-up
                if mode == "in_flight":
                    elapsed_s = time_in_flight(chunks, worker)
                else:
                    elapsed_s = sum(time_sequence(chunks, worker))
                row = {"mode": mode, "iteration": iteration, "time_ms": elapsed_s * 1e3}
                rows += [keys | row] if iteration >= 0 else []
        stream.write(rows)
        progress.step(f"round {round_ + 1}, chunks of {size:,} elements")
    return stream.table()
