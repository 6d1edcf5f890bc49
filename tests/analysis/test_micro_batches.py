"""Training runs on micro-batches, read and compared: tables are made up, so answers are known."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from micro_batch_support import opened, rank_rows, two_modes, write_run

from common.analysis.micro_batches import summary as summary_module
from common.analysis.micro_batches import training_runs
from common.analysis.micro_batches.summary import (
    CHANGE,
    AnalyzeMetrics,
    loss_agreement,
    main,
    printed,
    summary,
    training_measures,
    write_analysis,
)
from common.analysis.micro_batches.training_figures import FIGURES
from common.analysis.micro_batches.training_runs import (
    MicroBatchRun,
    check_comparable,
    find_run,
    read_run,
)
from common.errors import UserError
from common.runtime.script import exit_status, parse_settings
from common.tables import MICRO_BATCH_COLUMNS

STATIC = [[500.0, 900.0], [40.0, 60.0], [40.0, 100.0], [80.0, 40.0]]
DYNAMIC = [[500.0, 900.0], [30.0, 28.0], [50.0, 48.0], [38.0, 40.0]]


def read(folder: Path) -> MicroBatchRun:
    """Reads the training run of a run directory."""
    return read_run(opened(folder))


def write_two(folder: Path, **changed: object) -> list[Path]:
    """Writes a static and a dynamic run of three measured steps on two ranks."""
    padded = [[900, 900], [100, 300], [100, 500], [400, 200]]
    even = [[900, 900], [150, 150], [250, 250], [200, 200]]
    return [
        write_run(folder / "static", rank_rows(STATIC, padded)),
        write_run(folder / "dynamic", rank_rows(DYNAMIC, even), **({"mode": "dynamic"} | changed)),
    ]


# Numbers


def test_summary_is_that_of_the_slowest_rank_without_warm_up(tmp_path: Path) -> None:
    runs = [read(folder) for folder in write_two(tmp_path)]
    table = summary(runs)
    assert table.index.tolist() == ["static", "dynamic", CHANGE]
    # the slowest rank's computation and 2 ms: 62, 102, 82 and 32, 52, 42
    assert table["step_time_mean_ms"].tolist()[:2] == [82, 42]
    assert table["step_time_median_ms"].tolist()[:2] == [82, 42]
    assert table.loc["static", "step_time_p95_ms"] == pytest.approx(100)
    assert table.loc[CHANGE, "step_time_mean_ms"] == pytest.approx((42 / 82 - 1) * 100)
    # half the difference of two ranks: (10 + 30 + 20) / 3, and nothing where all wait
    assert table.loc["static", "compute_time_std_ms"] == pytest.approx(20)
    assert table.loc["static", "step_time_std_ms"] == 0
    assert table.loc["static", "padded_tokens_std"] == pytest.approx((100 + 200 + 100) / 3)
    assert table.loc["dynamic", "padded_tokens_std"] == 0
    assert pd.isna(table.loc[CHANGE, "step_time_std_ms"])  # a change from nothing
    assert table.loc["static", "peak_mem_std_mb"] == 5
    assert table.loc["static", "waiting_time_mean_ms"] == pytest.approx(20)
    assert table.loc["static", "compute_time_slowest_ms"] == pytest.approx(80)
    # 3 steps of 8 texts and 200 tokens in 246 ms, all ranks together
    assert table.loc["static", "samples_per_s"] == pytest.approx(24 / 0.246)
    assert table.loc["static", "tokens_per_s"] == pytest.approx(600 / 0.246)


def test_only_steps_that_both_runs_measured_are_compared(tmp_path: Path) -> None:
    static, dynamic = write_two(tmp_path)
    shutil.rmtree(dynamic)
    longer = rank_rows([*DYNAMIC, [1000.0, 1000.0]], warmup=2)
    write_run(dynamic, longer, mode="dynamic")
    table = summary([read(static), read(dynamic)])
    assert table["step_time_mean_ms"].tolist()[:2] == [(102 + 82) / 2, (52 + 42) / 2]


def test_one_run_is_summarised_by_itself(tmp_path: Path) -> None:
    run = read(write_two(tmp_path)[0])
    assert summary([run]).index.tolist() == ["static"]
    assert "static" in printed([run])


def test_two_runs_of_one_mode_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = write_two(tmp_path, mode="static")
    runs = [read(folder) for folder in folders]
    table = summary(runs)
    assert table.index[:2].tolist() == ["static (1: static)", "static (2: dynamic)"]


@pytest.mark.parametrize("mode", ["length_grouped", "token_budget"])
def test_a_mode_with_batches_of_its_own_is_compared_by_the_text_only(
    tmp_path: Path, mode: str
) -> None:
    static = read(write_run(tmp_path / "static", rank_rows(STATIC)))
    longer = rank_rows([*DYNAMIC, [900.0, 900.0]], tokens=300)  # a step that static has not
    runs = [static, read(write_run(tmp_path / mode, longer, mode=mode))]
    check_comparable(*runs)
    # 82 against 42 ms for 8 texts
    first, second = summary(runs)["samples_per_s"][:2]
    assert first / second == pytest.approx(42 / 82)
    assert f"{42 / 82:.3f} of the time per sample" in printed(runs)
    assert "not compared" in printed(runs)


def test_the_notebook_shows_measures_of_both_runs_and_the_largest_peak(tmp_path: Path) -> None:
    static, dynamic = (read(folder) for folder in write_two(tmp_path))
    shown = training_measures({"static": static, "dynamic": dynamic})
    mean = shown.loc["step_time_mean_ms"]
    assert mean[["static", "dynamic"]].tolist() == [82, 42]
    # rank 1 has 60 MB in every step of both runs
    assert shown.iloc[-1].tolist() == [60, 60, 0]


@pytest.mark.parametrize(("third", "verdict"), [(0.50001, "yes"), (0.51, "no")])
def test_losses_are_equal_but_for_rounding_relative_to_static(
    tmp_path: Path, third: float, verdict: str
) -> None:
    losses = {"static": [1.0, 0.5, 0.5, 0.4], "dynamic": [1.0, 0.5, third, 0.4]}
    runs = {
        mode: read(write_run(tmp_path / mode, rank_rows(STATIC), losses=values, mode=mode))
        for mode, values in losses.items()
    }
    row = loss_agreement(runs).iloc[0]
    assert row["within rounding"] == verdict
    assert row["largest difference"] == pytest.approx(third / 0.5 - 1)
    assert (row["at step"], row["in the first step"], row["steps"]) == (2, 0, 4)
    assert pd.isna(row["accuracy, static"])  # it was not evaluated


# What is written


def test_the_analysis_is_written_into_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(summary_module, "DPI", 40)  # drawing is what takes time here
    static, dynamic = two_modes(tmp_path, steps=70)
    main(AnalyzeMetrics(str(static), str(dynamic)))
    for name in FIGURES:
        assert (static / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(static / "summary.csv", index_col="mode")
    assert table.index.tolist() == ["static", "dynamic", CHANGE]
    rows = pd.read_csv(static / "merged_metrics.csv")
    assert rows.columns.tolist() == ["mode", *MICRO_BATCH_COLUMNS]
    # every row of both runs, warm-up included
    assert rows.groupby("mode").size().to_dict() == {"static": 140, "dynamic": 140}
    assert not (dynamic / "summary.csv").exists()
    assert not list(static.glob(".analysis-*"))
    shown = capsys.readouterr().out
    ratio = table.loc["dynamic", "step_time_mean_ms"] / table.loc["static", "step_time_mean_ms"]
    assert f"dynamic/static: {ratio:.3f}" in shown
    assert "figures/" in shown


def test_a_figure_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [read(folder) for folder in write_two(tmp_path)]
    before = sorted(runs[0].folder.rglob("*"))

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", no_space)
    with pytest.raises(UserError, match="No space left"):
        write_analysis(runs)
    assert sorted(runs[0].folder.rglob("*")) == before


def test_memory_that_was_not_measured_is_said_and_no_error(tmp_path: Path) -> None:
    rows = rank_rows(STATIC).assign(peak_mem_mb=None)
    run = read(write_run(tmp_path / "run", rows))
    assert pd.isna(summary([run]).loc["static", "peak_mem_std_mb"])
    fig = FIGURES["std_peak_mem_mb"]({"static": run}, "")
    assert "not measured here" in [text.get_text() for text in fig.axes[0].texts]


def test_the_timeline_adds_up_to_the_steps_it_shows(tmp_path: Path) -> None:
    run = read(write_two(tmp_path)[0])
    fig = FIGURES["timeline"]({"static": run}, "")
    assert "steps 1 to 3, 246 ms" in fig.axes[0].get_title(loc="left")
    # of each rank, bars end where the last step does
    ends = [bar.get_x() + bar.get_width() for bar in fig.axes[0].patches]
    assert max(ends) == pytest.approx(246)


# Bad input


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("dataset", "imdb", "data set"),
        ("train_texts", 5000, "number of texts"),
        ("data_source", "elsewhere", "data source"),
        ("model_name", "bert", "model"),
        ("max_length", 128, "max_length"),
        ("global_batch", 64, "global batch"),
        ("seed", 7, "seed"),
        ("precision", "bfloat16", "precision"),
    ],
)
def test_runs_of_other_data_batch_or_model_are_refused(
    tmp_path: Path, setting: str, value: object, said: str
) -> None:
    static, dynamic = (read(folder) for folder in write_two(tmp_path, **{setting: value}))
    with pytest.raises(UserError, match=f"^{said} differs between static .* and dynamic .*{value}"):
        check_comparable(static, dynamic)


def test_runs_on_other_ranks_or_hardware_are_refused(tmp_path: Path) -> None:
    static = read(write_run(tmp_path / "a", rank_rows(STATIC)))
    four = rank_rows([[1.0] * 4] * 4)
    ranks = read(write_run(tmp_path / "b", four, {"world_size": 4}, mode="dynamic"))
    with pytest.raises(UserError, match=r"^number of ranks differs .*\(2\) .*\(4\)"):
        check_comparable(static, ranks)
    other = {"hardware": "another machine"}
    machine = read(write_run(tmp_path / "c", rank_rows(DYNAMIC), other, mode="dynamic"))
    with pytest.raises(UserError, match=r"^hardware differs .*another machine"):
        check_comparable(static, machine)


def test_steps_of_other_samples_are_refused(tmp_path: Path) -> None:
    static = read(write_run(tmp_path / "a", rank_rows(STATIC)))
    other = read(write_run(tmp_path / "b", rank_rows(DYNAMIC, tokens=202), mode="dynamic"))
    # same settings, and yet not the same texts
    with pytest.raises(UserError, match=r"step 1 has 200 tokens .* 202 .* same samples"):
        check_comparable(static, other)
    with pytest.raises(UserError, match="compared with itself"):
        check_comparable(static, static)


def test_folders_that_are_no_complete_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        find_run(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not a run directory"):
        read(tmp_path / "empty")
    failed = {"status": "failed", "reason": "out of memory"}
    folder = write_run(tmp_path / "failed", rank_rows(STATIC), failed)
    with pytest.raises(UserError, match=r"not complete \(failed: out of memory\)"):
        read(folder)
    warm = write_run(tmp_path / "warm", rank_rows(STATIC, warmup=9))
    with pytest.raises(UserError, match="all of its 4 steps are warm-up"):
        read(warm)
    folder = write_run(tmp_path / "other", rank_rows(STATIC))
    shutil.rmtree(folder / "metrics")
    with pytest.raises(UserError, match="not a training run of assignment 3"):
        read(folder)


def test_tables_that_lack_a_column_a_rank_or_a_step_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rank_rows(STATIC))
    path = folder / "metrics" / "rank1.csv"
    whole = pd.read_csv(path)
    whole.drop(columns="waiting_time_ms").to_csv(path, index=False)
    with pytest.raises(UserError, match=r"rank1.csv: no column 'waiting_time_ms'; has step"):
        read(folder)
    whole.assign(step_time_ms="fast").to_csv(path, index=False)
    with pytest.raises(UserError, match=r"rank1.csv: line 2, column 'step_time_ms': 'fast'"):
        read(folder)
    whole.iloc[:-1].to_csv(path, index=False)
    with pytest.raises(UserError, match="step 3 is there for 1 of 2 ranks"):
        read(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"rank1.csv: no such file"):
        read(folder)


def test_a_run_id_is_found_below_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_runs, "project_root", lambda: tmp_path)
    for folder in (tmp_path / "outputs" / "20260102-a", tmp_path / "outputs" / "x" / "20260102-b"):
        folder.mkdir(parents=True)
        assert find_run(folder.name) == folder
        assert find_run(folder.relative_to(tmp_path)) == folder


def test_the_script_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_run(tmp_path / "run", rank_rows(STATIC), {"status": "interrupted"})
    flags = ["--run_dir", str(folder)]
    with pytest.raises(SystemExit) as stop, exit_status():
        main(parse_settings(AnalyzeMetrics, flags, "analyze_metrics"))
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "not complete (interrupted)" in shown.err
    assert not shown.out
