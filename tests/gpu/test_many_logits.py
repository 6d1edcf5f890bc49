"""Logits that 32 bits cannot count, such as GPT-2 with batch 64 has; without a GPU nothing runs."""

from __future__ import annotations

import pytest
import torch

from common.perfmodel.one_device.workload import Workload
from common.training.step import TrainingStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
MANY = Workload("gpt2-pico", batch_size=136, seq_len=256, vocab_size=2**16)
FEW = 8
"""Sequences whose logits 32 bits count easily."""
TABLES = 4
"""The logits, their logarithm of softmax and both gradients, if nothing is freed in between."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="eager"),
        pytest.param({"compile": True}, id="compiled"),
        pytest.param({"loss_chunks": 3}, id="in pieces"),
    ],
)
def test_a_batch_is_the_mean_of_its_parts_however_many_logits_it_has(options: dict) -> None:
    logits = MANY.batch_size * MANY.seq_len * MANY.config.vocab_size
    assert logits > 2**31
    if torch.cuda.mem_get_info(GPU)[0] < TABLES * 4 * logits:
        pytest.skip(f"needs {TABLES * 4 * logits / 1e9:.0f} GB of GPU memory")
    shape = (2, MANY.batch_size, MANY.seq_len)
    drawn = torch.randint(MANY.config.vocab_size, shape, generator=torch.Generator().manual_seed(5))
    tokens, targets = drawn.to(GPU)

    parts = TrainingStep(MANY, GPU, seed=7)
    expected = 0.0
    for few in zip(tokens.split(FEW), targets.split(FEW), strict=True):
        loss = parts.forward(*few) * len(few[0]) / MANY.batch_size
        loss.backward()
        expected += loss.item()

    whole = TrainingStep(Workload(**vars(MANY) | options), GPU, seed=7)
    loss = whole.forward(tokens, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        apart = (one.grad - other.grad).norm() / other.grad.norm()
        assert float(apart) < 1e-4
