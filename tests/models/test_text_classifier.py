"""Text classifiers: padding changes nothing, and those of transformers give what they gave."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig, DistilBertConfig

from common.errors import UserError
from common.models.text_classifier import (
    TextClassifier,
    TextClassifierConfig,
    build_text_classifier,
    model_limit,
)

SIZES = TextClassifierConfig(50, 3, max_length=24, d_model=16, n_head=2, n_layer=2, d_ff=32)
CONFIGS = {
    "distilbert": DistilBertConfig(
        vocab_size=50, dim=16, n_heads=2, n_layers=2, hidden_dim=32, max_position_embeddings=24
    ),
    "bert": BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=32,
        max_position_embeddings=24,
    ),
}
GPT2 = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=24)
"""A configuration that names dropout and positions in a way of its own."""
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(params=["ours", *CONFIGS])
def model(request, tmp_path: Path) -> nn.Module:
    """Makes a classifier of three classes in float64, without dropout, every weight random."""
    torch.manual_seed(0)
    if request.param == "ours":
        model = TextClassifier(SIZES)
    else:
        CONFIGS[request.param].save_pretrained(tmp_path)
        model = build_text_classifier(str(tmp_path), 3, 50, 24, dropout=0.0)
    for parameter in model.parameters():  # biases too, which start at 0
        nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    return model.double()


def padded(texts: list[Tensor], length: int, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Pads texts of several lengths to input_ids and attention_mask, each [batch, length]."""
    ids = torch.full((len(texts), length), pad_id)
    mask = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return ids, mask


def texts_of(*lengths: int) -> list[Tensor]:
    return [torch.randint(1, 50, (length,)) for length in lengths]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("training", [True, False])
def test_padding_changes_no_logits(model, training):
    model.train(training)
    texts = texts_of(3, 24, 1, 9)
    with torch.set_grad_enabled(training):
        together = model(*padded(texts, 24))
        # A text alone and unpadded; and with another token, and more of it, as its padding.
        alone = torch.cat([model(*padded([text], len(text))) for text in texts])
        short = model(*padded(texts[2:], 17, pad_id=7))
    assert together.std() > 1e-3  # the comparison is not one of constants
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-12)
    torch.testing.assert_close(short, together[2:], rtol=0, atol=1e-12)


def test_padding_changes_no_gradients(model):
    texts, labels = texts_of(3, 20, 1), torch.tensor([0, 2, 1])
    F.cross_entropy(model(*padded(texts, 24)), labels, reduction="sum").backward()
    together = gradients(model)
    model.zero_grad()
    for text, label in zip(texts, labels, strict=True):
        F.cross_entropy(model(*padded([text], len(text))), label[None]).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, together[name], rtol=0, atol=1e-12, msg=name)


