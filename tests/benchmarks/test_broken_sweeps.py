"""A sweep that breaks off: what it measured is kept, its run says how it ended, nothing is left.

The sweeps are far too long to end by themselves. The slow one runs under the launcher, as in
ddplab run; that it leaves no process is also said in tests/cluster/test_launch.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest
from interruptible import start_interruptible, wait_until
from rank_support import ASSIGNMENT2, FinishedRanks

from common.cluster.launch import MARK
from common.runtime.records.run_directory import newest_complete_run, read_environment

pytestmark = pytest.mark.two_ranks

WORKER = Path(__file__).with_name("broken_sweep_worker.py")
LAUNCH = """
import sys
from pathlib import Path
from common.cluster.launch import launch
from common.errors import RunFailed
try:
    launch(Path(sys.argv[1]), sys.argv[3:], 2, Path(sys.argv[2]))
except RunFailed as error:
    sys.exit(f"failed: {error}")
"""
CAPS = ["1", "None"]
STEPS = 2
DDP_SWEEP = [
    *("ddp_benchmark", "--bucket_cap_mb", *CAPS, "--rounds", "5000", "--num_steps", str(STEPS)),
    *("--model", "nano", "--batch_size", "1", "--max_seq_len", "16"),
]


@pytest.fixture
def sweep(tmp_path) -> Iterator[subprocess.Popen]:
    """Yields what launched a sweep of DDP; what is left of it in the end is killed."""
    script, *flags = DDP_SWEEP
    where = ["--output_dir", str(tmp_path), "--run_id", "run", "--device", "cpu"]
    parent = start_interruptible(
        [
            *(sys.executable, "-c", LAUNCH, str(ASSIGNMENT2 / f"{script}.py")),
            *(str(tmp_path / "log"), *flags, *where),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    yield parent
    if parent.poll() is None:
        for process in with_descendants(parent):
            process.kill()
        parent.wait()


def with_descendants(parent: subprocess.Popen) -> list[psutil.Process]:
    process = psutil.Process(parent.pid)
    return [process, *process.children(recursive=True)]


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def kept(partial: Path) -> pd.DataFrame:
    """Reads the samples so far; fails if there is a table of the final name or a complete run."""
    assert not partial.with_suffix("").exists()
    assert newest_complete_run(partial.parents[1], []) is None
    return pd.read_csv(partial, keep_default_na=False)


@pytest.fixture
def break_off(rank_server, tmp_path):
    """Returns ``break_off(signal, rank)``: how the ranks ended, its record and the samples."""

    def break_off(name: str, rank: int) -> tuple[FinishedRanks, dict, pd.DataFrame]:
        variables = {"BREAK_SIGNAL": name, "BREAK_RANK": str(rank)}
        done = rank_server.run(WORKER, tmp_path, ranks=2, variables=variables)
        run = tmp_path / "run"
        return done, read_environment(run), kept(run / "allreduce-samples.csv.partial")

    return break_off


@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_rank_is_killed_the_run_is_failed_and_its_samples_are_kept(break_off, killed):
    done, record, samples = break_off("SIGKILL", killed)
    assert done.exit_codes[killed] == -signal.SIGKILL
    assert done.exit_codes[1 - killed] == 1
    assert done.error_line.startswith(f"failed: rank {1 - killed} lost another rank: ")
    assert record["status"] == "failed"
    assert len(samples) >= 8


def test_ctrl_c_interrupts_the_run_and_its_samples_are_kept(break_off):
    done, record, samples = break_off("SIGINT", 0)
    assert done.exit_codes == [130, 1]
    assert done.stderr[0] == "interrupted\n"
    assert record["status"] == "interrupted"
    assert record["end_time"] >= record["start_time"]  # by the run itself, not from its absence
    assert len(samples) >= 8
    assert set(samples["rank"]) == {0, 1}


@pytest.mark.slow
def test_a_killed_rank_fails_the_ddp_sweep_and_the_finished_caps_are_kept(sweep, tmp_path):
    """Rank 1 dies as DDP is made anew for the next cap. Now and then gloo then leaves rank 0 stuck
    in a broadcast, where no Python handler runs, and torchrun kills it half a minute later."""
    partial = tmp_path / "run" / "ddp-times.csv.partial"

    def two_visits_are_over() -> bool:
        assert sweep.poll() is None, sweep.communicate()
        return partial.exists() and partial.read_bytes().count(b"\n") > 2 * STEPS * 2

    wait_until(two_visits_are_over)
    processes = with_descendants(sweep)
    assert len(processes) == 4  # who launched, torchrun, two ranks
    variables = {process: process.environ() for process in processes}
    [rank_1] = [p for p, env in variables.items() if MARK in env and env.get("RANK") == "1"]
    rank_1.kill()
    _, stderr = sweep.communicate(timeout=60)

    assert sweep.returncode == 1
    assert stderr.startswith("failed: ")
    assert len(stderr.splitlines()) == 1
    record = read_environment(tmp_path / "run")
    assert record["status"] == "failed"
    assert record["reason"]
    visits = kept(partial).groupby(["bucket_cap_mib", "round"])[["iteration", "rank"]]
    whole = {(step, rank) for step in range(STEPS) for rank in range(2)}
    assert len(visits) >= 2
    assert all(set(rows.itertuples(index=False, name=None)) == whole for _, rows in visits)
    assert living(processes) == []
