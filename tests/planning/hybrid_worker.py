"""Ranks of two hosts train under the strategies that are named; rank 0 prints what all have seen.

A JSON line per strategy: of each rank its host, the ranks of its groups, its peak and the one that
is predicted, and the bytes that its host's interface sends in a step.
"""

from __future__ import annotations

import json
import os
import socket
import sys

import plan_models
import torch
import torch.distributed as dist

from common.models.traced import traced_architecture
from common.planning.space import Plan, Question, sized
from common.runtime.group.process_group import process_group
from common.training.parallel import make_mesh
from common.tuning.plans import planned_step
from common.tuning.user_model import UserModel

planned_step.PEAKS = 6  # what gloo's threads free is missed at random
STEPS = 3
SAMPLES, TOKENS, BLOCKS = 4, 64, 4


def make() -> tuple:
    batch = torch.randint(50, (SAMPLES, TOKENS))
    return plan_models.Blocks(BLOCKS, 128), batch, plan_models.loss_of


def sent_bytes() -> int:
    """Returns what this host's interface has sent."""
    with open("/proc/net/dev") as lines:
        line = next(line for line in lines if os.environ["GLOO_SOCKET_IFNAME"] in line)
    return int(line.split(":")[1].split()[8])


with process_group("cpu", "gloo") as worker:
    per_node = worker.ranks.local_world_size
    architecture = traced_architecture(make, "made", "cpu")
    batch = SAMPLES * worker.world_size
    question = Question(architecture, worker.world_size, per_node, batch, 1e9, device="cpu")
    for strategy in sys.argv[1:]:
        plan = Plan(strategy, SAMPLES)
        mesh = make_mesh(worker, strategy, per_node)
        step = planned_step.PlannedStep(UserModel(*make(), "made"), plan, worker, mesh)
        step.run()
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        for _ in range(STEPS):
            step.run()
        dist.barrier()
        sent = (sent_bytes() - before) / STEPS
        dist.barrier()
        names = mesh.mesh_dim_names or ()
        seen = worker.gather(
            {
                "host": socket.gethostname(),
                "groups": {n: dist.get_process_group_ranks(mesh.get_group(n)) for n in names},
                "sent": sent,
                "peak": step.peak_bytes(),
                "predicted": sized(question, plan).peak_bytes,
            }
        )
        if worker.is_main:
            parameters = architecture.num_parameters
            print(json.dumps({"strategy": strategy, "parameters": parameters, "ranks": seen}))