def test_one_text_of_one_token_gives_every_parameter_a_gradient(model):
    # DDP waits for every parameter's gradient, whatever a rank got.
    model(*padded(texts_of(1), 1)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast_is_close_to_float32(model, precision):
    batch = padded(texts_of(3, 24, 9), 24)
    exact = model.float()(*batch)
    with torch.autocast("cpu", precision):
        logits = model(*batch)
    assert logits.dtype == precision
    logits.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    torch.testing.assert_close(logits.float(), exact, rtol=0.05, atol=0.15)


def test_small_has_the_size_that_the_assignment_names():
    # Counted by hand: embeddings, then per layer attention, feed-forward and two norms, then the
    # last norm and the head.
    small = build_text_classifier("small", 2, vocab_size=8192, max_length=256)
    layer = 4 * (256 * 256 + 256) + 2 * 256 * 1024 + 1024 + 256 + 2 * 512
    assert small.num_parameters() == (8192 + 256) * 256 + 4 * layer + 512 + 2 * 256 + 2
    assert model_limit("small") is None


def test_layers_do_not_begin_as_copies_of_each_other():
    first, second = TextClassifier(SIZES).encoder.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


@pytest.mark.parametrize("kind", ["small", *CONFIGS])
def test_dropout_is_drawn_from_the_first_step_on_and_in_training_only(kind, tmp_path):
    name, labels = kind, 2
    if kind != "small":  # transformers hands out models of recorded weights ready for evaluation
        AutoModelForSequenceClassification.from_config(CONFIGS[kind]).save_pretrained(tmp_path)
        name, labels = str(tmp_path), CONFIGS[kind].num_labels
    model = build_text_classifier(name, labels, 50, 24, dropout=0.5)
    batch = padded(texts_of(9, 4), 9)
    assert not torch.equal(model(*batch), model(*batch))
    model.eval()
    assert torch.equal(model(*batch), model(*batch))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_gives_the_logits_that_transformers_gives(kind, tmp_path, caplog):
    torch.manual_seed(1)
    CONFIGS[kind].num_labels = 4
    theirs = AutoModelForSequenceClassification.from_config(CONFIGS[kind]).eval()
    theirs.save_pretrained(tmp_path)
    ours = build_text_classifier(str(tmp_path), 4, 50, 24).eval()
    ids, mask = padded(texts_of(3, 24, 9), 24)
    expected = theirs(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(ours(ids, mask), expected)
    assert not caplog.records
    # For another number of classes the head alone is new, and said to be.
    with caplog.at_level(logging.INFO):
        other = build_text_classifier(str(tmp_path), 2, 50, 24)
    assert other(ids, mask).shape == (3, 2)
    assert caplog.messages == [
        f"model {tmp_path}: random weights for classifier.bias, classifier.weight"
    ]


@pytest.mark.parametrize("config", [*CONFIGS.values(), GPT2], ids=[*CONFIGS, "gpt2"])
def test_random_weights_are_said_and_dropout_is_set_everywhere(config, tmp_path, caplog):
    config.save_pretrained(tmp_path)
    model = build_text_classifier(str(tmp_path), 2, 50, 24, dropout=0.3)
    (message,) = caplog.messages
    assert "training starts from random weights" in message
    dropouts = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert dropouts == {0.3}
    assert model_limit(str(tmp_path)) == 24


def test_a_folder_below_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    CONFIGS["bert"].save_pretrained(tmp_path / "bert")
    assert model_limit("~/bert") == 24
    assert build_text_classifier("~/bert", 2, 50, 24)(*padded(texts_of(9), 9)).shape == (1, 2)


def test_a_model_may_number_its_positions_from_beyond_its_padding(tmp_path):
    # RoBERTa's 514 positions take 512 tokens: the first two are never used.
    from transformers import RobertaConfig

    sizes = {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    config = RobertaConfig(vocab_size=50, hidden_size=16, max_position_embeddings=26, **sizes)
    config.save_pretrained(tmp_path)
    assert model_limit(str(tmp_path)) == 24
    model = build_text_classifier(str(tmp_path), 2, 50, 24, pad_id=1)
    assert model(*padded([torch.full((24,), 5)], 24)).isfinite().all()


TINY_XLNET = {"model_type": "xlnet", "d_model": 16, "n_head": 2, "n_layer": 1, "d_inner": 16}
BERT = CONFIGS["bert"].to_dict()
ROBERTA = BERT | {"model_type": "roberta", "pad_token_id": None}


@pytest.mark.parametrize(
    ("config", "pad_id", "limit"),
    [
        (TINY_XLNET | {"vocab_size": 50}, 0, None),  # positions are relative: any length is taken
        (ROBERTA, 3, 20),  # of 24 positions the first is after the padding's number
    ],
    ids=["xlnet", "roberta"],
)
def test_positions_and_padding_may_be_unsaid(config, pad_id, limit, tmp_path):
    Path(tmp_path, "config.json").write_text(json.dumps(config))
    model = build_text_classifier(str(tmp_path), 2, 50, limit or 40, pad_id=pad_id)
    texts = padded([torch.full((limit or 40,), 5)], limit or 40)
    assert model.eval()(*texts).isfinite().all()
    if limit is None:
        assert model_limit(str(tmp_path)) is None
        return
    with pytest.raises(UserError, match=f"takes at most {limit} tokens"):
        build_text_classifier(str(tmp_path), 2, 50, limit + 1, pad_id=pad_id)


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (BERT, b"", "EOFError"),
        ({"model_type": "clip"}, None, "AttributeError: .*vocab_size"),
        (CONFIGS["distilbert"].to_dict() | {"n_heads": 0}, None, "ZeroDivisionError: "),
    ],
    ids=["empty weights", "no texts", "no heads"],
)
def test_a_folder_that_makes_no_classifier_is_one_line(config, weights, words, tmp_path):
    Path(tmp_path, "config.json").write_text(json.dumps(config))
    if weights is not None:
        Path(tmp_path, "pytorch_model.bin").write_bytes(weights)
    with pytest.raises(UserError, match=f"^model {tmp_path}: {words}.*; --model_name") as caught:
        build_text_classifier(str(tmp_path), 2, 50, 24)
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Makes a model's folder without weights."""
    CONFIGS["bert"].save_pretrained(tmp_path)
    return str(tmp_path)


def test_what_the_model_cannot_hold_is_one_line(folder):
    with pytest.raises(UserError, match=r"max_length 25: .* takes at most 24 tokens; give"):
        build_text_classifier(folder, 2, 50, max_length=25)
    with pytest.raises(UserError, match="has 50 tokens, but the tokenizer 51"):
        build_text_classifier(folder, 2, 51, max_length=24)
    with pytest.raises(UserError, match="texts of 25 tokens: the model has 24 positions"):
        TextClassifier(SIZES)(*padded(texts_of(25), 25))


def test_a_model_that_cannot_be_had_is_one_line_that_says_what_helps(folder, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", UNREACHABLE)
    helps = "--model_name takes a local folder, or small, which needs no hub"
    Path(folder, "model.safetensors").write_text("damaged")
    os.mkdir(f"{folder}/empty")
    cases = {
        "nobody/nothing": "127.0.0.1:9 cannot be reached",
        f"{folder}/none": "does not exist",
        f"{folder}/config.json": "a file",
        f"{folder}/empty": "has no config.json",
        folder: "deserializing",
    }
    for name, words in cases.items():
        with pytest.raises(UserError, match=f"{words}.*; {helps}") as caught:
            build_text_classifier(name, 2, 50, 24)
        assert "\n" not in str(caught.value)
