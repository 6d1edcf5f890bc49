"""Part 2: one total in ever larger chunks (Li et al. 2020, Figure 2). See --help."""

from common.benchmarks.buckets.allreduce_chunks import ChunkBenchmark, main
from common.runtime.script import run_script

VARIABLES = {"NUMEL": "numel", "DTYPE": "dtype", "BACKEND": "backend"}

if __name__ == "__main__":
    run_script(main, ChunkBenchmark, variables=VARIABLES)
