"""Part 3: where the time of a training step goes. See --help."""

from common.benchmarks.one_device.profiling import ProfileTraining, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, ProfileTraining)
