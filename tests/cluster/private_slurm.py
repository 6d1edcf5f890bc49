"""A private Slurm on one machine, to try the job files on what they are written for.

::

    with private_slurm(nodes=2, gpus_per_node=4) as cluster:
        variables = {"MODEL": "nano", "DEVICE": "cpu"}
        job_id = cluster.submit("sbatch/launch-ddp-benchmark.sbatch", variables=variables)
        [job] = cluster.wait(job_id)
        print(job.state, job.log.read_text())

The controller, the nodes' daemons and munge are those of Debian's packages, with their own
configuration, ports, sockets and key in a folder of their own; a Slurm that the machine already
has is not touched. The nodes share the machine's cores and network, and their GPUs are only
pretended (the programs see none, hence DEVICE), so the jobs work as on a cluster but their times
mean nothing.

All of it lives in one process-ID namespace, which the kernel ends as a whole when the block is
left, by whatever way: no daemon, job or child of a job stays behind, even if this process is
killed by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_configuration import PARTITIONS, write_configuration

from common.errors import RunFailed, UserError
from common.runtime.paths import search_path

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
    "unshare": "util-linux",
}
"""The programs it takes, each with its Debian package (``slurm-wlm`` and ``munge`` bring all)."""

# When process 1 of the namespace ends, or unshare does, the kernel kills all others in it.
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")

# Process 1 of the namespace. It ends when a daemon ends, or when the pipe on its standard input is
# closed, which happens whenever the process at the other end is gone.
DAEMONS = """
start() { "${@:2}" >"$1.log" 2>&1 </dev/null; echo "$1 ended with status $?" >>ended.log; }
cat <&0 >/dev/null &
start munged munged --foreground --force --socket munge.sock --key-file munge.key \\
    --pid-file munged.pid --seed-file munged.seed &
{
    until [ -S munge.sock ]; do sleep 0.05; done
    start slurmctld slurmctld -D &
    for node; do start "$node" slurmd -D -N "$node" & done
    wait -n
} &
wait -n
"""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
LONGEST_FOLDER = 80  # characters; the path of a socket has at most 107


@dataclass(frozen=True)
class Job:
    """A job, or one task of a job array, as the controller describes it."""

    job_id: int
    array_index: int | None
    """Number of the task in its array; None for a job that is not of an array."""
    state: str
    """Slurm's word: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT …"""
    exit_status: int
    """Exit status of the batch script; 0 while it runs."""
    partition: str
    nodes: str
    """Slurm's list of the nodes, such as ``n[1-2]``."""
    log: Path
    """File of the job's output."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True)
class PrivateSlurm:
    """A running cluster; jobs are submitted to it and waited for."""

    folder: Path
    """Configuration, logs and spools; gone when the cluster is."""
    environment: dict[str, str]
    """Variables with which a Slurm command reaches this cluster and no other."""

    def command(self, *words: object, variables: Mapping[str, str] | None = None) -> str:
        """Runs a Slurm command, such as ``("scontrol", "show", "nodes")``; returns its output.

        Raises:
            UserError: the command refuses; the message is its own.
        """
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment | dict(variables or {}),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise UserError(" ".join((done.stderr or done.stdout).split()))
        return done.stdout

    def submit(
        self, job_file: Path | str, *flags: object, variables: Mapping[str, str] | None = None
    ) -> int:
        """Submits a job file; ``flags`` are sbatch's, ``variables`` the job's. Returns the job id.

        Raises:
            UserError: sbatch refuses.
        """
        said = self.command("sbatch", "--parsable", *flags, job_file, variables=variables)
        return int(said.split(";")[0])

    def jobs(self, job_id: int) -> list[Job]:
        """Returns the job, or the tasks of the array, in order."""
        said = self.command("scontrol", "show", "job", "--oneliner", job_id)
        return sorted((_read_job(line) for line in said.splitlines()), key=lambda job: job.job_id)

    def wait(self, job_id: int, timeout_s: float = 300) -> list[Job]:
        """Waits until the job, or every task of the array, has ended; returns them.

        Raises:
            RunFailed: it has not ended after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        found = self.jobs(job_id)
        while not all(job.ended for job in found):
            if time.monotonic() > deadline:
                states = ", ".join(job.state for job in found)
                raise RunFailed(f"job {job_id} has not ended after {timeout_s:g} s: {states}")
            time.sleep(0.2)
            found = self.jobs(job_id)
        return found


def why_not() -> str | None:
    """Returns the reason why no private Slurm can run here, or None if one can."""
    if not sys.platform.startswith("linux"):
        return "Slurm runs on Linux only"
    missing = [name for name in PACKAGES if not shutil.which(name, path=search_path())]
    if missing:
        packages = sorted({PACKAGES[name] for name in missing})
        return f"{', '.join(missing)} missing: apt-get install {' '.join(packages)}"
    if os.geteuid() != 0:
        return "it takes root: pretended GPUs are device files, which only root can make"
    done = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    if done.returncode:
        return f"no process-ID namespace can be made here: {' '.join(done.stderr.split())}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(Path(folder) / "gpu", 0o20666, os.stat(os.devnull).st_rdev)
        except OSError as error:  # a container whose root has few rights
            return f"no device files can be made here: {error.strerror}"
    return None


