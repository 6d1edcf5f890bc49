"""All modes on 8 to 1,024 ranks, simulated with a calibrated cost; planning times. See --help."""

from common.benchmarks.micro_batches.simulated_modes import ModeSimulation, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, ModeSimulation)
