"""Runs a script on ranks, watched or not, and reads what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ddplab_watch

SCRIPTS = Path(__file__).parent / "scripts"
MAIN = Path(ddplab_watch.__file__).parent / "__main__.py"
SHORT = {"warmup": 2, "window": 4, "bucket_steps": 3}
"""A short watch: nine steps."""
EXCHANGES_EVERY_PASS = (
    *("--no_sync", 0, "--find_unused", 1, "--slow_data_s", 0.06, "--own_noise", 1),
    *("--steps", 12, "--short_trials", 1),
)
"""Flags of micro-batches all of which exchange, in a script that also waits for its data."""


def run_loop(
    ranks: Callable, folder: Path, *flags: object, count: int = 2, watch: dict | None = None
) -> list[dict]:
    """Runs loop.py; returns what each rank computed, and leaves what it said in rank0.err.

    ``watch`` has settings, None for no watch.
    """
    words = [str(SCRIPTS / "loop.py"), str(folder / "out"), *map(str, flags)]
    if watch is not None:
        settings = {"folder": folder / "bundle", **SHORT, **watch}
        words = [str(MAIN), *(f"{name}={value}" for name, value in settings.items()), *words]
    done = ranks(Path(words[0]), *words[1:], ranks=count, variables={"DDPLAB_WATCH_DEBUG": "1"})
    assert done.exit_codes == [0] * count, "\n".join(done.stderr)
    for rank, text in enumerate(done.stderr):
        (folder / f"rank{rank}.err").write_text(text)
    if "--profiles_itself" not in flags:  # nothing of the watch's own profiles is to be read
        assert not any("profiler_start" in text for text in done.stderr)
    return [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(count)]


def assert_same(expected: list[dict], found: list[dict]) -> None:
    """Compares what the ranks of two runs computed, to the last bit."""
    for before, after in zip(expected, found, strict=True):
        for name in ("losses", "parameters", "buffers", "random", "indices"):
            assert before[name] == after[name], name


def rows_of(folder: Path, rank: int, table: str) -> list[dict]:
    """Returns a rank's rows of a table in the bundle."""
    lines = (folder / "bundle" / f"rank{rank}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["table"] == table]
