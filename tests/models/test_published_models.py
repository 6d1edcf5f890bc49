"""Models of published measurements, against published counts, transformers and closed forms."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.models.published import resnet, ssd
from common.models.published import transformer_big as big
from common.models.published.gnmt import Gnmt, gnmt
from common.models.published.gnmt import loss_of as gnmt_loss_of
from common.models.published.resnet import ResNet, resnet_50
from common.models.published.ssd import ssd_300
from common.models.published.transformer_big import transformer_big
from common.models.published.transformer_xl import (
    BASE,
    LARGE,
    TransformerXl,
    places_of,
    transformer_xl,
    waves,
)
from common.models.traced import ModelBatchLoss, traced_architecture
from common.perfmodel.architectures.published_sizes import FOLLOWED


def parameters(make) -> int:
    with torch.device("meta"):
        module, *_ = make()
    return sum(parameter.numel() for parameter in module.parameters())


PAPER = replace(
    BASE, width=410, heads=10, head_width=41, wide=2100, ends=(20_000, 40_000, 200_000, 267_735)
)
"""Transformer-XL of the paper's repository, run_wt103_base.sh, which prints its parameters."""
TINY = replace(
    LARGE, layers=2, width=64, heads=2, head_width=8, wide=48, segment=6, ends=(5, 9, 20, 30)
)


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (resnet_50, 25_557_032),  # torchvision, resnet50
        (gnmt, 160_671_297),  # NVIDIA/apex, tests of its optimizers: GNMT of MLPerf
        (lambda: (TransformerXl(PAPER),), 151_107_538),
    ],
)
def test_parameters_are_those_published_to_the_unit(make, published: int) -> None:
    assert parameters(make) == published


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (ssd_300, 23),
        (transformer_big, 211),
        (lambda: (TransformerXl(BASE),), 192),
        (lambda: (TransformerXl(LARGE),), 285),
    ],
)
def test_parameters_are_those_that_nvidia_publishes_in_millions(make, millions: int) -> None:
    assert round(parameters(make) / 1e6) == millions


def test_resnet_50_has_the_operations_published_and_the_shapes_of_transformers() -> None:
    with torch.device("meta"):
        ours, batch, _ = resnet_50()
        theirs = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(num_labels=1000)
        )
        images = batch["images"][:1]
        operations = [counted(partial(module, images)) for module in (ours, theirs)]
    assert operations[0] == operations[1]
    # 4.09 G multiplications and additions: torchvision, table of classification weights.
    assert round(operations[0] / 2e9, 2) == 4.09
    shapes = [sorted(tuple(p.shape) for p in module.parameters()) for module in (ours, theirs)]
    assert shapes[0] == shapes[1]


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


# Torch counts the product with the mixed sources, and none of a matrix with a vector.
@pytest.mark.slow
def test_gnmts_operations_are_two_for_each_weight_and_token_and_those_of_attention() -> None:
    units = 64

    def make() -> ModelBatchLoss:
        sentences = torch.zeros(2, 4, dtype=torch.long)
        return Gnmt(units, words=101), {"from": sentences, "to": sentences}, gnmt_loss_of

    architecture, (module, _, _) = traced_architecture(make, "gnmt"), make()
    matrices = {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2 and not name.startswith("embedding")
    }
    of_attention = 2 * 4 * 4 * units
    assert architecture.forward_flops == 2 * 4 * sum(matrices.values()) + of_attention


def test_the_big_transformer_is_torchs_own_but_for_the_last_norms() -> None:
    with torch.device("meta"):
        theirs = nn.Transformer(1024, 16, 6, 6, 4096, batch_first=True)
    norms = 2 * 2 * 1024
    expected = sum(parameter.numel() for parameter in theirs.parameters()) - norms
    assert parameters(transformer_big) == expected + 33_712 * 1024


def test_ssds_heads_look_at_8732_boxes() -> None:
    module, batch, _ = ssd_300()
    with torch.no_grad():
        places, classes = module.eval()(batch["images"][:1])
    assert places.shape == (1, 4, 8732)  # the paper, table 7
    assert classes.shape == (1, 81, 8732)


