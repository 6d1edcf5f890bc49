"""Batches of different sizes, padding, and what no cause accounts for, from made-up runs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from scaling_evidence import MadeUp, as_watched, case_of, change_table, verdict_on

from common.diagnose.diagnosis import Diagnosis, examine_case, lines_of
from common.diagnose.evidence.bundle_tables import of_usual_batch

ONE_RANK_MS = 0.2 + 30 / 1.1 + 1
"""Of ``MadeUp``'s step: data, both passes alone, and the update."""


def written(folder: Path, run: MadeUp | None = None, watched: bool = True, **columns) -> Path:
    """Writes a run without noise, as of a watched script; ``columns`` replace those of steps."""
    folder = (run or MadeUp(noise=0.0)).write(folder)
    if watched:
        as_watched(folder)
    return change_table(folder, **columns)


def examined(folder: Path, baseline: Path | None = None) -> Diagnosis:
    return examine_case(case_of(folder, baseline))


def test_passes_are_those_of_the_steps_mean_size() -> None:
    # A pass takes 2 ms and 1 ms per 100 elements; ranks were probed on 300 and on 4,000.
    def time_ms(elements: float) -> float:
        return 2 + elements / 100

    own = {0: 300, 1: 4000}
    rows = [
        {"rank": rank, "size": size, "elements": elements * size, "together": together}
        | {"batch_per_rank": round(6 * size), "repeat": 0}
        | {"forward_time_ms": time_ms(elements * size)}
        | {"backward_time_ms": 2 * time_ms(elements * size)}
        for rank, elements in own.items()
        for size, together in ((0.5, True), (1.0, True), (2.0, True), (1.0, False))
    ]
    sent = [
        {"rank": rank, "elements": elements, "exchange_time_ms": 7.0}
        | {"forward_time_ms": time_ms(elements), "backward_time_ms": 2 * time_ms(elements)}
        for rank, elements in own.items()
    ]
    steps = {"warmup": [True, False, False], "kind": "plain", "micro_batches": 2}
    steps = pd.DataFrame(steps | {"elements": [9e9, 1000, 3000]})  # 1,000 a pass
    probes, exchanging = of_usual_batch(pd.DataFrame(rows), pd.DataFrame(sent), steps, batch=8)
    for _, row in probes.iterrows():
        assert row["batch_per_rank"] == 8 * row["size"]
        assert row["forward_time_ms"] == pytest.approx(time_ms(1000 * row["size"]))
        assert row["backward_time_ms"] == pytest.approx(2 * time_ms(1000 * row["size"]))
    assert exchanging["forward_time_ms"].tolist() == pytest.approx([time_ms(1000)] * 2)
    assert exchanging["exchange_time_ms"].tolist() == [7.0, 7.0]


def test_passes_of_an_earlier_watch_stay_as_they_are() -> None:
    probes = pd.DataFrame({"rank": [0], "batch_per_rank": [8], "forward_time_ms": [3.0]})
    steps = pd.DataFrame({"warmup": [False], "kind": ["plain"], "micro_batches": [1]})
    unchanged, _ = of_usual_batch(probes, pd.DataFrame(), steps, batch=16)
    pd.testing.assert_frame_equal(unchanged, probes)


def test_one_rank_is_compared_over_the_same_mixture(tmp_path: Path) -> None:
    # One step in four has seven times the tokens of the others, and its passes take as much longer.
    folder = written(tmp_path / "run")
    steps = pd.read_csv(folder / "steps.csv")
    factor = (steps["step"] % 4 == 0) * 2.4 + 0.4
    for column in ("forward_time_ms", "backward_time_ms", "padded_tokens", "tokens"):
        steps[column] *= factor
    steps["step_time_ms"] += 30 * (factor - 1)
    steps[steps["step"] < 28].to_csv(folder / "steps.csv", index=False)
    case = case_of(folder)
    mean_ms = 33.2  # that of a step whose factor is 1, as the mean of the factors is
    assert case.run.throughput == pytest.approx(64 / mean_ms * 1e3)
    assert case.one_rank_throughput == pytest.approx(32 / ONE_RANK_MS * 1e3)
    assert examine_case(case).healthy


