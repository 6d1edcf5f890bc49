"""Run the changes that are proposed for a sweep, and compare with the prediction. See --help."""

from common.benchmarks.scaling.verify_changes import VerifyChanges, main
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(main, VerifyChanges)
