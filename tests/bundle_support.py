"""A bundle of two ranks, as a watch writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.evidence.bundle_tables import write_run
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import open_evidence

ABOUT = {
    "table": "about",
    "format": 1,
    "version": "0.1.0",
    "world_size": 2,
    "backend": "gloo",
    "host": "here",
    "process": 7,
    "started": "2026-11-23T10:00:00+0000",
    "torch": "2.9.0",
    "python": "3.12.0",
    "cpu": "x86_64",
    "device": "cpu",
    "device_name": "",
    "command": ["train.py"],
    "variables": {},
}
EXCHANGES_MS = {0: [5.0, 2.0], 1: [1.0, 4.0]}
"""Exchanges of ranks 0 and 1, in two steps."""


def step_row(rank: int, step: int) -> dict:
    """Returns a row of ``steps``, as a rank writes it."""
    exchange = EXCHANGES_MS[rank][step]
    return {
        "table": "steps",
        "kind": "timed",
        "epoch": 0,
        "step": step,
        "warmup": False,
        "samples": 8,
        "tokens": 8,
        "padded_tokens": 8,
        "longest": 1,
        "micro_batches": 1,
        "step_time_ms": 10.0 + exchange,
        "data_time_ms": 1.0,
        "forward_time_ms": 3.0,
        "backward_time_ms": 5.0,
        "exchange_time_ms": exchange,
        "optimizer_time_ms": 1.0,
        "began_s": step * 1.0,
        "ended_s": step + 0.25,
        "cpu_time_ms": 9.0,
        "exchanged_bytes": 4000,
    }


def write_bundle(folder: Path, ranks: tuple[int, ...] = (0, 1), **about: object) -> Path:
    """Writes a bundle of two steps; returns its folder."""
    folder.mkdir()
    for rank in ranks:
        facts = {"table": "facts", "parameters": 1000, "gradient_bytes": 4000}
        facts |= {"gradient_dtype": "float32", "compute_dtype": "float32"}
        facts |= {"model": "Net", "data": "Texts", "data_samples": 100}
        rows = [ABOUT | about, facts, *(step_row(rank, step) for step in (0, 1))]
        rows.append({"table": "end", "status": "complete", "steps": 2})
        add_rows(folder, *rows, ranks=(rank,))
    return folder


def add_rows(bundle: Path, *rows: dict, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Adds rows to the files of ranks."""
    for rank in ranks:
        with (bundle / f"rank{rank}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def change_rows(
    bundle: Path, change: Callable[[dict], dict | None], ranks: tuple[int, ...] = (0, 1)
) -> None:
    """Puts another row in place of each of ranks' rows, or none."""
    for rank in ranks:
        path = bundle / f"rank{rank}.jsonl"
        rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.unlink()
        add_rows(bundle, *filter(None, rows), ranks=(rank,))


def with_values(
    bundle: Path, table: str, ranks: tuple[int, ...] = (0, 1), **values: object
) -> None:
    """Gives all rows of a table these values."""
    change_rows(bundle, lambda row: row | values if row["table"] == table else row, ranks)


def opened(bundle: Path) -> Case:
    """Opens the tables of a bundle, which are written beside it."""
    folder = bundle.with_name(f"{bundle.name}-tables")
    return Case(open_evidence(write_run(read_bundle(bundle), folder)))


def with_surroundings(bundle: Path, **changed: object) -> None:
    """Adds what both ranks read of two cores, which were busy between the two readings."""
    first = {"table": "surroundings", "machine": "m", "host": "h", "machine_cores": 2}
    first |= {"core_list": "0-1", "load_1min": 2.0}
    span = {"interval_s": 9.0, "interval_busy_cores": 2.0, "interval_stolen_cores": 0.0}
    add_rows(bundle, first, first | span | changed)
