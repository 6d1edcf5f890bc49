"""The seven results of a scaling study, from the original's files and from our run directories."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from text_run_support import write_original, write_text_run

from common.analysis.scaling import study_report
from common.analysis.scaling.speedups import OVER_EPOCHS, OVER_RUNS, Speedup
from common.analysis.scaling.study import compare_configurations, summary, verdict
from common.analysis.scaling.study_figures import speedup_efficiency
from common.analysis.scaling.study_files import read_published
from common.analysis.scaling.study_report import (
    ComprehensiveAnalysis,
    analyse,
    escape,
    latex_table,
    main,
    report,
    summary_of,
    write_results,
)
from common.analysis.scaling.text_study import open_text_study
from common.errors import UserError

FIGURES = ("epoch_time_detailed", "speedup_efficiency", "throughput", "accuracy")
COLUMNS = ["Configuration", "Dataset", "Train Size", "Mean Epoch Time (s)", "Total Time (s)"]
COLUMNS += ["Speedup", "Efficiency", "Throughput (sps)", "Final Val Acc"]
"""Columns of the original's summary."""


@pytest.fixture(autouse=True)
def _coarse_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_report, "DPI", 40)  # drawing is what takes time here


def write_study(root: Path) -> Path:
    """Writes two IMDB runs in the original's form: 8 s an epoch on one GPU, 2.5 s on four."""
    write_original(root / "exp1_imdb_1gpu_3ep", [20.0, 8.0, 8.0])
    write_original(root / "exp2_imdb_4gpu_3ep", [20.0, 2.5, 2.5])
    return root


def settings(root: Path, **changed: object) -> ComprehensiveAnalysis:
    return ComprehensiveAnalysis(**{"root": str(root), "datasets": ("imdb", "ag news")} | changed)


def test_all_seven_results_have_the_originals_names(tmp_path: Path) -> None:
    out = tmp_path / "plots"
    main(settings(write_study(tmp_path / "runs"), out=str(out)))
    written = {path.name for path in out.iterdir()}
    assert written == {f"imdb_{name}.png" for name in FIGURES} | {
        "comprehensive_summary.csv",
        "summary_table.tex",
        "performance_report.txt",
    }
    for name in FIGURES:
        assert (out / f"imdb_{name}.png").read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(out / "comprehensive_summary.csv", keep_default_na=False)
    assert list(table.columns) == COLUMNS


def test_efficiency_is_the_speedup_over_the_gpus_not_over_the_bars_place(tmp_path: Path) -> None:
    table = summary_of(analyse(settings(write_study(tmp_path))))
    assert table["Speedup"].tolist() == ["1.00", "3.20*"]
    assert table["Efficiency"].tolist() == ["1.000", "0.800*"]
    # Nobody counted samples here, and nobody knows them from elsewhere.
    assert table["Throughput (sps)"].tolist() == ["n/a", "n/a"]
    assert table["Total Time (s)"].tolist() == ["36.00", "25.00"]


def test_warm_up_epochs_are_left_out_of_means(tmp_path: Path) -> None:
    root = write_study(tmp_path)
    table = summary_of(analyse(settings(root, warmup=0)))
    assert table["Mean Epoch Time (s)"].tolist() == ["12.00", "8.33"]
    with pytest.raises(UserError, match="leaves out every epoch"):
        analyse(settings(root, warmup=3))
    with pytest.raises(UserError, match="0 or more"):
        analyse(settings(root, warmup=-1))


def test_the_published_summary() -> None:
    runs = read_published()
    by_data = {name: [run for run in runs if run.dataset == name] for name in ("IMDB", "AGNews")}
    imdb, agnews = (summary(compare_configurations(each, 1)) for each in by_data.values())
    assert imdb["Mean Epoch Time (s)"].tolist() == ["11.20", "3.21"]
    assert imdb["Speedup"].tolist() == ["1.00", "3.49*"]
    assert imdb["Efficiency"].tolist() == ["1.000", "0.873*"]
    assert agnews["Speedup"].tolist() == ["1.00", "0.46*", "1.00", "0.80*"]
    assert agnews["Efficiency"].tolist() == ["1.000", "0.115*", "1.000", "0.200*"]
    assert agnews["Train Size"].tolist() == ["120000"] * 4
    # Four GPUs computed all 120,000 four times: 480,000 in 42.33 s.
    rates = agnews["Throughput (sps)"].astype(float)
    assert rates[1] == pytest.approx(480_000 / 42.33, rel=1e-3)


