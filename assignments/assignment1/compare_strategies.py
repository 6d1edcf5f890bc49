"""One training step under each strategy, in rotated order, on the same ranks. See --help."""

from common.benchmarks.strategies import StrategyBenchmark, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, StrategyBenchmark)
