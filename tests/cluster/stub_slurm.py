"""Runs a job file with bash where Slurm's programs and uv only note how they are called.

Whatever a job file decides, which is all but what Slurm itself does, is seen here in a fraction of
a second: what it starts, with which flags and variables, and how it ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
JOB_ID = 4711
GPUS = 4  # of each node, all of which --exclusive grants, whatever was asked for
NAMES = ("srun", "uv", "scontrol", "squeue", "getent")

# srun runs its command on each node in turn; a step gets the GPUs that it asks for, else as many as
# the job asked for. No node's name is a host's, as on many a cluster.
STUB = r"""#!/bin/bash
shopt -s nullglob
noted=("$CALLS"/*.words) name=${0##*/}
call=$CALLS/${#noted[@]}
trap -p USR1 >"$call.trap"
env -0 >"$call.variables"
printf '%s\0' "$name" "$@" >"$call.words"
case "$name $*" in
"scontrol show hostnames "*) printf 'n1\nn2\n' ;;
"scontrol show node n1") echo "   NodeAddr=10.0.0.1 NodeHostName=n1 Version=24.11" ;;
"scontrol requeue "*) exit "${REQUEUE_STATUS:-0}" ;;
"squeue "*"--jobs=${SLURM_ARRAY_JOB_ID:-none} "*) printf 'RUNNING\nRUNNING\n' ;; # of all tasks
"squeue "*) echo "${JOB_STATE:-RUNNING}" ;;
"getent "*) exit 2 ;;
"uv run --no-sync python -m common.runtime.job_device"*) exit "${DEVICE_STATUS:-0}" ;;
"uv run --no-sync torchrun "*) eval "${RANKS:-}" ;;
"srun "*)
    gpus=${SLURM_GPUS_PER_NODE:-}
    while [[ $1 == --* ]]; do
        if [[ $1 == --gpus-per-node=* ]]; then gpus=${1#*=}; fi
        shift
    done
    if [ -n "$gpus" ]; then export SLURM_GPUS_ON_NODE=$gpus; fi
    for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" || exit; done
    ;;
esac
"""


@dataclass(frozen=True)
class Call:
    """One call of a program: its words, the first of which is its name."""

    words: tuple[str, ...]
    variables: dict[str, str]
    ignores_usr1: bool

    @property
    def program(self) -> tuple[str, ...]:
        """Returns what torchrun was to start: a script, or ``-m`` and a module, and its flags."""
        own = self.words.index("torchrun") + 1
        while self.words[own].startswith("--"):
            own += 1
        return self.words[own:]


@dataclass(frozen=True)
class EndedJob:
    """How a job file ended, what it printed and what it called, in order."""

    status: int
    stdout: str
    stderr: str
    calls: tuple[Call, ...]

    def calls_of(self, *words: str) -> list[Call]:
        """Returns the calls that begin with these words."""
        return [call for call in self.calls if call.words[: len(words)] == words]

    @property
    def torchruns(self) -> list[Call]:
        """Returns the torchrun of each node."""
        return self.calls_of("uv", "run", "--no-sync", "torchrun")

    @property
    def program(self) -> tuple[str, ...]:
        """Returns what all nodes run; fails where the job did, and where they differ."""
        assert (self.status, self.stderr) == (0, "")
        [program] = {torchrun.program for torchrun in self.torchruns}
        return program


def sbatch_flags(job_file: Path) -> dict[str, str]:
    """Parses the ``#SBATCH`` lines: ``--nodes=2`` to ``{"nodes": "2"}``, ``--exclusive`` to ""."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", job_file.read_text(), flags=re.M)
    assert len(lines) == len(dict(lines)), f"{job_file.name}: a flag twice"
    return dict(lines)


def make_project(folder: Path) -> Path:
    """Makes a project of only what job files source; its path has a space in it."""
    project = folder / "my project"
    (project / "sbatch").mkdir(parents=True)
    (project / "sbatch" / "rendezvous.sh").symlink_to(SBATCH / "rendezvous.sh")
    return project


def run_job_file(
    job_file: Path, folder: Path, submitted_in: Path, variables: Mapping[str, str] | None = None
) -> EndedJob:
    """Runs a copy of the file, as Slurm does, with the variables of a job as its lines ask for it.

    ``folder`` takes the copy, the programs and their notes. ``variables`` are the user's; RANKS is
    what torchrun does, in bash; DEVICE_STATUS, REQUEUE_STATUS and JOB_STATE are what the others
    answer.
    """
    copy, programs, calls = folder / "slurm_script", folder / "programs", folder / "calls"
    shutil.copy(job_file, copy)
    for place in (programs, calls):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    for name in NAMES:
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    flags = sbatch_flags(job_file)
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "SLURM_SUBMIT_DIR": str(submitted_in),
        "SLURM_JOB_ID": str(JOB_ID),
        "SLURM_JOB_NUM_NODES": flags["nodes"],
        "SLURM_JOB_NODELIST": f"n[1-{flags['nodes']}]",
    }
    if "gpus-per-node" in flags:
        environment["SLURM_GPUS_PER_NODE"] = flags["gpus-per-node"]
        environment["SLURM_GPUS_ON_NODE"] = str(GPUS)
    done = subprocess.run(
        ["bash", copy],
        cwd=submitted_in,
        env=environment | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    noted = sorted(calls.glob("*.words"), key=lambda path: int(path.stem))
    return EndedJob(done.returncode, done.stdout, done.stderr, tuple(map(_read_call, noted)))


def _read_call(path: Path) -> Call:
    variables = path.with_suffix(".variables").read_text().split("\0")[:-1]
    return Call(
        words=tuple(path.read_text().split("\0")[:-1]),
        variables=dict(line.split("=", 1) for line in variables),
        ignores_usr1="''" in path.with_suffix(".trap").read_text(),
    )
