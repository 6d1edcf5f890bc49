"""GPT-2 beside transformers' model: with the same weights, and their gradients compared."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config as TheirConfig
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


def randomised(model: nn.Module) -> nn.Module:
    """Draws every weight, biases and norms too, which start at 0 and 1; returns the model."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    return model


def transformers_model(**settings: object) -> GPT2LMHeadModel:
    """Makes a small model of transformers without dropout whose every weight is random."""
    torch.manual_seed(0)
    small = {"vocab_size": 50, "n_positions": 24, "n_embd": 16, "n_head": 2, "n_layer": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = TheirConfig(**small | dropout | settings, attn_implementation="eager")
    return randomised(GPT2LMHeadModel(config))


def their_names(ours: GPT2) -> dict[str, str]:
    """Maps our parameters' names to those in transformers' model."""
    names = [name for name, _ in ours.named_parameters()]
    return {name: "transformer." + name.replace("blocks.", "h.") for name in names}


def check_gradients(ours: GPT2, theirs: GPT2LMHeadModel, tolerance: float) -> None:
    """Asserts that every gradient is that of transformers' model, relative to its norm."""
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    names = their_names(ours)
    # The tied embedding is one parameter on both sides, so its two uses are added up.
    assert sorted(names.values()) == sorted(expected)
    for name, parameter in ours.named_parameters():
        other = expected[names[name]]
        other = other.T if other.ndim == 2 and ".c_" in name else other
        assert other.norm() > 0
        assert (parameter.grad - other).norm() <= tolerance * other.norm(), name
