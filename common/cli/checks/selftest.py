"""``ddplab doctor --selftest``: the self-test on the ranks that this machine can have."""

from __future__ import annotations

import tempfile
from pathlib import Path

from common.errors import RunFailed, UserError


def run_selftest(output_dir: str) -> None:
    """Starts the self-test, shows its table, and leaves with its verdict.

    Raises:
        UserError: GPUs were granted that torch cannot use.
        RunFailed: a check failed, or a rank died.
    """
    from common.benchmarks.selftest import Result, print_results, read_results
    from common.cluster.launch import launch
    from common.runtime.machine.device import choose_device
    from common.runtime.machine.gpus import cuda_devices
    from common.runtime.paths import project_root
    from common.runtime.stage_progress import StageProgress

    device = choose_device()
    ranks = len(cuda_devices()) if device == "cuda" else 2
    with tempfile.TemporaryDirectory(prefix="ddplab-selftest-") as folder:
        results = Path(folder) / "results"
        log = Path(folder) / "log"
        flags = ["--output_dir", str(Path(output_dir).absolute()), "--results", str(results)]
        flags += ["--device", device]
        script = project_root() / "common" / "benchmarks" / "selftest.py"
        failure = None
        try:
            with StageProgress().stage(f"self-test ({ranks} ranks)") as update:
                launch(script, flags, ranks, log, on_output=update)
        except (RunFailed, UserError) as error:
            failure = str(error)
        rows = read_results(results)
        if not rows:
            lines = log.read_text().strip().splitlines()[-1:] or [""]
            rows = [Result("start", "failed", failure or lines[0], "see ddplab doctor")]
    print_results(rows)
    failed = [result.name for result in rows if result.is_bad]
    if failed or failure:
        raise RunFailed(f"self-test: {', '.join(failed) or failure}")
