"""Seeds that PyTorch does not take: refused when settings are made, in every benchmark."""

from __future__ import annotations

import pytest

from common.benchmarks.buckets.ddp import DdpBenchmark
from common.benchmarks.one_device.options import OptionsBenchmark
from common.benchmarks.one_device.profiling import ProfileTraining
from common.benchmarks.one_device.throughput import ThroughputBenchmark
from common.benchmarks.scaling.scaling import ScalingBenchmark
from common.benchmarks.strategies import StrategyBenchmark
from common.errors import UserError


@pytest.mark.parametrize(
    "kind",
    [
        *(DdpBenchmark, OptionsBenchmark, ProfileTraining, ThroughputBenchmark),
        *(ScalingBenchmark, StrategyBenchmark),
    ],
)
def test_a_seed_that_pytorch_does_not_take_is_refused(kind: type) -> None:
    assert kind(seed=20_000_000_000).seed == 20_000_000_000
    for seed in (-1, 2**63):
        with pytest.raises(UserError, match=f"seed is {seed}; it must be from 0 to"):
            kind(seed=seed)
