"""Passes that send their gradients as DDP does, and what a diagnosis takes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from watch_support import SCRIPTS


def exchanged(rank_server, folder: Path, cap_mb: float, loses: bool) -> list[dict]:
    """Runs exchange.py on two ranks; returns what each of them wrote."""
    done = rank_server.run(SCRIPTS / "exchange.py", folder, cap_mb, int(loses), ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return [json.loads((folder / f"out-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("cap_mb", [0.001, 0.005, 25.0])
def test_gradients_are_those_of_ddp_in_its_own_buckets(
    rank_server, tmp_path: Path, cap_mb: float
) -> None:
    for told in exchanged(rank_server, tmp_path, cap_mb, loses=False):
        assert told["sent"] == told["sizes"]
        assert told["difference"] < 1e-6
        assert not told["failed"]


def test_a_pass_that_fails_on_one_rank_leaves_no_rank_waiting(rank_server, tmp_path: Path) -> None:
    first, second = exchanged(rank_server, tmp_path, 0.001, loses=True)
    assert (first["failed"], second["failed"]) == (False, True)
