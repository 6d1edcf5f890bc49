"""The models of the study of plan: transformers' own, small enough for a step of 30 to 100 ms.

A sample has as many tokens as the exchange needs to be as large beside the passes as in training:
width makes a step cheaper and leaves the ratio of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from common.models.from_config import random_model
from common.tuning.plans.sized_model import SizedModel

TRANSFORMER = {"vocab_size": 1000, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = TRANSFORMER | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class StudyModel:
    """A configuration of transformers, tokens of a sample (0 for images) and a global batch."""

    values: dict[str, object]
    seq_len: int = 64
    global_batch: int = 16


MODELS = {
    "bert": StudyModel(
        {"model_type": "bert", "hidden_size": 96, "intermediate_size": 384}
        | TRANSFORMER
        | NO_DROPOUT
    ),
    "resnet": StudyModel(
        {
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 32, 96],
            "depths": [1, 1, 2, 2],
            "layer_type": "basic",
            "num_labels": 10,
        },
        seq_len=0,
    ),
    "llama": StudyModel(
        {"model_type": "llama", "hidden_size": 96, "intermediate_size": 256} | LLAMA
    ),
    "experts": StudyModel(
        {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128}
        | LLAMA
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "tiny": StudyModel(
        {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64}
        | {"vocab_size": 64, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "num_key_value_heads": 2},
        seq_len=8,
        global_batch=2,
    ),
}
"""Models by name; the tiny one is for a look at whether the study runs, and in no case of it."""


def sized_model(name: str, seed: int) -> SizedModel:
    """Returns a model of the study with random weights and batches of any size."""
    model = MODELS[name]
    return SizedModel(partial(random_model, model.values, model.seq_len), name, seed)
