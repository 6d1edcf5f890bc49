"""Run directories of assignment 1, made up for tests."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import yaml

MIB = 2**20
SETTINGS = {
    "model": "gpt2-nano",
    "vocab_size": 0,
    "global_batch_size": 16,
    "micro_batch_size": 4,
    "seq_len": 64,
    "num_steps": 4,
    "optimizer": "adamw",
    "optimizer_implementation": "fused",
    "lr": 1e-3,
    "precision": "float32",
    "data": "",
    "seed": 42,
    "device": "cpu",
    "entropy_nats": 2.0,
    "unigram_entropy_nats": 5.0,
    "bucket_cap_mb": None,
}
ENVIRONMENT = {
    "status": "complete",
    "start_time": "2026-01-02T03:04:05+00:00",
    "backend": "gloo",
    "hardware": "a pretend machine",
    "network": "TCP over loopback",
    "interconnect": {},
}


def write_run(
    folder: Path, settings: dict, environment: dict, **tables: list[dict] | pd.DataFrame
) -> Path:
    """Writes a run directory with these tables; ``training_steps`` makes training-steps.csv."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | environment))
    for name, rows in tables.items():
        pd.DataFrame(rows).to_csv(folder / f"{name.replace('_', '-')}.csv", index=False)
    return folder


def steps(
    times_ms: list[list[float]], losses: list[float] | None = None, profiled: tuple[int, ...] = ()
) -> list[dict]:
    """Returns rows of training-steps.csv from the ranks' times of each step."""
    return [
        {
            "step": step,
            "rank": rank,
            "loss": (losses or [3.0] * len(times_ms))[step],
            "step_time_ms": time_ms,
            "sent_bytes": 100,
            "profiled": step in profiled,
        }
        for step, of_ranks in enumerate(times_ms)
        for rank, time_ms in enumerate(of_ranks)
    ]


def write_training(
    folder: Path,
    strategy: str,
    ranks: int,
    losses: list[float] | None = None,
    started: str = "2026-01-02T03:04:05+00:00",
    peak_bytes: int = 0,
    **changed: object,
) -> Path:
    """Writes a training run of four steps in the folder of a name that says nothing."""
    losses = losses or [9.0, 8.0, 7.0, 6.0]
    settings = SETTINGS | {"strategy": strategy, "num_steps": len(losses)} | changed
    memory = [{"rank": rank, "peak_bytes": peak_bytes} for rank in range(ranks)]
    return write_run(
        folder,
        settings,
        {"world_size": ranks, "start_time": started},
        training_steps=steps([[10.0] * ranks] * len(losses), losses),
        memory=memory if peak_bytes else [{"rank": 0, "peak_bytes": None}],
    )


def strategy_rows(
    times_ms: dict[str, list[list[tuple]]], sent: dict[str, int], accumulation: int = 1
) -> list[dict]:
    """Returns rows of strategy-times.csv: strategy → rounds → steps → ranks' times."""
    return [
        {
            "strategy": strategy,
            "accumulation": accumulation,
            "round": round_,
            "iteration": iteration,
            "rank": rank,
            "step_time_ms": time_ms,
            "sent_bytes": sent.get(strategy, 0),
        }
        for strategy, rounds in times_ms.items()
        for round_, of_round in enumerate(rounds)
        for iteration, of_ranks in enumerate(of_round)
        for rank, time_ms in enumerate(of_ranks)
    ]


BENCHMARK = {
    "model": "gpt2-nano",
    "micro_batch_size": 4,
    "seq_len": 64,
    "precision": "float32",
    "bucket_cap_mb": 4.0,
    "accumulations": [1],
}
