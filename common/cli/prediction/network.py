"""Measured all-reduces in place of a cluster's model of NCCL: a table, or a job's traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import UserError, naming

if TYPE_CHECKING:
    from common.perfmodel.cluster.clusters import Cluster


def measured_cluster(cluster: Cluster, allreduce: str | None, from_traces: str | None) -> Cluster:
    """Returns the cluster with the all-reduces of --allreduce or --from-traces, where given.

    Raises UserError for a table or traces that cannot be read, of ranks that the cluster cannot
    hold, or of CPUs; for traces that lack ranks, or whose replay is off.
    """
    from common.perfmodel.cluster.nccl import with_measured
    from common.perfmodel.tables import AllReduceTable, read_all_reduce

    if allreduce and from_traces:
        raise UserError("--allreduce and --from-traces both tell of the network: give one")
    if allreduce:
        return with_measured(cluster, read_all_reduce(allreduce))
    if not from_traces:
        return cluster
    from common.analysis.replay.job import read_job
    from common.analysis.replay.system import checked_system
    from common.perfmodel.replay.engine import run
    from common.perfmodel.replay.gate import gate_of

    job = read_job(from_traces)
    if not job.on_device:
        raise UserError(f"--from-traces {from_traces}: all-reduces of CPUs, not of {cluster.gpu}")
    with naming(f"--from-traces {from_traces}"):
        if not job.is_whole:
            few = f"{len(job.lanes)} of {job.world_size} ranks"
            raise UserError(f"{few}: their waits for the others are in every all-reduce")
        gate_of(run(job.program)).check()
        system = checked_system(job)
    samples = system.calibration.all_reduce
    cluster = with_measured(
        cluster, AllReduceTable(samples.curve(), None, samples.world_size, from_traces)
    )
    *before, measured = cluster.assumptions  # the last sentence stands for the network
    return replace(cluster, assumptions=(*before, *system.assumed, measured))
