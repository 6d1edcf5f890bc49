"""How tests run beside each other; ranks, a browser and assignment 2's benchmarks for them."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING

import pytest
from company import Room
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from rank_support import ASSIGNMENT2, RankServer

from common.runtime.processes.bytecode import keep_bytecode

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TINY_STEP = ("--model", "gpt2-pico", "--batch_size", 1, "--max_seq_len", 16)
WORKERS = 3
"""Processes of a whole run on two cores: ranks and jobs wait for each other much of the time."""
FIRST, LAST = ("slurm", "emulated"), "alone"
"""Groups that are long and mostly wait begin first; what has to be alone comes last."""
BENCHMARK_RUNS = "assignment2_runs"
WITH_BROWSER = "report"
LONGEST_ID = 300
"""Characters that a value takes in a test's name at most."""
ROOM = pytest.StashKey[Room]()
RANKS = pytest.StashKey[RankServer]()


settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Read when torch is imported. Two threads on busy cores wait for each other more than they work.
os.environ["OMP_NUM_THREADS"] = "1"

# Hypothesis parses all modules that are imported for constants to draw: 5 s of each process.
providers._get_local_constants = lambda: providers._local_constants

# A grammar of addresses, for which jsonschema takes 4 s and which no schema here asks for.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]


# What is imported while tests are collected lives as long as the process: a tenth of the time went
# to looking through it for what can be freed.
gc.disable()
atexit.register(gc.unfreeze)  # libraries count at the end what they made and was not freed

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leaves out of later searches for garbage what is there before the first test."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what is compiled in pytest's cache, where every process would compile it anew."""
    if sys.dont_write_bytecode and hasattr(config, "cache"):
        keep_bytecode(config.cache.mkdir("bytecode"))
    if "TEST_DURATIONS" in os.environ:
        from durations import TestDurations  # not in a student's tree

        path = Path(os.environ["TEST_DURATIONS"]).absolute()
        config.pluginmanager.register(TestDurations(path, lambda: config.stash.get(RANKS, None)))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Starts workers for a run of everything; files that were named run in this process."""
    return WORKERS if config.args_source != pytest.Config.ArgsSource.ARGS else 0


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names a long text by its argument: tables of durations have one line a test."""
    return argname if isinstance(val, str | bytes) and len(val) > LONGEST_ID else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests that share a run, or have to be alone, a worker; orders the groups."""
    for item in items:
        if "benchmark_run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.two_ranks)
            item.add_marker(pytest.mark.xdist_group(BENCHMARK_RUNS))
        elif item.get_closest_marker("xdist_group"):
            continue
        elif item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group(LAST))
        elif shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(WITH_BROWSER))
    items.sort(key=_place)


def shares_a_fixture(item: pytest.Item) -> bool:
    """Returns True for a test whose file makes something once; two workers would make it twice."""
    definitions = getattr(item, "_fixtureinfo", None)  # as pytest keeps them, 9.1 at the latest
    return definitions is not None and any(
        choices[-1].scope == "module" for choices in definitions.name2fixturedefs.values()
    )


def _place(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    name = group.args[0] if group else ""
    if name in FIRST:
        return FIRST.index(name)
    return len(FIRST) + 2 if name == LAST else len(FIRST) + (not group)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout: waiting is no test's time
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keeps other workers' tests away from one that is marked ``alone``."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if not run:
        return (yield)
    with _room(item.config, run).entered(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def _room(config: pytest.Config, run: str) -> Room:
    if ROOM not in config.stash:
        config.stash[ROOM] = Room(_folder_of(run))
    return config.stash[ROOM]


def _folder_of(run: str) -> Path:
    """Returns the folder that all workers of a run have in common."""
    return Path(gettempdir()) / f"pytest-room-{run}"


@pytest.hookimpl(tryfirst=True)  # before pytest remembers what failed
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Takes from a test's name the group that pytest-xdist has put there.

    No test has the name with the group, so ``--last-failed`` would run all tests.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = re.sub(r"@[^@\]]*$", "", report.nodeid)


@pytest.fixture(scope="session")
def rank_server(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankServer]:
    """Yields what runs scripts on ranks that start at once; the first use takes seconds."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    with nullcontext(_folder_of(run)) if run else TemporaryDirectory() as folder:
        pytestconfig.stash[RANKS] = RankServer(tmp_path_factory.mktemp, Path(folder))
        yield pytestconfig.stash[RANKS]


@pytest.fixture(scope="module")
def slow_chosen(request: pytest.FixtureRequest) -> bool:
    """Returns whether slow tests of the module were chosen, for which its ranks run all cases."""
    items = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("slow") for item in items)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Yields Chromium, one a process; tests with it are skipped where it is missing."""
    from browser_support import started_chromium  # not in a student's tree

    with started_chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def benchmark_run(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Returns ``benchmark_run(script, *flags, variables={})``: the folder of a two-rank run."""

    def run(script: str, *flags: object, variables: Mapping[str, str] | None = None) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        arguments = [*flags, "--device", "cpu", "--output_dir", folder, "--run_id", "run"]
        script = ASSIGNMENT2 / f"{script}.py"
        done = rank_server.run(script, *arguments, ranks=2, variables=variables)
        assert done.exit_codes == [0, 0], "\n".join(done.stderr)
        return folder / "run"

    return run


@pytest.fixture(scope="session")
def train_run(benchmark_run: Callable) -> Path:
    """Runs train_benchmark.py: 3 measured steps of gpt2-pico."""
    return benchmark_run("train_benchmark", *TINY_STEP, "--warmup-steps", 1, "--num_steps", 3)


@pytest.fixture(scope="session")
def allreduce_run(benchmark_run: Callable) -> Path:
    """Runs allreduce_benchmark.py, its sizes taken from NUMEL."""
    flags = ("--rounds", 3, "--iterations", 2, "--in-flight-mib", 1)
    return benchmark_run("allreduce_benchmark", *flags, variables={"NUMEL": "1, 1000 20000"})


@pytest.fixture(scope="session")
def chunk_run(benchmark_run: Callable) -> Path:
    """Runs allreduce_chunk_benchmark.py over 12,000 elements, taken from NUMEL."""
    return benchmark_run("allreduce_chunk_benchmark", "--rounds", 2, variables={"NUMEL": "12000"})


@pytest.fixture(scope="session")
def ddp_run(benchmark_run: Callable) -> Path:
    """Runs ddp_benchmark.py: 2 rounds of 2 steps, three caps from BUCKET_SIZE."""
    few = ("--rounds", 2, "--num_steps", 2, "--initial_steps", 0, "--timeline_steps", 1)
    caps = {"BUCKET_SIZE": "0.05 0.5,None"}
    return benchmark_run("ddp_benchmark", *TINY_STEP, *few, variables=caps)


@pytest.fixture(scope="session")
def overlap_run(benchmark_run: Callable) -> Path:
    """Runs overlap_benchmark.py: 2 rounds of a step, messages of two sizes."""
    few = ("--rounds", 2, "--num_steps", 1, "--warmup_steps", 1)
    return benchmark_run("overlap_benchmark", *TINY_STEP, *few, "--message_mib", 0.001, 0.0625)
