"""The table of every speedup of several ranks: paired by round, with what explains them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from assignment1_support import BENCHMARK, strategy_rows, write_run
from scipy import stats

from common.analysis.show import show
from common.analysis.speedups import (
    SAME_BATCH_PER_RANK,
    SAME_GLOBAL_BATCH,
    TITLES,
    find_speedups,
    tabulate_speedups,
)
from common.errors import UserError
from common.runtime.paths import project_root
from common.tables import ARM_COLUMNS, STEP_COLUMNS

DATA = project_root() / "data"


def strategies(folder: Path, times_ms: dict[str, list[float]], sent: dict[str, int]) -> None:
    """Writes a comparison of strategies: strategy → time of each round."""
    rows = {
        name: [[(time, time - 1.0)] * 3 for time in by_round] for name, by_round in times_ms.items()
    }
    write_run(folder, BENCHMARK, {"world_size": 2}, strategy_times=strategy_rows(rows, sent))


def sweep(folder: Path, arms: list[dict], times_ms: dict[int, list[float]]) -> None:
    """Writes a sweep: arm → time of each round."""
    filled = dict.fromkeys(ARM_COLUMNS) | {"accumulation": 1, "precision": "float32"}
    filled |= {"compression": "none", "change": "none"}
    rows = []
    for arm in arms:
        for round_, time_ms in enumerate(times_ms.get(arm["arm"], ())):
            for rank in range(arm["world_size"]):
                row = dict.fromkeys(STEP_COLUMNS) | {"rank": rank, "arm": arm["arm"]}
                row |= {"round": round_, "epoch": 0, "step": 0, "warmup": False, "kind": "timed"}
                row |= {"exchanged_bytes": 5e6, "step_time_ms": time_ms, "data_time_ms": 1.0}
                row |= {"forward_time_ms": 2.0, "backward_time_ms": 4.0, "optimizer_time_ms": 3.0}
                row |= {"waiting_time_ms": 0.5, "communication_time_ms": time_ms - 10.5}
                row |= dict.fromkeys(("samples", "tokens", "padded_tokens"), 8)
                rows.append(row)
    tables = {"arms": [filled | arm for arm in arms]}
    tables["steps"] = pd.DataFrame(rows, columns=[*STEP_COLUMNS])
    write_run(folder, {"workload": "mlp"}, {"label": "assignment4-sweep"}, **tables)


def test_a_speedup_is_paired_by_round_and_stands_beside_what_explains_it(tmp_path: Path) -> None:
    # The machine is twice as slow in the third round, for everybody.
    times = {
        "single": [100.0, 104.0, 202.0, 100.0, 100.0, 101.0],
        "local": [50.0, 50.0, 100.0, 50.0, 50.0, 50.0],
        "DDP": [62.0, 65.0, 130.0, 61.0, 63.0, 62.0],
    }
    strategies(tmp_path / "compare_strategies", times, {"DDP": 31_000_000})
    table = tabulate_speedups(find_speedups([tmp_path])).set_index("what")
    logs = np.log(np.divide(times["single"], times["DDP"]))
    # Of two speedups at once.
    off = stats.t.ppf(1 - 0.025 / 2, 5) * logs.std(ddof=1) / np.sqrt(6)
    row = table.loc["DDP"]
    assert row["speedup"] == pytest.approx(np.exp(logs.mean()))
    assert row["interval"].low == pytest.approx(np.exp(logs.mean() - off))
    assert row["interval"].high == pytest.approx(np.exp(logs.mean() + off))
    assert (row["verdict"], row["rounds"], row["ranks"]) == ("faster", 6, 2)
    assert row["gradient_bytes"] == 27_607_040
    assert row["computation_ms"] == 50.0
    assert row["needed_bytes_per_s"] == pytest.approx(31e6 / 50e-3)
    assert row["regime"] == SAME_GLOBAL_BATCH
    local = table.loc["no communication"]
    assert (local["exchanged_bytes"], local["needed_bytes_per_s"]) == (0, 0)
    assert list(table.index) == ["no communication", "DDP"]  # what is hidden with ease comes first


def test_a_sweep_has_both_regimes_in_samples_per_second(tmp_path: Path) -> None:
    size = {"regime": "weak", "batch_per_rank": 4}
    arms = [
        {"arm": 0, "world_size": 1, "global_batch": 4} | size,
        {"arm": 1, "world_size": 2, "global_batch": 8} | size,
        {"arm": 2, "world_size": 1, "global_batch": 8, "regime": "strong", "batch_per_rank": 8},
        {"arm": 3, "world_size": 2, "global_batch": 8, "regime": "strong", "batch_per_rank": 4},
        {"arm": 4, "world_size": 2, "global_batch": 6, "regime": "strong", "batch_per_rank": 3},
    ]
    times = {0: [20.0] * 4, 1: [25.0] * 4, 2: [30.0] * 4, 3: [25.0] * 4, 4: [25.0] * 4}
    sweep(tmp_path / "sweep", arms, times)
    speedups = find_speedups([tmp_path])
    by_regime = {row.regime: row for row in speedups}
    weak, strong = by_regime[SAME_BATCH_PER_RANK], by_regime[SAME_GLOBAL_BATCH]
    assert len(speedups) == 2
    # Twice the samples in 25 ms against 20: 1.6 times; the same samples in 25 against 30: 1.2.
    assert weak.speedup.estimate == pytest.approx(1.6)
    assert strong.speedup.estimate == pytest.approx(1.2)
    assert (weak.exchanged_bytes, weak.computation_ms) == (5e6, 10.0)


def test_few_rounds_and_text_after_text_settle_nothing(tmp_path: Path) -> None:
    strategies(tmp_path / "two", {"single": [100.0, 101.0], "DDP": [50.0, 51.0]}, {})
    strategies(tmp_path / "one", {"single": [100.0], "DDP": [50.0]}, {})
    rows = {row.run.folder.name: row for row in find_speedups([tmp_path])}
    assert rows["two"].verdict == "not settled: 4 more rounds"
    assert rows["one"].verdict == "not settled: 5 more rounds"
    assert np.isnan(rows["one"].computation_ms)
    assert np.isnan(rows["one"].speedup.interval.low)


def test_a_noisy_speedup_is_not_called_one(tmp_path: Path) -> None:
    times = {"single": [100.0] * 6, "DDP": [80.0, 130.0, 90.0, 120.0, 95.0, 105.0]}
    strategies(tmp_path / "compare", times, {})
    [row] = find_speedups([tmp_path])
    assert row.verdict == "hidden by noise"


def test_the_recorded_runs_have_every_speedup_once() -> None:
    rows = find_speedups([DATA / "epyc-2-cores/assignment1", DATA / "xeon-2-cores/assignment4"])
    table = tabulate_speedups([row for row in rows if row.ranks == 2])
    assert not table.duplicated(["what", "network", "regime"]).any()
    assert set(table["network"]) == {
        "TCP over loopback",
        *("2 emulated hosts at 1 Gbit/s", "8 emulated hosts at 1 Gbit/s"),
    }
    assert table.set_index("what").loc["MLP sweep, batch 64", "gradient_bytes"] == 14_694_400
    text = table.set_index("what").loc["text training"]
    assert text["verdict"] == "not settled: 5 more rounds"
    assert text["interval"].text() == "not told (1 round; 4 are needed)"
    assert (
        "| MLP sweep, batch 64 | not settled: 2 more rounds |"
        in show(table, TITLES)._repr_markdown_()
    )


def test_a_table_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    strategies(tmp_path / "compare", {"single": [100.0], "DDP": [50.0]}, {})
    (tmp_path / "compare" / "strategy-times.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"strategy-times\.csv: no column 'strategy'"):
        find_speedups([tmp_path])
    size = {"regime": "strong", "global_batch": 8}
    arms = [
        {"arm": 0, "world_size": 1, "batch_per_rank": 8} | size,
        {"arm": 1, "world_size": 2, "batch_per_rank": 4} | size,
    ]
    sweep(tmp_path / "other" / "sweep", arms, {0: [20.0]})
    with pytest.raises(UserError, match=r"steps\.csv: no measured step of arm 1"):
        find_speedups([tmp_path / "other"])
    assert find_speedups([tmp_path / "nothing"]) == []


def test_a_ring_sends_more_than_it_reduces(tmp_path: Path) -> None:
    size = {"regime": "strong", "global_batch": 8}
    arms = [
        {"arm": 0, "world_size": 1, "batch_per_rank": 8} | size,
        {"arm": 1, "world_size": 8, "batch_per_rank": 1} | size,
    ]
    sweep(tmp_path / "sweep", arms, {0: [20.0] * 4, 1: [15.0] * 4})
    [row] = find_speedups([tmp_path])
    # All-reduces of 5 MB: as a ring, each of 8 ranks sends 7 eighths of them twice.
    assert row.exchanged_bytes == pytest.approx(5e6 * 14 / 8)
