"""GPT-2 against transformers' GPT2LMHeadModel with the same weights, and the published sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpt2_support import check_gradients, of_transformers, their_names, transformers_model
from refusals import problem
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from common.models.gpt2 import CONFIGS, GPT2, GPT2Config

LENGTH = 24
SHAPES = {
    "width 64": {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 211, "n_positions": 32},
    "width 60": {"n_embd": 60, "n_head": 3, "n_layer": 2, "vocab_size": 97, "n_positions": 24},
    "epsilon": {"n_embd": 40, "n_head": 5, "n_layer": 1, "layer_norm_epsilon": 1e-3},
}


@pytest.fixture(params=SHAPES)
def pair(request) -> tuple[GPT2LMHeadModel, GPT2, torch.Tensor]:
    """Makes their model, ours with the same weights, and tokens of the longest length."""
    theirs = transformers_model(**SHAPES[request.param])
    tokens = torch.randint(theirs.config.vocab_size, (3, LENGTH))
    return theirs, of_transformers(theirs), tokens


def test_logits_equal_those_of_transformers(pair):
    theirs, ours, tokens = pair
    expected = theirs(tokens).logits
    assert expected.abs().max() > 0.5  # the comparison is not one of zeros
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=0)


def test_loss_equals_that_of_transformers_on_shifted_labels(pair):
    # transformers shifts the labels itself; ours takes the next tokens.
    theirs, ours, tokens = pair
    expected = theirs(tokens, labels=tokens).loss
    assert ours(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(expected.item(), abs=1e-5)
    # Or the whole sequence, the last token without a target.
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
    assert ours(tokens, targets).item() == pytest.approx(expected.item(), abs=1e-5)


def test_every_gradient_equals_that_of_transformers(pair):
    theirs, ours, tokens = pair
    theirs(tokens, labels=tokens).loss.backward()
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    check_gradients(ours, theirs, 1e-4)


def test_a_token_does_not_see_those_after_it():
    ours = of_transformers(transformers_model())
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    difference = (ours(tokens) - ours(changed)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


def test_dropout_acts_in_training_only():
    model = GPT2(GPT2Config(50, 24, n_layer=2, n_head=2, n_embd=16, dropout=0.5))
    tokens = torch.randint(50, (1, 12))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_published_sizes_have_their_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = GPT2(GPT2Config.named(name))
    # The tied embedding is one parameter: DDP sees it once.
    assert model.num_parameters() == parameters


def test_published_sizes_are_those_of_transformers():
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(TheirConfig())
        ours = GPT2(GPT2Config.named("gpt2"))
    assert sum(p.numel() for p in theirs.parameters()) == ours.num_parameters()
    shapes = {name: p.shape.numel() for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert shapes[their_names(ours)[name]] == parameter.numel()


def test_a_model_starts_at_the_loss_of_a_uniform_guess():
    torch.manual_seed(0)
    model = GPT2(GPT2Config.named("gpt2-nano", n_layer=2))
    tokens = torch.randint(8192, (2, 65))
    loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(torch.log(torch.tensor(8192.0)).item(), abs=0.15)


def test_a_name_is_known_with_and_without_its_family():
    assert GPT2Config.named("large") == GPT2Config.named("gpt2-large") == CONFIGS["gpt2-large"]
    assert GPT2Config.named("nano", n_layer=2).n_layer == 2


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("gpt2-lagre", "gpt2-large"),
        ("gpt2-huge", "gpt2"),
        ("gpt2_medium", "gpt2-medium"),
        ("GPT2-XL", "gpt2-xl"),
        ("gpt-2", "gpt2"),
        ("gpt2-nanno", "gpt2-nano"),
        ("llama", None),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest_known_one(wrong, nearest):
    message = problem(GPT2Config.named, wrong)
    assert repr(wrong) in message
    assert (f"did you mean '{nearest}" if nearest else "") in message
    assert all(known in message for known in CONFIGS)


def test_a_sequence_beyond_the_positions_is_refused_with_both_lengths():
    model = of_transformers(transformers_model())
    model(torch.zeros(1, 24, dtype=torch.long))
    message = problem(model, torch.zeros(1, 25, dtype=torch.long))
    assert "25" in message
    assert "24" in message


def test_a_width_that_the_heads_do_not_divide_is_refused():
    message = problem(GPT2Config, n_embd=100, n_head=3)
    assert "100" in message
    assert "3" in message
