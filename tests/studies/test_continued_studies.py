"""Studies that are cut go on where they were."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from common.errors import UserError
from common.report.progress import StageProgress
from common.runtime.paths import project_root
from common.studies.tune_check import TuneStudy, run_study

OF_BEFORE = project_root() / "data" / "xeon-2-cores" / "study-tune"


def test_complete_cases_are_taken_over_with_their_samples(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    row = {"model": "convolutions", "network": "loopback", "half_width": 0.01, "share": 0.1}
    row |= {"regret": 0.004, "regret_low": -0.001}
    (cut / "convolutions-loopback" / "sweep").mkdir(parents=True)
    (cut / "convolutions-loopback" / "sweep" / "sweep.csv").write_text("sweep_s\n9\n")
    pd.DataFrame([row]).to_csv(cut / "cases.csv", index=False)
    study = TuneStudy(models=("convolutions",), rate="", continues=str(cut))
    path = run_study(study, str(tmp_path / "new"), StageProgress())
    assert pd.read_csv(path / "cases.csv").to_dict("records") == [row]
    assert (path / "convolutions-loopback" / "sweep" / "sweep.csv").is_file()
    assert pd.read_csv(path / "verdicts.csv")["held"].all()


def test_a_study_of_an_older_kind_is_refused_in_a_line(tmp_path: Path) -> None:
    study = TuneStudy(models=("convolutions",), rate="", continues=str(OF_BEFORE))
    with pytest.raises(UserError, match=r"its cases\.csv has no column half_width"):
        run_study(study, str(tmp_path), StageProgress())
    assert not list(tmp_path.iterdir())
