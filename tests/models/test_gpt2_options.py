"""The options of GPT-2 change how it is computed, and nothing about what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpt2_support import check_gradients, of_transformers, randomised, transformers_model
from torch import Tensor

from common.models.chunked_loss import chunked_cross_entropy
from common.models.gpt2 import GPT2, GPT2Config, fused_attention, written_out_attention

SMALL = GPT2Config(vocab_size=211, n_positions=32, n_layer=2, n_head=4, n_embd=64)
WIDTH, VOCABULARY = 24, 97


def batch(vocabulary: int = SMALL.vocab_size, shape: tuple = (3, 20)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)


def twin(model: GPT2, **options) -> GPT2:
    """Makes a model with the same weights, sizes and type, and other options."""
    other = GPT2(model.config, **options).to(model.wte.weight.dtype)
    other.load_state_dict(model.state_dict())
    return other


def loss_and_gradients(model: GPT2, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, targets = batch(model.config.vocab_size)
    torch.manual_seed(seed)  # of the dropout, where there is any
    model.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_same(one: GPT2, other: GPT2, tolerance: float) -> None:
    """Asserts that losses and every gradient agree, relative to the gradient's norm."""
    loss, gradients = loss_and_gradients(one)
    other_loss, other_gradients = loss_and_gradients(other)
    assert loss.item() == pytest.approx(other_loss.item(), rel=tolerance)
    for name, gradient in gradients.items():
        assert gradient.norm() > 0, name
        difference = (gradient - other_gradients[name]).norm()
        assert difference <= tolerance * gradient.norm(), name


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(0)
    return randomised(GPT2(SMALL))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 2e-4)])
def test_attention_written_out_equals_the_fused_one(model, dtype, tolerance):
    exact = model.to(getattr(torch, dtype))
    check_same(exact, twin(exact, attention="eager"), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 2e-4)])
@pytest.mark.parametrize("heads", [4, 5])  # of width 10 the scale is no power of two, nor of 8
def test_attention_written_out_equals_that_of_transformers(dtype, tolerance, heads):
    theirs = transformers_model(n_embd=40, n_head=heads).to(getattr(torch, dtype))
    ours = twin(of_transformers(theirs), attention="eager")
    tokens, _ = batch(50)
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    loss = ours(tokens, F.pad(tokens[:, 1:], (0, 1), value=-100))
    loss.backward()
    # transformers computes the loss in float32 whatever its weights are.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(ours, theirs, max(tolerance, 1e-6))


