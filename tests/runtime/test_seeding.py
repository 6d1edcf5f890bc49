"""Random numbers that a measurement draws are missing from no training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import current_ranks
from common.runtime.seeding import kept_random_numbers
from common.scheduling.memory_probe import LocalStep
from common.training.scaling.data_parallel_step import StepOptions
from common.training.scaling.probes import Probed, ProbePlan, probe

GPU = torch.device("cuda", 3)


class Forked(Exception):
    """Ends a probe where it forks the generators, as no GPU is there to go on with."""


def run_scaling_probe(worker: Worker) -> None:
    never = lambda *_: pytest.fail("computed before the generators were forked")  # noqa: E731
    probed = Probed(nn.Linear(2, 2), never, never, never, 4, StepOptions())
    probe(probed, worker, SimpleNamespace(witness=lambda *_: None), ProbePlan())


def run_memory_probe(worker: Worker) -> None:
    LocalStep(nn.Linear(2, 2), 8, worker)(1)


@pytest.mark.parametrize("run", [run_scaling_probe, run_memory_probe])
def test_probes_on_a_gpu_leave_its_generator_as_it_was(monkeypatch, run):
    forked = []

    def fork_rng(devices=None, *_, **__):
        forked.append(list(devices))
        raise Forked

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    with pytest.raises(Forked):
        run(Worker(current_ranks({}), GPU, "nccl"))
    assert forked == [[GPU]]


def test_on_the_cpu_the_next_number_is_what_it_would_have_been():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with kept_random_numbers(torch.device("cpu")):
        torch.rand(100)
    assert torch.equal(torch.rand(4), expected)
