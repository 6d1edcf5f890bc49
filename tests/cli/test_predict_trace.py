"""``ddplab predict --trace``: what is written, from recorded tables and passes made by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from command_line import ddplab

from common.runtime.paths import project_root
from common.traces.bucket_trace import BUCKET_FIELDS

RECORDED = project_root() / "data" / "epyc-2-cores" / "assignment2"


def predict(*arguments: object) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error of ``ddplab predict``."""
    ended = ddplab("predict", *arguments)
    return ended.status, ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory) -> Path:
    """Copies the recorded run and adds a watched pass of its slowest cap: evenly spaced."""
    run = tmp_path_factory.mktemp("run") / "assignment2"
    shutil.copytree(RECORDED, run)
    ddp = run / "ddp_benchmark"
    buckets = pd.read_csv(ddp / "ddp-buckets.csv")
    rows = []
    for (cap, rank), own in buckets.groupby(["bucket_cap_mib", "rank"]):
        count = len(own)
        for bucket, size in zip(own["bucket"], own["size_bytes"], strict=True):
            moments = (bucket + 1.0, bucket + 1.0, bucket + 2.0, count + bucket + 2.0)
            values = (bucket, size, 0, 0.1, 0.1, *moments, count + 1.0, 2 * count + 2.0)
            keys = {"bucket_cap_mib": cap, "iteration": 0, "rank": rank}
            rows.append(keys | dict(zip(BUCKET_FIELDS, values, strict=True)))
    pd.DataFrame(rows).to_csv(ddp / "bucket-timeline.csv", index=False)
    return run


def processes(path: Path) -> dict[int, str]:
    records = json.loads(path.read_text())["traceEvents"]
    return {r["pid"]: r["args"]["name"] for r in records if r["name"] == "process_name"}


def test_a_run_that_watched_its_buckets_gives_both_passes(watched_run, tmp_path):
    path = tmp_path / "trace.json"
    status, said, complaints = predict(
        *("--run-dir", watched_run, "--bucket-cap-mb", 1, "--trace", path)
    )
    assert (status, complaints) == (0, "")
    assert "at 1 MiB (predicted and measured)" in said
    assert processes(path) == {1: "predicted", 2: "measured"}
    records = json.loads(path.read_text())["traceEvents"]
    (second,) = [r for r in records if r["pid"] == 2 and r["name"] == "all-reduce of bucket 2"]
    assert second["dur"] == 1000
    assert "weight" in second["args"]["gradients"]
    # Both backward passes begin where the longer of the two forward passes ends.
    forward = {r["pid"]: r for r in records if r["name"] == "forward pass"}
    begin = {r["ts"] + r["dur"] for r in forward.values()}
    assert set(forward) == {1, 2}
    longest = max(r["dur"] for r in forward.values())
    assert [*begin] == pytest.approx([longest] * len(begin))
    assert second["ts"] == pytest.approx(longest + 2000, abs=1e-3)
    # The medians of the slowest rank's steps, with and without DDP.
    for process, name in ((1, "local-times.csv"), (2, "ddp-times.csv")):
        steps = pd.read_csv(watched_run / "ddp_benchmark" / name)
        if process == 2:
            steps = steps[steps["bucket_cap_mib"] == 1]
        slowest = steps.groupby(["round", "iteration"])["forward_time_ms"].max()
        assert forward[process]["dur"] == pytest.approx(slowest.median() * 1e3, abs=0.01)
    updates = [r for r in records if r["name"] == "update"]
    assert {r["pid"] for r in updates} == {1, 2}
    assert all(r["dur"] > 0 for r in updates)


def test_a_run_that_did_not_gives_the_predicted_pass_and_says_so(tmp_path):
    path, run = tmp_path / "trace.json", tmp_path / "run"
    shutil.copytree(RECORDED, run, ignore=shutil.ignore_patterns("bucket-timeline.csv"))
    status, said, _ = predict("--run-dir", run, "--trace", path, "--bucket-cap-mb", "None")
    assert status == 0
    assert "at None MiB (predicted only: not measured)" in said
    assert processes(path) == {1: "predicted"}


def test_without_a_cap_it_is_the_best_of_those_that_were_watched(watched_run, tmp_path):
    path = tmp_path / "trace.json"
    status, said, _ = predict("--run-dir", watched_run, "--trace", path)
    assert status == 0
    cap = json.loads(path.read_text())["otherData"]["bucket_cap_mib"]
    assert f"at {cap} MiB (predicted and measured)" in said
    caps = set(pd.read_csv(watched_run / "ddp_benchmark" / "bucket-timeline.csv")["bucket_cap_mib"])
    assert float(cap) in caps


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trace", "nowhere/trace.json"], "there is no folder nowhere"),
        (["--trace", "."], "give the name of a file"),
        (["--trace", "x.json", "--bucket-cap-mb", "1", "5"], "--trace shows one cap, 2 are given"),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_printed(
    flags, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    status, printed, complaints = predict("--run-dir", RECORDED, *flags)
    assert (status, printed) == (2, "")
    assert said in complaints
    assert len(complaints.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_measured_table_that_cannot_be_one_is_refused(watched_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(watched_run, run)
    table = run / "ddp_benchmark" / "bucket-timeline.csv"
    rows = pd.read_csv(table)
    rows.loc[0, "end_ms"] = -5
    rows.to_csv(table, index=False)
    status, printed, complaints = predict("--run-dir", run, "--trace", tmp_path / "trace.json")
    assert (status, printed) == (2, "")
    assert "line 2, column 'end_ms'" in complaints
    assert not (tmp_path / "trace.json").exists()
