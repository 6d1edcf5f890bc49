"""The reading of a throughput run: tables are made up, so that the answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.container import ErrorbarContainer

from common.analysis.one_device import throughput_figures as plots
from common.analysis.one_device.options import GAINS, OptionsRun, not_measured
from common.analysis.one_device.throughput import (
    SATURATION,
    SWEEP,
    ThroughputRun,
    extrapolation_facts,
    open_throughput,
)
from common.analysis.runs import Run
from common.analysis.show import show, told_of
from common.benchmarks.one_device.throughput import PointOutcome, batch_row
from common.errors import UserError
from common.perfmodel.one_device.peaks import DevicePeak

SETTINGS = {
    "model": "gpt2",
    "batch_size": 8,
    "seq_len": 1024,
    "gradient_accumulation": 1,
    "precision": "float32",
    "tf32": False,
    "device": "cuda",
    "attention": "eager",
    "optimizer": "adamw",
    "optimizer_implementation": "fused",
    "compile": False,
    "activation_checkpointing": False,
    "loss_chunks": 1,
}
ENVIRONMENT = {
    "status": "complete",
    "hardware": "one GPU",
    "start_time": "2026-01-01",
    "gpus": [{"name": "Pretend GPU"}],
    "cpu": {"model": "CPU"},
}
PEAK = DevicePeak(
    device="Pretend GPU",
    flops_per_s={"float32": 1e14},
    memory_bytes_per_s=1e12,
    source="its maker's data sheet",
)
RATES = {1: 16_521, 4: 30_819, 8: 32_585, 16: 33_900, 32: 34_560}
"""The course's, with batch 64 out of memory."""


def opened(folder: Path) -> Run:
    """Opens a run whose settings and environment are on disk."""
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    return Run(folder=folder, source=folder)


def made_up(folder: Path, peak: DevicePeak | None, steps_s: dict[int, float]) -> ThroughputRun:
    """Makes a run with these times of a step, and one batch that did not fit."""
    rows = [
        {
            "batch_size": batch,
            "status": "measured",
            "tokens_per_s": batch * 1024 / time_s,
            "tokens_per_s_q25": 0.99 * batch * 1024 / time_s,
            "tokens_per_s_q75": 1.01 * batch * 1024 / time_s,
            "steps_per_s": 1 / time_s,
            "peak_allocated_mib": 100.0 * batch,
        }
        for batch, time_s in steps_s.items()
    ]
    table = pd.DataFrame([*rows, {"batch_size": 64, "status": "out of memory"}])
    return ThroughputRun(opened=opened(folder), batches=table, peak=peak)


def test_a_fixed_cost_per_step_is_found(tmp_path: Path) -> None:
    run = made_up(tmp_path, PEAK, {b: 0.03 + 0.005 * b for b in (1, 4, 8, 16)})
    assert run.saturation.fixed_s == pytest.approx(0.03)
    assert run.saturation.per_sequence_s == pytest.approx(0.005)
    # Half of the highest rate, which is length / per_sequence_s.
    half = run.saturation.half_batch
    assert half * 1024 / run.saturation.step_s(half) == pytest.approx(1024 / 0.005 / 2)


def test_neither_part_of_a_step_is_negative(tmp_path: Path) -> None:
    # A large batch that takes more than in proportion would give a negative fixed part.
    run = made_up(tmp_path, PEAK, {b: 0.01 * b**1.3 for b in (1, 4, 8, 16)})
    assert run.saturation.fixed_s == 0
    assert run.saturation.per_sequence_s > 0


def test_a_point_off_the_line_is_found(tmp_path: Path) -> None:
    # All but one batch on a line: its distance from the fitted line is the largest, and it is slow.
    steps_s = {b: 0.03 + 0.005 * b for b in (1, 2, 4, 8, 16)}
    run = made_up(tmp_path, PEAK, steps_s | {4: 1.2 * steps_s[4]})
    error = run.off_the_line
    assert error.abs().idxmax() == 4
    assert error[4] < -0.1
    assert told_of(run, SATURATION)["batches without a result"] == "64 (out of memory)"


def test_two_batches_are_no_line(tmp_path: Path) -> None:
    facts = told_of(made_up(tmp_path, PEAK, {8: 0.25, 16: 0.4}), SATURATION)
    assert next(iter(facts.values())) == "none: it takes 3 batch sizes"
    # Each was visited once, so that nobody knows how much visits differ.
    assert facts["fastest batch"] == "not told from others; it may be 16, at 40,960 tokens/s"


def test_the_courses_figures_read_as_the_course_did(tmp_path: Path) -> None:
    run = made_up(tmp_path, None, {b: b * 1024 / rate for b, rate in RATES.items()})
    assert run.tokens_per_s == pytest.approx(32_585)
    assert run.naive.years == pytest.approx(78_202, rel=1e-4)
    # 12 · 12 · 768 · 1024 operations for attention on 6 for each of 123.5 million weights.
    assert run.flops_per_token == 6 * (12 * 12 * 768**2 + 50_257 * 768) + 12 * 12 * 768 * 1024
    assert "MFU" not in show(run.sweep, SWEEP).columns


def test_the_two_extrapolations_differ_by_operations_per_parameter(tmp_path: Path) -> None:
    run = made_up(tmp_path, None, {8: 0.25})
    over, small, large, *_ = extrapolation_facts(run).values()
    assert float(over.strip("+%")) / 100 == pytest.approx(float(small) / float(large) - 1, abs=1e-3)


