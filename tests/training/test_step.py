"""A training step against the loop that one would write by hand."""

from __future__ import annotations

import os
import shutil
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from refusals import problem
from torch import Tensor

from common.models.gpt2 import GPT2, GPT2Config
from common.perfmodel.one_device.workload import Workload
from common.training.precision import set_tf32
from common.training.step import TrainingStep, build_model, build_optimizer

CPU = torch.device("cpu")
TINY = GPT2Config(vocab_size=211, n_positions=32, n_layer=2, n_head=4, n_embd=32)
STEPS, LR = 3, 1e-2


def tiny_model(config: GPT2Config = TINY, **options) -> GPT2:
    torch.manual_seed(0)
    return GPT2(config, **options)


def batches(count: int = STEPS, batch_size: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return [tuple(torch.randint(211, (2, batch_size, 16)).unbind(0)) for _ in range(count)]


def workload(**options) -> Workload:
    return Workload("gpt2-nano", batch_size=4, seq_len=16, **options)


def step_of(model: GPT2, **options) -> TrainingStep:
    return TrainingStep(workload(**options), CPU, model=model, lr=LR)


def by_hand(
    model: GPT2,
    data: list[tuple[Tensor, Tensor]],
    dtype: torch.dtype = torch.float32,
    optimizer: str = "adamw",
) -> list[float]:
    """Takes plain steps: logits, cross-entropy, backward, update; returns their losses."""
    if optimizer == "sgd":
        update = torch.optim.SGD(model.parameters(), lr=LR)
    else:
        update = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for tokens, targets in data:
        update.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def taken(step: TrainingStep, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Takes one step per batch; returns their losses."""
    source = iter(data)
    return [step.run(source).item() for _ in data]


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-6),
        ({"attention": "eager"}, 1e-5),
        ({"activation_checkpointing": True}, 1e-6),
        ({"loss_chunks": 3}, 1e-5),
        ({"optimizer_implementation": "foreach"}, 1e-5),
        ({"optimizer_implementation": "fused"}, 1e-5),
        ({"optimizer": "sgd"}, 1e-6),
        ({"precision": "bfloat16"}, 5e-3),
        ({"precision": "bfloat16", "loss_chunks": 3, "attention": "eager"}, 2e-2),
        ({"precision": "float16", "optimizer": "sgd"}, 5e-3),
    ],
    ids=str,
)
def test_losses_are_those_of_a_loop_by_hand(options, tolerance):
    dtype = getattr(torch, options.get("precision", "float32"))
    kept = ("attention", "activation_checkpointing", "loss_chunks")
    model = tiny_model(**{key: options[key] for key in kept if key in options})
    step = step_of(model, **options)
    expected = by_hand(tiny_model(), batches(), dtype, options.get("optimizer", "adamw"))
    losses = taken(step, batches())
    assert losses == pytest.approx(expected, rel=tolerance)
    assert losses[0] != losses[1]


def test_a_step_builds_the_model_that_its_workload_says():
    options = {"attention": "eager", "activation_checkpointing": True, "loss_chunks": 3}
    made = build_model(workload(**options, vocab_multiple=1000), CPU)
    assert made.wte.num_embeddings == 9000
    assert made.activation_checkpointing
    assert made.loss_chunks == 3
    assert torch.equal(weights(made), weights(build_model(workload(vocab_multiple=1000), CPU)))
    again = build_model(workload(vocab_multiple=1000), CPU, seed=1)
    assert not torch.equal(weights(made), weights(again))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_micro_batches_make_the_step_of_the_joined_batch(precision):
    halves = batches(2 * STEPS, batch_size=2)
    joined = [
        tuple(torch.cat(pair) for pair in zip(*halves[i : i + 2], strict=True))
        for i in range(0, 2 * STEPS, 2)
    ]
    accumulated = step_of(tiny_model(), gradient_accumulation=2, precision=precision)
    whole = step_of(tiny_model(), precision=precision)
    source = iter(halves)
    losses = [accumulated.run(source).item() for _ in range(STEPS)]
    assert next(source, None) is None  # each step took its two
    exact = precision == "float32"
    assert losses == pytest.approx(taken(whole, joined), rel=1e-5 if exact else 5e-3)
    if exact:
        difference = (weights(accumulated.model) - weights(whole.model)).norm()
        assert difference <= 1e-3 * weights(whole.model).norm()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_implementations_of_an_optimizer_make_the_same_weights(optimizer, implementation):
    # Of the same gradients: AdamW divides by their size, so that rounding of near-zero ones in
    # a forward pass would grow.
    models = [tiny_model(), tiny_model()]
    for model, how in zip(models, ("for-loop", implementation), strict=True):
        chosen = workload(optimizer=optimizer, optimizer_implementation=how)
        update = build_optimizer(model.parameters(), chosen, LR)
        for number in range(STEPS):
            torch.manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            update.step()
    torch.testing.assert_close(weights(models[0]), weights(models[1]), atol=1e-6, rtol=1e-5)
    assert not torch.equal(weights(models[1]), weights(tiny_model()))


def test_gradients_are_dropped_after_the_update_and_the_loss_holds_no_graph():
    step = step_of(tiny_model())
    assert not step.run(batches(1)).requires_grad
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_float16_scales_the_loss_and_the_others_do_not():
    assert step_of(tiny_model(), precision="float16").scaler.get_scale() == 65536
    for precision in ("float32", "bfloat16"):
        assert not step_of(tiny_model(), precision=precision).scaler.is_enabled()


def test_a_float16_overflow_leaves_the_weights_and_lowers_the_scale():
    step = step_of(tiny_model(), precision="float16", optimizer="sgd")
    before = weights(step.model)
    for parameter in step.model.parameters():
        parameter.register_hook(lambda gradient: gradient * float("inf"))
    step.run(batches(1))
    assert torch.equal(weights(step.model), before)
    assert step.scaler.get_scale() == 32768


@pytest.fixture
def tf32_kept():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_tf32_is_set_by_each_step_and_so_does_not_outlast_it(tf32_kept):
    # Two steps in one process, as when options are measured side by side.
    fast, exact = (step_of(tiny_model(), tf32=tf32) for tf32 in (True, False))
    for step, expected in ((fast, True), (exact, False), (fast, True), (exact, False)):
        step.run(batches(1))
        assert torch.backends.cuda.matmul.allow_tf32 is expected
        assert torch.backends.cudnn.allow_tf32 is expected


@pytest.mark.parametrize("before", ["old", "new", "warns"])
@pytest.mark.parametrize("enabled", [True, False])
def test_both_apis_agree_on_tf32_whichever_was_used_before(
    tf32_kept, monkeypatch, recwarn, before, enabled
):
    # torch.compile reads one or the other, and fails where they differ.
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if before == "new":  # as transformers does
        for switch in (cuda.matmul, cudnn.conv, cudnn.rnn):
            switch.fp32_precision = "ieee" if enabled else "tf32"
    if before == "warns":  # as torch 2.9 does, once a process
        set_quietly = torch._C._set_cublas_allow_tf32

        def set_with_warning(value: bool) -> None:
            warnings.warn("Please use the new API settings to control TF32", stacklevel=2)
            set_quietly(value)

        monkeypatch.setattr(torch._C, "_set_cublas_allow_tf32", set_with_warning)
    set_tf32(enabled)
    assert not recwarn
    assert cuda.matmul.allow_tf32 is cudnn.allow_tf32 is enabled
    for switch in (cuda.matmul, cudnn.conv, cudnn.rnn):
        assert (switch.fp32_precision == "tf32") is enabled
    assert torch.get_float32_matmul_precision() == ("high" if enabled else "highest")


def has_compiler() -> bool:
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return any(name and shutil.which(name) for name in names)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler for torch.compile")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_takes_the_same_steps(monkeypatch, backend):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    small = GPT2Config(vocab_size=211, n_positions=16, n_layer=1, n_head=2, n_embd=32)
    eager = step_of(tiny_model(small, loss_chunks=2), loss_chunks=2)
    compiled = step_of(tiny_model(small, loss_chunks=2), loss_chunks=2, compile=True)
    try:
        losses = taken(compiled, batches())
    finally:
        torch._dynamo.reset()
    assert losses == pytest.approx(taken(eager, batches()), rel=1e-4)


def test_compiling_without_a_compiler_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    line = problem(step_of, tiny_model(), compile=True)
    assert "g++" in line
    assert "leave out --compile" in line


@pytest.mark.slow  # compiles; the refusal above names what is missing
def test_a_compiler_named_by_cxx_is_enough(monkeypatch, tmp_path):
    compiler = tmp_path / "my-compiler"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "my-compiler")
    step_of(tiny_model(), compile=True)  # compiles when it is first run, which is not here
