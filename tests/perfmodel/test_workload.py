"""What a training step may be, and what follows from its sizes alone."""

from __future__ import annotations

import pytest
from refusals import problem

from common.models.gpt2 import GPT2
from common.perfmodel.one_device.architecture import CONFIGS, TITLES, GPT2Config
from common.perfmodel.one_device.workload import CHOICES, Workload


@pytest.mark.parametrize(
    "name", ["batch_size", "seq_len", "vocab_multiple", "loss_chunks", "gradient_accumulation"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_counts_are_at_least_one(name, value):
    assert problem(Workload, **{name: value}) == f"{name} is {value}; it must be at least 1"


@pytest.mark.parametrize(
    ("name", "wrong", "nearest"),
    [
        ("precision", "bf16", None),
        ("precision", "bfloat", "bfloat16"),
        ("precision", "fp32", None),
        ("attention", "flash", None),
        ("attention", "SDPA", "sdpa"),
        ("optimizer", "adam", "adamw"),
        ("optimizer_implementation", "fuse", "fused"),
        ("optimizer_implementation", "forloop", "for-loop"),
    ],
)
def test_an_unknown_choice_is_refused_with_all_known_ones(name, wrong, nearest):
    line = problem(Workload, **{name: wrong})
    assert f"unknown {name} {wrong!r}" in line
    assert all(choice in line for choice in CHOICES[name])
    assert nearest is None or f"did you mean {nearest!r}" in line


def test_an_unknown_model_is_refused_with_the_nearest_known_one():
    line = problem(Workload, model="gpt2-larg")
    assert "did you mean 'gpt2-large'" in line
    assert all(name in line for name in CONFIGS)


@pytest.mark.parametrize(("model", "positions"), [("gpt2", 1024), ("gpt2-nano", 256)])
def test_a_sequence_is_no_longer_than_the_positions(model, positions):
    assert Workload(model, 1, positions).seq_len == positions
    line = problem(Workload, model=model, seq_len=positions + 1)
    assert str(positions + 1) in line
    assert f"--seq_len {positions} or less" in line


def test_there_are_no_more_pieces_than_tokens():
    assert Workload(batch_size=2, seq_len=8, loss_chunks=16).loss_chunks == 16
    assert "16 tokens" in problem(Workload, batch_size=2, seq_len=8, loss_chunks=17)


@pytest.mark.parametrize("n_layer", [1, 3])
@pytest.mark.parametrize("n_embd", [8, 24])
@pytest.mark.parametrize("vocab_size", [5, 50])
def test_the_formula_holds_for_any_sizes(n_layer, n_embd, vocab_size):
    config = GPT2Config(vocab_size, 16, n_layer, n_head=4, n_embd=n_embd)
    model = GPT2(config)
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    assert config.parameters_per_layer() == block
    matrices = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    assert config.matrix_parameters_per_layer() == matrices


def test_a_padded_vocabulary_is_in_the_sizes_and_in_their_count():
    padded = Workload(vocab_multiple=64).config
    assert padded.vocab_size == 50304
    assert padded.num_parameters() == CONFIGS["gpt2"].num_parameters() + (50304 - 50257) * 768
    assert Workload(vocab_multiple=1).config == CONFIGS["gpt2"]


def test_a_step_has_the_tokens_of_all_its_passes():
    workload = Workload(batch_size=3, seq_len=20, gradient_accumulation=4)
    assert workload.tokens_per_step == 240


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_has_a_title_with_and_without_its_family(name):
    assert Workload(name, seq_len=8).title == TITLES[name]
    if name != "gpt2":
        assert Workload(name.removeprefix("gpt2-"), seq_len=8).title == TITLES[name]


@pytest.mark.parametrize(
    ("options", "device", "word"),
    [
        ({"tf32": True}, "cpu", "tf32"),
        ({"tf32": True, "precision": "bfloat16"}, "cuda", "tf32"),
        ({"async_batches": True}, "cpu", "async_batches"),
        ({"optimizer_implementation": "foreach"}, "cpu", "foreach"),
    ],
)
def test_an_option_without_effect_is_named(options, device, word):
    (line,) = Workload(**options).without_effect(device)
    assert word in line


def test_options_with_effect_are_not_named():
    every = {"tf32": True, "async_batches": True, "optimizer_implementation": "foreach"}
    assert Workload(**every).without_effect("cuda") == []
    assert Workload().without_effect("cpu") == []
