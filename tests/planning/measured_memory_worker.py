"""Measures for plans of a model of large products; prints what it takes on rank 0, in bytes.

Arguments: a folder, and what plans are chosen by: the memory of a rank in bytes, and strategies.
"""

from __future__ import annotations

import json
import resource
import sys

import plan_models
import torch

from common.planning.search import sized_plans
from common.planning.space import Question, candidates
from common.runtime.group.process_group import process_group
from common.runtime.records.recorder import record_run
from common.tuning import measured
from common.tuning.plans import measuring
from common.tuning.plans.plan_settings import PlanSettings
from common.tuning.plans.sized_model import SizedModel

measuring.ROUNDS = 2  # what lives from visit to visit is there in the second
measuring.CALLS = 1
measured.CURVE_ROUNDS = measured.CONTENTION_ROUNDS = measured.CONTENTION_PASSES = 1


def make(batch_size: int = 1) -> tuple:
    return plan_models.Blocks(2, 1024), torch.randint(50, (batch_size, 4)), plan_models.loss_of


def largest_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


folder, memory_bytes, *strategies = sys.argv[1:]
settings = PlanSettings(function="here:make", device="cpu", output_dir=folder)
with process_group("cpu", "gloo") as worker, record_run(settings, "plan", worker) as recorder:
    model = SizedModel(make, "made", seed=0)
    architecture = model.architecture(2, "cpu")
    question = Question(
        *(architecture, worker.world_size, 2, 4, float(memory_bytes), ("float32",), "cpu"),
        strategies=tuple(strategies),
        checkpointing=("none", "block"),
    )
    fitting, _ = sized_plans(question, list(candidates(question)))
    plans = [sized.plan for sized in fitting]
    before = largest_bytes()
    sizes = measuring.sizes_to_time(question, plans, 1e12)
    measuring.measure_inputs(model, question, plans, sizes, recorder)
    taken = {"taken": largest_bytes() - before, "parameters": architecture.num_parameters}
    if worker.is_main:
        print(json.dumps(taken | {"strategies": sorted({plan.strategy for plan in plans})}))
