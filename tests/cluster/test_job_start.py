"""How job files find the project, start torchrun on every node, and go back into the queue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job_files import (
    EXPECTED,
    REPORT,
    RUNS_RANKS,
    SBATCH,
    each_that_runs_ranks,
    job_files,
    only_linux,
)
from stub_slurm import JOB_ID, EndedJob, run_job_file

pytestmark = only_linux
TRAINING = [path for path in RUNS_RANKS if "/assignment1/" in EXPECTED[path.stem].script]
each_training = pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)

# What torchrun does, in bash, where its ranks are told to stop. The folder is its last word.
FOLDER = 'folder=${*: -1}; mkdir -p "$folder"; '
STOPPED = FOLDER + 'mkdir "$folder/step-00000012"; echo 12 >"$folder/stopped"; exit 75'


def preamble(path: Path) -> str:
    """Reads what follows the #SBATCH lines, to the source line; less what is the file's own."""
    begin_to_source = re.compile(r"^set -euo pipefail\n.*?^source .*?\n", flags=re.M | re.S)
    [text] = begin_to_source.findall(path.read_text())
    own = r'^(OUTPUT_DIR=|ASSIGNMENT=|\[ -n "\$\{FUNCTION:-\}" \]).*\n'
    return re.sub(own, "", text, flags=re.M)


def test_all_job_files_look_for_the_project_in_the_same_words():
    [text] = {preamble(path) for path in job_files()}
    assert "rendezvous.sh" in text


def test_a_project_is_found_from_its_folder(tmp_path, project):
    job = run_job_file(REPORT, tmp_path, project)
    assert (job.status, job.stderr) == (0, "")
    assert [call.variables["PWD"] for call in job.calls] == [str(project)]


@pytest.mark.parametrize("given", ["my project", "{tmp_path}/my project"])
def test_a_project_is_found_by_project_root_from_elsewhere(tmp_path, project, given):
    root = given.format(tmp_path=tmp_path)
    job = run_job_file(REPORT, tmp_path, tmp_path, {"PROJECT_ROOT": root})
    assert (job.status, job.stderr) == (0, "")
    assert [call.variables["PWD"] for call in job.calls] == [str(project)]


@pytest.mark.parametrize("given", [{}, {"PROJECT_ROOT": "nowhere"}])
def test_a_job_from_elsewhere_is_one_line_that_names_what_is_missing(tmp_path, given):
    job = run_job_file(REPORT, tmp_path, tmp_path, given)
    assert (job.status != 0, job.stdout, job.calls) == (True, "", ())
    [line] = job.stderr.splitlines()
    missing = f"{given.get('PROJECT_ROOT', tmp_path)}/sbatch/rendezvous.sh"
    assert line.endswith(f"{missing}: No such file or directory")


def test_what_a_site_needs_in_the_job_is_sourced_before_anything_else_runs(run, project):
    # Sites' own files read variables that need not be set.
    (project / "sbatch" / "modules.sh").write_text("export LOADED=yes$UNSET_HERE\n")
    job = run(SBATCH / "launch-options.sbatch")
    assert {call.variables.get("LOADED") for call in job.calls} == {"yes"}


