"""A private Slurm of two nodes with four pretended GPUs each, and one that only takes notes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from job_files import submit_job_file
from private_slurm import PrivateSlurm, private_slurm, why_not
from stub_slurm import EndedJob, make_project, run_job_file

NEEDED = {"FUNCTION": "tuned_models:make"}
"""Variables without which a job file (launch-tune, launch-plan) refuses to run anything."""


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """Yields the cluster; tests that ask for it are skipped with the reason where it cannot run."""
    if reason := why_not():
        pytest.skip(f"no private Slurm: {reason}")
    with private_slurm(nodes=2, gpus_per_node=4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the folder of the job files' run directories, together as on a cluster."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="session")
def submitted(slurm: PrivateSlurm, output: Path) -> Callable[[str], int]:
    """Returns ``submitted(name)``: the id of that file's job, submitted when first asked for."""
    return functools.cache(lambda name: submit_job_file(slurm, name, output))


@pytest.fixture(scope="session")
def processes_of() -> Callable[[str], list[str]]:
    """Returns ``processes_of(folder)``: names of the Slurm's living processes in that folder.

    Its daemons, whose SLURM_CONF is there, tell its process-ID namespace, which all share.
    """
    namespaces: dict[str, str] = {}

    def find(folder: str) -> list[str]:
        living = []
        for process in psutil.process_iter():
            try:
                namespace = os.readlink(f"/proc/{process.pid}/ns/pid")
                configuration = process.environ().get("SLURM_CONF", "")
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append((process.name(), namespace))
                if process.name() == "slurmctld" and configuration.startswith(str(folder)):
                    namespaces[str(folder)] = namespace
            except (psutil.Error, OSError):
                continue
        return sorted(name for name, namespace in living if namespace == namespaces[str(folder)])

    return find


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Makes a project of which there is only what job files source."""
    return make_project(tmp_path)


@pytest.fixture
def run(tmp_path: Path, project: Path) -> Callable[..., EndedJob]:
    """Returns ``run(path, **variables)``: runs a job file without a Slurm; how it ended."""

    def run(path: Path, **variables: str) -> EndedJob:
        return run_job_file(path, tmp_path, project, NEEDED | variables)

    return run


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], EndedJob]:
    """Returns ``plain_run(path)``: runs a job file with no variable that it does not need."""

    def run(path: Path) -> EndedJob:
        folder = tmp_path_factory.mktemp("plain")
        return run_job_file(path, folder, make_project(folder), NEEDED)

    return functools.cache(run)
