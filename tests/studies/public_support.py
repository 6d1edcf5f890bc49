"""Made tables of published rows, whose truth is a formula."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.errors import UserError
from common.studies.public.jobs import Forecast, PublishedJob, read_published
from common.studies.public.public import predict_rows, score_rows

LOSS = 0.05
ROW = {
    "kind": "training",
    "source_repo": "somebody/something",
    "gpu": "H100",
    "gpus_per_node": 8,
    "network": "NVLink; InfiniBand",
    "model": "Llama 3.1 8B",
    "seq_len": 4096,
    "micro_batch_per_gpu": 2,
    "grad_accum": 1,
    "precision": "bf16",
    "strategy": "FSDP2 FULL_SHARD",
    "act_ckpt": "none",
    "compile": "no",
    "throughput_unit": "sequences/s",
    "memory_gib": 40.0,
}


def true_rate(job: PublishedJob) -> float:
    """Returns the samples per second and GPU that made tables hold: a loss per added GPU."""
    return 3.0 / (1 + LOSS * (job.gpus - 1))


def row(gpus: int, **changes: object) -> dict:
    """Returns a published row whose throughput is the true one."""
    made = ROW | {"gpus": gpus, "global_batch": 2 * gpus} | changes
    return {"throughput": gpus * true_rate(PublishedJob("H100", gpus))} | made


def written(path: Path, rows: list[dict]) -> Path:
    """Writes rows as a table."""
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def scored(path: Path, predict) -> pd.DataFrame:
    """Reads, predicts and scores the rows of a table."""
    table, _ = read_published(path)
    return score_rows(predict_rows(table, predict, str))


def exact(job: PublishedJob) -> Forecast:
    """Predicts the truth."""
    rate = true_rate(job)
    return Forecast(rate, low=0.9 * rate, high=1.1 * rate, memory_bytes=44 * 2**30, fits=True)


def tenth_off(job: PublishedJob) -> Forecast:
    """Predicts a tenth too much on several GPUs, and the truth on one."""
    rate = true_rate(job) * (1.1 if job.gpus > 1 else 1)
    return Forecast(rate, low=0.99 * rate, high=1.01 * rate, fits=job.gpus < 8)


def refuses(job: PublishedJob) -> Forecast:
    """Refuses all but one GPU."""
    if job.gpus > 1:
        raise UserError("one GPU only")
    return exact(job)
