"""The command ddplab as a user types it: output, one-line errors, exit statuses.

One refusal is that of a process of its own; everything else comes from the same ``main`` in this
process. CI runs the README's commands as processes.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pandas as pd
import pytest
from command_line import ROOT, Ended, answered, error_line, refused
from rank_support import ASSIGNMENT2, RankServer

RECORDED = ROOT / "data" / "epyc-2-cores" / "assignment2"
UMD = ROOT.parent / "shared" / "measured" / "umd-2x4-a100"


@pytest.fixture(autouse=True)
def _in_the_projects_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_doctor_shows_what_works() -> None:
    shown = answered("doctor")
    for word in ("torch", "gloo", "rank", "benchmarks on GPU", "report"):
        assert word in shown


@pytest.fixture(scope="module")
def predicted() -> str:
    """Returns what is said of the recorded run, on a terminal of a known width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        return answered("predict", "--run-dir", RECORDED)


def test_predict_reads_a_run_directory_and_compares_as_the_students_script_does(
    rank_server: RankServer, predicted: str
) -> None:
    for word in ("b* =", "within 1 %", "noise floor", "Regret", "measured (ms)"):
        assert word in predicted
    assert "contention" not in predicted  # it was measured as it is now
    (default,) = (line for line in predicted.splitlines() if "None │" in line)
    assert all(cell.strip() for cell in default.strip().strip("│").split("│"))
    assert "None is DDP's default" in predicted
    script = ASSIGNMENT2 / "predict_bucket_size.py"
    done = rank_server.run(script, "--run_dir", RECORDED, variables={"COLUMNS": "100"})
    assert (done.exit_codes, done.stdout) == ([0], [predicted])


def test_predict_gives_the_interval_that_the_studys_errors_and_chance_make(predicted: str) -> None:
    def numbers(pattern: str) -> list[float]:
        return list(map(float, re.search(pattern, predicted).groups()))

    [best] = numbers(r"b\* = .*? MiB: ([\d.]+) ms")
    [error] = numbers(r"90 % were within ([\d.]+)%")
    chance = numbers(r"in 90 % of draws the backward pass takes ([\d.]+) to ([\d.]+) ms")
    wide = math.hypot(error / 100, (chance[1] - chance[0]) / 2 / best)
    expected = numbers(r"So expect ([\d.]+) to ([\d.]+) ms")
    assert expected == pytest.approx([best / (1 + wide), best / (1 - wide)], abs=0.2)


def test_predict_says_that_contention_was_not_measured(tmp_path: Path) -> None:
    table = pd.read_csv(RECORDED / "overlap_benchmark" / "overlap-times.csv")
    without = table[table["arm"].isin(["local", "bookkeeping"])]
    without.to_csv(tmp_path / "without.csv", index=False)
    said = answered("predict", "--run-dir", RECORDED, "--overlap", tmp_path / "without.csv")
    assert "computation and communication do not slow each other" in said


@pytest.mark.skipif(not UMD.is_dir(), reason="the shared measurements are not beside the project")
def test_predict_reads_the_course_tables_as_they_are() -> None:
    shown = answered(
        *("predict", "--layer-sizes", UMD / "layer-sizes-gpt2_large-bs4.csv"),
        *("--layer-times", UMD / "layer-times-gpt2_large-bs4.csv"),
        *("--allreduce", UMD / "allreduce-times.csv", "--bucket_cap_mb", 1, 25, 100),
    )
    text = " ".join(shown.split())
    assert "listed twice; it is counted once" in text
    assert "is no backward time" in text
    assert "b* =" in text
    assert "b* with α = 40 µs" in text
    assert "the embeddings' own gradient takes no time" in text
    # the bucket counts of gpt2-large at 1, 25 and 100 MiB (published facts)
    for buckets in ("146", "109", "28"):
        assert f"│ {buckets} │" in text


