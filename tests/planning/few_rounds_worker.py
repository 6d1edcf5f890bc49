"""Runs a script that plans on ranks, so that it measures little: for tests that judge no time.

Arguments: the script, and its own.
"""

from __future__ import annotations

import gc
import runpy
import sys

from common.tuning import measured, visit_plan
from common.tuning.plans import measuring, plan_visits

measuring.ROUNDS = 3  # a median leaves out one that was disturbed
measured.CURVE_ROUNDS = measured.CONTENTION_ROUNDS = measured.CONTENTION_PASSES = 1
plan_visits.STEPS = 1
visit_plan.LADDERS = ((4, 2), (3,), (2,), (1,))
visit_plan.MOST_FINAL = visit_plan.FEWEST_FINAL

if __name__ == "__main__":
    gc.freeze()  # or each visit looks through what is imported here
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
