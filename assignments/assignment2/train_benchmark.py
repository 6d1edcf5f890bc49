"""Part 2: how long each layer's gradient takes. See --help."""

from common.benchmarks.one_device.layers import LayerBenchmark, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, LayerBenchmark)