def scores_of_all_words(module: TransformerXl, x: torch.Tensor) -> torch.Tensor:
    """Returns the logarithms of all words' probabilities by the definition of the clusters."""
    first = torch.cat((module.logits(x, 0), module.cluster_words(x)), dim=1).log_softmax(1)
    inside = [module.logits(x, number).log_softmax(1) for number in (1, 2, 3)]
    words = module.sizes.ends[0]
    rare = [first[:, words + n : words + n + 1] + part for n, part in enumerate(inside)]
    return torch.cat((first[:, :words], *rare), dim=1)


def test_transformer_xls_clusters_make_probabilities_of_all_words() -> None:
    torch.manual_seed(0)
    module = TransformerXl(TINY)
    words = np.arange(30).reshape(5, 6)
    x, targets = torch.randn(30, 64), torch.arange(30)
    log = scores_of_all_words(module, x)
    assert log.exp().sum(dim=1).tolist() == pytest.approx([1] * 30, rel=1e-5)
    loss = module.loss(x, targets, places_of(words, TINY.ends))
    assert loss.item() == pytest.approx(-log[targets, targets].mean().item(), rel=1e-5)


def test_a_transformer_xl_sees_its_memory_as_if_it_were_one_segment() -> None:
    # A block over a segment and its memory gives the later half what it gives the whole at once.
    torch.manual_seed(0)
    module = TransformerXl(TINY)
    block, biases = module.blocks[0], (module.content_bias, module.place_bias)
    nn.init.normal_(biases[0])
    nn.init.normal_(biases[1])
    x = torch.randn(2, 12, 64)
    whole = block(x, x[:, :0], waves(12, 64), *biases)
    later = block(x[:, 6:], x[:, :6], waves(12, 64), *biases)
    torch.testing.assert_close(later, whole[:, 6:])


@pytest.mark.slow
def test_biases_that_blocks_share_are_ready_before_the_first_block_and_embeddings_last() -> None:
    sizes = replace(TINY, layers=3, narrower=1)
    first, *layers = traced_architecture(lambda: transformer_xl(sizes), "transformer-xl").layers
    assert [tensor.name for tensor in first.tensors] == ["embeddings.0"]
    assert [layer.count for layer in layers if layer.is_block] == [1, 2]
    assert [tensor.name for tensor in layers[1].tensors] == ["content_bias", "place_bias"]


def small_resnet() -> ModelBatchLoss:
    images = {"images": torch.randn(2, 3, 32, 32), "labels": torch.arange(2)}
    return ResNet(stages=((4, 1, 1), (8, 3, 2)), classes=5), images, resnet.loss_of


def small_gnmt() -> ModelBatchLoss:
    sentences = torch.randint(11, (2, 3))
    return Gnmt(units=8, words=11), {"from": sentences, "to": sentences}, gnmt_loss_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        small_resnet,
        pytest.param(small_gnmt, marks=pytest.mark.slow),
        partial(transformer_xl, TINY),
        partial(transformer_xl, replace(TINY, narrower=1)),
        pytest.param(ssd_300, marks=pytest.mark.slow),
        pytest.param(partial(transformer_big, 4), marks=pytest.mark.slow),
    ],
)
def test_gradients_become_ready_as_in_the_real_backward_pass(make, monkeypatch) -> None:
    monkeypatch.setattr(ssd, "IMAGES", 2)
    for name, size in {"WIDTH": 64, "WIDE": 96, "WORDS": 101}.items():
        monkeypatch.setattr(big, name, size)
    module, batch, loss = make()
    ready: list[int] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: ready.append(weight.numel()))
    with torch.backends.mkldnn.flags(not isinstance(module, Gnmt)):  # for an LSTM's order
        loss(module, batch).backward()
    architecture = traced_architecture(make, "a model")
    sizes = architecture.parameter_sizes()
    followed = [sizes[index] for index in architecture.ready_order()]
    assert sorted(followed) == sorted(ready)
    # What blocks share is ready within the first, which counts whole: Transformer-XL's two biases.
    assert [size for size in followed if size != 16] == [size for size in ready if size != 16]


def test_each_model_has_a_name_that_leads_to_it() -> None:
    for name, target in FOLLOWED.items():
        module, function = target.split(":")
        assert function == name.replace("-", "_")
        assert callable(getattr(importlib.import_module(module), function))
