"""Peaks, and bytes sent in a step, of plans of partly frozen models: a JSON line a plan and rank.

Arguments: a folder for a store, then a function of ``plan_models.PARTLY_FROZEN`` and a plan, as a
repr, with a space between them.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache, partial
from pathlib import Path

import plan_models
import torch
from torch.distributed import FileStore

from common.models.traced import traced_architecture
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.fsdp.communication import step_control_bytes, step_wire_bytes
from common.planning.measured_times import collectives_of
from common.planning.space import Plan, Question, sized
from common.runtime.group.process_group import process_group
from common.runtime.group.socket_bytes import sent_bytes
from common.tuning.plans import planned_step
from common.tuning.user_model import UserModel

planned_step.PEAKS = 3  # what gloo's threads free is missed at random


def made(function: str) -> tuple:
    torch.manual_seed(0)
    module = getattr(plan_models, function)(6, 128)
    return module, torch.randint(50, (2, 4)), plan_models.loss_of


@cache
def followed(function: str) -> Architecture:
    return traced_architecture(partial(made, function), "made", "cpu")


def wait_for_all(name: str) -> None:
    """Waits until every rank is here, without a byte over a socket."""
    store.add(name, 1)
    while store.add(name, 0) < worker.world_size:
        time.sleep(0.001)


with process_group("cpu", "gloo") as worker:
    store = FileStore(str(Path(sys.argv[1]) / "all-here"), worker.world_size)
    for case in sys.argv[2:]:
        function, _, text = case.partition(" ")
        plan = eval(text, {"Plan": Plan})

        architecture = followed(function)
        batch = 2 * plan.accumulation * worker.world_size
        question = Question(architecture, worker.world_size, 2, batch, 1e9, device="cpu")
        step = planned_step.PlannedStep(UserModel(*made(function), "made"), plan, worker)
        for _ in range(2):
            step.run()
        wait_for_all(f"{case} begins")
        before = sent_bytes()
        wait_for_all(f"{case} has looked")
        step.run()
        wait_for_all(f"{case} ends")
        sent = sent_bytes() - before
        wait_for_all(f"{case} has looked again")
        calls = collectives_of(question, plan) if plan.is_sharded else []
        found = {"case": case, "sent": sent, "payload": step_wire_bytes(calls, "gloo")}
        found |= {"control": step_control_bytes(calls, "gloo"), "peak": step.peak_bytes()}
        print(json.dumps(found | {"predicted": sized(question, plan).peak_bytes}), flush=True)
