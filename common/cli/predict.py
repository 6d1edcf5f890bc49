"""``ddplab predict``: T(b) and b* from measured tables, and the error of the prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from common.cli.prediction.cluster import ClusterQuestion, given_flags
from common.errors import UserError


@dataclass(frozen=True)
class Predict:
    """Predict the backward time of DDP by bucket cap, and the best cap b*.

    Gradients come from --layer-sizes and --layer-times (the course's CSVs) or, exactly, from
    --ready-times; --run-dir takes all tables of one run. With --measured the prediction is held
    against ddp-times.csv. With --cluster, --model and --gpus, and no table, a step on up to
    thousands of GPUs is predicted. There, what takes three numbers has a likeliest value, a lowest
    and a highest one, from which the bands come; a single number is taken as certain.
    """

    layer_sizes: str | None = None
    """layer-sizes.csv: parameters of each layer."""
    layer_times: str | None = None
    """layer-times.csv: seconds of each layer's gradient."""
    ready_times: str | None = None
    """gradient-ready-times.csv, in place of the two layer tables."""
    allreduce: str | None = None
    """allreduce-times.csv or allreduce-samples.csv."""
    overlap: str | None = None
    """overlap-times.csv: DDP's bookkeeping and contention; without it both are left out."""
    bucket_cap_mb: tuple[str, ...] = ()
    """Caps in MiB (None is DDP's default); by default a few from 0.25 MiB to the whole model."""
    measured: str | None = None
    """ddp-times.csv to compare with."""
    run_dir: str | None = None
    """Run directory whose tables are used where no other table is given."""
    alpha_us: float | None = None
    """Answer also for this latency, in microseconds, in place of the measured one."""
    trace: str | None = None
    """Write the step at one cap, predicted and (where the run watched its buckets) measured, to
    this file, as a trace for https://ui.perfetto.dev."""
    on_cluster: Annotated[ClusterQuestion, tyro.conf.arg(name="")] = field(
        default_factory=ClusterQuestion
    )

    def run(self) -> None:
        """Prints the prediction."""
        from rich.console import Console

        if self.on_cluster.cluster is not None:
            if tables := given_flags(self, leave_out=("on_cluster",)):
                raise UserError(f"{tables[0]} has no effect with --cluster, which takes no tables")
            self.on_cluster.run()
            return
        if given := given_flags(self.on_cluster):
            raise UserError(f"{given[0]} has an effect with --cluster only")

        from common.cli.prediction.report import Report

        Report(self).print(Console())