@each_that_runs_ranks
def test_one_torchrun_per_node_starts_a_rank_per_gpu_and_all_meet_at_the_first_node(
    plain_run, path
):
    expected = EXPECTED[path.stem]
    job = plain_run(path)
    [step] = job.calls_of("srun")
    nodes, ranks = f"--ntasks={expected.nodes}", f"--nproc-per-node={expected.gpus}"
    assert {nodes, "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(step.words)
    assert len(job.torchruns) == expected.nodes
    for node, torchrun in enumerate(job.torchruns):
        own = set(torchrun.words)
        # n1 is no host's name, so it is the address that Slurm knows.
        meeting = {f"--rdzv-endpoint=10.0.0.1:{20000 + JOB_ID}", f"--rdzv-id={JOB_ID}"}
        assert {f"--nnodes={expected.nodes}", ranks, *meeting, "--rdzv-backend=c10d"} <= own
        wait_s = 60 if path.stem == "selftest" else 600
        assert f"--rdzv-conf=is_host={int(node == 0)},join_timeout={wait_s}" in own
        # Who does not expect USR1 dies of it; the ranks inherit that it is ignored.
        assert torchrun.ignores_usr1
    assert step.ignores_usr1


@pytest.mark.parametrize(
    ("asked", "ranks_per_node", "ranks", "said"),
    [
        ("1", "", 8, ""),
        ("8", "", 8, ""),
        ("a100:8", "", 8, ""),
        ("4", "", 8, "asked for 4 GPUs per node, granted all 8"),
        ("4", "4", 4, ""),
    ],
)
def test_the_step_has_all_gpus_of_its_nodes_whatever_the_job_asked_for(
    run, asked, ranks_per_node, ranks, said
):
    granted = {"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": asked}
    job = run(SBATCH / "selftest.sbatch", **granted, RANKS_PER_NODE=ranks_per_node)
    assert (job.status, job.stderr) == (0, "")
    assert len(job.torchruns) == 2
    for torchrun in job.torchruns:
        assert torchrun.variables["SLURM_GPUS_ON_NODE"] == "8"
        assert f"--nproc-per-node={ranks}" in torchrun.words
    assert job.stdout.startswith(said)
    assert bool(job.stdout) == bool(said)


def test_ranks_are_bound_to_a_numa_node_where_that_is_asked_for(run):
    path = SBATCH / "selftest.sbatch"
    bound = {word for call in run(path, NUMA_BINDING="node").torchruns for word in call.words}
    free = {word for call in run(path).torchruns for word in call.words}
    assert bound - free == {"--numa-binding=node"}


def test_steps_get_the_jobs_variables_also_after_sbatch_export(run):
    job = run(SBATCH / "launch-options.sbatch", SLURM_EXPORT_ENV="MODEL")
    [step] = job.calls_of("srun")
    assert step.variables["SLURM_EXPORT_ENV"] == "ALL"


@pytest.mark.parametrize("path", [TRAINING[1], *RUNS_RANKS[-2:]], ids=lambda path: path.stem)
def test_a_job_that_cannot_use_its_device_ends_with_status_2_before_any_rank(run, path):
    job = run(path, DEVICE_STATUS="2")
    assert (job.status, job.stderr, job.torchruns) == (2, "", [])
    # It is asked for with the flags that the script would get, among which may be a device.
    script = EXPECTED[path.stem].script.split()
    assert (*script, *device_asked(job)) == run(path).program


def test_the_device_is_asked_for_with_flags_and_variable(run):
    job = run(SBATCH / "launch-options.sbatch", DEVICE="cpu", FLAGS="--device cuda")
    asked = device_asked(job)
    assert (asked[:2], asked[-2:]) == (("--device", "cpu"), ("--device", "cuda"))


def device_asked(job: EndedJob) -> tuple[str, ...]:
    """Returns the flags with which the job asked for its device."""
    words = ("uv", "run", "--no-sync", "python", "-m", "common.runtime.job_device")
    [call] = job.calls_of(*words)
    return call.words[len(words) :]


@pytest.mark.parametrize("name", ["launch-options", "launch-train-ddp"])
def test_a_job_fails_when_its_ranks_do(run, name):
    assert run(SBATCH / f"{name}.sbatch", RANKS="exit 3").status == 3


@each_training
def test_ranks_that_were_told_to_stop_and_got_further_are_requeued(run, path):
    job = run(path, RANKS=STOPPED, RANKS_PER_NODE="2")
    assert (job.status, job.stdout, job.stderr) == (0, "stopped at step 12: requeued\n", "")
    [call] = job.calls_of("scontrol", "requeue")
    assert call.words[2:] == (str(JOB_ID),)
    assert len(job.torchruns) == 1


def test_a_task_of_an_array_is_requeued_by_itself(run):
    # One task has the id of the whole array, by which Slurm means all of its tasks.
    array = {"SLURM_ARRAY_JOB_ID": str(JOB_ID), "SLURM_ARRAY_TASK_ID": "1"}
    settings = {"MODEL": "gpt2 gpt2-medium", "CHECKPOINT_DIR": "saved"}
    job = run(SBATCH / "launch-train-ddp.sbatch", RANKS=STOPPED, **array, **settings)
    assert (job.status, job.stdout) == (0, "stopped at step 12: requeued\n")
    [call] = job.calls_of("scontrol", "requeue")
    assert call.words[2:] == (f"{JOB_ID}_1",)
    [torchrun] = job.torchruns
    assert torchrun.program[-2:] == ("--checkpoint_dir", "saved/gpt2-medium")


@pytest.mark.parametrize(
    ("variables", "status", "said"),
    [
        # A failure. The file of an earlier job is no word of this one's ranks.
        ({"RANKS": "exit 1"}, 1, ""),
        ({"RANKS": FOLDER + 'echo 1 >"$folder/stopped"; exit 75'}, 1, "without a new checkpoint"),
        # Slurm requeues by itself, or ends the job.
        ({"RANKS": STOPPED, "JOB_STATE": "COMPLETING"}, 75, ""),
        ({"RANKS": STOPPED, "SLURM_RESTART_COUNT": "20"}, 75, "after 20 requeues (MAX_REQUEUES)"),
        (
            {"RANKS": STOPPED, "SLURM_RESTART_COUNT": "1", "MAX_REQUEUES": "1"},
            75,
            "stopped at step 12 after 1 requeues (MAX_REQUEUES): submit again to go on",
        ),
    ],
)
def test_no_other_training_is_requeued(run, project, variables, status, said):
    left = project / "outputs" / "assignment1" / "cluster" / "checkpoints" / "ddp"
    left.mkdir(parents=True)
    (left / "stopped").touch()
    (left / "step-00000005").mkdir()
    job = run(SBATCH / "launch-train-ddp.sbatch", **variables)
    assert job.status == status
    assert job.calls_of("scontrol", "requeue") == []
    assert said in job.stderr
    assert bool(job.stderr) == bool(said)


def test_where_slurm_refuses_to_requeue_the_job_says_what_to_do(run):
    job = run(SBATCH / "launch-train-ddp.sbatch", RANKS=STOPPED, REQUEUE_STATUS="1")
    assert job.status == 75
    assert job.stderr == "stopped at step 12 and not requeued: submit again to go on\n"


def test_a_training_that_is_told_to_stop_in_its_last_step_is_done(run):
    job = run(SBATCH / "launch-train-ddp.sbatch", RANKS=STOPPED.replace("exit 75", "exit 0"))
    assert job.status == 0
    assert job.calls_of("scontrol", "requeue") == []
