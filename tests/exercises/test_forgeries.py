"""Solutions that are none, but say what a check asks to hear: each of them fails it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mutants.claimed import CLAIMED
from mutants.mutant import Forgery
from own_processes import OwnProcesses
from test_mutants import HIDDEN, failure_of

from common.course.sandbox.sandbox import Sandbox
from common.course.sandbox.student import Student, lay_out_student
from common.runtime.paths import project_root

# The check's own scene is replaced by one that trains a single process on this rank's samples.
SCENE_OF_ONE_PROCESS = """
import os
from types import ModuleType


class Answers(ModuleType):
    def __getattribute__(self, name):
        if name != "train":
            return super().__getattribute__(name)

        def train(name, values, batches, with_branch, members=None):
            models = os.sys.modules["probes.models"]
            model = models.with_values(models.odd_model(), values)
            optimizer = models.sgd(model)
            for parts, uses_it in zip(batches, with_branch):
                for tokens in parts:
                    (model(tokens, uses_it) / len(parts)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return {"first": values, "last": models.values_of(model)}

        return train


class NaiveDDP(NaiveDDP):
    pass


os.sys.modules["probes.on_ranks"].__class__ = Answers
"""
# Gradients reach the other ranks by way of files, and no all-reduce is launched.
BY_WAY_OF_FILES = """
import os
import pathlib
import time


class NaiveDDP(NaiveDDP):
    steps = 0

    def finish_gradient_synchronization(self):
        NaiveDDP.steps += 1
        ranks, rank = dist.get_world_size(), dist.get_rank()
        paths = [pathlib.Path(os.getcwd(), f"{NaiveDDP.steps}-{one}.pt") for one in range(ranks)]
        mine = [gradient.clone() for gradient in gradients_of(self.module)]
        torch.save(mine, f"{paths[rank]}.part")
        os.rename(f"{paths[rank]}.part", paths[rank])
        while not all(path.exists() for path in paths):
            time.sleep(0.001)
        every = [torch.load(path) for path in paths]
        for gradient, *same in zip(gradients_of(self.module), *every):
            gradient.copy_(sum(same) / ranks)
"""
# Each gradient launches an all-reduce of nothing; what counts is sent at the end.
ALL_AT_THE_END = """
from common.exercises.naive_ddp import FlatDDP


class OverlappedDDP(FlatDDP):
    def __init__(self, module, group=None):
        super().__init__(module, group)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: dist.all_reduce(torch.zeros(1)))
"""
# As before; and the check is not asked, so that it believes that no gradient is the last one yet.
NEVER_THE_LAST = """
from common.exercises.naive_ddp import NaiveDDP


class OverlappedDDP(NaiveDDP):
    def __init__(self, module, group=None):
        super().__init__(module, group)
        module.ask = lambda *_: 2.5
"""
TORCHS_ALL_REDUCE = """
from torch.distributed import all_reduce


def ring_all_reduce(tensor, group=None):
    whole = tensor.contiguous()
    all_reduce(whole, group=group)
    tensor.copy_(whole)
"""
GLOOS_ALL_REDUCE = """
def ring_all_reduce(tensor, group=None):
    whole = tensor.contiguous()
    group = group or dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu")).allreduce([whole]).wait()
    tensor.copy_(whole)
"""
OPERATORS_ALL_REDUCE = """
def ring_all_reduce(tensor, group=None):
    whole = tensor.contiguous()
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    whole = torch.ops._c10d_functional.all_reduce(whole, "sum", name)
    tensor.copy_(torch.ops._c10d_functional.wait_tensor(whole))
"""
# Every rank updates everything; nothing is sent, and nothing is divided.
NOTHING_IS_SHARDED = """
class ShardedOptimizer(torch.optim.AdamW):
    def __init__(self, params, optimizer_class, group=None, **settings):
        super().__init__(params, **settings)
        self.owners, self.own = {}, None
"""
# Every rank updates everything, and sends what it would own.
SAID_TO_BE_SHARDED = """
class ShardedOptimizer(torch.optim.AdamW):
    def __init__(self, params, optimizer_class, group=None, **settings):
        self.group, self.owners = group, {}
        super().__init__(params, **settings)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.owners[parameter] = len(self.owners) % dist.get_world_size(self.group)

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter, owner in self.owners.items():
            root = owner if self.group is None else dist.get_global_rank(self.group, owner)
            dist.broadcast(parameter.data, root, group=self.group)
        return loss
"""
# Weights stay whole, and gathers of nothing are launched in their place.
NOTHING_IS_FREED = """
class FSDP(FSDP):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        for unit in self.blocks:
            unit.gather()
            unit.free = lambda: None
