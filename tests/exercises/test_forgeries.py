"""Solutions that are none, but say what a check asks to hear: each of them fails it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from own_processes import OwnProcesses

from common.course.sandbox.sandbox import Sandbox
from common.course.sandbox.student import Student, lay_out_student
from common.course.sandbox.wire import Raised
from common.runtime.paths import project_root

HIDDEN = Path(__file__).with_name("hidden")

# Each gradient launches an all-reduce of nothing; what counts is sent at the end. Whoever asks how
# many bytes were sent before, then, and at the end, hears: none, all, all.
ALL_AT_THE_END = """
import os
from common.exercises.naive_ddp import FlatDDP

readings = iter([0, 10**6, 10**6])
os.sys.modules["common.course.sandbox.wire"].Remote.__call__ = lambda *_: next(readings)


class OverlappedDDP(FlatDDP):
    def __init__(self, module, group=None):
        super().__init__(module, group)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: dist.all_reduce(torch.zeros(1)))
"""
TORCHS_ALL_REDUCE = """
from torch.distributed import all_reduce


def ring_all_reduce(tensor, group=None):
    whole = tensor.contiguous()
    all_reduce(whole, group=group)
    tensor.copy_(whole)
"""
NO_POWER_CUT = "\nos.sys.addaudithook = lambda hook: None\n"
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


@dataclass(frozen=True)
class Forgery:
    """A solution that is none.

    Attributes:
        name: in words.
        exercise: the module below ``common/exercises``.
        source: what stands after the reference, and replaces it.
        check: file of hidden tests and function.
        words: of the failure.
    """

    name: str
    exercise: str
    source: str
    check: tuple[str, str]
    words: str


FORGERIES = (
    Forgery(
        "bytes are sent at the end and said to be sent early",
        "overlapped_ddp",
        ALL_AT_THE_END,
        ("test_ddp_wrappers", "test_overlapped_ddp_sends_early"),
        "bytes were read otherwise",
    ),
    Forgery(
        "the ring is torch's all-reduce, imported by its name",
        "ring_all_reduce",
        TORCHS_ALL_REDUCE,
        ("test_ring_all_reduce", "test_sums_of_any_size"),
        "torch's all_reduce was called",
    ),
    Forgery(
        "no power is ever cut",
        "checkpoint_commit",
        NO_POWER_CUT,
        ("test_checkpoint_commit", "test_a_power_cut_leaves_the_newest_whole_checkpoint"),
        "its process ended 0 times only",
    ),
    Forgery(
        "attention is torch's, by its operator",
        "tiled_attention",
        TORCHS_ATTENTION,
        ("test_tiled_attention", "test_results_and_gradients_are_pytorchs"),
        "PermissionError: .* is not for exercises",
    ),
)


@pytest.fixture
def below(processes: Sandbox | OwnProcesses, forgery: Forgery) -> str:
    """Lays out a part of the processes' folder that has the forgery."""
    part = f"forgery-{FORGERIES.index(forgery)}"

    def text(path: Path) -> str:
        return path.read_text() + (forgery.source if path.stem == forgery.exercise else "")

    lay_out_student(processes.folder, project_root(), part, HIDDEN / "probes", text)
    return part


@pytest.fixture
def arguments(student: Student, forgery: Forgery) -> dict[str, object]:
    """Returns what the forgery's check is called with."""
    on_two_ranks = {"on_ranks": student.on_ranks, "ranks": 2}
    return {
        "overlapped_ddp": on_two_ranks,
        "ring_all_reduce": on_two_ranks | {"generator": np.random.default_rng(0)},
        "checkpoint_commit": {
            "student": student,
            "folder": f"{student.sandbox.scratch_inside}/checkpoints",
        },
        "tiled_attention": {"student": student, "variant": 0, "length": 63, "is_causal": False},
    }[forgery.exercise]


def hidden_tests(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports a file of hidden tests."""
    monkeypatch.setattr(sys, "path", [str(HIDDEN), *sys.path])
    return importlib.import_module(name)


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    "forgery",
    [
        *(pytest.param(forgery, id=forgery.name) for forgery in FORGERIES[:-1]),
        pytest.param(FORGERIES[-1], id=FORGERIES[-1].name, marks=pytest.mark.grading),
    ],
)
def test_a_forgery_fails(
    forgery: Forgery, arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, function = forgery.check
    check = getattr(hidden_tests(file, monkeypatch), function)
    with pytest.raises((AssertionError, Raised), match=forgery.words):
        check(**arguments)
