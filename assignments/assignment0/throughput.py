"""Part 2: tokens per second, by batch size, and what share of the peak they are. See --help."""

from common.benchmarks.one_device.throughput import ThroughputBenchmark, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, ThroughputBenchmark, variables={"BATCH_SIZES": "batch_sizes"})
