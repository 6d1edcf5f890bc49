"""Measure how DDP scales on a synthetic MLP. See --help."""

from common.benchmarks.scaling.scaling import ScalingBenchmark, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, ScalingBenchmark)
