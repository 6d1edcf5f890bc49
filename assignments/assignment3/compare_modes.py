"""Every mode of choosing micro-batches, on the same global batches. See --help."""

from common.benchmarks.micro_batches.compare_modes import ModeComparison, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, ModeComparison)
