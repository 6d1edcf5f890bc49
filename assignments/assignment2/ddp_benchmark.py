"""Part 3: DDP training steps over bucket caps. See --help."""

from common.benchmarks.buckets.ddp import DdpBenchmark, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, DdpBenchmark, variables={"BUCKET_SIZE": "bucket_cap_mb"})
