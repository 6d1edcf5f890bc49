"""Models of transformers by their configuration, with random weights and random samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.models.traced import ModelBatchLoss

PIXELS = 224


class LossOf(nn.Module):
    """A model of transformers, called with inputs and labels; it returns their loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss that the model computes, a scalar."""
        return self.model(**{self.model.main_input_name: inputs, "labels": labels}).loss


def transformers_model(values: Mapping[str, object]) -> nn.Module:
    """Makes the model of a configuration's values, with the head that it is trained with.

    Raises UserError where transformers does not take the values.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
    )

    of_kind = {
        "bert": AutoModelForMaskedLM,
        "roberta": AutoModelForMaskedLM,
        "t5": AutoModelForSeq2SeqLM,
        "resnet": AutoModelForImageClassification,
        "vit": AutoModelForImageClassification,
    }
    try:
        config = AutoConfig.for_model(**values)
        return of_kind.get(config.model_type, AutoModelForCausalLM).from_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"transformers cannot make the model: {error}") from None


def random_samples(model: nn.Module, batch_size: int, seq_len: int | None) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels: tokens of ``seq_len``, or images where that is None or 0."""
    config = model.config
    if seq_len:
        tokens = torch.randint(config.vocab_size, (batch_size, seq_len))
        return tokens, tokens
    images = torch.randn(batch_size, 3, PIXELS, PIXELS)
    return images, torch.randint(config.num_labels, (batch_size,))


def random_model(
    values: Mapping[str, object], seq_len: int | None, batch_size: int = 8
) -> ModelBatchLoss:
    """Returns a configuration's model with a batch and its loss, as ``user_model`` wants them.

    A model of images has no ``seq_len``.
    """
    model = transformers_model(values)
    inputs, labels = random_samples(model, batch_size, seq_len)
    batch = {model.main_input_name: inputs, "labels": labels}
    return model.train(), batch, lambda called, batch: called(**batch).loss
