"""Task 1: where the memory of a training step goes. See --help."""

from common.benchmarks.one_device.memory import MemoryAnalysis, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, MemoryAnalysis)