@pytest.mark.parametrize(
    ("value", "ranks", "words"),
    [
        (3.4, 4, "Excellent scaling performance"),
        (3.39, 4, "Good scaling performance"),
        (2.8, 4, "Good scaling performance"),
        (2.79, 4, "Low scaling efficiency"),
        (0.8, 4, "Low scaling efficiency"),
        (0.79, 4, "Negative scaling detected"),
    ],
)
def test_verdict_words(value: float, ranks: int, words: str) -> None:
    assert verdict(Speedup(value, value, value, "", ranks)) == words


def test_a_verdict_that_the_interval_does_not_carry_says_so() -> None:
    ratio = Speedup(3.0, 2.6, 3.5, OVER_RUNS, 4, repeats=8)
    assert verdict(ratio) == "Good scaling performance, not certain by this interval"
    assert ratio.judged.is_settled
    assert not replace(ratio, repeats=5).judged.is_settled
    # Epochs of a run do not know by how much runs differ.
    of_epochs = replace(ratio, over=OVER_EPOCHS)
    assert verdict(of_epochs) == "Good scaling performance, not certain: runs were not repeated"
    assert not of_epochs.judged.is_settled
    assert np.isnan(of_epochs.judged.interval.low)


def test_our_runs_have_speedups_that_carry_no_mark(tmp_path: Path) -> None:
    write_text_run(tmp_path / "one", 1, (12.0, 10.0, 10.2))
    write_text_run(tmp_path / "two", 2, (7.0, 6.0, 6.1))
    analysis = analyse(settings(tmp_path))
    table = summary_of(analysis)
    assert table["Speedup"].tolist() == ["1.00", f"{20.2 / 12.1:.2f}"]
    assert table["Configuration"].tolist() == ["1 rank", "2 ranks"]
    assert "Diagnosis of two:" in report(analysis)


def test_a_refused_speedup_is_na_and_the_report_says_why(tmp_path: Path) -> None:
    write_text_run(tmp_path / "runs" / "one", 1)
    write_text_run(tmp_path / "runs" / "two", 2, (14.0, 12.0, 12.0), passes=2)
    analysis = analyse(settings(tmp_path / "runs"))
    assert summary_of(analysis)["Speedup"].tolist() == ["1.00", "n/a"]
    assert summary_of(analysis)["Efficiency"].tolist() == ["1.000", "n/a"]
    text = report(analysis)
    assert "Speedup n/a: 2 ranks computed 2,000 samples an epoch, 1,000 different ones" in text
    assert "Per sample 1.67x" in text
    write_text_run(tmp_path / "runs" / "narrow", 2, facts={"compute_dtype": "bfloat16"})
    text = report(analyse(settings(tmp_path / "runs")))
    assert "Speedup n/a: precision differs (float32 and bfloat16)" in text


def test_configurations_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    write_text_run(tmp_path / "one", 1)
    write_text_run(tmp_path / "near", 2, environment={"network": "loopback"})
    write_text_run(tmp_path / "far", 2, environment={"network": "1 Gbit/s"})
    write_text_run(tmp_path / "far_again", 2, environment={"network": "1 Gbit/s"})
    table = summary_of(analyse(settings(tmp_path)))
    assert table["Configuration"].tolist() == ["1 rank", "1 Gbit/s, 2 ranks", "loopback, 2 ranks"]


def test_one_world_size_only_has_no_speedup(tmp_path: Path) -> None:
    write_text_run(tmp_path / "two", 2)
    analysis = analyse(settings(tmp_path))
    assert summary_of(analysis)["Speedup"].tolist() == ["n/a"]
    assert "one world size only (2): no speedup can be computed" in report(analysis)
    write_results(analysis, tmp_path / "out")


def test_bad_runs_are_named_and_the_rest_is_analysed(tmp_path: Path) -> None:
    write_study(tmp_path)
    write_original(tmp_path / "exp3_imdb_2gpu", [9.0])  # nothing is left after warm-up
    (tmp_path / "exp4_imdb_8gpu").mkdir()
    (tmp_path / "exp4_imdb_8gpu" / "metrics.csv").write_text("a,b\n1,2\n")
    analysis = analyse(settings(tmp_path))
    assert len(analysis.compared["IMDB"]) == 2
    lines = report(analysis).split("What could not be used as it was")[1]
    assert "exp3_imdb_2gpu: all of its 1 epochs are warm-up; left out" in lines
    assert "exp4_imdb_8gpu" in lines
    assert "no run of data set ag news" in lines


