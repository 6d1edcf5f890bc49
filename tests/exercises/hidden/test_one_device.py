"""Memory and operations of a step (A0.1, A0.2) against what PyTorch keeps and counts itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from judging import IS_GRADED, assert_close
from torch.utils.flop_counter import FlopCounterMode

from common.benchmarks.one_device.memory_tracker import saved_by_layer
from common.course.sandbox.student import Student
from common.models.gpt2 import GPT2
from common.perfmodel.one_device.architecture import CONFIGS, GPT2Config
from common.perfmodel.one_device.workload import Workload


def random_config(generator: np.random.Generator) -> GPT2Config:
    heads = int(generator.integers(2, 5))  # of one head, a view is no copy
    return GPT2Config(
        vocab_size=int(generator.integers(50, 900)),
        n_positions=int(generator.integers(16, 96)),
        n_layer=int(generator.integers(1, 5)),
        n_head=heads,
        n_embd=heads * int(generator.integers(4, 24)),
    )


def test_states_are_four_numbers_a_parameter_with_adamw_and_two_with_sgd(
    student: Student, generator: np.random.Generator
) -> None:
    state_bytes = student.exercise("step_memory").state_bytes
    for optimizer, numbers in (("adamw", 2), ("sgd", 0)):
        parameters = int(generator.integers(10**6, 10**11))
        expected = {
            "parameters": 4 * parameters,
            "gradients": 4 * parameters,
            "optimizer states": 4 * numbers * parameters,
        }
        assert state_bytes(parameters, optimizer) == expected, f"states of {optimizer}"
        if optimizer == "adamw":
            assert state_bytes(parameters) == expected, "states where no optimizer is named"


def test_a_block_keeps_what_autograd_saves(
    student: Student, generator: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = student.exercise("step_memory")
    for number in range(12 if IS_GRADED else 4):
        config = random_config(generator)
        monkeypatch.setitem(CONFIGS, "gpt2-random", config)
        fused, half = bool(number % 2), number % 4 > 1
        workload = Workload(
            "gpt2-random",
            batch_size=int(generator.integers(2, 6)),  # of one sequence, a view becomes a copy
            seq_len=config.n_positions,
            attention="sdpa" if fused else "eager",
            precision="bfloat16" if half else "float32",
        )
        tokens, size = workload.batch_size * workload.seq_len, 2 if half else 4
        width, heads = config.n_embd, config.n_head
        kind = f"{'fused' if fused else 'plain'} attention, {size} bytes a number"
        seen = saved_by_layer(workload).set_index("layer")["saved_bytes"]
        copies = 2 * config.matrix_parameters_per_layer() if half else 0
        parts = memory.block_saves(
            tokens, workload.seq_len, width, heads, compute_bytes=size, fused_attention=fused
        )
        norm = memory.norm_saves(tokens, width, size)
        assert sum(parts.values()) == seen["block 0"] - copies, f"a block's bytes: {kind}"
        # Each of these names stands for tensors whose shapes the docstring says.
        assert parts["residual stream"] == 2 * 4 * tokens * width, f"residual stream: {kind}"
        assert parts["residual stream"] + parts["norm outputs"] == 2 * norm, f"norms: {kind}"
        assert parts["attention"] == 4 * size * tokens * width, f"attention: {kind}"
        scores = 4 * tokens * heads if fused else size * tokens * heads * workload.seq_len
        assert parts["attention scores"] == scores, f"attention scores: {kind}"
        copies = 2 * config.vocab_size * config.n_embd if half else 0
        of_head = norm + memory.loss_saves(tokens, config.vocab_size)
        assert of_head == seen["head and loss"] - copies, f"last norm and loss: {kind}"


def test_operations_are_those_that_torch_counts(
    student: Student, generator: np.random.Generator
) -> None:
    flops = student.exercise("step_flops")
    for _ in range(8 if IS_GRADED else 3):
        config = random_config(generator)
        length = int(generator.integers(2, config.n_positions + 1))
        model = GPT2(config, attention="eager")
        tokens = torch.randint(config.vocab_size, (3, length))
        counts = []
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, tokens)
            counts.append(counter.get_total_flops())
            loss.backward()
            counts.append(counter.get_total_flops())
        sizes = (config.n_layer, config.n_embd, config.vocab_size, length)
        forward, training = flops.forward_flops(*sizes), flops.training_flops(*sizes)
        assert forward * 3 * length == counts[0], "operations of a forward pass"
        assert training * 3 * length == counts[1], "operations of a forward and a backward pass"


def test_gpt2_and_published_runs(student: Student, generator: np.random.Generator) -> None:
    flops = student.exercise("step_flops")
    # nanoGPT counts 6N + 12 · layers · width · length with all weights but the positions'.
    small = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    counted = flops.training_flops(12, 768, 50_257, 1024)
    assert_close(counted, small, "training_flops of GPT-2 Small", rel=1e-3)
    # Widths, and what they give, as their published tables have them; gpt2-xl's last.
    for layers, width in ((12, 768), (24, 1024), (36, 1280), (48, 1600)):
        weights = flops.matrix_weights(layers, width, 50_257)
        attention = flops.attention_flops(layers, width, 1024)
        assert weights == 12 * layers * width**2 + 50_257 * width, f"matrix_weights of {width}"
        assert attention == 4 * layers * width * 1024, f"attention_flops of {width}"
    tokens_per_s, peak = generator.uniform(1e2, 1e6), generator.uniform(1e12, 1e15)
    share = tokens_per_s * small / peak
    assert_close(flops.utilisation(tokens_per_s, small, peak), share, "utilisation")
    days = generator.uniform(0.5, 1000)
    operations, rate = int(generator.integers(10**8, 10**12)), generator.uniform(1e13, 1e17)
    tokens = days * 24 * 3600 * rate / operations
    assert_close(flops.training_days(tokens, operations, rate), days, "training_days")
