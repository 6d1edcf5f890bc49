"""The job files of sbatch/, submitted as they are to a private Slurm of two nodes.

One of each kind is submitted by the slow tests; what each file runs, and how it ends, is tested
without a Slurm (test_job_files.py, test_job_start.py).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import subprocess
from contextlib import nullcontext

import pandas as pd
import psutil
import pytest
from interruptible import living, wait_until
from job_files import CASES, ROOT, SBATCH, submit_job_file
from private_slurm import Job, PrivateSlurm, private_slurm, why_not
from quick_torchrun import write_quick_torchrun

from common.errors import UserError
from common.runtime.machine.device import gpus_visible

pytestmark = [
    pytest.mark.two_ranks,
    pytest.mark.skipif(why_not() is not None, reason=f"no private Slurm: {why_not()}"),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(300),
]

SIGNALLED = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --exclusive --signal=USR1@60
set -euo pipefail
source "$PROJECT_ROOT/sbatch/rendezvous.sh"
run_ranks "$SCRIPT" "$OUTPUT_DIR"
"""
# Leaves a file when it is ready, one when it is told to make a checkpoint, and then goes on.
CHECKPOINT = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(True))
(folder / ("ready-" + rank)).touch()
while not told:
    time.sleep(0.05)
(folder / ("checkpoint-" + rank)).touch()
time.sleep(1)
print("rank", rank, "went on to its end")
"""

# What ranks have, started as job files on all GPUs are.
EACH_GPU = """#!/bin/bash
{flags}
source "$PROJECT_ROOT/sbatch/rendezvous.sh"
run_ranks "$SCRIPT"
"""
SEEN = """
import os
seen = len([name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name])
line = f"local rank {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']} sees {seen}\\n"
os.write(1, line.encode())  # at once, as other ranks write, too
"""

COURSE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --exclusive --mem=0
srun --gpu-bind=none uv run --no-sync python assignments/assignment2/allreduce_benchmark.py \\
    --device cpu --rounds 2 --iterations 2 --output_dir "$OUTPUT_DIR" --run_id run
"""

# The first places its ranks well, the second is the classic: as many tasks as GPUs, each with a
# torchrun that starts as many ranks again.
PLACED = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --gpus-per-node=2
cd "$PROJECT_ROOT"
doctor="uv run --no-sync ddplab doctor"
echo "== good"; srun --gpus-per-task=1 $doctor; echo "status $?"
echo "== classic"
srun uv run --no-sync torchrun --standalone --nproc-per-node=2 -m common.cli.main doctor
echo "status $?"
"""


@pytest.fixture
def submit_to(tmp_path):
    """Returns ``submit_to(cluster, text, script, **variables)``, which returns the job's id."""

    def submit_to(cluster: PrivateSlurm, text: str, script: str = "", **variables: str) -> int:
        (tmp_path / "job.sbatch").write_text(text)
        (tmp_path / "script.py").write_text(script)
        places = {"SCRIPT": tmp_path / "script.py", "PROJECT_ROOT": ROOT, "OUTPUT_DIR": tmp_path}
        variables |= {name: str(place) for name, place in places.items()} | {"DEVICE": "cpu"}
        return cluster.submit(
            tmp_path / "job.sbatch", f"--output={tmp_path}/log-%j", variables=variables
        )

    return submit_to


@pytest.fixture
def submit(slurm, submit_to):
    """Returns ``submit(text, script, **variables)``: the same, to the cluster that tests share."""
    return functools.partial(submit_to, slurm)


def ended(slurm: PrivateSlurm, job_id: int) -> tuple[Job, str]:
    """Waits for the job; returns its end and what it said."""
    [job] = slurm.wait(job_id)
    return job, job.log.read_text()


def processes_of_job(job_id: int) -> list[psutil.Process]:
    """Lists the living processes that have the job's id among their variables."""
    return living(lambda own: own.get("SLURM_JOB_ID") == str(job_id))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name, case in CASES.items() if case.is_submitted and name != "launch-report"],
)
def test_a_job_file_runs_as_it_is(slurm, submitted, output, name):
    case = CASES[name]
    job, said = ended(slurm, submitted(name))
    assert (job.state, job.exit_status) == ("COMPLETED", 0), said
    assert case.says in said
    for table_name, rows in case.tables.items():
        records = {
            table: json.loads((table.parent / "environment.json").read_text())
            for table in output.glob(f"*/{table_name}")
        }
        [table] = [of for of in records if records[of]["slurm_job_id"] == str(job.job_id)]
        assert len(pd.read_csv(table)) == rows
        record = records[table]
        assert record["status"] == "complete"
        assert (record["world_size"], record["launcher"]) == (case.world_size, "torchrun")
        assert (record["device"], record["backend"]) == ("cpu", case.backend)


