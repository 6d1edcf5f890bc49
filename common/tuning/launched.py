"""Tunes on ranks that are started for it: for a command line or a notebook, which are no ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from common.cluster.emulated import EmulatedCluster
from common.cluster.launch import launch
from common.errors import UserError, naming_os_errors
from common.runtime.flags import as_flags
from common.runtime.records.run_directory import new_run_id
from common.tuning.results.recommendation import Recommendation, read_recommendation
from common.tuning.tune_settings import check_module_exists

JOB = Path(__file__).with_name("job.py")


def tune_on_ranks(
    function: str,
    ranks: int = 2,
    *,
    hosts: EmulatedCluster | None = None,
    output_dir: Path | str = "outputs/tune",
    run_id: str = "",
    flags: Mapping[str, object] | None = None,
    on_output: Callable[[str], None] = lambda line: None,
) -> Recommendation:
    """Tunes MODULE:FUNCTION on local ranks, or on those of emulated hosts.

    Args:
        function: MODULE:FUNCTION, as ``common.tuning.user_model`` wants it, in this folder or
            an installed package.
        ranks: local ranks, at least 2; emulated hosts have their own number.
        hosts: emulated hosts; None for ranks of this machine.
        output_dir: folder of the run directory.
        run_id: name of the run directory; made up by default.
        flags: other settings of ``TuneSettings``.
        on_output: called with each line that ranks print.

    Raises:
        UserError: the model cannot be tuned; nothing is left behind.
        RunFailed: a rank died; the log is beside the run directories.
    """
    folder = Path.cwd()
    check_module_exists(function, folder)
    if ranks < 2:
        raise UserError(f"tune on {ranks} ranks: there is nothing to exchange; at least 2")
    settings = {"function": function, "folder": folder, "output_dir": output_dir}
    settings |= {"run_id": run_id or new_run_id("tune")} | dict(flags or {})
    return read_recommendation(run_job(JOB, settings, ranks, hosts=hosts, on_output=on_output))


def run_job(
    job: Path,
    settings: Mapping[str, object],
    ranks: int,
    *,
    hosts: EmulatedCluster | None = None,
    on_output: Callable[[str], None] = lambda line: None,
) -> Path:
    """Runs a script on ranks that are started for it; returns its run directory.

    Args:
        job: the script.
        settings: flags of the script, ``output_dir`` and ``run_id`` among them.
        ranks, hosts, on_output: as for ``tune_on_ranks``.

    Raises UserError as the script does, and leaves nothing behind; RunFailed where a rank died.
    """
    output = Path(settings["output_dir"]).absolute()
    run_id = settings["run_id"]
    settings = {**settings, "output_dir": output}
    made = [path for path in (output, *output.parents) if not path.exists()]
    with naming_os_errors(f"output folder {output}"):
        output.mkdir(parents=True, exist_ok=True)
    log = output / f"{run_id}.log"
    try:
        launch(
            job,
            as_flags(settings),
            hosts.ranks if hosts else ranks,
            log,
            hosts=hosts,
            on_output=on_output,
        )
    except UserError:
        log.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else uses it by now
            for path in made:
                path.rmdir()
        raise
    log.unlink()
    return output / run_id
