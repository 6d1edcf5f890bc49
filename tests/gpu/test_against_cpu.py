"""On a GPU a step computes what it computes on the CPU in float64; elsewhere nothing runs here."""

from __future__ import annotations

import copy

import pytest
import torch
from ddplab_watch.marks import CudaClock
from torch import Tensor

from common.perfmodel.one_device.workload import Workload
from common.training.step import TrainingStep, build_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STEPS = 20


def workload(**options: object) -> Workload:
    """Makes a step of gpt2-nano with these options."""
    return Workload(model="gpt2-nano", batch_size=3, seq_len=96, **options)


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Draws ``count`` batches of random tokens and targets, a few of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = workload().config.vocab_size
    drawn = torch.randint(vocabulary, (count, 2, 3, 96), generator=generator)
    drawn[:, 1, :, -3:] = -100
    return [(tokens, targets) for tokens, targets in drawn]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Computes the norm of the difference over the norm of what was expected."""
    found = found.detach().to("cpu", torch.float64)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        pytest.param({}, 1e-5, id="float32"),
        pytest.param({"attention": "eager"}, 1e-5, id="eager"),
        pytest.param({"loss_chunks": 5}, 1e-5, id="loss in pieces"),
        pytest.param({"activation_checkpointing": True}, 1e-5, id="checkpointing"),
        pytest.param({"compile": True}, 1e-5, id="compiled"),
        pytest.param({"tf32": True}, 5e-3, id="tf32"),
        pytest.param({"precision": "bfloat16"}, 3e-2, id="bfloat16"),
        pytest.param({"precision": "bfloat16", "compile": True}, 3e-2, id="bfloat16 compiled"),
        pytest.param({"precision": "bfloat16", "loss_chunks": 5}, 3e-2, id="bfloat16 in pieces"),
    ],
)
def test_loss_and_gradients_are_those_of_float64_on_the_cpu(options: dict, limit: float) -> None:
    chosen = workload(**options)
    on_gpu = TrainingStep(chosen, GPU, model=build_model(chosen, GPU, seed=7))
    reference = copy.deepcopy(build_model(workload(), CPU, seed=7)).double()
    reference.load_state_dict(on_gpu.model.state_dict())
    [(tokens, targets)] = batches(1, seed=11)

    expected = reference(tokens, targets)
    expected.backward()
    from common.training.precision import set_tf32

    set_tf32(chosen.tf32)
    try:
        loss = on_gpu.forward(tokens.to(GPU), targets.to(GPU))
        loss.backward()
    finally:
        set_tf32(False)

    assert relative_error(loss, expected.detach()) < limit
    found = dict(on_gpu.model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert relative_error(found[name].grad, parameter.grad) < limit * 5, name


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_training_follows_float64_on_the_cpu(implementation: str) -> None:
    on_gpu = TrainingStep(workload(optimizer_implementation=implementation), GPU, seed=7)
    reference = build_model(workload(), CPU, seed=7).double()
    reference.load_state_dict(on_gpu.model.state_dict())
    on_cpu = TrainingStep(workload(), CPU, model=reference)

    for tokens, targets in batches(1, seed=3) * STEPS:
        expected = on_cpu.run([(tokens, targets)])
        loss = on_gpu.run([(tokens.to(GPU), targets.to(GPU))])
        assert float(loss) == pytest.approx(float(expected), rel=2e-4)
    assert float(expected) < 9.0  # it has learned something of the one batch


def test_a_stream_is_held_at_least_as_long_as_asked() -> None:
    clock = CudaClock(GPU)
    for seconds in (1e-3, 20e-3):
        clock.wait()
        start = clock.mark()
        clock.hold(seconds)
        end = clock.mark()
        clock.wait()
        assert clock.elapsed_s(start, end) >= seconds