def test_a_refusal_is_one_line_and_exit_status_2_of_the_process() -> None:
    command = [Path(sys.executable).with_name("ddplab"), "bogus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "predict" in error_line(Ended(done.returncode, done.stdout, done.stderr))


@pytest.mark.parametrize("command", ["--help", pytest.param("diagnose", marks=pytest.mark.slow)])
def test_a_reader_that_goes_away_gets_no_traceback(command: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "common.cli.main", command]
    if command == "diagnose":
        recorded = ROOT / "data" / "xeon-2-cores" / "study-diagnosis" / "model-too-small-seen"
        words.append(shutil.copytree(recorded, tmp_path / "run"))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("cap", ["0", "-1", "abc", "nan", "inf", "1e-12"])
def test_predict_refuses_caps_that_are_none(cap: str) -> None:
    assert cap in refused("predict", "--run-dir", RECORDED, f"--bucket_cap_mb={cap}")


@pytest.mark.parametrize("alpha", ["0", "-1", "inf"])
def test_predict_refuses_a_latency_that_is_none(alpha: str) -> None:
    assert "--alpha-us" in refused("predict", "--run-dir", RECORDED, f"--alpha-us={alpha}")


def test_another_latency_is_that_of_all_reduces_in_flight_together_too() -> None:
    # over loopback gloo has two under way at a time, and no bucket takes less than its latency
    answer = answered("predict", "--run-dir", RECORDED, "--alpha-us", 100_000)
    best, slow = re.findall(r"b\*.*?: ([\d.]+) ms", answer)[:2]
    assert float(slow) > max(100.0, float(best) + 50)


def test_a_table_of_large_messages_tells_no_latency(tmp_path: Path) -> None:
    # 1 Gbit/s: what 1 MiB takes is nearly all transfer
    sizes = [2**20, 2**24]
    times = [5e-5 + size / 125e6 for size in sizes]
    table = pd.DataFrame({"world_size": 2, "total_bytes": sizes, "average_time": times})
    table.to_csv(tmp_path / "large.csv", index=False)
    question = ("predict", "--run-dir", RECORDED, "--allreduce", tmp_path / "large.csv")
    answer = answered(*question)
    assert "begins at 1,024 KiB, more than 64: it does not tell the latency" in answer
    assert "b* with α" not in answer
    assert "large.csv begins at" in refused(*question, "--alpha-us", 5)


@pytest.mark.parametrize(
    "flags", [("--bucket-cap-mb", "5"), ("--timeline", "timeline.json")], ids=lambda flags: flags[0]
)
def test_a_table_of_operations_has_no_caps_and_no_timeline(flags: tuple, tmp_path: Path) -> None:
    rows = [(0, 0, 1, "forward-compute", t, 1.0, t) for t in range(3)]
    columns = ["dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "ops.csv", index=False)
    question = ("predict", "--from-traces", tmp_path / "ops.csv")
    assert f"{flags[0]} has an effect on traces" in refused(*question, *flags)
    answer = answered(*question)
    assert "1.000 times as long" in answer
    assert "costs most" not in answer  # there is one stage
    (tmp_path / "ops.csv").write_text(",".join(columns) + "\n0,0,1,forward-compute,0,long,0\n")
    assert refused(*question).count("ops.csv") == 1


def test_predict_refuses_missing_inputs(tmp_path: Path) -> None:
    assert "--allreduce" in refused("predict")
    assert "--layer-sizes" in refused("predict", "--allreduce", "x.csv")
    assert "no such file" in refused("predict", "--run-dir", RECORDED, "--allreduce", "nowhere.csv")
    assert "no such run" in refused("predict", "--run-dir", "nowhere")
    record = {"status": "interrupted", "reason": "ended by\nSIGTERM"}
    (tmp_path / "environment.json").write_text(json.dumps(record))
    why = "which broke off (ended by SIGTERM), has no complete allreduce-samples.csv"
    assert why in refused("predict", "--run-dir", tmp_path)


def test_predict_refuses_another_number_of_ranks(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {"world_size": 8, "total_bytes": [4, 1000, 10**8], "average_time": [1e-4, 2e-4, 1e-2]}
    )
    table.to_csv(tmp_path / "a.csv", index=False)
    line = refused("predict", "--run-dir", RECORDED, "--allreduce", tmp_path / "a.csv")
    assert "8 ranks" in line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run", "assignment9"], "assignment2"),
        (["run", "--preset", "tiny"], "smoke"),
        (["predict", "--bucket-cap", "1"], "--bucket-cap-mb"),
        (["handin", "assignment2", "--name", "B0b"], "expected letters of any script"),
        (["handin", "homework", "--name", "a-b"], "assignment2"),
        (["handin", "assignment2", "--name", "a-b", "--run-dir", "nowhere"], "ddplab run"),
        (["run", "assignment2", "--run-dir", ""], "'': no such run directory"),
        (["run", "a", "--run-dir", "b", "--preset", "smoke"], "--preset has no effect"),
        (["doctor", "--selftest", "--pairs"], "--selftest and --pairs: give one"),
        (["diagnose", "--verify", "data"], "--verify has no effect on what was watched: data"),
        (["diagnose", "--baseline", "a", "--read", "b"], "--baseline has no effect with --read"),
        (["diagnose", "--verify", "--compare", "a", "b"], "--verify has no effect with --compare"),
        (["diagnose", "--compare", "--json", "no/a.json", "a", "b"], "there is no folder no"),
        (["data", "record", "nowhere", "--machine", "x"], "not a run directory"),
        (["doctor", "--pairs", "--ranks", "two"], "--ranks two: expected a whole number"),
        (["diagnose", "--window", "2.5", "train.py"], "--window 2.5: expected a whole number"),
        (["diagnose", "--compare", "--fail-above", "x", "a", "b"], "x: expected a number"),
        (["study", "cs336", "--rounds", "2"], "--rounds: study cs336 has no rounds to choose"),
        (["study", "grading", "--rounds", "0"], "--rounds 0: at least 1"),
        (["study", "memory", "--only", "x"], "--only: study memory runs all of its cases"),
        (["study", "memory", "--continues", "x"], "--continues: study memory cannot be continued"),
        (["study", "scripts", "--only", "nothing"], "unknown case 'nothing'"),
        (["study", "plan", "--only", "llama-2x1gbits"], "did you mean 'llama-2x1gbit'"),
        (["study", "plan", "--continues", "none"], "no case of it was planned"),
        (["study", "scripts", "--only", "tenth", "--continues", "none"], "there is no cases.csv"),
    ],
)
def test_mistakes_get_one_line_that_helps(arguments: list[str], word: str) -> None:
    assert word in refused(*arguments)


