"""Runs a script on ranks, watched or not, and reads what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ddplab_watch
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
LOOP = SCRIPTS / "loop.py"
MAIN = Path(ddplab_watch.__file__).parent / "__main__.py"
SHORT = {"warmup": 2, "window": 4, "bucket_steps": 3}
"""A short watch: nine steps."""
EXCHANGES_EVERY_PASS = (
    *("--no_sync", 0, "--find_unused", 1, "--slow_data_s", 0.06, "--own_noise", 1),
    *("--steps", 12, "--short_trials", 1),
)
"""Flags of micro-batches all of which exchange, in a script that also waits for its data."""
SHORT_ROUNDS = 2
"""Rounds of trials that are short."""


def run_loop(
    ranks: Callable, folder: Path, *flags: object, count: int = 2, watch: dict | None = None
) -> list[dict]:
    """Runs loop.py; returns what each rank computed. ``watch`` has settings, None for no watch."""
    words = [LOOP, folder / "out", *flags]
    if watch is not None:
        words = [MAIN, *short_watch(folder, **watch), *words]
    told = run_ranks(ranks, folder, *words, count=count, variables={"DDPLAB_WATCH_DEBUG": "1"})
    if "--profiles_itself" not in flags:  # nothing of the watch's own profiles is to be read
        for rank in range(count):
            assert "profiler_start" not in (folder / f"rank{rank}.err").read_text()
    return told


def short_watch(folder: Path, **settings: int) -> list[str]:
    """Returns the options of a short watch, whose bundle is below a folder."""
    options = {"folder": folder / "bundle", **SHORT, **settings}
    return [f"{name}={value}" for name, value in options.items()]


def run_ranks(
    ranks: Callable, folder: Path, script: Path, *words: object, count: int = 2, **options: object
) -> list[dict]:
    """Runs a script that writes out-RANK.json into a folder; returns what each rank wrote.

    What each said on standard error is left in rankRANK.err.
    """
    done = ranks(script, *map(str, words), ranks=count, **options)
    assert done.exit_codes == [0] * count, "\n".join(done.stderr)
    for rank, text in enumerate(done.stderr):
        (folder / f"rank{rank}.err").write_text(text)
    return [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(count)]


def assert_same(expected: list[dict], found: list[dict]) -> None:
    """Compares what the ranks of two runs computed, to the last bit."""
    for before, after in zip(expected, found, strict=True):
        for name in ("losses", "parameters", "buffers", "random", "indices"):
            assert before[name] == after[name], name


def assert_parts_add_up(steps: list[dict]) -> None:
    """Compares the parts of each step with the step."""
    for row in steps:
        parts = ("data", "buffers", "forward", "backward", "exchange", "optimizer")
        whole = sum(row[f"{part}_time_ms"] or 0.0 for part in parts)
        assert whole == pytest.approx(row["step_time_ms"], rel=1e-6)


def rows_of(folder: Path, rank: int, table: str) -> list[dict]:
    """Returns a rank's rows of a table in the bundle."""
    lines = (folder / "bundle" / f"rank{rank}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["table"] == table]
