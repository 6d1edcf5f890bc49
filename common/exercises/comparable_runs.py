"""A4.1: may these two measurements be compared?

A speedup says something only where all but one thing was the same. What one wanted to vary is not
among the arguments here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measurement; None where its record does not say.

    Attributes:
        device: name of the GPU or CPU.
        network: name of what joins its ranks, such as ``TCP over loopback``.
        is_emulated: True if the network was made by software, which is always recorded.
        exchanged: False if the ranks sent nothing to each other; then any network will do.
        world_size: number of ranks.
        backend: gloo or nccl.
        ranks_per_gpu: 1 but for ranks that share a GPU.
    """

    device: str | None
    network: str | None
    is_emulated: bool = False
    exchanged: bool = True
    world_size: int | None = None
    backend: str | None = None
    ranks_per_gpu: int = 1


def differing_conditions(one: Conditions, other: Conditions) -> str | None:
    """Returns ``device`` or ``network``, the first that makes a comparison void, or None.

    What is not recorded is no difference, but for the name of a network where one is emulated. A
    study of scaling has jobs of different numbers of ranks, of which one may lie on one host and
    another on several: such networks may have different names, if neither is emulated and the ranks
    exchange over one backend, with as many on a GPU. There the numbers of ranks and the backends
    are compared as they are recorded: None is equal to None, and differs from any other.
    """
    # BEGIN SOLUTION A4.1
    if None not in (one.device, other.device) and one.device != other.device:
        return "device"
    if not (one.exchanged and other.exchanged) or one.network == other.network:
        return None
    if one.is_emulated or other.is_emulated:
        return "network"
    if None in (one.network, other.network):
        return None
    alike = (one.backend, one.ranks_per_gpu) == (other.backend, other.ranks_per_gpu)
    return None if alike and one.world_size != other.world_size else "network"
    # END SOLUTION


def differing_setting(
    one: Mapping[str, object],
    other: Mapping[str, object],
    must_agree: Collection[str],
    *,
    unknown_agrees: bool = False,
) -> str | None:
    """Returns the first setting in which two runs differ, or None.

    Args:
        one, other: the runs' settings.
        must_agree: names of settings, in the order in which they are looked at.
        unknown_agrees: a setting that one of the two does not have is no difference. One that is 0,
            False or empty is there.
    """
    # BEGIN SOLUTION A4.1
    for name in must_agree:
        values = one.get(name), other.get(name)
        if values[0] != values[1] and not (unknown_agrees and None in values):
            return name
    return None
    # END SOLUTION
