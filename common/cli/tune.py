"""``ddplab tune``: the best DDP settings for anyone's model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from common.errors import UserError


@dataclass(frozen=True)
class Tune:
    """Find the best DDP settings for your model: ddplab tune my_model:make

    FUNCTION takes no arguments and returns (module, batch, loss): a torch.nn.Module, one example
    batch, and loss(module, batch) that gives a scalar tensor. Inside a job (torchrun
    --nproc-per-node=2 -m common.cli.main tune my_model:make, srun, or ddplab emulate --hosts 2 --
    -m common.cli.main tune my_model:make) its ranks are used; alone, --nproc ranks are started on
    this machine. Gradients, all-reduces and contention are measured, every distinct bucketing is
    predicted, and the best few are verified by real steps beside DDP's default.
    """

    function: Annotated[str, tyro.conf.Positional]
    """MODULE:FUNCTION that makes the model; MODULE is looked for in this folder and among the
    installed packages."""
    nproc: int = 2
    """Ranks to start on this machine, outside of a job."""
    share: float = 0.2
    """Time for tuning, as a share of an exhaustive sweep's; few bucketings may need more."""
    device: str | None = None
    """cpu or cuda; by default CUDA where it is."""
    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""
    seed: int = 42
    """Seed that is set before FUNCTION is called, the same on all ranks."""
    output_dir: str = "outputs/tune"
    """Folder of the run directory."""
    run_id: str = ""
    """Name of the run directory; made up by default."""

    def run(self) -> None:
        """Tunes and prints the recommendation."""
        from common.runtime.processes.ranks import current_ranks
        from common.tuning.tune_settings import TuneSettings, parse_target

        parse_target(self.function)
        values = {key: value for key, value in asdict(self).items() if value not in (None, "")}
        ranks = int(values.pop("nproc"))
        TuneSettings(**values)
        if current_ranks().launcher != "single":
            from common.runtime.flags import as_flags
            from common.runtime.script import run_script
            from common.tuning.job import main

            run_script(main, TuneSettings, arguments=as_flags(values))
            return
        if ranks < 2:
            raise UserError(f"--nproc {ranks}: at least 2, a single rank exchanges nothing")
        self._launch(ranks, values)

    def _launch(self, ranks: int, values: dict) -> None:
        from common.runtime.stage_progress import StageProgress
        from common.tuning.launched import tune_on_ranks
        from common.tuning.results.report import print_recommendation

        function, output_dir = values.pop("function"), values.pop("output_dir", Tune.output_dir)
        run_id = values.pop("run_id", "")
        progress = StageProgress()
        with progress.stage(f"tune {function} ({ranks} ranks)") as update:
            recommendation = tune_on_ranks(
                function,
                ranks,
                output_dir=output_dir,
                run_id=run_id,
                flags=values,
                on_output=update,
            )
        print_recommendation(recommendation, progress.console)
