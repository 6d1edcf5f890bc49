"""``ddplab predict --gradient-mib``: does the bucket cap matter for gradients of this size?"""

from __future__ import annotations

from collections.abc import Sequence

from common.cli.flags import check_output, write_output
from common.cli.printed import print_grid, print_lines, print_notes
from common.errors import UserError


def print_gains(
    gradient_mib: Sequence[float], run_dir: str | None, gpus: str | None, csv: str | None
) -> None:
    """Prints what the best cap gains over DDP's default, for these gradients and for GPT-2s.

    Args:
        gradient_mib: sizes of the reader's gradients.
        run_dir: a run of assignment 2 whose networks stand beside the clusters; None for none.
        gpus: number of GPUs of a cluster, as text.
        csv: file for the whole table; None for none.

    Raises UserError for sizes, runs or numbers that are none.
    """
    import pandas as pd
    from rich.console import Console

    from common.analysis.buckets.cap_gains import (
        GPUS,
        GRADIENTS,
        WORKLOAD,
        cap_gains,
        gain_matrix,
        on_clusters,
        on_networks,
    )
    from common.analysis.show import show
    from common.perfmodel.cluster.scale_out import parse_gpus

    check_output("--csv", csv)
    numbers = [GPUS] if gpus is None else parse_gpus(gpus)
    if len(numbers) > 1:
        raise UserError(f"--gpus {gpus}: one number with --gradient-mib")
    where = [*(on_networks(run_dir) if run_dir else ()), *on_clusters(numbers[0])]
    gains: pd.DataFrame = cap_gains(where, gradient_mib)
    matrix = gain_matrix(gains)
    networks = {name: (name, "{:+.1%}") for name in gains["network"].unique()}
    console = Console()
    about = (
        "What the best bucket cap takes off the backward pass with DDP's default (1 MiB, then 25), "
        "predicted, not measured; buckets: the default's"
    )
    print_lines(console, [about])
    print_grid(show(matrix, GRADIENTS | networks))
    lines = [
        f"clusters: {numbers[0]:,} GPUs, {WORKLOAD.batch_size} sequences of {WORKLOAD.seq_len:,} "
        f"tokens a GPU, {WORKLOAD.precision}, all-reduces by a model of NCCL; "
        "ddplab predict --cluster has bands",
        "of a step on a cluster it is about two thirds of that, as the forward pass has no cap",
    ]
    if run_dir:
        lines.append(
            f"{run_dir}: its networks, and its device's speed in its own batch; all-reduces larger "
            "than those that were measured are extrapolated"
        )
    if csv is not None:
        write_output("--csv", csv, gains.to_csv(index=False))
        lines.append(f"all columns, the best caps among them: {csv}")
    print_notes(console, lines)
