"""Run directories of assignment 3, made up for tests from closed forms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from common.analysis.runs import Run

SETTINGS = {
    "mode": "static",
    "dataset": "sst2",
    "model_name": "small",
    "global_batch": 8,
    "max_length": 64,
    "seed": 42,
    "precision": "float32",
}
ENVIRONMENT = {
    "status": "complete",
    "start_time": "2026-01-02T03:04:05+00:00",
    "backend": "gloo",
    "hardware": "a pretend machine",
    "device": "cpu",
    "world_size": 2,
}


def opened(folder: Path) -> Run:
    """Returns a run directory as the analysis opens it."""
    return Run(folder, folder)


def rank_rows(
    compute_ms: list[list[float]],
    padded: list[list[int]] | None = None,
    tokens: int = 200,
    warmup: int = 1,
) -> pd.DataFrame:
    """Returns rows of all ranks: a step takes as long as its slowest rank computes, and 2 ms.

    Args:
        compute_ms: by step, each rank's.
        padded: by step, each rank's padded tokens; 100 for each by default, in 4 texts.
        tokens: of a step, all ranks together.
        warmup: number of first steps that are warm-up.
    """
    rows = []
    for step, of_ranks in enumerate(compute_ms):
        for rank, time_ms in enumerate(of_ranks):
            rows.append(
                {
                    "step": step,
                    "rank": rank,
                    "local_batch": 4,
                    "padded_tokens": padded[step][rank] if padded else 100,
                    "step_time_ms": max(of_ranks) + 2,
                    "peak_mem_mb": 50 + 10 * rank,
                    "tokens": tokens // len(of_ranks),
                    "compute_time_ms": time_ms,
                    "waiting_time_ms": max(of_ranks) - time_ms,
                    "communication_time_ms": 1,
                    "planning_time_ms": 0.25,
                    "planning_work_ms": 1,
                    "halvings": 0,
                    "warmup": step < warmup,
                }
            )
    table = pd.DataFrame(rows)
    table["max_seq_len_in_batch"] = table["padded_tokens"] // table["local_batch"]
    seconds = table["step_time_ms"] / 1e3
    table["throughput_samples_per_s"] = table["local_batch"] / seconds
    table["throughput_tokens_per_s"] = table["tokens"] / seconds
    return table


def write_run(
    folder: Path,
    rows: pd.DataFrame,
    environment: dict | None = None,
    losses: list[float] | None = None,
    **changed: object,
) -> Path:
    """Writes a training run of assignment 3 into ``folder``."""
    write_records(folder, SETTINGS | changed, environment)
    (folder / "metrics").mkdir()
    for rank, own in rows.groupby("rank"):
        own.to_csv(folder / "metrics" / f"rank{rank}.csv", index=False)
    if losses:
        table = pd.DataFrame({"step": range(len(losses)), "loss": losses, "learning_rate": 1e-3})
        table.to_csv(folder / "losses.csv", index=False)
    return folder


def write_records(folder: Path, settings: dict, environment: dict | None = None) -> Path:
    """Writes a run directory without tables."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    record = json.dumps(ENVIRONMENT | (environment or {}))
    (folder / "environment.json").write_text(record)
    return folder


def two_modes(folder: Path, steps: int = 80) -> list[Path]:
    """Writes a static and a dynamic run with noise, dynamic's ranks about equal, and shorter."""
    draw = np.random.default_rng(3)
    static = 40 + 60 * draw.random((steps, 2))
    work = static.max(axis=1, keepdims=True) * 0.6
    dynamic = work * (1 + 0.03 * draw.random((steps, 2)))
    losses = (0.3 + 0.4 * np.exp(-np.arange(steps) / 20)).tolist()
    return [
        write_run(
            folder / f"train_{mode}",
            rank_rows(times.tolist(), (times * 10).astype(int).tolist()),
            losses=losses,
            mode=mode,
        )
        for mode, times in (("static", static), ("dynamic", dynamic))
    ]


MODES = {
    "static": 1.0,
    "dynamic": 0.6,
    "dynamic_calibrated": 0.55,
    "karmarkar_karp": 0.95,
    "length_grouped": 0.5,
    "token_budget": 0.5,
}
"""Padded tokens of the fullest rank, over static's."""


def cost_ms(batch_size: float, longest: float) -> float:
    """Returns the time of a pass in these runs: 5 ms, and 20 µs a padded token."""
    return 5 + 0.02 * batch_size * longest


