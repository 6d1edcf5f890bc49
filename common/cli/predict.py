"""``ddplab predict``: T(b) and b* from measured tables, and the error of the prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from common.cli.flags import check_output, refuse_given, write_output
from common.cli.prediction.cluster import WITHOUT_CLUSTER, ClusterQuestion
from common.cli.prediction.question import TableQuestion
from common.cli.printed import print_grid, print_lines, print_notes
from common.errors import UserError


@dataclass(frozen=True)
class Predict(TableQuestion):
    """Predict the backward time of DDP by bucket cap, and the best cap b*.

    Gradients come from --layer-sizes and --layer-times (the course's CSVs) or, exactly, from
    --ready-times; --run-dir takes all tables of one run. With --measured the prediction is held
    against ddp-times.csv. With --model the memory of a training step is predicted, and with
    --cluster and --gpus beside it a step on up to thousands of GPUs, from no table. There, what
    takes three numbers has a likeliest value, a lowest and a highest one, from which the bands
    come; a single number is taken as certain. With --gradient-mib it says whether the cap matters
    at all for gradients of this size. With --from-traces a real job's traces are replayed.
    """

    gradient_mib: tuple[float, ...] = ()
    """MiB of your model's gradients (4 bytes a parameter in float32); also several. Shows how many
    buckets DDP's default makes of them and what the best cap gains over it, beside GPT-2s of all
    sizes, on six clusters of A100, H100 and H200 (with --gpus GPUs, by default 64), and on the
    networks of --run-dir. With --csv the best caps, too."""

    from_traces: str | None = None
    """Folder with the profiler's traces (Kineto's .json or .json.gz, one a rank) of a job of yours:
    they are replayed, and what changes would gain is said; with T(b) at --bucket-cap-mb. With
    --cluster its all-reduces stand in place of the model of NCCL."""

    timeline: str | None = None
    """With --from-traces: write the timelines, measured, replayed and with each change, to this
    file: .json for https://ui.perfetto.dev, .html for a page with one step as a figure."""

    on_cluster: Annotated[ClusterQuestion, tyro.conf.arg(name="")] = field(
        default_factory=ClusterQuestion
    )

    def run(self) -> None:
        """Prints the prediction."""
        from rich.console import Console

        if self.on_cluster.cluster is not None:
            left_out = ("on_cluster", "allreduce", "from_traces")
            refuse_given(self, "has no effect with --cluster", leave_out=left_out)
            self.on_cluster.run(self.allreduce, self.from_traces)
            return
        if self.gradient_mib:
            self._print_gains()
            return
        if self.from_traces is not None:
            left_out = ("on_cluster", "from_traces", "timeline", "bucket_cap_mb")
            refuse_given(self, "has no effect with --from-traces", leave_out=left_out)
            refuse_given(self.on_cluster, "has no effect with --from-traces")
            from common.cli.prediction.from_traces import print_from_traces

            print_from_traces(self.from_traces, self.bucket_cap_mb, Console(), self.timeline)
            return
        if self.timeline is not None:
            raise UserError("--timeline has an effect with --from-traces only")
        if self.on_cluster.model is not None:
            why = "has no effect with --model, which takes no tables"
            refuse_given(self, why, leave_out=["on_cluster"])
            self.on_cluster.print_memory()
            return
        self.on_cluster.refuse_without_cluster()

        from common.cli.prediction.report import Report

        Report(self).print(Console())

    def _print_gains(self) -> None:
        """Prints what the best cap gains over DDP's default, for these gradients and for GPT-2s."""
        from rich.console import Console

        from common.analysis.buckets import cap_gains
        from common.analysis.show import show
        from common.perfmodel.cluster.scale_out import parse_gpus

        why, left_out = "has no effect with --gradient-mib", ("gradient_mib", "run_dir")
        refuse_given(self, why, leave_out=("on_cluster", *left_out))
        refuse_given(self.on_cluster, why, leave_out=WITHOUT_CLUSTER["--gradient-mib"])
        run_dir, gpus, csv = self.run_dir, self.on_cluster.gpus, self.on_cluster.csv
        check_output("--csv", csv)
        numbers = [cap_gains.GPUS] if gpus is None else parse_gpus(gpus)
        if len(numbers) > 1:
            raise UserError(f"--gpus {gpus}: one number with --gradient-mib")
        measured = cap_gains.on_networks(run_dir) if run_dir else ()
        where = [*measured, *cap_gains.on_clusters(numbers[0])]
        gains = cap_gains.cap_gains(where, self.gradient_mib)
        networks = {name: (name, "{:+.1%}") for name in gains["network"].unique()}
        console, work = Console(), cap_gains.WORKLOAD
        about = (
            "What the best bucket cap takes off the backward pass with DDP's default (1 MiB, then "
            "25), predicted, not measured; buckets: the default's"
        )
        print_lines(console, [about])
        print_grid(show(cap_gains.gain_matrix(gains), cap_gains.GRADIENTS | networks))
        lines = [
            f"clusters: {numbers[0]:,} GPUs, {work.batch_size} sequences of {work.seq_len:,} "
            f"tokens a GPU, {work.precision}, all-reduces by a model of NCCL; "
            "ddplab predict --cluster has bands",
            "of a step on a cluster it is about two thirds of that, as the forward pass has no cap",
        ]
        if run_dir:
            lines.append(
                f"{run_dir}: its networks, and its device's speed in its own batch; all-reduces "
                "larger than those that were measured are extrapolated"
            )
        if csv is not None:
            write_output("--csv", csv, gains.to_csv(index=False))
            lines.append(f"all columns, the best caps among them: {csv}")
        print_notes(console, lines)
