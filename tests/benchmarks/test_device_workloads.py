"""Models and batches are drawn where they are used, and on the CPU they are what they always were.

The device "meta" stands in for a GPU: its tensors have no memory, so nothing can be drawn there
first and copied.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from common.benchmarks.scaling.workloads import MlpSizes, identities, mlp_workload
from common.benchmarks.steps import StepSettings, gpt2_step
from common.models.gpt2 import GPT2
from common.models.mlp import MLP
from common.perfmodel.one_device.workload import Workload
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import current_ranks
from common.training.step import build_model

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
SIZES = MlpSizes(input_dim=8, hidden_dim=6, num_layers=2, output_dim=4)
NANO = Workload("gpt2-nano", 1, 8)
STEP = StepSettings(model="gpt2-nano", batch_size=1, max_seq_len=8)


def model_of_a_step(device: torch.device) -> nn.Module:
    """Returns the model that the benchmarks of assignment 2 run."""
    return gpt2_step(STEP, Worker(current_ranks({}), device, "gloo")).model


@pytest.fixture
def drawn_on(monkeypatch):
    """Collects the devices on which initial weights are drawn."""
    devices = set()
    for name in ("normal_", "kaiming_uniform_", "uniform_"):
        draw = getattr(nn.init, name)

        def watched(tensor, *args, draw=draw, **kwargs):
            devices.add(tensor.device.type)
            return draw(tensor, *args, **kwargs)

        monkeypatch.setattr(nn.init, name, watched)
    return devices


@pytest.mark.parametrize(
    "build",
    [
        lambda device: build_model(NANO, device),
        model_of_a_step,
        lambda device: mlp_workload(SIZES, device, seed=3).build(1),
    ],
    ids=["GPT-2", "a step of GPT-2", "MLP"],
)
def test_weights_are_drawn_on_the_device(drawn_on, build):
    model = build(ELSEWHERE)
    assert drawn_on == {"meta"}
    assert {tensor.device for tensor in model.state_dict().values()} == {ELSEWHERE}


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_on_the_cpu_the_seed_gives_the_weights_it_gives_a_plain_model():
    torch.manual_seed(42)
    plain = GPT2(NANO.config)
    assert same(plain, build_model(NANO, CPU))
    assert same(plain, model_of_a_step(CPU))
    torch.manual_seed(3)
    assert same(MLP(8, 6, 2, 4), mlp_workload(SIZES, CPU, seed=3).build(1))


def test_batches_are_drawn_on_the_device(monkeypatch):
    asked = []
    randn, generator = torch.randn, torch.Generator
    gpu = torch.device("cuda", 0)

    def made(device: torch.device = CPU) -> torch.Generator:
        asked.append(device)
        return generator()

    def drawn(*shape, generator, device=CPU) -> torch.Tensor:
        asked.append(device)
        return randn(*shape, generator=generator)

    monkeypatch.setattr(torch, "Generator", made)
    monkeypatch.setattr(torch, "randn", drawn)
    mlp_workload(SIZES, gpu, seed=3).make_batch(5, 7, 2, 4)
    assert asked == [gpu, gpu, gpu]


def test_on_the_cpu_a_batch_is_what_a_generator_of_its_own_gives():
    batch = mlp_workload(SIZES, CPU, seed=3).make_batch(5, 7, 2, 4)
    state = np.random.SeedSequence([3, 7, 2]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]))
    assert torch.equal(batch.inputs[0], torch.randn(5, 8, generator=generator))
    assert torch.equal(batch.targets, torch.randn(5, 4, generator=generator))


def test_identities_bring_two_values_of_a_row_to_the_host(monkeypatch):
    brought = []
    cpu = torch.Tensor.cpu

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        brought.append(tensor.numel())
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", watched)
    numbers = identities(torch.tensor([[0.0, 1.0, 2.0], [2.0, -1.0, 3.0]]))
    assert brought == [2 * 2]
    # By IEEE 754 the bits of 1.0 are 3f800000, of 2.0 40000000 and of −1.0 bf800000.
    assert numbers.tolist() == [0x00000000_3F800000, 0x40000000_BF800000]
