"""A small system that is not measured, for the tests of the explorer."""

from __future__ import annotations

from functools import cache

import numpy as np

from common.explore.systems import RunCommand, System, on_a_ring
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import StepParts
from common.perfmodel.model import DdpModel

MIB = 2**20


def small_system(costs: DdpCosts = NO_COSTS, seed: int = 0) -> System:
    """Returns twelve gradients of a few MiB on 4 ranks, over a network of 1 ms and 1 GB/s."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(MIB // 4, 4 * MIB, size=12)
    ready_s = np.cumsum(generator.uniform(0.001, 0.006, size=12))
    profile = BackwardProfile(
        names=tuple(f"layer {place}" for place in range(12)),
        sizes_bytes=sizes,
        ready_s=ready_s,
        backward_s=float(ready_s[-1]),
        kinds=("float32",) * 12,
        registration=tuple(reversed(range(12))),
    )
    known_bytes = np.array([1e3, 1e5, 1e7, 1e8])
    network = MeasuredAllReduce(known_bytes, 1e-3 + known_bytes / 1e9)
    parts = StepParts(forward_s=0.02, update_s=0.005, local_backward_s=profile.backward_s)
    return System(
        name="small",
        caption="made up",
        ranks=4,
        on=cache(on_a_ring(DdpModel(profile, network, costs), parts, 4)),
        alone=parts,
        command=RunCommand(("--run-dir", "nowhere")),
    )