@contextlib.contextmanager
def private_slurm(
    folder: Path | str | None = None,
    nodes: int = 2,
    gpus_per_node: int = 4,
    cores_per_node: int = 8,
    start_timeout_s: float = 60,
) -> Iterator[PrivateSlurm]:
    """Starts a Slurm with nodes n1, n2 … and, on leaving the block, ends all of it and its jobs.

    Args:
        folder: where its own temporary folder is made; by default the system's place for them.
        nodes: nodes of the partition ``gpu``, which is the default, and of ``other``.
        gpus_per_node: pretended GPUs of each node.
        cores_per_node: cores that each node claims to have; they may be more than the machine has.
        start_timeout_s: how long the nodes may take to be ready for jobs, in seconds.

    Raises:
        UserError: it cannot run here, a number is below its least, or the folder's path is too
            long for the sockets below it.
        RunFailed: it did not come up; the line says which daemon's log gives what reason, and the
            ends of all logs are the exception's notes.
    """
    if nodes < 1 or cores_per_node < 1 or gpus_per_node < 0:
        raise UserError(
            f"{nodes} nodes of {cores_per_node} cores and {gpus_per_node} GPUs: "
            "at least 1 node of 1 core and 0 GPUs"
        )
    if reason := why_not():
        raise UserError(f"no private Slurm: {reason}")
    names = [f"n{number}" for number in range(1, nodes + 1)]
    with tempfile.TemporaryDirectory(prefix="slurm-", dir=folder) as own:
        place = Path(own).resolve()
        if len(str(place)) > LONGEST_FOLDER:
            raise UserError(f"{place}: at most {LONGEST_FOLDER} characters, sockets lie below it")
        write_configuration(place, names, gpus_per_node, cores_per_node)
        environment = _environment(place)
        daemons = subprocess.Popen(
            [*NAMESPACE, "bash", "-c", DAEMONS, "daemons", *names],
            cwd=place,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the daemons
        )
        try:
            cluster = PrivateSlurm(place, environment)
            _wait_until_ready(cluster, names, daemons, start_timeout_s)
            yield cluster
        finally:
            daemons.stdin.close()
            daemons.wait()  # for the namespace, which ends when nothing is left in it


def _environment(folder: Path) -> dict[str, str]:
    """Returns this process's variables, made to reach the Slurm in ``folder``.

    Those of a Slurm job that this process may be in are left out.
    """
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_", "SRUN_"))}
    return own | {"PATH": search_path(), "SLURM_CONF": str(folder / "slurm.conf")}


def _wait_until_ready(
    cluster: PrivateSlurm, names: list[str], daemons: subprocess.Popen, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        problem = f"not up after {timeout_s:g} s" if time.monotonic() > deadline else ""
        if daemons.poll() is not None:
            problem = "a daemon ended"
        if problem:
            raise _start_failure(cluster.folder, problem, [*names, "slurmctld", "munged"])
        if (cluster.folder / "slurmctld.pid").exists():  # before that sinfo would try for seconds
            with contextlib.suppress(UserError):
                said = cluster.command(
                    "sinfo", "--noheader", f"--partition={PARTITIONS[0]}", "-N", "-o", "%N %T"
                )
                if sorted(said.split()) == sorted([*names, *["idle"] * len(names)]):
                    return
        time.sleep(0.1)


def _start_failure(folder: Path, problem: str, daemons: list[str]) -> RunFailed:
    """Returns the error for a Slurm that did not come up, from the daemons' logs.

    Its message has their last error lines, its notes the ends of the logs.
    """
    logs = {name: _lines(folder / f"{name}.log") for name in daemons}
    ended = _lines(folder / "ended.log")
    reasons = []
    for name in [line.split()[0] for line in ended] or daemons:
        # Debian's Slurm always complains that it has no PMIx.
        errors = [line for line in logs[name] if re.search("error|fatal", line, flags=re.I)]
        telling = [line for line in errors if "pmix" not in line]
        reasons += [f"{name}: {line.removeprefix(f'{name}: ')}" for line in telling[-1:]]
    failure = RunFailed(f"Slurm did not come up: {'; '.join([problem, *ended, *reasons])}")
    for name, lines in logs.items():
        failure.add_note("\n".join([f"{name}.log:", *lines[-10:]]))
    return failure


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _read_job(line: str) -> Job:
    """Parses one line of ``scontrol show job --oneliner``."""
    field = dict(re.findall(r"(?:^| )(\w+)=(\S*)", line))
    index = field.get("ArrayTaskId", "")
    return Job(
        job_id=int(field["JobId"]),
        array_index=int(index) if index.isdigit() else None,
        state=field["JobState"],
        exit_status=int(field["ExitCode"].split(":")[0]),
        partition=field["Partition"],
        nodes=field.get("NodeList", ""),
        log=Path(field.get("StdOut", "")),
    )
