"""A training run in numbers, or two of the same global batches beside each other. See --help."""

from common.analysis.micro_batches.summary import AnalyzeMetrics, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, AnalyzeMetrics)
