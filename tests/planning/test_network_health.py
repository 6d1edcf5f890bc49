"""The network's health: all-reduces beside recorded ones, whose times are known here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from common.perfmodel.collectives import MeasuredAllReduce
from common.planning.network import network_health, recorded_tables

BYTES = np.array([2**10, 2**20])


def recorded(folder: Path, network: str, small_ms: float, large_ms: float) -> Path:
    """Writes a run of two ranks whose all-reduces took these times."""
    folder.mkdir()
    environment = {"network": network, "world_size": 2, "status": "complete"}
    (folder / "environment.json").write_text(json.dumps(environment))
    rows = [
        {"mode": "sequential", "total_bytes": size, "in_flight": 1, "round": 0}
        | {"total_elements": size // 4, "iteration": 0, "rank": rank, "time_ms": ms}
        for size, ms in zip(BYTES, (small_ms, large_ms), strict=True)
        for rank in range(2)
    ]
    path = folder / "allreduce-samples.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    ("here_ms", "network", "ranks", "said"),
    [
        ((1.1, 11.0), "a wire", 2, "as usual for a wire: an all-reduce of 1 KiB in 1.1"),
        ((1.0, 50.0), "a wire", 2, "5.0 times slower than usual for a wire"),
        ((6.0, 10.0), "a wire", 2, "6.0 times slower than usual for a wire"),
        ((1.0, 10.0), "a wire", 4, "nothing was recorded of 4 ranks over a wire"),
        ((1.0, 10.0), None, 2, "so its health is not known"),
        (None, "a wire", 2, "no all-reduce was measured, so its health is not known"),
    ],
)
def test_all_reduces_are_held_against_the_median_of_their_kind(
    tmp_path: Path, here_ms: tuple | None, network: str | None, ranks: int, said: str
) -> None:
    tables = [
        recorded(tmp_path / f"{index}", "a wire", *times)
        for index, times in enumerate([(1.0, 10.0), (1.0, 10.0), (9.0, 90.0)])
    ]
    tables.append(recorded(tmp_path / "other", "a rope", 100.0, 1000.0))
    curve = MeasuredAllReduce(BYTES, np.array(here_ms) / 1e3) if here_ms else None
    assert said in network_health(curve, network, ranks, tables)


def test_what_the_project_recorded_is_found() -> None:
    assert recorded_tables()
    curve = MeasuredAllReduce(BYTES, np.array([1e-3, 1e-3]))
    assert "TCP over loopback" in network_health(curve, "TCP over loopback", 2, recorded_tables())
