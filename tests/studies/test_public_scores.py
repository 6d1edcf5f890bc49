"""Scores of the study of published rows, on tables whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from public_support import LOSS, exact, refuses, row, scored, tenth_off, true_rate, written

from common.studies.public.collectives import collective_tables, predict_collectives
from common.studies.public.jobs import Forecast, PublishedJob, read_published
from common.studies.public.public import refusals_of, scores_of
from common.studies.public.scores import pair_scores, summary
from common.studies.public.series import LOSS_PER_DOUBLING, errors_by_series

GPUS = (1, 2, 4, 8)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.csv", [row(gpus) for gpus in GPUS])


def all_scores(rows: pd.DataFrame) -> Callable[..., pd.Series]:
    """Returns ``score(name, group)``, of these rows."""
    scores = scores_of(rows, errors_by_series(rows))
    return lambda name, group="all": scores.query("score == @name and group == @group").iloc[0]


def test_an_exact_predictor_has_no_error_and_the_rivals_have_the_loss(table: Path) -> None:
    rows = scored(table, exact)
    score = all_scores(rows)
    lossy = score("scaling, 3% lost or more")
    assert (lossy["count"], lossy["answered"]) == (1, 1)
    assert lossy[["value", "worst"]].tolist() == pytest.approx([0, 0], abs=1e-12)
    efficiency = np.array([1 / (1 + LOSS * (gpus - 1)) for gpus in GPUS[1:]])
    doublings = np.log2(GPUS[1:])
    assert lossy["perfect"] == pytest.approx(np.median(1 / efficiency - 1))
    constant = np.abs((1 - LOSS_PER_DOUBLING) ** doublings / efficiency - 1)
    assert lossy["constant"] == pytest.approx(np.median(constant))
    assert score("throughput")["worst"] == pytest.approx(0, abs=1e-12)
    assert score("90 % intervals that hold")["value"] == 1
    assert score("half-width of intervals, median")["value"] == pytest.approx(0.1)
    assert score("memory")["value"] == pytest.approx(0.1)
    assert score("ran and said not to fit, rows")["value"] == 0


def test_memory_is_scored_from_both_sides(table: Path) -> None:
    def fits_three(job: PublishedJob) -> Forecast:
        return replace(exact(job), largest_micro_batch=3 if job.gpus < 8 else 4)

    score = all_scores(scored(table, fits_three))
    assert score("memory", "somebody/something")["value"] == pytest.approx(0.1)
    above = score("largest micro-batch, predicted over published")
    assert (above["count"], above["value"]) == (4, pytest.approx(1.5))
    assert score("twice the largest published micro-batch said not to fit")["value"] == 0.75


def test_a_predictor_that_is_a_tenth_off_beside_its_anchor_has_that_error(table: Path) -> None:
    rows = scored(table, tenth_off)
    score = all_scores(rows)
    assert score("scaling")["value"] == pytest.approx(0.1)
    assert score("scaling", "one node, NVLink")["worst"] == pytest.approx(0.1)
    assert rows["absolute_error"].tolist() == pytest.approx([0, 0.1, 0.1, 0.1])
    assert score("90 % intervals that hold")["value"] == 0.25
    assert score("ran and said not to fit, rows")["value"] == 1
    assert np.isinf(score("memory")["value"])


def test_a_refusal_is_the_largest_error_and_its_reason_is_counted(table: Path) -> None:
    rows = scored(table, refuses)
    score = all_scores(rows)
    scaling = score("scaling")
    assert np.isinf(scaling["value"])
    assert scaling["answered"] == 0
    throughput = score("throughput")
    assert (throughput["count"], throughput["answered"]) == (4, 1)
    assert np.isinf(throughput["value"])
    assert throughput["of_answered"] == pytest.approx(0)
    assert refusals_of(rows).to_numpy().tolist() == [["one GPU only", 3]]


def test_a_summary_keeps_refusals_above_every_number() -> None:
    summed = summary([0.3, -0.1, np.inf, 0.2, 0.1])
    assert (summed["value"], summed["of_answered"]) == (0.2, pytest.approx(0.15))
    assert np.isinf([summed["p90"], summed["worst"], summed["high"]]).all()
    assert summed["low"] in (0.1, 0.2)


def test_weak_scaling_is_compared_with_weak_scaling(tmp_path: Path) -> None:
    half = {"micro_batch_per_gpu": 1, "throughput": 1.0}
    rows = [row(1), row(8), row(16, global_batch=16, **half), row(64, global_batch=64, **half)]
    other = {"model": "Llama 3.1 70B"}
    rows += [row(8, **other), row(16, global_batch=16, **other | half)]
    rows += [row(8, precision="fp8"), row(2, strategy="DDP")]
    scored_rows = scored(written(tmp_path / "rows.csv", rows), exact)
    assert scored_rows["series"].tolist()[:4] == [
        *scored_rows["series"][[1, 1]],
        *scored_rows["series"][[3, 3]],
    ]
    assert scored_rows["series"][0] != scored_rows["series"][2]
    assert scored_rows["scaling"].tolist() == ["weak"] * 4 + ["changed"] * 2 + ["", ""]
    assert (scored_rows["series"][6:] == -1).all()


def test_machines_that_measured_the_same_have_a_series_each(tmp_path: Path) -> None:
    rows = [row(gpus, note=f"{host} {gpus}x H100") for host in ("A", "B") for gpus in (1, 8)]
    scored_rows = scored(written(tmp_path / "rows.csv", rows), exact)
    score = all_scores(scored_rows)
    assert scored_rows["series"].tolist() == [0, 0, 1, 1]
    assert score("scaling, several machines")["count"] == 0


def test_the_other_machines_are_a_rival_where_three_measured_the_same(tmp_path: Path) -> None:
    rows = []
    for host, share in (("A", 0.99), ("B", 0.9), ("C", 0.8)):
        rows += [row(1, note=f"{host} 1x", throughput=2.0)]
        rows += [row(8, note=f"{host} 8x", throughput=8 * 2.0 * share)]
    scored_rows = scored(written(tmp_path / "rows.csv", rows), tenth_off)
    score = all_scores(scored_rows)
    errors = [0.85 / 0.99 - 1, 0.895 / 0.9 - 1, 0.945 / 0.8 - 1]
    assert scored_rows["repeat_error"].dropna().tolist() == pytest.approx(errors)
    chosen = score("scaling, several machines")
    assert (chosen["count"], chosen["repeat"]) == (3, pytest.approx(1 - 0.85 / 0.99))
    lossy = score("scaling, several machines, 3% lost or more")
    assert (lossy["count"], lossy["repeat"]) == (2, pytest.approx((errors[2] - errors[1]) / 2))
    # What is predicted is 1.1 / (1 + 7 · LOSS) of the anchor: a loss of 19 %.
    assert score("scaling, 3% predicted or more")["count"] == 3


def test_a_unit_that_cannot_be_converted_is_counted_and_still_scales(tmp_path: Path) -> None:
    rows = [row(gpus, throughput_unit="tokens/s", seq_len=None) for gpus in GPUS]
    score = all_scores(scored(written(tmp_path / "rows.csv", rows), exact))
    assert score("answered, unit not converted, rows")["value"] == len(GPUS)
    assert score("throughput")["count"] == 0
    assert score("scaling")["value"] == pytest.approx(0, abs=1e-12)


def test_model_parallel_rows_are_in_no_score(tmp_path: Path) -> None:
    rows = [row(8), row(16), row(8, tp=8, global_batch=2), row(16, tp=8, global_batch=4)]
    score = all_scores(scored(written(tmp_path / "rows.csv", rows), exact))
    assert score("throughput")["count"] == 2
    assert score("scaling")["count"] == 1
    assert PublishedJob("H100", 4, strategy="FSDP2 + async TP").is_model_parallel


def test_pairs_differ_in_one_setting_and_a_refused_pair_is_wrong(tmp_path: Path) -> None:
    def faster_compiled(job: PublishedJob) -> float:
        return true_rate(job) * (1.2 if job.compile == "yes" else 1)

    def predict(job: PublishedJob):
        forecast = exact(job)
        return type(forecast)(faster_compiled(job), forecast.low, forecast.high)

    slow, fast = (8 * true_rate(PublishedJob("H100", 8)) * factor for factor in (1, 1.2))
    rows = [row(8), row(8, compile="yes", throughput=fast), row(8, strategy="DDP", throughput=fast)]
    rows += [row(8, compile="yes", strategy="DDP", throughput=0.5 * slow)]
    scored_rows = scored(written(tmp_path / "rows.csv", rows), predict)
    pairs = pair_scores(scored_rows).set_index("group")
    # Compile is predicted right once of twice; a strategy is predicted to change nothing: wrong.
    assert pairs["count"].to_dict() == {"all": 4, "compile": 2, "strategy": 2}
    assert pairs["value"].to_dict() == {"all": 0.25, "compile": 0.5, "strategy": 0}
    refused = pair_scores(scored(tmp_path / "rows.csv", refuses))
    assert (refused["value"] == 0).all()
    assert (refused["answered"] == 0).all()


def test_a_collective_that_is_a_line_is_interpolated_without_error(tmp_path: Path) -> None:
    sizes = 2 ** np.arange(10, 21)
    rows = [
        {"kind": "collective", "gpu": "H200", "gpus": 8, "gpus_per_node": 8, "network": network}
        | {"model": "all_reduce (nccl-tests)", "size_bytes": size, "time_us": 20 + size / 1e4}
        for network in ("NVLink 4", "a wire")
        for size in sizes
    ]
    table, _ = read_published(written(tmp_path / "rows.csv", rows))
    tables = collective_tables(predict_collectives(table)).set_index("network")
    assert tables["interpolation_error"].tolist() == pytest.approx([0, 0], abs=1e-12)
    assert np.isfinite(tables["hardware_error"]["NVLink 4"])
    assert np.isinf(tables["hardware_error"]["a wire"])
    assert "no cluster of H200 over a wire" in tables["reason"]["a wire"]
