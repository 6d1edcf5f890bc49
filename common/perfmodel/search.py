"""The best bucket cap of measured inputs, and the regret of another one."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UserError
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.best_cap import BestCap
from common.perfmodel.ddp.bucketings import Bucketing
from common.perfmodel.ddp.comm_hooks import CommHook
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.model import DdpModel


def best_bucket_cap(
    profile: BackwardProfile,
    network: AllReduceModel,
    caps_mib: Sequence[float] | None = None,
    *,
    tolerance: float = 0.01,
    bucketings: Sequence[Bucketing] | None = None,
    hook: CommHook | None = None,
    **system: object,
) -> BestCap:
    """Finds the cap with the shortest predicted backward pass (``DdpModel.best_cap``).

    Args:
        profile: gradient sizes and ready times.
        network: the all-reduce model.
        caps_mib, tolerance, bucketings, hook: as for ``DdpModel.best_cap``.
        system: the other fields of ``DdpModel``, by name: costs, in_flight, crowded_network,
            added_latency_s.
    """
    return DdpModel(profile, network, **system).best_cap(
        caps_mib,
        tolerance=tolerance,
        bucketings=bucketings,
        hook=hook,
    )


def regret(measured_s: dict[float, float], chosen_mib: float) -> float:
    """Computes the excess of the measured time at the chosen cap over the best, as a fraction.

    Args:
        measured_s: measured time by cap (MiB).
        chosen_mib: one of those caps.
    """
    if chosen_mib not in measured_s:
        raise UserError(f"cap {chosen_mib} MiB was not measured")
    return measured_s[chosen_mib] / min(measured_s.values()) - 1