def test_mfu_is_of_the_peak_in_the_runs_precision(tmp_path: Path) -> None:
    run = made_up(tmp_path, PEAK, {8: 0.25})
    expected = 8 * 1024 / 0.25 * run.flops_per_token / 1e14
    assert run.sweep["mfu"][0] == pytest.approx(expected)


@pytest.mark.parametrize("batches", [{8: 0.25}, {8: 0.25, 16: 0.4, 32: 0.7}], ids=["one", "three"])
def test_the_sweep_is_drawn_with_what_did_not_fit(tmp_path: Path, batches: dict) -> None:
    figure = plots.batch_sweep(made_up(tmp_path, PEAK, batches))
    axes = figure.axes[0]
    assert axes.get_ylabel() == "throughput (tokens/s)"
    assert "sequences" in axes.get_xlabel()
    assert "out of memory" in [text.get_text() for text in axes.get_legend().get_texts()]


def made_up_options(folder: Path, arms: dict[str, float]) -> OptionsRun:
    """Makes a run with these ratios in six rounds of 1 % of noise, TF32 without effect."""
    times = pd.DataFrame(
        {
            "arm": arm,
            "round": round_,
            "iteration": 0,
            "tokens": 1,
            "step_time_ms": (1.01 if (index + round_) % 2 else 1.0) / ratio,
        }
        for index, (arm, ratio) in enumerate(arms.items())
        for round_ in range(6)
    )
    rows = [{"arm": arm, "measured": True, "reason": None} for arm in arms]
    rows.append({"arm": "tf32", "measured": False, "reason": "no effect"})
    table = pd.DataFrame(rows).assign(first_step_s=1.0, peak_allocated_mib=float("nan"))
    return OptionsRun(opened=opened(folder), times=times, arms=table)


ARMS = {
    "baseline": 1,
    "baseline-again": 1.01,
    "sdpa": 2.0,
    "fused": 1.005,
    "all": 2.2,
    "all-but-sdpa": 1.1,
}


def test_each_option_is_drawn_alone_and_on_top_of_the_others(tmp_path: Path) -> None:
    axes = plots.option_bars(made_up_options(tmp_path, ARMS)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sdpa", "fused", "all"]
    # sdpa alone and on top of the others, fused and all once each.
    assert len(axes.patches) - 1 == 4


def test_options_within_the_noise_are_marked_first(tmp_path: Path) -> None:
    run = made_up_options(tmp_path, ARMS)
    above_noise = run.measured["above_noise"]
    assert pd.isna(above_noise["baseline"])
    settled, hidden = "settled", "hidden by noise"
    assert above_noise.drop("baseline").to_dict() == {
        "baseline-again": hidden,
        "sdpa": settled,
        "fused": hidden,
        "all": settled,
        "all-but-sdpa": settled,
    }
    facts = told_of(run, GAINS)
    assert facts["can be told from the baseline"] == "sdpa"
    assert facts["cannot be told from the baseline"] == "fused"
    assert facts["largest ratio of one option"] == "2.00 (sdpa)"
    assert facts["control: the baseline measured twice"].endswith("hidden by noise")
    assert not_measured(run) == {"tf32": "no effect"}


def test_of_two_options_that_gain_alike_none_is_the_largest(tmp_path: Path) -> None:
    run = made_up_options(tmp_path, ARMS | {"fused": 2.01})
    assert run.clear == ["sdpa", "fused"]
    assert run.largest == "2.00 (sdpa) or 2.01 (fused)"


def test_a_run_without_its_headline_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "device-peak.csv").write_text("precision,flops_per_s\n")
    (tmp_path / "throughput-batches.csv").write_text(
        "batch_size,status,tokens_per_s,steps_per_s\n4,measured,10,1\n8,failed,,\n"
    )
    with pytest.raises(UserError, match="no result for batch_size 8"):
        open_throughput(tmp_path)


def test_a_rate_outside_of_the_quartiles_of_steps_is_drawn(tmp_path: Path) -> None:
    # Six visits of four steps, one of them slow: the mean over visits is below the lower quartile.
    steps_ms = [(369.0, 370.0, 370.0, 371.0)] * 5 + [(519.0, 520.0, 520.0, 521.0)]
    outcomes = [PointOutcome(status="measured", step_times_ms=times) for times in steps_ms]
    table = pd.DataFrame([batch_row(8, 8 * 1024, outcomes)])
    assert table["tokens_per_s"][0] < table["tokens_per_s_q25"][0]
    figure = plots.batch_sweep(ThroughputRun(opened=opened(tmp_path), batches=table, peak=None))
    [bar] = figure.axes[0].containers
    [(low, high)] = bar.lines[2][0].get_segments()
    ends = table.loc[0, ["tokens_per_s", "tokens_per_s_q75"]]
    assert [low[1], high[1]] == pytest.approx(ends.tolist())


def test_ends_of_too_few_rounds_are_not_drawn(tmp_path: Path) -> None:
    run = made_up_options(tmp_path, ARMS)
    four = replace(run, times=run.times[run.times["round"] < 4])
    lengths = []
    for variant in (run, four):
        axes = plots.option_bars(variant).axes[0]
        bars = [bar for bar in axes.containers if isinstance(bar, ErrorbarContainer)]
        segments = [ends for bar in bars for ends in bar.lines[2][0].get_segments()]
        lengths.append([ends[1][0] - ends[0][0] for ends in segments if len(ends)])
        is_shaded = "the baseline measured twice" in axes.get_legend_handles_labels()[1]
        assert is_shaded == (variant is run)
    assert max(lengths[0]) > 0
    assert lengths[1] == []
