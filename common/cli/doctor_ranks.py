"""What ``ddplab doctor`` starts on ranks: the times of all pairs, and the self-test."""

from __future__ import annotations

import tempfile
from pathlib import Path

from common.benchmarks import pairs, selftest
from common.cluster.launch import launch
from common.errors import RunFailed, UserError
from common.runtime.machine.device import choose_device
from common.runtime.machine.gpus import cuda_devices
from common.runtime.processes.ranks import current_ranks
from common.runtime.stage_progress import StageProgress


def time_pairs(ranks: int | None) -> None:
    """Times all pairs of a job's ranks, or of ranks that are started here.

    Raises UserError for a number of ranks that has no pair.
    """
    if current_ranks().world_size > 1:
        pairs.main(pairs.PairBenchmark())
        return
    device = choose_device()
    count = ranks_of(device) if ranks is None else ranks
    if count < 2:
        raise UserError(f"--ranks {count}: at least 2 have a pair")
    with tempfile.TemporaryDirectory(prefix="ddplab-pairs-") as folder:
        log = Path(folder) / "log"
        with StageProgress().stage(f"pairs ({count} ranks)") as update:
            launch(Path(pairs.__file__), ["--device", device], count, log, on_output=update)
        print(log.read_text(), end="")


def run_selftest(output_dir: str) -> None:
    """Starts the self-test, shows its table, and leaves with its verdict.

    Raises:
        UserError: GPUs were granted that torch cannot use.
        RunFailed: a check failed, or a rank died.
    """
    device = choose_device()
    ranks = ranks_of(device)
    with tempfile.TemporaryDirectory(prefix="ddplab-selftest-") as folder:
        results = Path(folder) / "results"
        log = Path(folder) / "log"
        flags = ["--output_dir", str(Path(output_dir).absolute()), "--results", str(results)]
        flags += ["--device", device]
        failure = None
        try:
            with StageProgress().stage(f"self-test ({ranks} ranks)") as update:
                launch(Path(selftest.__file__), flags, ranks, log, on_output=update)
        except (RunFailed, UserError) as error:
            failure = str(error)
        rows = selftest.read_results(results)
        if not rows:
            lines = log.read_text().strip().splitlines()[-1:] or [""]
            reason = failure or lines[0]
            rows = [selftest.Result("start", "failed", reason, "see ddplab doctor")]
    selftest.print_results(rows)
    failed = [result.name for result in rows if result.is_bad]
    if failed or failure:
        raise RunFailed(f"self-test: {', '.join(failed) or failure}")


def ranks_of(device: str) -> int:
    """Returns the number of ranks to start on this machine: one a GPU, two on a CPU."""
    return len(cuda_devices()) if device == "cuda" else 2
