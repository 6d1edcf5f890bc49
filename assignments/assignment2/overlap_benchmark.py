"""Part 2: what DDP adds to a backward pass besides waiting. See --help."""

from common.benchmarks.buckets.overlap import OverlapBenchmark, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, OverlapBenchmark)
