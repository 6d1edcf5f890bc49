"""The study of another course's tests, on a made-up clone of their repository."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from common.course.studies import cs336
from common.errors import RunFailed
from common.runtime.stage_progress import StageProgress

TESTS = """
import pytest
from . import adapters

def test_of_ours():
    assert adapters.get_ddp.__module__ == adapters.__name__

def test_fails():
    assert False

@pytest.mark.skip(reason="needs a GPU")
def test_left_out():
    pass
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cs336, "NEEDED", ())  # packages of theirs, which these tests do not import
    folder = tmp_path / "clone"
    (folder / cs336.BASICS).mkdir(parents=True)
    (folder / "tests").mkdir()
    for name in ("__init__.py", "adapters.py"):
        (folder / "tests" / name).write_text("")
    (folder / "tests" / "test_ddp.py").write_text(TESTS)
    return folder


def run(clone: Path, output: Path) -> pd.DataFrame:
    study = cs336.Cs336Study(tests=str(clone))
    folder = cs336.run_study(study, str(output), StageProgress())
    return pd.read_csv(folder / "results.csv")


@pytest.mark.slow  # pytest in a process of its own
def test_the_outcome_of_each_of_their_tests_is_recorded_with_our_adapters_in_place(clone, tmp_path):
    table = run(clone, tmp_path / "out").set_index("test")["outcome"].to_dict()
    assert table == {"test_of_ours": "passed", "test_fails": "failed", "test_left_out": "skipped"}
    assert (clone / "tests" / "adapters.py").read_text() == ""  # they stay as they were


def test_tests_that_cannot_be_run_are_a_failure_in_a_line(clone, tmp_path):
    (clone / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--unheard-of"\n')
    with pytest.raises(RunFailed, match=r"^their tests did not run: .*unheard-of"):
        run(clone, tmp_path / "out")
