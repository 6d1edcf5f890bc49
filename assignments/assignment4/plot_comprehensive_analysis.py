"""Speedup, efficiency, throughput and accuracy of text training over ranks. See --help."""

from common.analysis.scaling.study_report import ComprehensiveAnalysis, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, ComprehensiveAnalysis)
