"""What is kept of a run for others, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from common.errors import UserError
from common.report import recording
from common.report.recording import keep_run
from common.runtime.records.run_directory import RunDirectory


def finished_run(folder: Path, rows: int = 3) -> Path:
    environment = {
        "status": "running",
        "host": "node17.example",
        "host_names": ["node17.example"],
        "process": "4711:8812345:1:node17.example",
        "launched_by": "4710:8812344:1:node17.example",
        "slurm_job_id": "99",
        "command": "python a.py --rounds 2 --output_dir /home/ada/out --run-id mine --of=/ada/b",
        "variables": {"OMP_NUM_THREADS": "1", "NCCL_TOPO_FILE": "/home/ada/t", "TORCH_HOME": "x"},
        "gpus": [{"name": "NVIDIA H100", "uuid": "GPU-928eff98", "bus_id": "00000000:06"}],
    }
    config = {"rounds": 2, "output_dir": "/home/ada/out", "data": "/home/ada/tokens"}
    with RunDirectory.create(folder, "a", config, environment, "run") as run:
        run.write_table("times.csv", pd.DataFrame({"time_ms": range(rows)}))
    return run.path


def test_tables_stay_and_what_belongs_to_one_machine_or_user_does_not(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    kept = keep_run(run, "h100-1", "assignment0", tmp_path / "data")
    assert kept == tmp_path / "data" / "h100-1" / "assignment0"
    assert (kept / "times.csv").read_text() == (run / "times.csv").read_text()
    text = "".join(path.read_text() for path in kept.iterdir())
    for private in ("node17", "4711", "ada", "mine", "GPU-928eff98", "00000000:06"):
        assert private not in text
    record = json.loads((kept / "environment.json").read_text())
    assert record["command"] == "python a.py --rounds 2"
    assert record["gpus"] == [{"name": "NVIDIA H100"}]
    assert record["variables"] == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("status", "machine", "words"),
    [("failed", "h100-1", "its status is failed"), ("complete", "H100 one", "lower-case")],
)
def test_a_run_that_cannot_be_kept_leaves_nothing(
    tmp_path: Path, status: str, machine: str, words: str
) -> None:
    run = finished_run(tmp_path)
    record = run / "environment.json"
    record.write_text(record.read_text().replace('"complete"', f'"{status}"'))
    with pytest.raises(UserError, match=words):
        keep_run(run, machine, "assignment0", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["", "..", "../other/assignment2", "a b"])
def test_a_name_that_is_no_folders_removes_nothing(tmp_path: Path, name: str) -> None:
    run = finished_run(tmp_path)
    kept = keep_run(run, "h100-1", "assignment0", tmp_path / "data")
    with pytest.raises(UserError, match="lower-case letters, digits"):
        keep_run(run, "h100-1", name, tmp_path / "data")
    assert (kept / "times.csv").is_file()


def test_a_run_that_lacks_a_file_leaves_what_was_recorded(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    kept = keep_run(run, "h100-1", "assignment0", tmp_path / "data")
    (run / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config\.yaml: No such file"):
        keep_run(run, "h100-1", "assignment0", tmp_path / "data")
    assert [path.name for path in kept.parent.iterdir()] == ["assignment0"]
    assert (kept / "config.yaml").is_file()
    (run / "folder.csv").mkdir()
    with pytest.raises(UserError, match=r"folder\.csv: Is a directory"):
        keep_run(run, "h100-1", "assignment0", tmp_path / "data")


def test_a_record_of_another_version_may_lack_the_command_and_the_variables(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    record = json.loads((run / "environment.json").read_text())
    del record["command"], record["variables"]
    (run / "environment.json").write_text(json.dumps(record))
    kept = keep_run(run, "h100-1", "assignment0", tmp_path / "data")
    assert json.loads((kept / "environment.json").read_text())["status"] == "complete"


def test_tables_that_are_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "LIMIT_MIB", 0.01)
    with pytest.raises(UserError, match=r"at most 0\.01 are recorded"):
        keep_run(finished_run(tmp_path, rows=3000), "h100-1", "assignment0", tmp_path / "data")


def test_a_watchs_record_inside_a_run_is_kept_as_its_tables(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    tables = run / "runs" / "script" / "tables"
    tables.mkdir(parents=True)
    (tables / "steps.csv").write_text("step\n1\n")
    (tables / "environment.json").write_text('{"command": ["script.py"]}')
    kept = keep_run(run, "h100-1", "study-exchange", tmp_path / "data")
    inside = kept / "runs" / "script" / "tables"
    assert [path.name for path in inside.iterdir()] == ["steps.csv"]
