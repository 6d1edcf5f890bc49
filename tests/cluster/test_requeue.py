"""Training jobs that are preempted go on by themselves, until MAX_REQUEUES.

Which jobs put themselves back into the queue is tested without a Slurm, in test_job_start.py.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import numpy as np
import pytest
from interruptible import wait_until
from job_files import ROOT, SBATCH
from private_slurm import PrivateSlurm, why_not

from common.data.token_shards import write_shard

pytestmark = [
    pytest.mark.two_ranks,
    pytest.mark.skipif(why_not() is not None, reason=f"no private Slurm: {why_not()}"),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(300),
]

RANKS, STEPS = 2, 300
TRAINING = (
    "--device cpu --global_batch_size 2 --micro_batch_size 1 --seq_len 16 --log_every 5 "
    f"--num_steps {STEPS} --no-profile --optimizer sgd"
)
# Instead of uv, which would start torchrun. The folder is the last argument of all.
FAKE_UV = """#!/bin/bash
if [ "$3" = python ]; then exit; fi # asked for the device
folder=${*: -1}
echo "attempt ${SLURM_RESTART_COUNT:-0} in $folder"
mkdir -p "$folder/step-0000000$((SLURM_RESTART_COUNT + 1))"
echo 1 >"$folder/stopped"
exit 75
"""


def restarts(slurm: PrivateSlurm, job_id: int) -> int:
    """Counts how often the job was put back into the queue."""
    described = slurm.command("scontrol", "show", "job", "--oneliner", job_id)
    return int(re.search(r" Restarts=(\d+)", described)[1])


def losses_by_attempt(folder: Path) -> list[dict[tuple[int, int], str]]:
    """Reads the loss, as written, of each step and rank; one table per attempt, oldest first."""
    runs = sorted(folder.glob("*/training-steps.csv*"), key=lambda path: path.parent.name)
    attempts = []
    for path in runs:
        with path.open() as table:
            attempts.append(
                {(int(r["step"]), int(r["rank"])): r["loss"] for r in csv.DictReader(table)}
            )
    return attempts


@pytest.mark.slow
def test_a_job_that_is_requeued_and_then_signalled_ends_with_the_losses_of_an_undisturbed_one(
    slurm, rank_server, tmp_path
):
    (tmp_path / "tokens").mkdir()
    tokens = np.random.default_rng(0).integers(256, size=100_000)
    write_shard(tmp_path / "tokens" / "tokens_000000.bin", tokens)
    output, log = tmp_path / "job", tmp_path / "log"
    variables = {"PROJECT_ROOT": ROOT, "OUTPUT_DIR": output, "DATA": tmp_path / "tokens"}
    variables |= {"MODEL": "gpt2-pico", "RANKS_PER_NODE": RANKS, "FLAGS": TRAINING}
    variables |= {"OMP_NUM_THREADS": 1, "SAVE_EVERY": 1000}  # only those that signals ask for
    job_id = slurm.submit(
        *(SBATCH / "launch-train-ddp.sbatch", f"--output={log}"),
        variables={name: str(value) for name, value in variables.items()},
    )

    def got_far(attempts: int) -> bool:
        return [len(rows) > 10 for rows in losses_by_attempt(output)] == [True] * attempts

    wait_until(lambda: got_far(1), log.read_text, seconds=240)
    slurm.command("scontrol", "requeue", job_id)  # Slurm takes the nodes, and requeues by itself
    wait_until(lambda: got_far(2), log.read_text, seconds=240)
    slurm.command("scancel", "--signal=USR1", job_id)  # the ranks stop, and the job file requeues

    flags = (*TRAINING.split(), "--model", "gpt2-pico", "--data", tmp_path / "tokens")
    script = ROOT / "assignments" / "assignment1" / "train_ddp.py"
    rank_server.succeed(script, *flags, "--output_dir", tmp_path / "undisturbed", ranks=RANKS)
    [undisturbed] = losses_by_attempt(tmp_path / "undisturbed")

    [job] = slurm.wait(job_id)
    said = log.read_text()
    assert (job.state, job.exit_status) == ("COMPLETED", 0), said
    assert restarts(slurm, job_id) == 2  # none twice
    assert len(re.findall(r"stopped at step \d+: requeued", said)) == 1
    assert len(re.findall(r"Resumed from .*step-\d+ \(DDP on 2 ranks\)", said)) == 2
    attempts = losses_by_attempt(output)
    assert len(attempts) == 3
    # Bit for bit, and no step was left out or, since both stops made checkpoints, done twice.
    assert sum(len(rows) for rows in attempts) == len(undisturbed) == STEPS * RANKS
    assert attempts[0] | attempts[1] | attempts[2] == undisturbed
    assert not (output / "checkpoints" / "ddp" / "stopped").exists()


@pytest.mark.slow
def test_slurm_starts_a_job_again_that_asks_for_it_unless_that_is_forbidden(slurm, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(FAKE_UV)
    (tmp_path / "bin" / "uv").chmod(0o755)

    def submit(name: str, *flags: str) -> int:
        variables = {"PROJECT_ROOT": str(ROOT), "OUTPUT_DIR": str(tmp_path / name)}
        variables |= {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        flags = (f"--output={tmp_path}/{name}.log", *flags)
        job_file = SBATCH / "launch-train-baseline.sbatch"
        return slurm.submit(job_file, *flags, variables=variables | {"MAX_REQUEUES": "1"})

    def ended(job_id: int) -> tuple[tuple[str, int, int], str]:
        [job] = slurm.wait(job_id)
        return (job.state, job.exit_status, restarts(slurm, job_id)), job.log.read_text()

    stopping, forbidden = submit("stopping"), submit("forbidden", "--no-requeue")
    how, said = ended(forbidden)
    assert how == ("FAILED", 75, 0)
    assert said.endswith("stopped at step 1 and not requeued: submit again to go on\n")
    how, said = ended(stopping)
    assert how == ("FAILED", 75, 1)
    assert re.findall("attempt .", said) == ["attempt 0", "attempt 1"]
    assert len(re.findall("stopped at step 1: requeued", said)) == 1
    end = "stopped at step 1 after 1 requeues (MAX_REQUEUES): submit again to go on\n"
    assert said.endswith(end)
