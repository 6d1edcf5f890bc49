"""The private Slurm: jobs run on its nodes, and nothing of it is left when it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from interruptible import start_interruptible, wait_until
from private_slurm import private_slurm, why_not
from refusals import problem

from common.errors import RunFailed, UserError

pytestmark = pytest.mark.xdist_group("slurm")
needs_slurm = pytest.mark.skipif(why_not() is not None, reason=f"no private Slurm: {why_not()}")

# A job that leaves behind on both nodes what a job can: tasks, and a child that left its group.
LASTING = """#!/bin/bash
setsid sleep 1000 &
srun --ntasks=2 --ntasks-per-node=1 sleep 1000
"""
HOLD = f"""
import pathlib, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from private_slurm import private_slurm
with private_slurm() as cluster:
    flags = ("--nodes=2", f"--output={{sys.argv[1]}}/log")
    cluster.submit(sys.argv[2], *flags)
    print(cluster.folder, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def write(tmp_path):
    """Returns ``write(text)``: the path of a job file that holds it."""

    def write(text: str, name: str = "job.sbatch") -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


def test_a_job_has_both_nodes_and_four_gpus_on_each(slurm, write, tmp_path):
    job_file = write(
        "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4 --exclusive\n"
        "srun --ntasks-per-node=1 bash -c 'echo \"$SLURMD_NODENAME has $CUDA_VISIBLE_DEVICES\"'\n"
        'echo "$GREETING"'
    )
    variables = {"GREETING": "variables arrive"}
    job_id = slurm.submit(job_file, f"--output={tmp_path}/log", variables=variables)
    [job] = slurm.wait(job_id)
    assert (job.state, job.exit_status, job.nodes) == ("COMPLETED", 0, "n[1-2]")
    said = job.log.read_text().splitlines()
    assert {"n1 has 0,1,2,3", "n2 has 0,1,2,3", "variables arrive"} <= set(said)


def test_each_task_of_an_array_has_its_own_end(slurm, write, tmp_path):
    job_file = write("#!/bin/bash\nexit $SLURM_ARRAY_TASK_ID")
    job_id = slurm.submit(job_file, "--array=0,3", f"--output={tmp_path}/%j")
    ended = [(job.array_index, job.state, job.exit_status) for job in slurm.wait(job_id)]
    assert sorted(ended) == [(0, "COMPLETED", 0), (3, "FAILED", 3)]


def test_a_job_that_does_not_end_in_time_and_one_that_is_refused_are_one_line(
    slurm, write, tmp_path
):
    job_id = slurm.submit(write("#!/bin/bash\nsleep 1000"), f"--output={tmp_path}/log")
    with pytest.raises(RunFailed, match=rf"job {job_id} has not ended after 0.5 s"):
        slurm.wait(job_id, 0.5)
    slurm.command("scancel", job_id)
    [job] = slurm.wait(job_id)
    assert job.state == "CANCELLED"
    with pytest.raises(UserError, match="invalid partition") as refused:
        slurm.submit(write("#!/bin/bash"), "--partition=nosuch")
    assert len(str(refused.value).splitlines()) == 1


@needs_slurm
def test_an_exception_in_the_block_leaves_nothing_of_slurm_or_its_jobs(
    monkeypatch, write, tmp_path, short_folder, processes_of
):
    # Those of a Slurm that the machine already has are not used.
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
    monkeypatch.setenv("SBATCH_PARTITION", "nosuch")
    folders = []

    def use_and_fail() -> None:
        with private_slurm(short_folder) as cluster:
            folders.append(cluster.folder)
            flags = ("--nodes=2", f"--output={tmp_path}/log")
            cluster.submit(write(LASTING), *flags)
            wait_until(lambda: processes_of(cluster.folder).count("sleep") == 3)
            living = processes_of(cluster.folder)
            assert {"munged", "slurmctld", "slurmd"} <= set(living)
            assert living.count("slurmstepd") == 3  # the batch shell's and one for each task
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_and_fail()
    assert processes_of(folders[0]) == []
    assert not folders[0].exists()


@needs_slurm
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_the_one_that_started_slurm(how, write, tmp_path, processes_of):
    command = [sys.executable, "-c", HOLD, str(tmp_path), str(write(LASTING))]
    with start_interruptible(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as starter:
        folder = Path(starter.stdout.readline().strip())
        wait_until(lambda: processes_of(folder).count("sleep") == 3)
        starter.send_signal(how)
        starter.wait(20)
        wait_until(lambda: processes_of(folder) == [], seconds=5)
    if how == signal.SIGKILL:  # nobody is there to remove the folder
        subprocess.run(["rm", "-r", str(folder)], check=True)
    assert not folder.exists()


@pytest.fixture
def short_folder():
    """Yields a folder for sockets, as pytest's own folders grow longer with every run."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@needs_slurm
@pytest.mark.parametrize(
    ("daemon", "does", "reason"),
    [
        ("slurmctld", 'echo "slurmctld: fatal: port is taken"; exit 3', "ended with status 3"),
        ("slurmd", 'echo "slurmd: error: disk is full"; sleep 1000', "not up after 3 s"),
    ],
)
def test_a_slurm_that_does_not_come_up_says_why_and_leaves_nothing(
    monkeypatch, write, tmp_path, short_folder, daemon, does, reason
):
    write(f"#!/bin/bash\n{does}", daemon)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with (
        pytest.raises(RunFailed, match=reason) as failure,
        private_slurm(short_folder, start_timeout_s=3),
    ):
        pass
    said = does.split('"')[1]
    assert len(str(failure.value).splitlines()) == 1
    assert said in str(failure.value)
    # The ends of the logs are shown below the line.
    assert any(said in note for note in failure.value.__notes__)
    assert list(short_folder.iterdir()) == []
    # The daemons had this folder as their working directory.
    assert not [p for p in Path("/proc").glob("[0-9]*/cwd") if _links_into(p, short_folder)]


def test_what_is_missing_is_named_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(UserError, match=r"sbatch.* missing: apt-get install .*slurm-client"):
        private_slurm().__enter__()


@pytest.mark.parametrize("numbers", [{"nodes": 0}, {"cores_per_node": 0}, {"gpus_per_node": -1}])
def test_impossible_numbers_are_refused(numbers):
    assert "at least 1 node of 1 core and 0 GPUs" in problem(private_slurm(**numbers).__enter__)


@needs_slurm
def test_a_folder_too_deep_for_sockets_is_refused(tmp_path):
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    assert "characters" in problem(private_slurm(deep).__enter__)


def _links_into(link: Path, folder: Path) -> bool:
    try:
        return Path(os.readlink(link)).is_relative_to(folder)
    except OSError:
        return False
