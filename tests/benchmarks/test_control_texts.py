"""The control of the comparison of modes: texts of one length, which the model still takes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from common.benchmarks.micro_batches.compare_modes import control_texts
from common.data.text_splits import synthetic_texts


@pytest.mark.parametrize(
    ("global_batch", "slowest_tokens", "length"),
    [
        (8, 40, 10),  # four texts of a rank
        (7, 64, 16),  # a rank's four texts of 16 are more than three and a half
        (8, 4, 3),  # [CLS], a token, [SEP]
    ],
)
def test_a_share_has_the_tokens_of_the_slowest_rank_within_the_models_length(
    global_batch: int, slowest_tokens: int, length: int
) -> None:
    train = synthetic_texts("sst2", 30, vocab_size=50, max_length=16)
    plan = SimpleNamespace(padded_tokens=np.array([3, slowest_tokens]))
    control = control_texts(
        SimpleNamespace(global_batch=global_batch, max_length=16),
        SimpleNamespace(train=train),
        lambda step: plan,
        SimpleNamespace(world_size=2),
    )
    assert set(control.lengths) == {length}
    assert {len(tokens) for tokens in control.tokens} == {length}
