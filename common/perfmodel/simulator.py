"""A backward pass of DDP from measured inputs and the arguments of DDP."""

from __future__ import annotations

from collections.abc import Sequence

from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.comm_hooks import CommHook
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.perfmodel.model import DdpModel


def simulate_backward(
    profile: BackwardProfile,
    network: AllReduceModel,
    bucket_cap_mb: float | None,
    *,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    bucket_cap_mb_list: Sequence[float] = (),
    gradient_as_bucket_view: bool = False,
    hook: CommHook | None = None,
    **system: object,
) -> BackwardTimeline:
    """Simulates one backward pass of DDP in its steady state (``DdpModel.backward``).

    Args:
        profile: gradient sizes and ready times of the slowest rank.
        network: the all-reduce model.
        bucket_cap_mb: as for DDP, in MiB; None is DDP's default.
        static_graph, find_unused_parameters, bucket_cap_mb_list: as for DDP.
        gradient_as_bucket_view: as for DDP; nothing is copied back.
        hook: a communication hook, which decides what is sent.
        system: the other fields of ``DdpModel``, by name: costs, in_flight, crowded_network,
            added_latency_s.
    """
    options = DdpOptions(
        bucket_cap_mib=bucket_cap_mb,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mib_list=tuple(bucket_cap_mb_list),
    )
    return DdpModel(profile, network, **system).backward(
        options, gradient_as_bucket_view=gradient_as_bucket_view, hook=hook
    )
