"""Studies that are cut go on where they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from visit_samples import visits

from common.errors import UserError
from common.runtime.paths import project_root
from common.runtime.records.run_directory import read_environment
from common.runtime.records.study import earlier_tables, study_run
from common.runtime.stage_progress import StageProgress
from common.studies.exhaustive_sweep import runoff_regret
from common.studies.tune_check import TuneStudy, run_study

OF_BEFORE = project_root() / "data" / "xeon-2-cores" / "study-tune"


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Makes a study that was cut after a case whose recommendation is 0.4 % from the best."""
    folder = tmp_path / "cut"
    sweep = folder / "convolutions-loopback" / "sweep"
    sweep.mkdir(parents=True)
    times_ms = {"default": 103.0, "1 MiB": 100.4, "2 MiB": 100.0, "4 MiB": 120.0}
    visits("setting", times_ms, range(2)).to_csv(sweep / "sweep-visits.csv", index=False)
    visits("setting", times_ms, range(12)).to_csv(sweep / "runoff-visits.csv", index=False)
    row = {"model": "convolutions", "network": "loopback", "recommended": "1 MiB", "share": 0.1}
    row |= {"regret": 0.5, "regret_low": 0.4, "half_width": 0.1}  # as an earlier version had it
    pd.DataFrame([row]).to_csv(folder / "cases.csv", index=False)
    return folder


def test_complete_cases_are_taken_over_with_their_samples_and_judged_anew(
    cut: Path, tmp_path: Path
) -> None:
    study = TuneStudy(models=("convolutions",), rate="", continues=str(cut))
    path = run_study(study, str(tmp_path / "new"), StageProgress())
    [row] = pd.read_csv(path / "cases.csv").to_dict("records")
    assert (row["recommended"], row["share"], row["rounds"]) == ("1 MiB", 0.1, 12)
    assert row["best_of_sweep"] == "not settled: 2 more rounds"
    assert row["regret"] == pytest.approx(0.004)
    assert row["default_regret"] == pytest.approx(0.03)
    assert row["half_width"] == pytest.approx(0, abs=1e-9)
    assert (path / "convolutions-loopback" / "sweep" / "runoff-visits.csv").is_file()
    assert pd.read_csv(path / "verdicts.csv")["held"].all()


def test_a_case_whose_folder_is_gone_is_told_before_anything_is_written(
    cut: Path, tmp_path: Path
) -> None:
    shutil.rmtree(cut / "convolutions-loopback")
    study = TuneStudy(models=("convolutions",), rate="", continues=str(cut))
    with pytest.raises(UserError, match="no convolutions-loopback/sweep in it"):
        run_study(study, str(tmp_path / "new"), StageProgress())
    assert not (tmp_path / "new").exists()


def test_a_case_whose_table_is_gone_is_told_in_a_line(cut: Path, tmp_path: Path) -> None:
    (cut / "convolutions-loopback" / "sweep" / "runoff-visits.csv").unlink()
    study = TuneStudy(models=("convolutions",), rate="", continues=str(cut))
    with pytest.raises(UserError, match=r"runoff-visits\.csv: no such file"):
        run_study(study, str(tmp_path / "new"), StageProgress())


def test_a_continued_study_keeps_the_record_of_the_one_before(tmp_path: Path) -> None:
    def run(continues: str, hardware: str, start_time: str) -> Path:
        environment = {"hardware": hardware, "start_time": start_time, "git": start_time}
        study = TuneStudy(continues=continues)
        with study_run("tune", study, str(tmp_path), StageProgress(), environment) as folder:
            return folder.path

    first = run("", "2 cores of a Xeon", "on Monday")
    last = run(str(run(str(first), "2 cores of a Xeon", "on Tuesday")), "2 cores of a Xeon", "now")
    record = read_environment(last)
    assert (record["start_time"], record["continues"]["start_time"]) == ("now", "on Tuesday")
    assert record["continues"]["continues"] == {
        key: read_environment(first)[key] for key in ("start_time", "end_time", "git")
    }
    before = list(tmp_path.iterdir())
    with pytest.raises(UserError, match="it ran on 2 cores of a Xeon, and this is an EPYC"):
        run(str(last), "an EPYC", "now")
    assert list(tmp_path.iterdir()) == before


def test_a_case_that_a_table_lacks_and_half_of_a_line_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("case,x\none,1\ntwo,2\n")
    (tmp_path / "b.csv.partial").write_text("case,y\none,3\none,\ntwo,4")  # cut by a kill
    columns = {"a.csv": ("case", "x"), "b.csv": ("case", "y")}
    tables = earlier_tables(str(tmp_path), columns, ["case"])
    assert tables["a.csv"].to_dict("records") == [{"case": "one", "x": 1}]
    assert tables["b.csv"]["y"].astype(str).tolist() == ["3", ""]
    for name, table in earlier_tables("", columns, ["case"]).items():
        assert (tuple(table), len(table)) == (columns[name], 0)


def test_single_cases_can_be_asked_for() -> None:
    study = TuneStudy(only=("convolutions-2x1gbit", "encoder_decoder-loopback"))
    names = [f"{model}-{network}" for model, network, _ in study.cases()]
    assert names == ["encoder_decoder-loopback", "convolutions-2x1gbit"]
    assert len(list(TuneStudy().cases())) == 10
    with pytest.raises(UserError, match="did you mean 'convolutions-loopback'"):
        TuneStudy(only=("convolution-loopback",))


def test_settings_that_are_alike_have_no_regret_of_each_other() -> None:
    """However many rivals there are: the fastest in a round's own company would be too fast."""
    draw = np.random.default_rng(0)
    names = ["chosen", "a", "b", "c"]
    swept = pd.DataFrame({"setting": names})
    found = []
    for _ in range(100):
        times_ms = 100 * np.exp(0.03 * draw.standard_normal((12, len(names))))
        rows = [
            {"setting": name, "round": round_, "iteration": 0, "step_time_ms": time_ms}
            for round_, of_round in enumerate(times_ms)
            for name, time_ms in zip(names, of_round, strict=True)
        ]
        found.append(runoff_regret(pd.DataFrame(rows), swept, "chosen"))
    estimates = [regret.estimate for regret in found]
    error = np.std(estimates) / np.sqrt(len(found))
    assert abs(np.mean(estimates)) < 3 * error
    # And few are told to have one: a share of 5 % exceeds this once in a thousand studies.
    assert sum(regret.is_settled for regret in found) <= stats.binom.ppf(0.999, 100, 0.05)


def test_a_study_of_an_older_kind_is_refused_in_a_line(tmp_path: Path) -> None:
    study = TuneStudy(models=("convolutions",), rate="", continues=str(OF_BEFORE))
    with pytest.raises(UserError, match=r"its cases\.csv has no column half_width"):
        run_study(study, str(tmp_path), StageProgress())
    assert not list(tmp_path.iterdir())