def test_the_softmax_of_bfloat16_scores_is_computed_in_float32():
    # Rounded once at its end; summed in bfloat16, 512 equal weights of 1/512 would not make 1.
    query, key = torch.zeros(2, 1, 1, 512, 8, dtype=torch.bfloat16).unbind(0)
    value = torch.ones(1, 1, 512, 8, dtype=torch.bfloat16)
    mixed = written_out_attention(query, key, value, 0.0)
    torch.testing.assert_close(mixed, value, atol=4e-3, rtol=0)
    torch.testing.assert_close(mixed, fused_attention(query, key, value, 0.0), atol=4e-3, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_checkpointing_gives_the_same_gradients(model, attention):
    plain = twin(model, attention=attention)
    checkpointed = twin(model, attention=attention, activation_checkpointing=True)
    loss, gradients = loss_and_gradients(plain)
    other_loss, other_gradients = loss_and_gradients(checkpointed)
    # Not only close: each block is computed again by the same operations.
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_checkpointing_draws_the_same_dropout_again():
    torch.manual_seed(0)
    config = GPT2Config(211, 32, n_layer=2, n_head=4, n_embd=64, dropout=0.3)
    plain = GPT2(config)
    loss, gradients = loss_and_gradients(plain)
    assert loss != loss_and_gradients(plain, seed=1)[0]  # dropout is on
    # Were the masks drawn anew in the backward pass, gradients would not be those of this loss.
    loss_again, again = loss_and_gradients(twin(plain, activation_checkpointing=True))
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


def test_a_model_without_dropout_keeps_no_random_state(model):
    assert not model.has_dropout()
    assert GPT2(GPT2Config(50, 8, n_layer=1, n_head=1, n_embd=8, dropout=0.1)).has_dropout()


def head(dtype: torch.dtype = torch.float64, tokens: int = 26) -> tuple[Tensor, Tensor, Tensor]:
    """Draws hidden states, weight and targets of a head, some targets ignored."""
    torch.manual_seed(2)
    hidden = torch.randn(2, tokens // 2, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2, tokens // 2))
    targets[0, :3] = targets[1, -2:] = -100
    return hidden, weight, targets


def unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Computes the loss as torch does."""
    logits = F.linear(hidden, weight).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets.flatten())


def gradients_of(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunks", [1, 2, 4, 7, 26])  # 4 and 7 do not divide the 26 tokens
def test_a_loss_in_pieces_equals_cross_entropy(chunks):
    hidden, weight, targets = head()
    expected = unchunked(hidden, weight, targets)
    loss = chunked_cross_entropy(hidden, weight, targets, chunks)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    # Scaled, as gradient accumulation and a loss scaler do.
    found = gradients_of(loss * 3, hidden, weight)
    wanted = gradients_of(expected * 3, hidden, weight)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    # A token that does not count gets no gradient at all.
    assert found[0][targets == -100].abs().max() == 0


def test_one_counted_target_is_enough():
    hidden, weight, targets = head()
    only = torch.full_like(targets, -100)
    only[1, 4] = targets[1, 4]
    loss = chunked_cross_entropy(hidden, weight, only, 4)
    expected = unchunked(hidden, weight, only)
    torch.testing.assert_close(loss, expected)
    found, wanted = gradients_of(loss, hidden, weight), gradients_of(expected, hidden, weight)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen):
    hidden, weight, targets = head()
    still, free = (hidden, weight) if frozen == "hidden" else (weight, hidden)
    expected = gradients_of(unchunked(hidden, weight, targets), free)
    still.requires_grad_(False)
    chunked_cross_entropy(hidden, weight, targets, 3).backward()
    assert still.grad is None
    torch.testing.assert_close(free.grad, expected[0], atol=1e-12, rtol=1e-10)


def test_a_loss_in_pieces_can_be_evaluated_without_gradients():
    hidden, weight, targets = head()
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, targets, 3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, unchunked(hidden, weight, targets).detach())


def test_logits_too_large_to_exponentiate_give_a_finite_loss():
    hidden, weight, targets = head(torch.float32)
    loss = chunked_cross_entropy(hidden * 100, weight, targets, 2)
    expected = unchunked(hidden * 100, weight, targets)
    assert expected > 200  # e to the power of the largest logit is more than float32 holds
    torch.testing.assert_close(loss, expected)
    assert all(g.isfinite().all() for g in gradients_of(loss, hidden, weight))


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_under_autocast_a_loss_in_pieces_is_close_to_the_exact_one(precision, tolerance):
    # 65,536 is what a loss scaler begins with; without it float16 gradients would underflow.
    hidden, weight, targets = head(torch.float32)
    scale = 65536 if precision == "float16" else 1
    wanted = gradients_of(unchunked(hidden, weight, targets), hidden, weight)
    with torch.autocast("cpu", dtype=getattr(torch, precision)):
        loss = chunked_cross_entropy(hidden, weight, targets, 3)
        usual = unchunked(hidden, weight, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(usual.item(), rel=1e-3)
    found = gradients_of(loss * scale, hidden, weight)
    for gradient, exact in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient / scale - exact).norm() <= tolerance * exact.norm()


def test_small_float16_gradients_of_many_tokens_do_not_underflow():
    # Divided by 4,096 tokens first, most would be below 6e-8, the smallest float16.
    torch.manual_seed(3)
    hidden = (torch.randn(2, 2048, 8) * 0.1).requires_grad_()
    weight = (torch.randn(512, 8) * 0.01).requires_grad_()
    targets = torch.randint(512, (2, 2048))
    wanted = gradients_of(unchunked(hidden, weight, targets), hidden, weight)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked_cross_entropy(hidden, weight, targets, 4)
    found = gradients_of(loss * 65536, hidden, weight)
    for gradient, exact in zip(found, wanted, strict=True):
        assert (gradient / 65536 - exact).norm() <= 0.02 * exact.norm()


def test_under_autocast_a_model_trains_the_same_with_its_loss_in_pieces(model):
    pieces = twin(model, loss_chunks=7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, other = model(*batch()), pieces(*batch())
    loss.backward()
    other.backward()
    assert loss.item() == pytest.approx(other.item(), rel=1e-3)
    for one, two in zip(model.parameters(), pieces.parameters(), strict=True):
        assert (one.grad - two.grad).norm() <= 0.03 * one.grad.norm()


def test_all_options_together_compute_the_same(model):
    options = {"attention": "eager", "activation_checkpointing": True, "loss_chunks": 7}
    exact = model.double()  # but for the logits of the usual loss, which are made float32
    check_same(exact, twin(exact, **options), 1e-6)


def test_logits_do_not_depend_on_the_options(model):
    tokens, _ = batch()
    options = {"activation_checkpointing": True, "loss_chunks": 5}
    assert torch.equal(model(tokens), twin(model, **options)(tokens))


@pytest.mark.parametrize(("multiple", "size"), [(8, 50264), (64, 50304), (50257, 50257)])
def test_a_padded_vocabulary_is_the_next_multiple(multiple, size):
    padded = GPT2Config.named("gpt2").padded_vocabulary(multiple)
    assert padded.vocab_size == size
    with torch.device("meta"):
        model = GPT2(padded)
    assert model.wte.weight.shape == (size, 768)
    # Its rows are the only parameters added.
    assert model.num_parameters() == 124_439_808 + (size - 50257) * 768
    assert model(torch.zeros(1, 4, dtype=torch.long, device="meta")).shape == (1, 4, size)
