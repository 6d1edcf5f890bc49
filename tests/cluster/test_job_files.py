"""What the job files of sbatch/ decide by themselves, without a Slurm: see stub_slurm.py."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from collections.abc import Mapping, Sequence

import pytest
from command_line import ddplab
from job_files import (
    CASES,
    EXPECTED,
    REPORT,
    ROOT,
    SBATCH,
    each_that_runs_ranks,
    job_files,
    only_linux,
)
from stub_slurm import sbatch_flags

from common.cli.run import Run
from common.runtime import script

pytestmark = only_linux
each_file = pytest.mark.parametrize("path", job_files(), ids=lambda path: path.stem)
README = (SBATCH / "README.md").read_text()


class Parsed(BaseException):
    """Leaves a script when it has its settings, through all that would catch an error."""


def start(program: Sequence[str]) -> None:
    """Begins, in this process, what torchrun was to start."""
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / program[0]), run_name="__main__")


@pytest.fixture
def settings_of(monkeypatch):
    """Returns ``settings_of(program, variables)``: a script's own settings for these flags."""

    def parse(*arguments: object) -> object:
        raise Parsed(parse_settings(*arguments))

    parse_settings = script.parse_settings

    def settings(program: Sequence[str], variables: Mapping[str, str]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(script, "parse_settings", parse)
            patch.setattr(script, "leave_when_terminated", lambda: None)
            for name in ("NUMEL", "DTYPE", "BACKEND", "BUCKET_SIZE", "BATCH_SIZES"):
                patch.setenv(name, variables.get(name, ""))
            patch.setattr(sys, "argv", [word for word in program if word != "-m"])
            with pytest.raises(Parsed) as parsed:
                start(program)
        return parsed.value.args[0]

    return settings


def test_every_job_file_is_known_here_and_to_those_that_submit_it():
    names = {path.stem for path in job_files()}
    assert set(EXPECTED) | {REPORT.stem} == names
    assert set(CASES) == names


@each_file
def test_what_a_job_file_asks_of_slurm(path):
    flags = sbatch_flags(path)
    expected = EXPECTED.get(path.stem)
    assert flags["job-name"].startswith("ddplab-")
    assert flags["output"] == "%x-%j.out"
    assert re.fullmatch(r"0[01]:\d\d:00", flags["time"])
    if expected is None:  # the report
        assert flags.keys() & {"gpus-per-node", "exclusive", "mem"} == set()
        return
    # Any node with GPUs will do, and --exclusive brings all of them.
    assert (int(flags["nodes"]), flags["gpus-per-node"]) == (expected.nodes, "1")
    assert flags["ntasks-per-node"] == "1"  # torchrun starts the ranks
    # Other sites than the tests' give a few GB per core to a job that does not ask for memory.
    assert (flags["exclusive"], flags["mem"]) == ("", "0")
    goes_on = {name: flags.get(name) for name in ("requeue", "signal", "open-mode")}
    if expected.script.startswith("assignments/assignment1/"):
        assert goes_on == {"requeue": "", "signal": "USR1@120", "open-mode": "append"}
    else:
        assert set(goes_on.values()) == {None}


def test_jobs_have_names_of_their_own():
    names = [sbatch_flags(path)["job-name"] for path in job_files()]
    assert len(set(names)) == len(names)


@each_that_runs_ranks
def test_a_job_file_runs_its_script_with_the_variables_that_it_says_it_reads(
    run, settings_of, path
):
    expected = EXPECTED[path.stem]
    variables = {name: value for name, (value, _, _) in expected.reads.items()}
    job = run(path, **variables, OUTPUT_DIR="my runs", DEVICE="cpu", RANKS_PER_NODE="3")
    program = job.program
    assert " ".join(program).startswith(f"{expected.script} ")
    settings = settings_of(program, job.torchruns[0].variables)
    reached = {name: getattr(settings, name) for _, name, _ in expected.reads.values()}
    assert reached == {name: becomes for _, name, becomes in expected.reads.values()}
    assert (settings.output_dir, settings.device) == ("my runs", "cpu")
    ranks = 3 if expected.gpus > 1 else 1  # those of one device have one rank, whatever is set
    assert f"--nproc-per-node={ranks}" in job.torchruns[0].words

    head = path.read_text().split("#SBATCH")[0]
    documented = set(re.findall(r"^\| (`.*?) \|", README, flags=re.M))
    known = {name for cell in documented for name in re.findall(r"`([A-Z_]+)`", cell)}
    named = set(re.findall(r"\b[A-Z_]+\b", head.split("Variables:")[1])) & known
    assert named == {*expected.reads, "OUTPUT_DIR", "FLAGS"}


@each_that_runs_ranks
def test_without_variables_a_job_file_does_as_the_readme_says(plain_run, settings_of, path):
    expected = EXPECTED[path.stem]
    job = plain_run(path)
    settings = settings_of(job.program, job.torchruns[0].variables)
    assert settings.output_dir == expected.output_dir
    assert settings.device is None
    for name, value in expected.by_default.items():
        assert getattr(settings, name) == value
    if "FOLDER" in expected.reads:
        assert settings.folder == job.calls[0].variables["SLURM_SUBMIT_DIR"]


@each_that_runs_ranks
def test_flags_win_over_what_the_job_file_gives(run, settings_of, path):
    """Also: the flags with which the slow tests submit these files are flags of the scripts."""
    case = CASES[path.stem].variables
    flags = f"{case.get('FLAGS', '')} --device cuda --output_dir elsewhere"
    job = run(path, **case | {"FLAGS": flags, "DEVICE": "cpu", "OUTPUT_DIR": "runs"})
    settings = settings_of(job.program, job.torchruns[0].variables)
    assert (settings.device, settings.output_dir) == ("cuda", "elsewhere")


def test_a_flag_that_a_script_does_not_have_is_not_taken_for_one(run, settings_of, capsys):
    job = run(SBATCH / "launch-options.sbatch", FLAGS="--num_stepz 3")
    with pytest.raises(SystemExit):
        settings_of(job.program, {})
    assert "num_stepz" in capsys.readouterr().err


def test_the_readme_has_all_folders_for_runs():
    [row] = re.findall(r"^\| `OUTPUT_DIR`.*$", README, flags=re.M)
    folders = {expected.output_dir for expected in EXPECTED.values()}
    assert set(re.findall(r"`(outputs/\S+?)`", row)) == folders


def test_a_script_or_module_is_where_the_job_files_say():
    for expected in EXPECTED.values():
        *module, name = expected.script.split()
        assert importlib.util.find_spec(name) if module else (ROOT / name).is_file()


@pytest.mark.parametrize(("status", "ended", "said"), [(2, 2, ""), (1, 1, "self-test failed")])
def test_a_failed_selftest_says_what_to_look_at_unless_one_line_said_all(run, status, ended, said):
    job = run(SBATCH / "selftest.sbatch", RANKS=f"exit {status}")
    assert job.status == ended
    assert job.stderr.startswith(said)
    assert bool(job.stderr) == bool(said)


@pytest.mark.parametrize("name", ["launch-tune", "launch-plan"])
def test_tune_and_plan_need_a_function(run, name):
    job = run(SBATCH / f"{name}.sbatch", FUNCTION="")
    assert (job.status, job.calls) == (2, ())
    [line] = job.stderr.splitlines()
    assert line.startswith("error: FUNCTION is not set")


@pytest.mark.parametrize(
    ("variables", "assignment", "folder"),
    [
        ({}, "assignment2", "outputs/assignment2/cluster"),
        ({"ASSIGNMENT": "assignment0"}, "assignment0", "outputs/assignment0/cluster"),
        ({"OUTPUT_DIR": "my runs"}, "assignment2", "my runs"),
    ],
)
def test_the_report_is_that_of_the_assignment_on_the_folder(
    run, monkeypatch, variables, assignment, folder
):
    job = run(REPORT, **variables)
    assert (job.status, job.stderr) == (0, "")
    [call] = job.calls
    assert call.words[:4] == ("uv", "run", "--no-sync", "ddplab")
    parsed = []
    monkeypatch.setattr(Run, "run", lambda self: parsed.append(self))
    assert ddplab(*call.words[4:]).status == 0
    assert (parsed[0].what, parsed[0].run_dir) == (assignment, folder)


@pytest.mark.parametrize("index", [0, 1])
def test_task_i_of_an_array_measures_model_i_in_a_folder_of_its_name(run, settings_of, index):
    path = SBATCH / "launch-train-benchmark.sbatch"
    variables = {"MODEL": "gpt2, gpt2-large", "OUTPUT_DIR": "out"}
    job = run(path, **variables, SLURM_ARRAY_TASK_ID=str(index))
    settings = settings_of(job.program, {})
    model = ("gpt2", "gpt2-large")[index]
    assert (settings.model, settings.output_dir) == (model, f"out/{model}")
    assert job.stdout == ""


def test_an_index_without_a_model_is_one_clear_line_and_a_list_is_not_silently_cut(
    run, settings_of
):
    path = SBATCH / "launch-train-benchmark.sbatch"
    job = run(path, MODEL="gpt2 gpt2-large", SLURM_ARRAY_TASK_ID="2")
    assert (job.status, job.calls) == (2, ())
    assert job.stderr == "error: array index 2, but MODEL has 2 items, from 0: gpt2 gpt2-large\n"
    job = run(path, MODEL="gpt2 gpt2-large")
    assert job.stdout == "MODEL has 2 items; only gpt2 without sbatch --array=0-1\n"
    settings = settings_of(job.program, {})
    assert (settings.model, settings.output_dir) == ("gpt2", "outputs/assignment2/cluster")
