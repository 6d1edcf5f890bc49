"""Operations per token against PyTorch's own counter, and against Megatron's formula."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.models.gpt2 import GPT2
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.flops import (
    ONE_TRILLION,
    forward_flops_per_token,
    mfu,
    training_flops_per_token,
)

CONFIG = GPT2Config(vocab_size=211, n_positions=48, n_layer=3, n_head=2, n_embd=32)
BATCH, LENGTH = 2, 40


def counted(backward: bool, **how: bool) -> float:
    """Counts operations per token as torch does: matrix products, attention's among them."""
    model = GPT2(CONFIG, attention="eager", **how)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH))
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, tokens)
        if backward:
            loss.backward()
    return counter.get_total_flops() / (BATCH * LENGTH)


def test_forward_is_what_torch_counts() -> None:
    assert forward_flops_per_token(CONFIG, LENGTH) == counted(backward=False)


def test_training_is_what_torch_counts() -> None:
    assert training_flops_per_token(CONFIG, LENGTH) == counted(backward=True)


def test_mfu_does_not_count_what_checkpointing_repeats() -> None:
    needed = training_flops_per_token(CONFIG, LENGTH)
    assert counted(backward=True, activation_checkpointing=True) > needed
    assert mfu(1.0, CONFIG, LENGTH, peak_flops_per_s=needed) == 1


def test_the_large_model_agrees_with_megatrons_formula() -> None:
    # Narayanan et al. 2021, equation 3, with recomputed blocks:
    # F = 96 B s l h² (1 + s / 6h + V / 16lh), here for one token.
    layers, width = ONE_TRILLION.n_layer, ONE_TRILLION.n_embd
    vocabulary, length = ONE_TRILLION.vocab_size, ONE_TRILLION.n_positions
    share = 1 + length / (6 * width) + vocabulary / (16 * layers * width)
    blocks = forward_flops_per_token(ONE_TRILLION, length) - 2 * vocabulary * width
    ours = training_flops_per_token(ONE_TRILLION, length) + blocks
    assert ours == pytest.approx(96 * layers * width**2 * share, rel=1e-12)


def test_mfu_of_a_published_run() -> None:
    # nanoGPT's table for GPT-2 (124M), sequence 1024: 6N + 12·12·12·64·1024 with all weights but
    # the position embeddings, 855 million operations a token. Biases and norms are 0.1 % of that.
    per_token = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert training_flops_per_token(GPT2Config(), 1024) == pytest.approx(per_token, rel=1e-3)
    assert mfu(312e12 / per_token, GPT2Config(), 1024, 312e12) == pytest.approx(1, rel=1e-3)