def mode_times(
    steps: int = 20, ratios: dict[str, float] = MODES, unequal: dict[str, float] | None = None
) -> pd.DataFrame:
    """Returns rows of mode-times.csv on two ranks, by ``cost_ms``, and a millisecond of exchange.

    Args:
        steps: global batches of 8 texts; static's fullest rank has 400, 440, 480, 400, … tokens.
        ratios: by mode, the padded tokens of the fullest rank over static's.
        unequal: by mode, those of the emptier rank over the fullest's; half for static, else all.
    """
    unequal = {"static": 0.5, "control": 1.0} | (unequal or {})
    rows = []
    for step in range(steps):
        for order, (mode, ratio) in enumerate((ratios | {"control": 0.6}).items()):
            fullest = (400 + 40 * (step % 3)) * ratio
            padded = [fullest, fullest * unequal.get(mode, 1.0)]
            times = [cost_ms(4, tokens / 4) for tokens in padded]
            own_batch = mode in ("length_grouped", "token_budget")
            for rank, (tokens, time_ms) in enumerate(zip(padded, times, strict=True)):
                rows.append(
                    {
                        "mode": mode,
                        "step": step,
                        "rank": rank,
                        "order": order,
                        "same_batch": not own_batch and mode != "control",
                        "local_batch": 4,
                        "max_seq_len_in_batch": tokens / 4,
                        "padded_tokens": tokens,
                        "tokens": tokens / 2,
                        "global_batch": 8,
                        "step_time_ms": max(times) + 1,
                        "compute_time_ms": time_ms,
                        "waiting_time_ms": max(times) - time_ms,
                        "communication_time_ms": 1,
                        "planning_time_ms": 0.1,
                        "planning_work_ms": 1,
                        "loss": 0.7,
                    }
                )
    return pd.DataFrame(rows)


def calibration_rows() -> pd.DataFrame:
    """Returns rows of calibration.csv that take ``cost_ms``; one pass of three is off."""
    return pd.DataFrame(
        {
            "rank": rank,
            "batch_size": batch,
            "longest": longest,
            "repeat": repeat,
            "time_ms": cost_ms(batch, longest) * (3 if repeat == 2 else 1),
        }
        for rank in (0, 1)
        for batch in (1, 4, 16)
        for longest in (10, 30, 60)
        for repeat in range(3)
    )


def slow_rows() -> pd.DataFrame:
    """Returns rows of slow-rank.csv: rank 1 is slowed twofold, found by one mode in step 10."""
    rows = []
    for step in range(40):
        known = step >= 10
        times = {"not_told": 1.5, "dynamic_calibrated": 1.0 if known else 1.5, "told": 1.0}
        for mode, time in times.items():
            for rank in (0, 1):
                rows.append(
                    {
                        "mode": mode,
                        "step": step,
                        "rank": rank,
                        "slow_factor": rank + 1.0,
                        "estimated_factor": 2.0 if rank == 1 and known else 1.0,
                        "step_time_ms": 50 * time,
                    }
                )
    return pd.DataFrame(rows)


def simulated_rows() -> pd.DataFrame:
    """Returns rows of simulated-bottlenecks.csv: only static moves from the bound with the ranks.

    The token budget has half the texts in a step, and its bottleneck is half of dynamic's.
    """
    over = {
        "static": lambda ranks: 1 + np.log2(ranks) / 2,
        "dynamic": lambda ranks: 1.1,
        "packed_largest_first": lambda ranks: 1.01,
        "token_budget": lambda ranks: 0.55,
    }
    return pd.DataFrame(
        {
            "dataset": dataset,
            "world_size": ranks,
            "mode": mode,
            "draw": draw,
            "same_batch": mode != "token_budget",
            "samples": 16 * ranks / (2 if mode == "token_budget" else 1),
            "lower_bound_ms": (2.0 + draw) / (2 if mode == "token_budget" else 1),
            "bottleneck_ms": (2.0 + draw) * ratio(ranks) * (1 + 0.02 * draw),
        }
        for dataset in ("sst2", "ag_news", "imdb")
        for ranks in (8, 32, 128, 512, 1024)
        for mode, ratio in over.items()
        for draw in range(5)
    )


COMPARISON = {"dataset": "sst2", "model_name": "small", "global_batch": 8, "max_length": 64}


def write_comparison(
    folder: Path, times: pd.DataFrame, environment: dict | None = None, **changed: object
) -> Path:
    """Writes a run of compare_modes.py with all of its tables."""
    write_records(folder, COMPARISON | changed, environment)
    times.to_csv(folder / "mode-times.csv", index=False)
    calibration_rows().to_csv(folder / "calibration.csv", index=False)
    slow_rows().to_csv(folder / "slow-rank.csv", index=False)
    return folder


def write_lab(folder: Path) -> Path:
    """Writes the run of ``ddplab run assignment3``: training, comparisons, a simulation."""
    write_records(folder, {"stages": []})
    two_modes(folder)
    write_comparison(folder / "compare_modes", mode_times())
    write_comparison(folder / "compare_modes_ag_news", mode_times(), dataset="ag_news")
    write_records(folder / "simulate_modes", {})
    simulated = folder / "simulate_modes"
    simulated_rows().to_csv(simulated / "simulated-bottlenecks.csv", index=False)
    sizes = {"world_size": [64] * 3, "global_batch": 512, "cost": "tokens", "repeat": range(3)}
    planning = pd.DataFrame(sizes | {"time_ms": [0.25, 0.5, 9.0]})
    planning.to_csv(simulated / "planning-times.csv", index=False)
    return folder