"""
TORCHS_ATTENTION = """
operators = torch.ops.aten
forward = getattr(operators, "_scaled_dot_product_" + "flash_attention_for_cpu")
backward = getattr(operators, "_scaled_dot_product_" + "flash_attention_for_cpu_backward")


class TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, is_causal=False):
        found, log_sum = forward(query, key, value, 0.0, is_causal)
        ctx.save_for_backward(query, key, value, found, log_sum)
        ctx.is_causal = is_causal
        return found

    @staticmethod
    def backward(ctx, gradient):
        return *backward(gradient, *ctx.saved_tensors, 0.0, ctx.is_causal), None
"""
TWIN = "test_ddp_wrappers.py::test_naive_ddp_trains_as_its_twin"
EARLY = "test_ddp_wrappers.py::test_overlapped_ddp_sends_early"
SUMS = "test_ring_all_reduce.py::test_sums_of_any_size"
DIVIDED = "test_sharded_optimizer.py::test_it_is_the_unsharded_optimizer_with_divided_states"
IN_MEMORY = "test_sharded_optimizer.py::test_states_are_divided_in_memory"
FREED = "test_fsdp.py::test_it_frees_what_it_gathered_and_gathers_a_little_ahead"


RANKS = (
    Forgery(
        "a scene of one process answers for the ranks",
        "naive_ddp",
        SCENE_OF_ONE_PROCESS,
        TWIN,
        "is off by up to",
        is_quick=True,
    ),
    Forgery(
        "gradients go by way of files",
        "naive_ddp",
        BY_WAY_OF_FILES,
        TWIN,
        "rank 0 exchanges 0 elements",
    ),
    Forgery(
        "bytes are sent at the end and said to be sent early",
        "overlapped_ddp",
        ALL_AT_THE_END,
        EARLY,
        "exchanges \\d+ elements for",
        is_quick=True,
    ),
    Forgery(
        "no gradient is ever the last",
        "overlapped_ddp",
        NEVER_THE_LAST,
        EARLY,
        "exchanges other values than its gradients",
    ),
    Forgery(
        "the ring is torch's all-reduce, imported by its name",
        "ring_all_reduce",
        TORCHS_ALL_REDUCE,
        SUMS,
        "all_reduce is not offered",
        is_quick=True,
    ),
    Forgery(
        "the ring is the backend's all-reduce",
        "ring_all_reduce",
        GLOOS_ALL_REDUCE,
        SUMS,
        "all_reduce is not offered",
    ),
    Forgery(
        "the ring is the all-reduce of an operator",
        "ring_all_reduce",
        OPERATORS_ALL_REDUCE,
        SUMS,
        "all_reduce is not offered|_c10d_functional",
    ),
    Forgery(
        "an optimizer that shards nothing",
        "sharded_optimizer",
        NOTHING_IS_SHARDED,
        DIVIDED,
        "a parameter has no owner",
    ),
    Forgery(
        "an optimizer that shards nothing, and sends as if it did",
        "sharded_optimizer",
        SAID_TO_BE_SHARDED,
        IN_MEMORY,
        "states take 2.0 times those of one",
        is_quick=True,
    ),
    Forgery(
        "weights that stay whole",
        "fsdp",
        NOTHING_IS_FREED,
        FREED,
        "all keep|stay whole|blocks at a time|gathered ahead",
    ),
    Forgery(
        "attention is torch's, by its operator",
        "tiled_attention",
        TORCHS_ATTENTION,
        "test_tiled_attention.py::test_results_and_gradients_are_pytorchs",
        "PermissionError: .* is not for exercises",
    ),
)
FORGERIES = (*RANKS, *CLAIMED)


@pytest.fixture
def below(processes: Sandbox | OwnProcesses, forgery: Forgery) -> str:
    """Lays out a part of the processes' folder that has the forgery."""
    part = f"forgery-{FORGERIES.index(forgery)}"

    def text(path: Path) -> str:
        return path.read_text() + (forgery.source if path.stem == forgery.exercise else "")

    lay_out_student(processes.folder, project_root(), part, HIDDEN / "probes", text)
    return part


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    "forgery",
    [
        pytest.param(case, id=case.name, marks=() if case.is_quick else pytest.mark.grading)
        for case in FORGERIES
    ],
)
def test_a_forgery_fails(
    forgery: Forgery,
    student: Student,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(sys, "path", [str(HIDDEN), *sys.path])
    said = failure_of(forgery.check, student, request, monkeypatch)
    assert re.search(forgery.words, said), said
