"""Peaks of plans whose units are larger than their activations: a JSON line a plan, from rank 0.

Arguments: plans, as reprs.
"""

from __future__ import annotations

import json
import sys

import plan_models
import torch

from common.models.traced import traced_architecture
from common.planning.space import Plan, Question, sized
from common.runtime.group.process_group import process_group
from common.tuning.plans import planned_step
from common.tuning.user_model import UserModel

ATTEMPTS, WITHIN = 30, 0.01
"""What gloo's threads free is missed at random, and makes a peak too high, never too low: where it
is, more steps are run."""


def make() -> tuple:
    return plan_models.Blocks(6, 128), torch.randint(50, (2, 4)), plan_models.loss_of


with process_group("cpu", "gloo") as worker:
    architecture = traced_architecture(make, "made", "cpu")
    question = Question(architecture, worker.world_size, 2, 4, 1e9, device="cpu")
    for text in sys.argv[1:]:
        plan = eval(text, {"Plan": Plan})
        step = planned_step.PlannedStep(UserModel(*make(), "made"), plan, worker)
        step.run()
        peak, predicted = step.peak_bytes(), sized(question, plan).peak_bytes
        for _ in range(1, ATTEMPTS):
            if not worker.broadcast(predicted < (1 - WITHIN) * peak):
                break
            peak = min(peak, step.peak_bytes())
        if worker.is_main:
            print(json.dumps({"peak": peak, "predicted": predicted}), flush=True)
