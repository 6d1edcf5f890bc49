"""The options benchmark on a GPU: one arm is on it, the others rest on the host.

No GPU is needed: a move from the CPU to the CPU copies, too, so that what would be lost on the way
shows in the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretended_gpu import pretend_gpu

from common.benchmarks.one_device import options
from common.benchmarks.one_device.option_arms import plan_arms
from common.benchmarks.one_device.options import (
    OptionsBenchmark,
    check_memory,
    main,
    rest,
    states_of,
)
from common.errors import UserError
from common.models.gpt2 import GPT2, GPT2Config
from common.perfmodel.one_device.workload import Workload
from common.training.step import TrainingStep

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = GPT2Config(vocab_size=211, n_positions=16, n_layer=1, n_head=2, n_embd=32)


def check(settings: OptionsBenchmark) -> int:
    """Looks at the memory of all arms that the settings have on a GPU; returns their number."""
    arms = [arm for arm in plan_arms(settings.baseline(), GPU) if not arm.reason]
    check_memory(arms, GPU)
    return len(arms)


def test_the_defaults_fit_a_gpu_of_40_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, gpu_bytes=40e9, host_bytes=100e9)
    assert check(OptionsBenchmark()) >= 19


def test_a_gpu_that_is_too_small_for_one_arm_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(monkeypatch, gpu_bytes=40e9)
    with pytest.raises(UserError, match=r"arm \S+ of gpt2-xl takes [\d.]+ GiB, .* GPU") as caught:
        check(OptionsBenchmark(model="gpt2-xl"))
    assert "\n" not in str(caught.value)


def test_a_host_that_is_too_small_for_all_arms_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GPT-2 and AdamW's states are 124 million × 12 bytes an arm: 19 of them are 28 GB.
    pretend_gpu(monkeypatch, gpu_bytes=40e9, host_bytes=20e9)
    with pytest.raises(UserError, match=r"arms of gpt2 keep .* on the host.* --arms") as caught:
        check(OptionsBenchmark())
    assert "\n" not in str(caught.value)


def step_of(compiled: bool = False, **chosen: object) -> TrainingStep:
    torch.manual_seed(0)
    workload = Workload("gpt2-nano", batch_size=4, seq_len=16, **chosen)
    step = TrainingStep(workload, CPU, model=GPT2(SMALL), lr=1e-2)
    if compiled:  # with the guards of any compiled code, without a compiler's minute
        step.loss_of = torch.compile(step.model, backend="aot_eager")
    return step


def losses(step: TrainingStep, between: Callable[[], None]) -> list[float]:
    torch.manual_seed(5)
    found = []
    for _ in range(4):
        found.append(step.run([torch.randint(211, (2, 4, 16)).unbind(0)]).item())
        between()
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"optimizer_implementation": "fused"},
        {"optimizer_implementation": "foreach"},
        {"precision": "float16"},
        pytest.param({"compiled": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_that_rested_goes_on_as_if_it_had_not(chosen: dict) -> None:
    rested, awake = step_of(**chosen), step_of(**chosen)
    parameters = list(rested.model.parameters())

    def rest_and_wake() -> None:
        before = {id(tensor): tensor.data_ptr() for tensor in states_of(rested)}
        wake = rest(rested, CPU)
        # The same tensors, states and parameters, each with a copy of its data.
        assert len(before) > 3 * len(parameters)
        assert all(before[id(tensor)] != tensor.data_ptr() for tensor in states_of(rested))
        wake()

    try:
        # Compiled code is used again: a guard that failed would be an error.
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = losses(rested, rest_and_wake)
        torch._dynamo.reset()
        assert found == losses(awake, lambda: None)
    finally:
        torch._dynamo.reset()
    assert all(a is b for a, b in zip(parameters, rested.model.parameters(), strict=True))
    for one, other in zip(states_of(rested), states_of(awake), strict=True):
        assert torch.equal(one, other)


def test_what_was_elsewhere_is_not_brought_along() -> None:
    step = step_of()
    losses(step, lambda: None)
    state = next(iter(step.optimizer.state.values()))
    state["elsewhere"] = torch.empty(3, device="meta")  # whose data could not be copied
    rest(step, CPU)()
    assert state["elsewhere"].device.type == "meta"


def test_one_arm_at_a_time_is_awake_and_computes_what_it_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = OptionsBenchmark(
        model="gpt2-pico",
        batch_size=1,
        seq_len=32,
        optimizer="sgd",
        arms=("sdpa",),
        rounds=2,
        num_steps=1,
        warmup_steps=0,
        device="cpu",
    )
    run = TrainingStep.run
    found: dict[str, list[float]] = {"awake": [], "resting": []}
    made, resting = set(), set()

    def watched(step: TrainingStep, batches: object) -> torch.Tensor:
        made.add(id(step))
        assert case == "awake" or made - resting == {id(step)}
        loss = run(step, batches)
        found[case].append(loss.item())
        return loss

    def watched_rest(step: TrainingStep, place: torch.device) -> Callable[[], None]:
        wake = rest(step, place)
        resting.add(id(step))
        return lambda: (resting.remove(id(step)), wake())

    monkeypatch.setattr(TrainingStep, "run", watched)
    case = "awake"
    main(replace(settings, output_dir=str(tmp_path / case)))
    made.clear()
    monkeypatch.setattr(options, "resting_place", lambda device: CPU)
    monkeypatch.setattr(options, "rest", watched_rest)
    case = "resting"
    main(replace(settings, output_dir=str(tmp_path / case)))
    assert found["resting"] == found["awake"]
    assert len(resting) == 3
