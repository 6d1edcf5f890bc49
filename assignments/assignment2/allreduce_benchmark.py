"""Part 2: how long an all-reduce takes, by size. See --help."""

from common.benchmarks.buckets.allreduce import AllReduceBenchmark, main
from common.runtime.script import run_script

VARIABLES = {"NUMEL": "numel", "DTYPE": "dtype", "BACKEND": "backend"}

if __name__ == "__main__":
    run_script(main, AllReduceBenchmark, variables=VARIABLES)
