"""``ddplab tune``: the best DDP settings for anyone's model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import tyro

from common.cli.flags import refuse_given
from common.cli.plan import Plan, check_changes_training, cuda_is_there
from common.errors import UserError

FSDP_SECONDS = 60.0
"""Seconds in which settings of FSDP are tried after its strategies were."""


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
    fsdp: bool = False
    """Find the best FSDP settings in place of DDP's, by the search of ddplab plan: blocks of a
    unit, when units are dropped again, how many are gathered ahead, the mesh, and with
    --changes-training yes the precision. Takes no --share, --backend and --run-id."""
    changes_training: str = "no"
    """With --fsdp; yes: also parameters in bfloat16 may be chosen, with gradients reduced in
    float32. With no, their time is shown where products of this device are no slower in them."""
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
        check_changes_training(self.changes_training)
        if self.fsdp:
            self._tune_fsdp()
            return
        if self.changes_training != "no":
            raise UserError("--changes-training has an effect with --fsdp only")
        values = {key: value for key, value in asdict(self).items() if value not in (None, "")}
        del values["fsdp"], values["changes_training"]
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

    def _tune_fsdp(self) -> None:
        """Runs the search and the visits of ``ddplab plan`` on FSDP's strategies alone.

        Precision is FUNCTION's own, whatever the device, unless training may change.
        """
        import psutil

        from common.planning.space import SHARDED

        refuse_given(self, "has no effect with --fsdp", only=("share", "backend", "run_id"))
        if self.nproc < 2:
            raise UserError(f"--nproc {self.nproc}: at least 2, a single rank shards nothing")
        on_gpu = self.device != "cpu" and cuda_is_there()
        memory = None if on_gpu else f"{psutil.virtual_memory().total // self.nproc}"
        plan = Plan(self.function, ranks=self.nproc, memory=memory, strategies=SHARDED)
        replace(
            plan,
            precision="float32",
            changes_training=self.changes_training,
            tune_seconds=FSDP_SECONDS,
            seed=self.seed,
            device=self.device,
            output_dir=self.output_dir,
        ).tune()

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
