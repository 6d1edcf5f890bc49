"""Activations of modules that were followed, against autograd and PyTorch's tracker.

A convolution's kernel takes memory of its own on a CPU, which an operator's outputs do not show;
``ddplab study memory`` holds a ResNet against the allocator.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.traced import ModelBatchLoss, traced_architecture
from common.perfmodel.architectures.activations import Numerics, in_parts
from common.perfmodel.one_device.training_memory import Passes, predict_training_memory
from common.runtime import torch_internals


class Residual(nn.Module):
    """A ResNet's basic block; a step of two halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Maps [samples, channels, height, width] to another such image."""
        y = functional.relu(self.first_norm(self.first(x)), inplace=True)
        return functional.relu(self.second_norm(self.second(y)) + self.skip(x), inplace=True)


class ResNet(nn.Module):
    """A stem, three stages and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages = (Residual(32, 32), Residual(32, 32), Residual(32, 64, 2))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images to scores."""
        x = self.pool(self.stem(images))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def resnet(samples: int = 4) -> ModelBatchLoss:
    batch = torch.zeros(samples, 3, 64, 64), torch.zeros(samples, dtype=torch.int64)
    return ResNet(), batch, loss_of


def loss_of(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(module(images), labels)


@pytest.fixture(scope="module")
def followed():
    return traced_architecture(resnet, "resnet")


def passes(architecture, samples: int, half: bool) -> Passes:
    return Passes(architecture, samples, Numerics("autocast" if half else "float32"))


@pytest.mark.parametrize(("samples", "half"), [(4, False), (16, False), (2, True)])
def test_the_peak_is_the_trackers(followed, samples, half):
    with torch_internals.fake_tensors():
        module, batch, loss = resnet(samples)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        tracker = torch_internals.memory_tracker()
        for watched in (False, True):
            with tracker if watched else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    value = loss(module, batch)
                value.backward()
                del value
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if not watched:
                tracker.track_external(module, optimizer, *batch)
    sizes = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    [seen] = [size for key, size in sizes.items() if "Total" in str(key)]
    predicted = predict_training_memory(passes(followed, samples, half)).peak_bytes
    assert predicted == pytest.approx(seen, rel=0.02)


def test_what_is_kept_is_what_autograd_saves(followed):
    module, batch, loss = resnet()
    held = [*module.parameters(), *module.buffers(), *batch]
    known = {tensor.untyped_storage()._cdata for tensor in held}
    sizes, alive = {}, []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            alive.append(tensor)
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(module, batch)
    kept = [piece for layer in followed.layers for piece in layer.count * layer.activations.kept]
    predicted = sum(in_parts(kept, Numerics(), 4).values())
    assert predicted == pytest.approx(sum(sizes.values()), rel=0.005)


def test_a_gpus_dropout_keeps_a_byte_an_element():
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.layer(x)).sum()

    def make() -> ModelBatchLoss:
        return Drops(), torch.zeros(8, 64), lambda module, x: module(x)

    layers = traced_architecture(make, "drops").layers
    kept = [piece for layer in layers for piece in layer.activations.kept]
    assert sum(piece.bytes_in(Numerics()) for piece in kept) == 64


def test_attention_with_dropout_writes_no_scores_out():
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.inputs(x).unflatten(-1, (3, 2, 16)).movedim(2, 0).transpose(2, 3)
            return functional.scaled_dot_product_attention(*parts, dropout_p=0.1).sum()

    def make() -> ModelBatchLoss:
        return Attends(), torch.zeros(2, 512, 32), lambda module, x: module(x)

    layers = traced_architecture(make, "attends").layers
    kept = [piece for layer in layers for piece in layer.activations.kept]
    scores = 4 * 2 * 512 * 512
    assert sum(piece.bytes_in(Numerics()) for piece in kept) < scores / 2
