"""The student whose exercises are checked: the one being graded, or this project itself.

Grading (``common.course.grading.grade``) names a folder, an isolation and a variant of the numbers
drawn. Without it the reference solutions are checked, without a sandbox. Tests marked ``grading``
are of the grader: they have the strongest sandbox of this machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import numpy as np
import pytest
from own_processes import OwnProcesses, OwnStudent
from rank_support import RankServer

from common.course.sandbox.isolation import strongest_isolation
from common.course.sandbox.sandbox import Sandbox
from common.course.sandbox.student import Ranks, Student, lay_out, lay_out_student
from common.errors import UserError
from common.runtime.paths import project_root

GRADED = json.loads(os.environ.get("DDPLAB_GRADED", "{}"))
HIDDEN = Path(__file__).parent / "hidden"
PROBES = HIDDEN / "probes"
OWN = "own"


@pytest.hookimpl(trylast=True)  # after marks have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves hidden tests marked ``grading`` to gradings: test_grade.py grades the references."""
    if not GRADED:
        left_out = {item for item in items if HIDDEN in item.path.parents and is_to_grade(item)}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def is_to_grade(item: pytest.Item) -> bool:
    """Returns True for a test of a grader."""
    return item.get_closest_marker("grading") is not None


def isolation() -> str:
    """Returns this machine's strongest isolation; none at all is enough for one's own code."""
    try:
        return strongest_isolation()
    except UserError:
        return "none"


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Yields the sandbox of all gradings; its folder has the part ``own``, tests may add others."""
    if GRADED:
        folder, kind = Path(GRADED["folder"]), GRADED["isolation"]
    else:
        folder, kind = tmp_path_factory.mktemp("sandbox"), isolation()
        lay_out(folder, project_root())
        lay_out_student(folder, project_root(), OWN, PROBES, Path.read_text)
    with Sandbox(folder, kind) as started:
        yield started


@pytest.fixture(scope="session")
def own_processes(
    rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnProcesses]:
    """Yields processes without a sandbox; their part ``own`` is this project."""
    folder = tmp_path_factory.mktemp("own-processes")
    (folder / OWN).symlink_to(project_root())
    processes = OwnProcesses(folder, rank_server)
    yield processes
    processes.afresh()


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Sandbox | OwnProcesses:
    """Returns where a student's processes are started."""
    is_graded = GRADED or is_to_grade(request.node)
    return request.getfixturevalue("sandbox" if is_graded else "own_processes")


@pytest.fixture(scope="session")
def other_sandbox(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Yields a sandbox of the references, which the student's one has nothing of."""
    if sandbox.isolation != "namespaces":  # elsewhere he might see it, or its network is his
        pytest.skip(f"not timed here: needs root's namespaces, not {sandbox.isolation}")
    folder = tmp_path_factory.mktemp("references")
    folder.chmod(0o755)
    lay_out(folder, project_root())
    lay_out_student(folder, project_root(), OWN, PROBES, Path.read_text)
    with Sandbox(folder, sandbox.isolation) as started:
        yield started


@pytest.fixture
def reference(other_sandbox: Sandbox) -> Student:
    """Starts the references, to be timed beside the student."""
    found = Student(other_sandbox, OWN)
    found.afresh()
    return found


@pytest.fixture
def below() -> str:
    """Returns the part of the processes' folder that is checked."""
    return OWN


@pytest.fixture
def student(processes: Sandbox | OwnProcesses, below: str) -> Iterator[Student]:
    """Starts the student, in processes of this check's own."""
    if time.time() > GRADED.get("until", inf):
        pytest.fail("no time is left")
    is_itself = isinstance(processes, OwnProcesses) and below == OWN
    found = (OwnStudent if is_itself else Student)(processes, below)
    found.afresh()
    yield found
    if isinstance(processes, OwnProcesses):  # its time is this test's
        processes.afresh()


@pytest.fixture
def on_ranks(student: Student) -> Callable[[int], Ranks]:
    """Returns ``on_ranks(3)``: ranks with the student's code."""
    return student.on_ranks


@pytest.fixture(scope="session")
def variant() -> int:
    """Returns what random numbers are drawn from."""
    return int(GRADED.get("variant", 0))


@pytest.fixture
def every() -> int:
    """Returns how many operations apart power is cut: one for students, and for mutants."""
    return 1 if GRADED else 3


@pytest.fixture
def generator(variant: int) -> np.random.Generator:
    """Makes a generator of this variant's random numbers."""
    return np.random.default_rng(variant)
