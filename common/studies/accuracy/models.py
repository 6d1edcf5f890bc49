"""The models of the accuracy study: ours, transformers', and a recorded backward pass.

Each is cut to 2 to 10 million parameters with random weights, so that a step on two cores takes a
fraction of a second. What is trained does not matter here: the weights stand still, so that every
step of an arm computes the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.benchmarks.steps import FixedBatchStep, StepSettings, make_step, module_step
from common.errors import UserError, unknown_name
from common.models.mlp import MLP
from common.models.text_classifier import TextClassifier, TextClassifierConfig
from common.perfmodel.published import UMD_A100
from common.runtime.group.process_group import Worker
from common.runtime.seeding import seed_everything

SEQUENCE = 64
LABELS = 4
VOCABULARY = 4_000

LossOf = Callable[[nn.Module], Tensor]


def accuracy_step(
    name: str, batch_size: int, worker: Worker, factor: float = 1.0, time_factor: float = 1.0
) -> FixedBatchStep:
    """Makes the training step of a model of ``MODELS``, of ``gpt2-nano`` or of ``replay``.

    ``factor`` and ``time_factor`` divide the sizes and times of the replayed recording. Raises
    UserError for an unknown name.
    """
    if name == "replay":
        settings = StepSettings(
            model="gpt2-nano",
            batch_size=1,
            max_seq_len=1,
            replay=UMD_A100,
            replay_factor=factor,
            replay_time_factor=time_factor,
        )
        return make_step(settings, worker)
    if name == "gpt2-nano":
        return make_step(StepSettings(name, batch_size, SEQUENCE, optimizer="sgd", lr=0.0), worker)
    if name not in MODELS:
        raise UserError(unknown_name("model", name, ("gpt2-nano", *MODELS, "replay")))
    seed_everything(42)
    model, loss_of = MODELS[name](batch_size)
    return module_step(model, loss_of, worker)


def mlp(batch_size: int) -> tuple[nn.Module, LossOf]:
    """Makes an MLP of width 768 with 512 outputs: 2.8 million parameters in ten tensors."""
    inputs, targets = torch.randn(batch_size, 768), torch.randn(batch_size, 512)
    return MLP(768, 768, 4, 512), lambda model: functional.mse_loss(model(inputs), targets)


def classifier(batch_size: int) -> tuple[nn.Module, LossOf]:
    """Makes the encoder of assignments 3 and 4: 2.5 million parameters in many small tensors."""
    config = TextClassifierConfig(
        VOCABULARY, LABELS, SEQUENCE, d_model=160, n_head=4, n_layer=6, d_ff=640
    )
    tokens, labels = _texts(batch_size)
    mask = torch.ones_like(tokens)
    return TextClassifier(config), lambda model: functional.cross_entropy(
        model(tokens, mask), labels
    )


def bert(batch_size: int) -> tuple[nn.Module, LossOf]:
    """Makes transformers' BERT for classification: 2.6 million parameters."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
        max_position_embeddings=SEQUENCE,
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens, labels = _texts(batch_size)
    return BertForSequenceClassification(
        config
    ), lambda model: model(input_ids=tokens, labels=labels).loss


def convnext(batch_size: int) -> tuple[nn.Module, LossOf]:
    """Makes transformers' ConvNeXt for classification: 2.6 million parameters, convolutions."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[48, 96, 192, 384], depths=[1, 1, 3, 1], num_labels=LABELS, drop_path_rate=0.0
    )
    images = torch.randn(batch_size, 3, 64, 64)
    labels = torch.randint(LABELS, (batch_size,))
    return ConvNextForImageClassification(
        config
    ), lambda model: model(pixel_values=images, labels=labels).loss


def _texts(batch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, SEQUENCE))
    return tokens, torch.randint(LABELS, (batch_size,))


MODELS: dict[str, Callable[[int], tuple[nn.Module, LossOf]]] = {
    "mlp": mlp,
    "classifier": classifier,
    "bert": bert,
    "convnext": convnext,
}
"""Name → function from the batch size of a rank to the model and its loss on such a batch."""