@pytest.mark.slow
def test_the_report_comes_after_the_jobs_it_depends_on(slurm, submitted, output):
    after = f"{submitted('launch-micro-batches')}:{submitted('launch-compare-modes')}"
    flag = f"--dependency=afterok:{after}"
    job, said = ended(slurm, submit_job_file(slurm, "launch-report", output, flag))
    assert (job.state, job.exit_status) == ("COMPLETED", 0), said
    assert CASES["launch-report"].says in said
    assert (output / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "<html" in (output / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(gpus_visible(env={}), reason="there are GPUs that can be used")
def test_a_job_that_cannot_use_the_gpus_it_was_granted_says_so_in_one_line_at_once(slurm, tmp_path):
    variables = {"PROJECT_ROOT": str(ROOT), "OUTPUT_DIR": str(tmp_path / "runs")}
    flags = (f"--output={tmp_path}/log",)
    job, said = ended(slurm, slurm.submit(SBATCH / "selftest.sbatch", *flags, variables=variables))
    assert (job.state, job.exit_status) == ("FAILED", 2), said
    assert re.fullmatch(r"error: the job was granted 4 GPUs, but .*DEVICE=cpu\n", said)
    described = slurm.command("scontrol", "show", "job", "--oneliner", job.job_id)
    times = [re.search(f" {which}Time=(\\S+)", described)[1] for which in ("Start", "End")]
    started, stopped = (datetime.datetime.fromisoformat(time) for time in times)
    # 5 s, for the import of torch, where nothing else runs; a rendezvous waits 10 minutes
    assert stopped - started <= datetime.timedelta(seconds=90)
    assert not (tmp_path / "runs").exists()
    assert processes_of_job(job.job_id) == []


@pytest.mark.slow
def test_usr1_reaches_the_ranks_and_nobody_dies_of_it(slurm, submit, tmp_path):
    job_id = submit(SIGNALLED, CHECKPOINT)
    log = tmp_path / f"log-{job_id}"
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 8, log.read_text)
    slurm.command("scancel", "--signal=USR1", job_id)
    job, said = ended(slurm, job_id)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 8
    assert said.count("went on to its end") == 8
    assert (job.state, job.exit_status) == ("COMPLETED", 0)


AS_IT_IS, THREE = {}, {"SBATCH_GPUS_PER_NODE": "3"}


@pytest.mark.parametrize(
    ("gpus", "asked", "too_many"),
    [
        (4, (AS_IT_IS, THREE), ()),
        (0, ({"SBATCH_GPUS_PER_NODE": "0"},), (AS_IT_IS, THREE)),
    ],
)
def test_a_job_has_a_rank_for_each_gpu_of_its_nodes_whatever_was_asked_for(
    slurm, submit_to, tmp_path, gpus, asked, too_many
):
    quick = write_quick_torchrun(tmp_path)
    # As the self-test asks, and so all files (test_job_files.py).
    flags = re.findall(r"^#SBATCH.*$", (SBATCH / "selftest.sbatch").read_text(), flags=re.M)
    text = EACH_GPU.format(flags="\n".join(flags))
    with nullcontext(slurm) if gpus else private_slurm(nodes=2, gpus_per_node=0) as cluster:
        # More than a node has, or any of one that has none, Slurm refuses at once.
        for site in too_many:
            with pytest.raises(UserError, match="Requested node configuration is not available"):
                submit_to(cluster, text, **site)
        job_ids = [submit_to(cluster, text, SEEN, **quick, **site) for site in asked]
        for job_id in job_ids:
            job, said = ended(cluster, job_id)
            assert job.state == "COMPLETED", said
            ranks = max(1, gpus)  # without GPUs one, on the CPU
            each = [f"local rank {rank} of {ranks} sees {gpus}" for rank in range(ranks)]
            assert sorted(re.findall("^local rank.*", said, flags=re.M)) == sorted(each * 2)


@pytest.mark.slow
def test_the_courses_way_srun_with_one_process_per_gpu_works(slurm, submit, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    job, said = ended(slurm, submit(COURSE, NUMEL="1 1000"))
    assert job.state == "COMPLETED", said
    table = pd.read_csv(tmp_path / "run" / "allreduce-times.csv")
    assert list(table["total_elements"]) == [1, 1000]
    assert list(table["world_size"]) == [2, 2]
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (record["launcher"], record["ranks_per_node"]) == ("slurm", 1)


def test_site_env_changes_nothing_as_it_is_and_wins_over_the_job_files(slurm):
    def shell(command: str) -> str:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=slurm.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    variables = "export -p | grep -v ' _='"  # bash's own says what was called last
    assert shell(f"source sbatch/site.env; {variables}") == shell(variables)
    # Lines that a new site takes the # off.
    text = re.sub(r"# (export SBATCH_PARTITION=).*", r"\1other", (SBATCH / "site.env").read_text())
    text = re.sub(r"# (export SBATCH_GPUS_PER_NODE=).*", r"\g<1>2", text)
    text = re.sub(r"# (export SBATCH_MEM_PER_NODE=).*", r"\g<1>1M", text)
    job_id = shell(f"{text}\nsbatch --parsable --hold sbatch/launch-ddp-benchmark.sbatch").strip()
    [job] = slurm.jobs(int(job_id))
    described = slurm.command("scontrol", "show", "job", job_id)
    slurm.command("scancel", job_id)
    assert job.partition == "other"
    assert re.search(r"TresPerNode=gres:gpu:2\b", described)
    assert "MinMemoryNode=1M" in described


@pytest.mark.slow
def test_doctor_in_a_job_shows_where_ranks_run_and_refuses_what_cannot_go_well(slurm, submit):
    _, said = ended(slurm, submit(PLACED))
    _, good, classic = re.split(r"== \w+\n", said)
    assert "status 0" in good
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in good.splitlines() if "│ n" in line]
    assert [row[:3] for row in rows] == [["0", rows[0][1], "0"], ["1", rows[0][1], "1"]]
    assert rows[0][3] != rows[1][3]  # each its own GPU
    assert rows[0][1] in ("n1", "n2")

    assert "status 0" not in classic
    assert "4 workers for 2 GPUs (2 srun tasks, each with a torchrun that starts 2)" in classic
