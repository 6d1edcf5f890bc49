"""GPT-2 with the weights of transformers' model."""

from __future__ import annotations

import torch
from transformers import GPT2LMHeadModel

from common.models.gpt2 import GPT2, GPT2Config


def of_transformers(theirs: GPT2LMHeadModel) -> GPT2:
    """Makes a GPT2 with the weights and the dtype of a model of the same architecture."""
    sizes = {
        name: getattr(theirs.config, name)
        for name in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
    }
    epsilon = theirs.config.layer_norm_epsilon
    config = GPT2Config(**sizes, dropout=theirs.config.resid_pdrop, layer_norm_epsilon=epsilon)
    model = GPT2(config).to(theirs.dtype)
    weights = theirs.transformer.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[name.replace("blocks.", "h.")]
            is_conv1d = name.endswith(".weight") and ".c_" in name
            parameter.copy_(weight.T if is_conv1d else weight)
    return model
