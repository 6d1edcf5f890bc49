"""Run directories: unique, readable at every moment, and never complete before they are."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading

import pandas as pd
import pytest
import yaml
from refusals import problem

from common.errors import RunFailed, UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.processes.process_identity import own_identity
from common.runtime.records.run_directory import (
    RunDirectory,
    find_table,
    new_run_id,
    newest_complete_run,
    read_environment,
)

COLUMNS = ("size_bytes", "time_ms")
ROWS = [{"size_bytes": 4, "time_ms": 0.5}, {"size_bytes": 8, "time_ms": 0.25}]


def new_run(folder, run_id="run", **environment) -> RunDirectory:
    return RunDirectory.create(
        folder, "probe", {"rounds": 2}, describe_environment("gloo", "cpu") | environment, run_id
    )


def finished_run(folder, run_id, start_time, status="complete", tables=("times.csv",)):
    """Makes a run that ended, as a reader finds it."""
    run = new_run(folder, run_id, start_time=start_time)
    for table in tables:
        run.write_table(table, pd.DataFrame(ROWS))
    run.finish(status)
    return run.path


def status_of(run: RunDirectory) -> str:
    return json.loads((run.path / "environment.json").read_text())["status"]


def test_a_thousand_runs_of_one_second_have_different_ids():
    assert len({new_run_id("ddp") for _ in range(1000)}) == 1000


def test_runs_made_at_once_by_several_processes_do_not_meet(tmp_path):
    code = (
        "import sys; from common.runtime.records.run_directory import RunDirectory\n"
        "for _ in range(50): RunDirectory.create(sys.argv[1], 'x', {}, {'status': 'running'})"
    )
    makers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [maker.wait(30) for maker in makers] == [0, 0]
    assert len(list(tmp_path.glob("*/environment.json"))) == 100


def test_a_run_holds_its_settings_and_is_running_until_it_ends(tmp_path):
    with new_run(tmp_path) as run:
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"rounds": 2}
        assert status_of(run) == "running"
    assert status_of(run) == "complete"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RunFailed("rank 1 lost another rank"), "failed", "RunFailed: rank 1 lost another rank"),
        (ValueError("a bug"), "failed", "ValueError: a bug"),
        (KeyboardInterrupt(), "interrupted", "interrupted by the user"),
        (GeneratorExit(), "interrupted", "interrupted by the user"),  # by a second signal
    ],
)
def test_a_run_that_breaks_off_says_how_and_keeps_its_samples_as_partial(
    tmp_path, error, status, reason
):
    run = new_run(tmp_path)
    run.stream("samples.csv", COLUMNS).write(ROWS)
    with pytest.raises(type(error)), run:
        raise error
    record = json.loads((run.path / "environment.json").read_text())
    assert (record["status"], record["reason"]) == (status, reason)
    assert not (run.path / "samples.csv").exists()
    pd.testing.assert_frame_equal(pd.read_csv(run.path / "samples.csv.partial"), pd.DataFrame(ROWS))


def test_samples_can_be_read_while_the_run_goes_on_and_get_their_name_at_its_end(tmp_path):
    with new_run(tmp_path) as run:
        stream = run.stream("samples.csv", COLUMNS)
        for count, row in enumerate(ROWS, start=1):
            stream.write([row])
            assert len(pd.read_csv(run.path / "samples.csv.partial")) == count
        assert not (run.path / "samples.csv").exists()
    pd.testing.assert_frame_equal(pd.read_csv(run.path / "samples.csv"), pd.DataFrame(ROWS))
    assert not list(run.path.glob("*.partial"))


@pytest.mark.parametrize("row", [{"size_bytes": 4}, {"size_bytes": 4, "time_ms": 1, "rank": 0}])
def test_a_row_that_lacks_a_column_or_has_another_is_refused(tmp_path, row):
    with pytest.raises(ValueError, match=r"samples\.csv"), new_run(tmp_path) as run:
        run.stream("samples.csv", COLUMNS).write([row])


def test_a_reader_never_sees_half_a_table(tmp_path):
    run = new_run(tmp_path)
    tables = [pd.DataFrame({"value": [number] * 10_000}) for number in (1, 2)]
    whole = {table.to_csv(index=False) for table in tables}
    path = run.write_table("table.csv", tables[0])
    seen, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.append(path.read_text() in whole)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        run.write_table("table.csv", tables[number % 2])
    stop.set()
    reader.join()
    assert seen
    assert all(seen)


def test_a_table_that_cannot_be_written_leaves_the_one_before_it(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = new_run(tmp_path)
    path = run.write_table("table.csv", pd.DataFrame(ROWS))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run.write_table("table.csv", pd.DataFrame(ROWS[:1]))
    with pytest.raises(UserError, match=r"output folder .*: No space"):
        new_run(tmp_path, "another")
    pd.testing.assert_frame_equal(pd.read_csv(path), pd.DataFrame(ROWS))
    assert not list(tmp_path.rglob(".*.partial"))


def test_the_id_of_an_existing_run_is_refused_and_that_run_is_not_touched(tmp_path):
    path = finished_run(tmp_path, "twice", "2026-01-01T00:00:00+00:00")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert "twice exists; choose another" in problem(new_run, tmp_path, "twice")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(UserError, match=r"output folder .*Not a directory"):
        new_run(file / below)
    assert file.read_text() == "not a folder"


def identity_of_one_that_ended():
    code = (
        "from common.runtime.processes.process_identity import own_identity; print(own_identity())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def test_a_running_record_whose_process_or_launcher_is_gone_reads_as_failed(tmp_path):
    gone = identity_of_one_that_ended()
    # A process of an emulated host is numbered in a namespace that is not seen from here.
    unseen = gone.replace(f":{socket.gethostname()}", ":host2")
    for number, known in enumerate(({"process": gone}, {"process": unseen, "launched_by": gone})):
        path = new_run(tmp_path, f"run{number}", **known).path
        assert read_environment(path)["status"] == "failed"


def test_a_running_record_of_a_living_process_or_of_another_host_stays_running(tmp_path):
    gone = identity_of_one_that_ended()
    another_host = gone.replace(f":{socket.gethostname()}", ":another-host")
    pid, created, _, host = gone.split(":")
    for number, known in enumerate(
        (
            {},
            {"launched_by": own_identity()},
            {"process": another_host},
            {"process": f"{pid}:{created}:7:{host}"},  # in a container
        )
    ):
        path = new_run(tmp_path, f"run{number}", **known).path
        assert read_environment(path)["status"] == "running"


def test_another_process_with_the_number_of_one_that_ended_is_not_taken_for_it(tmp_path):
    _, created, namespace, host = own_identity().split(":")
    earlier = f"{os.getpid()}:{int(created) - 1}:{namespace}:{host}"
    assert read_environment(new_run(tmp_path, process=earlier).path)["status"] == "failed"


def test_the_newest_complete_run_is_chosen_by_its_start_not_its_name(tmp_path):
    newest = finished_run(tmp_path, "a", "2026-03-01T00:00:00+00:00")
    finished_run(tmp_path, "b", "2026-01-01T00:00:00+00:00")
    finished_run(tmp_path, "c", "2026-02-01T00:00:00+00:00")
    assert newest_complete_run(tmp_path, ["times.csv"]) == newest


def test_runs_that_broke_off_or_lack_a_table_are_passed_over(tmp_path):
    good = finished_run(tmp_path, "good", "2026-01-01T00:00:00+00:00", tables=("a.csv", "b.csv"))
    finished_run(tmp_path, "lacks-b", "2026-02-01T00:00:00+00:00", tables=("a.csv",))
    for month, status in enumerate(("failed", "interrupted"), start=3):
        start = f"2026-0{month}-01T00:00:00+00:00"
        finished_run(tmp_path, status, start, status, tables=("a.csv", "b.csv"))
    new_run(tmp_path, "still-running", start_time="2026-05-01T00:00:00+00:00")
    assert newest_complete_run(tmp_path, ["a.csv", "b.csv"]) == good


def test_without_a_complete_run_none_is_chosen(tmp_path):
    finished_run(tmp_path, "failed", "2026-01-01T00:00:00+00:00", "failed")
    assert newest_complete_run(tmp_path, []) is None
    assert newest_complete_run(tmp_path / "missing", []) is None


def test_a_table_is_found_in_the_newest_complete_run_inside_a_run(tmp_path):
    outer = new_run(tmp_path, "outer").path
    finished_run(outer, "old", "2026-01-01T00:00:00+00:00")
    new = finished_run(outer, "new", "2026-02-01T00:00:00+00:00")
    finished_run(outer, "failed", "2026-03-01T00:00:00+00:00", "failed")
    assert find_table(outer, "times.csv") == new / "times.csv"
    assert find_table(outer, "missing.csv") is None
    # Runs of another script may have a table of the same name.
    assert find_table(outer, "times.csv", "probe") == new / "times.csv"
    assert find_table(outer, "times.csv", "another") is None


def test_a_runs_own_table_wins_over_those_of_runs_inside_it(tmp_path):
    outer = finished_run(tmp_path, "outer", "2026-01-01T00:00:00+00:00")
    finished_run(outer, "inner", "2026-02-01T00:00:00+00:00")
    assert find_table(outer, "times.csv") == outer / "times.csv"


@pytest.mark.parametrize(
    ("record", "status"),
    [
        *(("", "failed"), ("[]", "failed"), ("{}", "unknown")),
        ('{"status": "running", "process": 7}', "failed"),
        ('{"status": "running", "process": "x"}', "failed"),
    ],
)
def test_what_is_no_record_is_none_of_a_complete_run(tmp_path, record, status):
    (tmp_path / "environment.json").write_text(record)
    assert read_environment(tmp_path)["status"] == status


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_table_of_a_run_that_broke_off_is_not_found_there(tmp_path, status):
    run = finished_run(tmp_path, "run", "2026-01-01T00:00:00+00:00", status)
    assert (run / "times.csv").is_file()
    assert find_table(run, "times.csv") is None
    (run / "environment.json").unlink()  # tables without a record are a user's own
    assert find_table(run, "times.csv") == run / "times.csv"
