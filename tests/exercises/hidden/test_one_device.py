"""Memory and operations of a step (A0.1, A0.2) against what PyTorch keeps and counts itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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
    student: Student,
) -> None:
    state_bytes = student.exercise("step_memory").state_bytes
    parameters = 124_439_808  # gpt2
    assert state_bytes(parameters) == {
        "parameters": 497_759_232,
        "gradients": 497_759_232,
        "optimizer states": 995_518_464,
    }
    assert sum(state_bytes(parameters, "sgd").values()) == 8 * parameters


def test_a_block_keeps_what_autograd_saves(
    student: Student, generator: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = student.exercise("step_memory")
    for number in range(12):
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
        seen = saved_by_layer(workload).set_index("layer")["saved_bytes"]
        copies = 2 * config.matrix_parameters_per_layer() if half else 0
        found = memory.block_saves(
            tokens,
            workload.seq_len,
            config.n_embd,
            config.n_head,
            compute_bytes=size,
            fused_attention=fused,
        )
        assert sum(found.values()) == seen["block 0"] - copies
        of_head = memory.norm_saves(tokens, config.n_embd, size)
        of_head += memory.loss_saves(tokens, config.vocab_size)
        copies = 2 * config.vocab_size * config.n_embd if half else 0
        assert of_head == pytest.approx(seen["head and loss"] - copies, rel=0.02)


def test_operations_are_those_that_torch_counts(
    student: Student, generator: np.random.Generator
) -> None:
    flops = student.exercise("step_flops")
    for _ in range(8):
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
        assert flops.forward_flops(*sizes) * 3 * length == counts[0]
        assert flops.training_flops(*sizes) * 3 * length == counts[1]


def test_gpt2_and_published_runs(student: Student) -> None:
    flops = student.exercise("step_flops")
    # nanoGPT counts 6N + 12 · layers · width · length with all weights but the positions'.
    small = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert flops.training_flops(12, 768, 50_257, 1024) == pytest.approx(small, rel=1e-3)
    assert flops.matrix_weights(12, 768, 50_257) == 12 * 12 * 768**2 + 50_257 * 768
    assert flops.attention_flops(12, 768, 1024) == 4 * 12 * 768 * 1024
    assert flops.utilisation(1000.0, small, 312e12) == pytest.approx(1000 * small / 312e12)
    # 10^13 tokens at 10^9 operations each and 10^14 a second: 10^8 s.
    assert flops.training_days(1e13, 10**9, 1e14) == pytest.approx(1e8 / 86_400)
