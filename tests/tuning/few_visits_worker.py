"""One of two ranks for test_tune_two_ranks.py: tunes as the command does, with few visits."""

from __future__ import annotations

from common.runtime.script import run_script
from common.tuning import job, visit_plan
from common.tuning.tune_settings import TuneSettings

visit_plan.LADDERS = ((4, 2),)
visit_plan.MOST_FINAL = visit_plan.FEWEST_FINAL
visit_plan.MOST_WITH_TIME_LEFT = visit_plan.FEWEST_FINAL + 1

if __name__ == "__main__":
    run_script(job.main, TuneSettings)
