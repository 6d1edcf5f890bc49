"""``ddplab handin``: what goes into the tarball, and runs and answers that are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from common.cli.handin import Handin, build
from common.course.submission import read_submission
from common.errors import UserError
from common.runtime.paths import project_root

ROOT = project_root()
PDF = b"%PDF-1.7\n<< /Type /Pages /Count 3 >>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "stage" / "traces").mkdir(parents=True)
    (folder / "report.pdf").write_bytes(PDF)
    (folder / "stage" / "times.csv").write_text("time_ms\n1.5\n")
    (folder / "stage" / "config.yaml").write_text("a: 1\n")
    (folder / "stage" / "traces" / "rank0.json").write_text("{}")
    (folder / "stage" / "weights.bin").write_bytes(b"x")
    return folder


def test_exercises_report_tables_and_answers(tmp_path: Path, run: Path) -> None:
    path, files, without = build(
        Handin("assignment2", name="doe-jane", run_dir=str(run), output_dir=str(tmp_path))
    )
    assert path == tmp_path / "doe-jane-assign2.tar.gz"
    assert read_submission(path).files == files
    assert set(files) == {
        "exercises/bucket_assignment.py",
        "exercises/bucket_time.py",
        "exercises/cap_search.py",
        "exercises/bucketed_ddp.py",
        "answers.yaml",
        "report.pdf",
        "run/stage/times.csv",
        "run/stage/config.yaml",
    }
    assert without[0] == "Q2.1"


def test_who_hands_in_stands_in_the_manifest(tmp_path: Path) -> None:
    asked = Handin("assignment1", name="Mary O'Brien", email="m@x.org", id="s17", part=1)
    path, _, _ = build(replace(asked, output_dir=str(tmp_path)))
    assert path.name == "mary-obrien-assign1-part1.tar.gz"
    renamed = path.rename(tmp_path / "download (2).gz")
    found = read_submission(renamed)
    assert (found.of.name, found.of.email, found.of.id) == ("Mary O'Brien", "m@x.org", "s17")
    assert abs((found.packed_at - datetime.now(UTC)).total_seconds()) < 3600


def test_the_first_part_of_assignment_1_is_code_alone(tmp_path: Path) -> None:
    asked = Handin("assignment1", name="doe-jane", part=1, output_dir=str(tmp_path))
    path, files, without = build(asked)
    assert path.name == "doe-jane-assign1-part1.tar.gz"
    assert sorted(files) == [
        "exercises/naive_ddp.py",
        "exercises/overlapped_ddp.py",
        "exercises/ring_all_reduce.py",
    ]
    assert without == []
    with pytest.raises(UserError, match="in two parts"):
        build(Handin("assignment1", name="doe-jane", output_dir=str(tmp_path)))


def test_recorded_tables_are_refused(tmp_path: Path, run: Path) -> None:
    recorded = ROOT / "data" / "epyc-2-cores" / "assignment2" / "ddp_benchmark" / "ddp-times.csv"
    shutil.copy(recorded, run / "stage" / "ddp-times.csv")
    with pytest.raises(UserError, match=r"ddp-times\.csv is recorded data, data/epyc"):
        build(Handin("assignment2", name="a-b", run_dir=str(run), output_dir=str(tmp_path)))
    assert not list(tmp_path.glob("*.tar.gz"))
