"""Runs of text training, made up for tests: ours with all of their tables, and the original's."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from assignment1_support import write_run

from common.tables import BUCKET_COLUMNS

ENVIRONMENT = {"label": "assignment4-text", "device": "cpu", "network": None}
TEXTS = 1000


def write_original(
    folder: Path,
    times_s: list[float],
    epochs: list[int] | None = None,
    losses: list[float] | None = None,
    accuracy: float = 0.8,
) -> Path:
    """Writes ``metrics.csv`` as the original did."""
    folder.mkdir(parents=True)
    table = pd.DataFrame({"epoch": epochs or range(1, len(times_s) + 1)})
    table["train_loss"] = losses or [1 / (1 + epoch) for epoch in table["epoch"]]
    table["train_time"] = times_s
    table["val_loss"], table["val_acc"] = 0.5, accuracy
    table.to_csv(folder / "metrics.csv", index=False)
    return folder


def write_text_run(
    folder: Path,
    ranks: int = 1,
    times_s: tuple[float, ...] = (12.0, 10.0, 10.0),
    *,
    batch_per_rank: int | None = None,
    passes: int = 1,
    losses: list[float] | None = None,
    environment: dict | None = None,
    settings: dict | None = None,
    facts: dict | None = None,
) -> Path:
    """Writes a run of train_text.py on ``TEXTS`` texts, by default with a global batch of 32.

    Args:
        times_s: training time of each epoch, on its slowest rank.
        passes: how often an epoch goes through the data; the number of ranks without a sampler.
    """
    batch = batch_per_rank or 32 // ranks
    each = TEXTS * passes // ranks
    arm = {"arm": 0, "regime": "", "world_size": ranks, "batch_per_rank": batch}
    arm |= {"global_batch": batch * ranks, "accumulation": 1, "compression": "none"}
    arm |= {"bucket_cap_mb": "", "precision": "float32", "change": "none"}
    fact = {"parameters": 1000, "gradient_bytes": 4000, "gradient_dtype": "float32"}
    fact |= {"compute_dtype": "float32", "input_shape": 64, "model": "encoder of 2 layers"}
    fact |= {"data": "ag_news/train.csv", "data_samples": TEXTS} | (facts or {})
    sampled = {"arm": 0, "processed": each, "distinct": min(each, TEXTS), "data_samples": TEXTS}
    sampled |= {"shared": each if passes > 1 else 0, "distinct_all_ranks": TEXTS}
    parts = {"data_time_ms": 1.0, "forward_time_ms": 4.0, "backward_time_ms": 8.0}
    parts |= {"waiting_time_ms": 0.0, "optimizer_time_ms": 2.0}
    parts |= {"communication_time_ms": 3.0 * (ranks > 1)}
    numbered = list(enumerate(times_s, 1))
    return write_run(
        folder,
        {"dataset": "ag_news", "epochs": len(times_s)} | (settings or {}),
        ENVIRONMENT | {"world_size": ranks} | (environment or {}),
        arms=[arm],
        facts=[{"rank": rank} | fact for rank in range(ranks)],
        samples=[
            {"epoch": epoch, "rank": rank, "order": 10 * epoch + rank} | sampled
            for epoch, _ in numbered
            for rank in range(ranks)
        ],
        epochs=[
            {"rank": rank, "epoch": epoch, "train_time_s": time - 0.5 * (rank > 0)}
            | {"evaluation_time_s": 1.0, "epoch_time_s": time + 1, "steps": each // batch}
            | {"samples": each, "train_loss": losses[epoch - 1] if losses else 1 / epoch}
            | {"val_loss": 0.5, "val_acc": 0.7 + 0.01 * epoch}
            for epoch, time in numbered
            for rank in range(ranks)
        ],
        steps=[
            {"rank": rank, "arm": 0, "kind": "timed", "round": 0, "epoch": epoch, "step": step}
            | {"warmup": epoch == 1 and step < 2, "samples": batch, "tokens": 20 * batch}
            | {"padded_tokens": 30 * batch, "longest": 30, "micro_batches": 1}
            | {"exchanged_bytes": 4000 * (ranks > 1), "step_time_ms": sum(parts.values()), **parts}
            | {"between_time_ms": 0.1 if step else None, "cpu_time_ms": 15.0}
            for epoch, _ in numbered
            for step in range(8)
            for rank in range(ranks)
        ],
        placement=[
            {"rank": rank, "host": "here", "local_rank": rank, "device": "cpu"}
            | {"identity": str(rank), "cores": 1, "core_list": str(rank), "threads": 1}
            for rank in range(ranks)
        ],
        buckets=pd.DataFrame(columns=[*BUCKET_COLUMNS]),
    )