def test_run_refuses_a_folder_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused("run", "assignment2", "--preset", "smoke", "--output-dir", tmp_path / "file")
    assert "output folder" in line


def make_run(folder: Path, report: bytes, status: str = "complete") -> Path:
    folder.mkdir()
    (folder / "report.pdf").write_bytes(report)
    (folder / "environment.json").write_text(f'{{"status": "{status}", "start_time": "2026"}}')
    return folder


def test_handin_builds_a_tarball_with_the_report(tmp_path: Path) -> None:
    import typst

    source = tmp_path / "r.typ"
    source.write_text("one #pagebreak() two")
    run = make_run(tmp_path / "run", typst.compile(str(source)))
    arguments = ("handin", "assignment2", "--name", "doe-jane", "--run-dir", run)
    assert "2 pages" in answered(*arguments, "--output-dir", tmp_path)
    with tarfile.open(tmp_path / "doe-jane-assign2.tar.gz") as tar:
        assert "doe-jane-assign2/report.pdf" in tar.getnames()


def test_handin_refuses_what_is_no_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", b"not a pdf")
    arguments = ("handin", "assignment2", "--name", "doe-jane", "--run-dir", run)
    assert "not a PDF" in refused(*arguments, "--output-dir", tmp_path)
    assert not list(tmp_path.glob("*.tar.gz*"))
    assert not list(tmp_path.glob(".*.partial"))


def test_handin_refuses_a_run_that_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", b"%PDF-1.7", status="failed")
    assert "not a complete run" in refused(
        "handin", "assignment2", "--name", "doe-jane", "--run-dir", run
    )


def test_a_report_of_a_folder_without_measurements_is_refused_and_leaves_it_empty(
    tmp_path: Path,
) -> None:
    assert "no complete run with" in refused("run", "assignment2", "--run-dir", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "say which" in refused("run", "--run-dir", tmp_path)
    assert "no such run directory" in refused("run", "assignment2", "--run-dir", "nowhere")
