"""The command ddplab as a user types it: output, one-line errors, exit statuses.

What works is run as a process of its own, as is one refusal; the other refusals come from the same
``main`` in this process, where nothing has to be imported again.
"""

import contextlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from common.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "data" / "epyc-2-cores" / "assignment2"
UMD = ROOT.parent / "shared" / "measured" / "umd-2x4-a100"


def ddplab(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).with_name("ddplab"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def one_error_line(stderr: str) -> str:
    """The one line of a refusal."""
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def refused(*arguments: object) -> str:
    """The one line of a refusal."""
    with (
        mock.patch.object(sys, "argv", ["ddplab", *map(str, arguments)]),
        contextlib.chdir(ROOT),
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        pytest.raises(SystemExit) as left,
    ):
        main()
    assert left.value.code == 2, stderr.getvalue()
    return one_error_line(stderr.getvalue())


def test_help_lists_the_subcommands() -> None:
    done = ddplab("--help")
    assert done.returncode == 0
    for command in ("run", "predict", "emulate", "doctor", "data", "study", "handin"):
        assert command in done.stdout


def test_doctor_shows_what_works() -> None:
    done = ddplab("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("torch", "gloo", "rank", "benchmarks on GPU", "report"):
        assert word in done.stdout


@pytest.fixture(scope="module")
def predicted() -> str:
    """What ``ddplab predict`` says of the recorded run."""
    done = ddplab("predict", "--run-dir", RECORDED)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_predict_reads_a_run_directory_and_compares(predicted: str) -> None:
    for word in ("b* =", "within 1 %", "noise floor", "Regret", "measured (ms)"):
        assert word in predicted


@pytest.mark.skipif(not UMD.is_dir(), reason="the shared measurements are not beside the project")
def test_predict_reads_the_course_tables_as_they_are() -> None:
    done = ddplab(
        *("predict", "--layer-sizes", UMD / "layer-sizes-gpt2_large-bs4.csv"),
        *("--layer-times", UMD / "layer-times-gpt2_large-bs4.csv"),
        *("--allreduce", UMD / "allreduce-times.csv", "--bucket_cap_mb", 1, 25, 100),
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "listed twice; it is counted once" in text
    assert "is no backward time" in text
    assert "b* =" in text
    assert "b* with α = 40 µs" in text
    assert "the embeddings' own gradient takes no time" in text
    # the bucket counts of gpt2-large at 1, 25 and 100 MiB (published facts)
    for buckets in ("146", "109", "28"):
        assert f"│ {buckets} │" in text


def test_the_student_script_is_the_same(predicted: str) -> None:
    script = ROOT / "assignments" / "assignment2" / "predict_bucket_size.py"
    done = subprocess.run(
        [sys.executable, script, "--run_dir", RECORDED], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == predicted


def test_a_refusal_is_one_line_and_exit_status_2() -> None:
    done = ddplab("bogus")
    assert (done.returncode, done.stdout) == (2, "")
    assert "predict" in one_error_line(done.stderr)


@pytest.mark.parametrize("cap", ["0", "-1", "abc", "nan", "inf", "1e-12"])
def test_predict_refuses_caps_that_are_none(cap: str) -> None:
    assert cap in refused("predict", "--run-dir", RECORDED, f"--bucket_cap_mb={cap}")


@pytest.mark.parametrize("alpha", ["0", "-1", "inf"])
def test_predict_refuses_a_latency_that_is_none(alpha: str) -> None:
    assert "--alpha-us" in refused("predict", "--run-dir", RECORDED, f"--alpha-us={alpha}")


def test_predict_refuses_missing_inputs() -> None:
    assert "--allreduce" in refused("predict")
    assert "--layer-sizes" in refused("predict", "--allreduce", "x.csv")
    assert "no such file" in refused("predict", "--run-dir", RECORDED, "--allreduce", "nowhere.csv")
    assert "no such run" in refused("predict", "--run-dir", "nowhere")


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
        (["bogus"], "predict"),
        (["predict", "--bucket-cap", "1"], "--bucket-cap-mb"),
        (["handin", "assignment2", "--name", "Bob"], "lastname-firstname"),
        (["handin", "homework", "--name", "a-b"], "assignment2"),
        (["handin", "assignment2", "--name", "a-b", "--run-dir", "nowhere"], "ddplab run"),
        (["data", "record", "nowhere", "--machine", "x"], "not a run directory"),
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
    done = ddplab(*arguments, "--output-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 pages" in done.stdout
    with tarfile.open(tmp_path / "doe-jane-assign2.tar.gz") as tar:
        assert tar.getnames() == ["doe-jane-assign2/report.pdf"]


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
