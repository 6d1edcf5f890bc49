"""Models to tune, as a user would hand them over: transformers' own, with random weights.

Each function keeps the contract of ``user_model``: it returns ``(module, batch, loss)``. They are
small enough for a step of a tenth of a second on one core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from common.models.traced import ModelBatchLoss

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY, TOKENS = 2_000, 32


def encoder_decoder() -> ModelBatchLoss:
    """Makes a T5 that translates: 2.9 million parameters, shared embeddings."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=192,
        d_kv=48,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    batch = {"input_ids": _tokens(), "labels": _tokens()}
    return T5ForConditionalGeneration(config), batch, own_loss


def convolutions() -> ModelBatchLoss:
    """Makes a ResNet that classifies images: 2.8 million parameters, running means as buffers."""
    from transformers import ResNetConfig

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    return _image_classifier(config)


def vision_transformer() -> ModelBatchLoss:
    """Makes a ViT that classifies images: 1.8 million parameters in equal layers."""
    from transformers import ViTConfig

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _image_classifier(config)


def masked_language_model() -> ModelBatchLoss:
    """Makes a DistilBERT that fills in words: 1.5 million parameters, tied embeddings."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=192,
        hidden_dim=576,
        n_layers=3,
        n_heads=4,
        max_position_embeddings=TOKENS,
        dropout=0.0,
        attention_dropout=0.0,
    )
    tokens = _tokens()
    return DistilBertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}, own_loss


def depthwise_convolutions() -> ModelBatchLoss:
    """Makes a MobileNetV2 that classifies images: many small tensors, running means as buffers."""
    from transformers import MobileNetV2Config

    return _image_classifier(
        MobileNetV2Config(image_size=64, num_labels=10, classifier_dropout_prob=0.0)
    )


def own_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss that models of transformers compute when they are given labels."""
    return module(**batch).loss


def _tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (4, TOKENS))


def _image_classifier(config: PretrainedConfig) -> ModelBatchLoss:
    """Returns the model of a configuration, with four images of 64 × 64 pixels."""
    from transformers import AutoModelForImageClassification

    batch = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(10, (4,))}
    return AutoModelForImageClassification.from_config(config), batch, own_loss
