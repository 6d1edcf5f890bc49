"""Operations per token against PyTorch's own counter and Megatron's formula; extrapolations against
what the course printed and what Narayanan et al. published."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.analysis.one_device.throughput_text import naive_block
from common.models.gpt2 import GPT2
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.flops import (
    ONE_TRILLION,
    TOKENS,
    by_operations,
    by_parameters,
    mfu,
    training_flops_per_token,
)

CONFIG = GPT2Config(vocab_size=211, n_positions=48, n_layer=3, n_head=2, n_embd=32)
BATCH, LENGTH = 2, 40
GPT2_SMALL = 124_439_808


def counted(**how: bool) -> float:
    """Counts operations per token as torch does: matrix products, attention's among them."""
    model = GPT2(CONFIG, attention="eager", **how)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops() / (BATCH * LENGTH)


def test_training_is_what_torch_counts() -> None:
    assert training_flops_per_token(CONFIG, LENGTH) == counted()


def test_mfu_does_not_count_what_checkpointing_repeats() -> None:
    needed = training_flops_per_token(CONFIG, LENGTH)
    assert counted(activation_checkpointing=True) > needed
    assert mfu(1.0, CONFIG, LENGTH, peak_flops_per_s=needed) == 1


def test_the_large_model_agrees_with_megatrons_formula() -> None:
    # Narayanan et al. 2021, equation 3, with recomputed blocks:
    # F = 96 B s l h² (1 + s / 6h + V / 16lh), here for one token.
    layers, width = ONE_TRILLION.n_layer, ONE_TRILLION.n_embd
    vocabulary, length = ONE_TRILLION.vocab_size, ONE_TRILLION.n_positions
    share = 1 + length / (6 * width) + vocabulary / (16 * layers * width)
    needed = training_flops_per_token(ONE_TRILLION, length)
    ours = needed + needed / 3 - 2 * vocabulary * width
    assert ours == pytest.approx(96 * layers * width**2 * share, rel=1e-12)


def test_mfu_of_a_published_run() -> None:
    # nanoGPT's table for GPT-2 (124M), sequence 1024: 6N + 12·12·12·64·1024 with all weights but
    # the position embeddings, 855 million operations a token. Biases and norms are 0.1 % of that.
    per_token = 6 * (GPT2_SMALL - 1024 * 768) + 12 * 12 * 768 * 1024
    assert training_flops_per_token(GPT2Config(), 1024) == pytest.approx(per_token, rel=1e-3)
    assert mfu(312e12 / per_token, GPT2Config(), 1024, 312e12) == pytest.approx(1, rel=1e-3)


def test_the_courses_figures() -> None:
    # Printed from a rate that itself was printed as 32,582.4: 28,545,911 days is within what that
    # rounding allows, which is 44 days either way.
    large = by_parameters(32_582.4, GPT2_SMALL)
    assert large.days == pytest.approx(28_545_911, abs=44)
    assert round(large.years, 1) == 78_208.0
    text = naive_block("GPT-2 Small", 32_582.396, GPT2_SMALL)
    assert text.strip().splitlines() == [
        "--- Modern LLM Training Extrapolation ---",
        "GPT-2 Small: 32,582 tokens/sec",
        "1T Model throughput: 4.055 tokens/sec",
        "Training 10T tokens:",
        "Time: 28,545,911 days (78208.0 years)",
    ]


def test_the_large_model_has_the_published_size() -> None:
    assert round(ONE_TRILLION.num_parameters() / 1e9, 1) == 1008.0


def test_a_published_estimate() -> None:
    # Narayanan et al. 2021, section 5.1.1: 450 billion tokens on 3,072 GPUs at 163 TFLOP/s each
    # take about 84 days. Their rate counts recomputed blocks, which training does not need.
    length = ONE_TRILLION.n_positions
    needed = training_flops_per_token(ONE_TRILLION, length)
    head = 2 * ONE_TRILLION.vocab_size * ONE_TRILLION.n_embd
    recomputed = needed / 3 - head
    useful = 3072 * 163e12 * needed / (needed + recomputed)
    assert by_operations(useful).days * 450e9 / TOKENS == pytest.approx(84, rel=0.02)


def test_the_two_ways_differ_by_what_is_not_proportional_to_parameters() -> None:
    # Counted by parameters alone, 6 operations each, both ways would be one.
    rate, config, length = 1000.0, GPT2Config(), 1024
    per_token = training_flops_per_token(config, length)
    large = by_operations(rate * per_token)
    per_parameter = per_token / config.num_parameters()
    large_per_parameter = training_flops_per_token(ONE_TRILLION, 2048) / 1e12
    ratio = by_parameters(rate, config.num_parameters()).days / large.days
    assert ratio == pytest.approx(per_parameter / large_per_parameter)
    assert ratio == pytest.approx(1.12, abs=0.005)  # attention: 13 % of GPT-2 Small, 1 % of it


def test_devices_are_counted_in_whole() -> None:
    large = by_operations(1e15)
    assert large.devices_for(90) * 90 >= large.days > (large.devices_for(90) - 1) * 90
