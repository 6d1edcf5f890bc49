"""A cluster whose all-reduces were measured: the model of NCCL is held to the table."""

from __future__ import annotations

from dataclasses import replace

from common.errors import UserError, naming
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.cluster.nccl import NcclAllReduce
from common.perfmodel.tables import AllReduceTable


def with_measured(cluster: Cluster, table: AllReduceTable) -> Cluster:
    """Returns the cluster with each collective as many times slower as the table's is, by size.

    On the table's ranks an all-reduce takes what was measured. Other numbers of GPUs and other
    collectives are off from the model by as much.

    Raises UserError where the cluster cannot hold the table's ranks.
    """
    ranks = table.world_size
    if ranks is None or ranks < 2:
        raise UserError(f"{table.source}: {ranks or 'no'} ranks: a network is between two or more")
    with naming(table.source):
        model = NcclAllReduce(cluster, ranks)
    sizes, times = table.curve.sizes_bytes, table.curve.times_s
    factors = times / model.time_s(sizes)
    return replace(
        cluster,
        measured=tuple(zip(sizes.tolist(), factors.tolist(), strict=True)),
        measured_gpus=ranks,
        assumptions=(
            *cluster.assumptions,
            f"all-reduces over {ranks} GPUs are those of {table.source}, {factors.min():.2g} to "
            f"{factors.max():.2g} times what the model of NCCL gives; other collectives, and other "
            "numbers of GPUs, are off from it by as much at the same size",
        ),
    )