def test_no_data_set_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run of data set SST2; there are runs of: IMDB"):
        analyse(settings(write_study(tmp_path), datasets=("SST2",)))


def test_nothing_is_left_behind_where_a_figure_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysis = analyse(settings(write_study(tmp_path / "runs")))
    out = tmp_path / "out"
    out.mkdir()
    (out / "comprehensive_summary.csv").write_text("of before")

    def fails(*_: object) -> None:
        raise RuntimeError("no figure")

    monkeypatch.setitem(study_report.FIGURES, "accuracy", fails)
    with pytest.raises(RuntimeError):
        write_results(analysis, out)
    assert [path.name for path in out.iterdir()] == ["comprehensive_summary.csv"]
    assert (out / "comprehensive_summary.csv").read_text() == "of before"


def check_latex(text: str) -> list[list[str]]:
    """Reads the cells of a table that LaTeX with booktabs takes; fails where it would not."""
    ends = re.findall(r"\\(begin|end)\{(\w+)\}", text)
    opened: list[str] = []
    for what, name in ends:
        if what == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    columns = len(re.search(r"\\begin\{tabular\}\{([lrc]+)\}", text)[1])
    body = text.split("\\toprule")[1].split("\\bottomrule")[0].replace("\\midrule", "")
    rows = [row.strip() for row in re.split(r"\\\\", body) if row.strip()]
    cells = [re.split(r"(?<!\\)&", row) for row in rows]
    assert {len(row) for row in cells} == {columns}
    for line in text.splitlines():
        if line.startswith("%"):
            continue
        # Specials are escaped, but & between cells and ^ and $ of the mark.
        plain = line.replace("$^{*}$", "").replace("\\\\", "")
        plain = re.sub(r"\\textasciicircum\{\}|\\text\w+\{\}", "", plain)
        assert not re.search(r"(?<!\\)[%_#$^~]", plain), line
        assert plain.count("{") == plain.count("}")
    assert all(ord(character) < 128 for character in text)
    return [[cell.strip() for cell in row] for row in cells]


def test_the_latex_table_is_one_that_compiles(tmp_path: Path) -> None:
    table = summary_of(analyse(settings(write_study(tmp_path))))
    cells = check_latex(latex_table(table))
    assert cells[0] == COLUMNS
    assert cells[2][5] == "3.20$^{*}$"


def test_specials_in_names_are_escaped() -> None:
    row = dict.fromkeys(COLUMNS, "1") | {"Configuration": "a_b & 50 % of #1 {x} ^~\\ $"}
    cells = check_latex(latex_table(pd.DataFrame([row])))
    assert cells[1][0].startswith(r"a\_b \& 50 \% of \#1 \{x\}")
    assert escape("\\") == r"\textbackslash{}"


def test_runs_of_a_single_epoch_have_no_warm_up_to_leave_out(tmp_path: Path) -> None:
    write_text_run(tmp_path / "one", 1, (10.0,))
    write_text_run(tmp_path / "two", 2, (5.0,))
    study = open_text_study(tmp_path)
    ((_, both),) = study.local.values()
    assert (both.speedup.value, study.warmup) == (2.0, 0)


def test_an_interval_that_is_not_told_makes_no_verdict_certain(tmp_path: Path) -> None:
    ratio = Speedup(3.0, 2.9, 3.1, OVER_RUNS, 4, repeats=6)
    assert verdict(ratio) == "Good scaling performance"
    few = "Good scaling performance, not certain: too few runs"
    assert [verdict(replace(ratio, repeats=count)) for count in (3, 5)] == [few, few]
    for repeat in range(3):
        write_text_run(tmp_path / f"one{repeat}", 1, (12.0, 10.0 + 0.01 * repeat, 10.2))
        write_text_run(tmp_path / f"two{repeat}", 2, (7.0, 6.0 + 0.01 * repeat, 6.1))
    [base, two] = open_text_study(tmp_path).all_local
    assert two.speedup.interval == "not told (3 runs; 4 are needed), over repeated runs"
    assert verdict(two.speedup).endswith("not certain: too few runs")
    figure = speedup_efficiency([base, two], "")
    assert not any(
        isinstance(bar, ErrorbarContainer) for axes in figure.axes for bar in axes.containers
    )
