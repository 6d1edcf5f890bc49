"""Models that sort texts into classes, all called as ``model(input_ids, attention_mask)``.

``TextClassifier`` is small and starts from random weights, so that an assignment runs without a
hub and on two cores. ``build_text_classifier`` gives it, or a model of transformers, by name.
Padding changes neither logits nor gradients (tests/models/test_text_classifier.py): which texts
share a batch is then a matter of speed alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from common.runtime.hugging_face_hub import load, one_line_errors

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of files of weights, followed by ``.index.json`` where weights are in several files."""
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet")
"""Kinds of model whose first position is the one after their padding token's number."""
INSTEAD = "--model_name takes a local folder, or small, which needs no hub"


@dataclass(frozen=True)
class TextClassifierConfig:
    """Sizes of a ``TextClassifier``; ``max_length`` is its number of positions, in tokens.

    Without dropout a loss depends on nothing but weights and samples, so that two ways to divide
    the same samples among ranks can be compared step by step.
    """

    vocab_size: int
    num_labels: int
    max_length: int = 256
    d_model: int = 256
    n_head: int = 8
    n_layer: int = 4
    d_ff: int = 1024
    dropout: float = 0.0


class TextClassifier(nn.Module):
    """A Transformer encoder with learned positions; a text is the mean over its real tokens.

    The layers are PyTorch's own, in the pre-norm form, whose attention is
    ``F.scaled_dot_product_attention`` with a mask that hides padding.
    """

    def __init__(self, config: TextClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_length, config.d_model)
        layer = nn.TransformerEncoderLayer(
            config.d_model,
            config.n_head,
            config.d_ff,
            config.dropout,
            activation=F.gelu,
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(config.d_model)
        # A nested tensor would leave padding out only in evaluation, which is not timed.
        self.encoder = nn.TransformerEncoder(
            layer, config.n_layer, norm=norm, enable_nested_tensor=False
        )
        self.head = nn.Linear(config.d_model, config.num_labels)
        for name, parameter in self.named_parameters():  # PyTorch makes all layers copies of one
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Computes logits [batch, num_labels].

        Args:
            input_ids: integer tensor [batch, length], length at most ``max_length``.
            attention_mask: tensor [batch, length]; 1 or True where a token is real, which at least
                one of a text is.

        Raises UserError for texts longer than the model has positions.
        """
        length = input_ids.shape[1]
        if length > self.config.max_length:
            raise UserError(
                f"texts of {length} tokens: the model has {self.config.max_length} positions"
            )
        real = attention_mask.bool()
        x = self.tokens(input_ids) + self.positions.weight[:length]
        x = F.dropout(x, self.config.dropout, self.training)
        x = self.encoder(x, src_key_padding_mask=~real)
        # Padding is replaced by 0, not multiplied by 0, so that a NaN in it cannot reach a text.
        summed = x.masked_fill(~real[:, :, None], 0).sum(1)
        return self.head(summed / real.sum(1, keepdim=True))

    def num_parameters(self) -> int:
        """Returns the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


class TransformersClassifier(nn.Module):
    """A sequence classifier of transformers, called like ``TextClassifier``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Computes logits [batch, num_labels]; both arguments are [batch, length]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def build_text_classifier(
    name: str,
    num_labels: int,
    vocab_size: int,
    max_length: int,
    dropout: float | None = None,
    pad_id: int = 0,
) -> nn.Module:
    """Builds the classifier of a name, float32, called as ``model(input_ids, attention_mask)``.

    Args:
        name: ``small``, a folder with ``config.json`` and weights, or a name on the hub. A folder
            without weights gives a model with random ones, and a warning.
        vocab_size: number of tokens that the tokenizer has.
        max_length: longest text, in tokens.
        dropout: probability, set wherever the model has dropout; None keeps the model's own.
        pad_id: number of the padding token, for a model that has none.

    Raises UserError where the model cannot be had or read, is no sequence classifier, or is too
    small for the texts or the vocabulary.
    """
    if name == "small":
        sizes = TextClassifierConfig(vocab_size, num_labels, max_length, dropout=dropout or 0.0)
        return TextClassifier(sizes)
    name = expanded(name)
    config = _read_config(name)
    with one_line_errors(f"model {name}", INSTEAD):
        tokens = config.vocab_size
        if config.pad_token_id is None:
            config.pad_token_id = pad_id
        limit = _longest_input(config)
    if limit is not None and max_length > limit:
        raise UserError(
            f"max_length {max_length}: {name} takes at most {limit} tokens; "
            f"give --max_length {limit} or less"
        )
    if vocab_size > tokens:
        raise UserError(
            f"model {name}: has {tokens} tokens, but the tokenizer {vocab_size}; "
            "the model's own tokenizer fits"
        )
    config.num_labels = num_labels
    if dropout is not None:
        _set_dropout(config, dropout)
    from transformers import AutoModelForSequenceClassification as Classifier

    with one_line_errors(f"model {name}", INSTEAD), _quiet_transformers():
        weights = [file + end for file in WEIGHT_FILES for end in ("", ".index.json")]
        if Path(name).is_dir() and not any(Path(name, file).is_file() for file in weights):
            logger.warning(
                f"model {name}: has config.json but no {' or '.join(WEIGHT_FILES)}; "
                "training starts from random weights"
            )
            model = Classifier.from_config(config)
        else:
            # A head for another number of classes is replaced; the log then names what is new.
            model, info = load(
                name,
                "model",
                INSTEAD,
                functools.partial(
                    Classifier.from_pretrained,
                    name,
                    config=config,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                ),
            )
            _say_what_is_new(name, info)
    # from_pretrained gives a model in evaluation mode, in which it would train without dropout.
    return TransformersClassifier(model.float()).train()


def model_limit(name: str) -> int | None:
    """Returns the longest text that a model takes, in tokens; None if it has no limit.

    Raises UserError where the model cannot be had or read.
    """
    return None if name == "small" else _longest_input(_read_config(expanded(name)))


def expanded(name: str) -> str:
    """Returns a model's name, with the home folder in place of ``~``, which no shell may see."""
    return str(Path(name).expanduser()) if name.startswith("~") else name


def _read_config(name: str) -> PretrainedConfig:
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model folder {name}: has no config.json; {INSTEAD}")
    elif folder.exists() or name.startswith((".", "/", "~")):
        problem = "a file" if folder.exists() else "does not exist"
        raise UserError(f"model folder {name}: {problem}; {INSTEAD}")
    from transformers import AutoConfig

    return load(name, "model", INSTEAD, functools.partial(AutoConfig.from_pretrained, name))


def _longest_input(config: PretrainedConfig) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    if not positions or positions < 0:  # XLNet says −1
        return None
    if config.model_type in POSITIONS_AFTER_PADDING:
        return positions - (config.pad_token_id or 0) - 1
    return positions


def _set_dropout(config: PretrainedConfig, dropout: float) -> None:
    """Gives every probability of dropout in a configuration the same value."""
    for entry in config.to_dict():
        is_one = "dropout" in entry or entry.endswith("pdrop")  # as GPT-2 names them
        if is_one and not isinstance(getattr(config, entry), bool):
            setattr(config, entry, dropout)


def _say_what_is_new(name: str, info: dict) -> None:
    """Logs the weights that were not in the files, or not in this shape: those of a new head."""
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    new = sorted({*info["missing_keys"], *mismatched})
    if new:
        more = f" and {len(new) - 4} more" if len(new) > 4 else ""
        logger.info(f"model {name}: random weights for {', '.join(new[:4])}{more}")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences transformers' table about the head, new by intent, and its progress bars."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
