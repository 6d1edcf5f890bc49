"""A private Slurm of two nodes with four pretended GPUs each, started once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from job_files import submit_job_files, submit_placed

from common.cluster.slurm import PrivateSlurm, private_slurm, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """The cluster; tests that ask for it are skipped with the reason where it cannot run."""
    if reason := why_not():
        pytest.skip(f"no private Slurm: {reason}")
    with private_slurm(nodes=2, gpus_per_node=4) as cluster:
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start Slurm before all other tests; those that need its nodes come last.

    The job files then run while other tests do, most of which need one core.
    """

    def place(item: pytest.Item) -> int:
        if "slurm" in getattr(item, "fixturenames", ()):
            return 2
        return 0 if item.path.name == "test_slurm.py" else 1

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def job_files_in_the_background(request: pytest.FixtureRequest) -> None:
    """Submit the job files before the first test here."""
    wanted = any("test_every_job_file_runs" in item.nodeid for item in request.session.items)
    if wanted and why_not() is None:
        request.getfixturevalue("placed")
        request.getfixturevalue("submitted")


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job files' run directories go, together as on a cluster."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="session")
def submitted(slurm: PrivateSlurm, output: Path) -> dict[str, int]:
    """Job ids of all job files, submitted at once, the report to run after the measurements."""
    return submit_job_files(slurm, output)


@pytest.fixture(scope="session")
def placed(slurm: PrivateSlurm, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Id of the job in which ddplab doctor looks at three placements."""
    return submit_placed(slurm, tmp_path_factory.mktemp("placed"))


@pytest.fixture(scope="session")
def processes_of() -> Callable[[str], list[str]]:
    """``processes_of(folder)``: names of the living processes of the Slurm in that folder.

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