def test_time_that_nothing_accounts_for_is_said_and_is_not_healthy(tmp_path: Path) -> None:
    one = MadeUp(ranks=1, noise=0.0).write(tmp_path / "one")
    healthy = examined(written(tmp_path / "healthy", watched=False), one)
    assert healthy.healthy
    folder = written(tmp_path / "run", watched=False, step_time_ms=93.2, backward_time_ms=80.0)
    diagnosis = examined(folder, one)
    assert not diagnosis.verdicts
    assert not diagnosis.healthy
    assert diagnosis.as_json()["healthy"] is False
    # Of 93.2 ms one rank takes 31.2, communication 2; passes together take 1.1 times as long.
    hindered = 90 / 93.2 * (1 - 1 / 1.1)
    left = 1 - 31.2 / 93.2 - 2 / 93.2 - hindered
    assert diagnosis.unexplained.share == pytest.approx(left)
    assert diagnosis.unexplained.low <= diagnosis.unexplained.share <= diagnosis.unexplained.high
    told = " ".join(" ".join(lines_of(diagnosis)).split())
    assert f"Not explained: {left * 100:.3g} % of the step" in told
    assert "No limiting cause found" not in told


def test_what_causes_account_for_is_not_unexplained(tmp_path: Path) -> None:
    one = MadeUp(ranks=1, noise=0.0).write(tmp_path / "one")
    slow = MadeUp(noise=0.0, slow={1: 3.0})
    diagnosis = examined(written(tmp_path / "slow", slow, watched=False), one)
    assert diagnosis.verdicts[0].cause == "slow-rank"
    # Of the step's 93.2 ms rank 1 computes 60 more than rank 0, which waits: the mean of both is
    # half of that. So 60 ms are lost, and the mean rank waits for 30.
    assert diagnosis.unexplained.exchanging == pytest.approx(32 / 93.2)
    times = {"step_time_ms": 93.2, "between_time_ms": 0.0, "collecting_time_ms": 60.0}
    collected = written(tmp_path / "run", **times)
    diagnosis = examined(collected)
    assert [verdict.cause for verdict in diagnosis.verdicts] == ["garbage-collection"]
    assert diagnosis.unexplained.caused == pytest.approx(60 / 93.2)
    assert not diagnosis.much_unexplained


def test_padding_costs_what_grows_with_the_batch(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", tokens=280)  # of 1,000
    [verdict] = examined(folder).verdicts
    assert verdict.cause == "padding"
    assert verdict.title == "72 % of a batch is padding"
    # Passes take 30 of 33.2 ms, and 80 % of them grow with the batch.
    lost = 30 / 33.2 * 0.8 * 0.72
    assert verdict.lost_share == pytest.approx(lost)
    assert verdict.predicted_speedup == pytest.approx(verdict.speedup_now / (1 - lost))
    assert verdict.confidence == "high"


def test_ranks_of_unequal_means_have_not_drifted(tmp_path: Path) -> None:
    # Rank 1 has twice rank 0's elements. Forward passes take 0.2 and 0.8 per mean batch of 10 ms.
    def share(steps: pd.DataFrame) -> pd.Series:
        return (1 + steps["rank"]) / 1.5 * (1 + 0.5 * (-1.0) ** steps["step"])

    folder = written(
        tmp_path / "run",
        elements=lambda steps: 3000 * share(steps),
        forward_time_ms=lambda steps: 2 + 8 * share(steps),
    )
    case = case_of(folder)
    assert case.one_rank_throughput == pytest.approx(32 / ONE_RANK_MS * 1e3)


@pytest.mark.parametrize(
    ("columns", "watched"),
    [
        ({"tokens": 950}, True),
        ({"tokens": 0, "padded_tokens": 0}, True),
        ({"tokens": 280}, False),
    ],
    ids=["a little", "no tokens", "this project's own program"],
)
def test_other_batches_are_not_called_padded(tmp_path: Path, columns: dict, watched: bool) -> None:
    folder = written(tmp_path / "run", watched=watched, **columns)
    assert verdict_on(folder, "padding") is None
