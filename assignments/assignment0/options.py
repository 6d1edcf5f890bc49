"""Part 4: what each option of the training step buys, alone and together. See --help."""

from common.benchmarks.one_device.options import OptionsBenchmark, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, OptionsBenchmark)
