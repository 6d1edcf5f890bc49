"""ResNet-50 v1.5 (He et al. 2015, arXiv 1512.03385, table 1), which classifies images.

Version 1.5 halves an image in a block's 3 × 3 convolution and not in the first
(NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.traced import ModelBatchLoss

EXPANSION = 4
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width inside a block, blocks, and stride of the first block, of each stage of ResNet-50."""
IMAGES, PIXELS, CLASSES = 8, 224, 1000


def convolution(inputs: int, outputs: int, width: int, stride: int = 1) -> list[nn.Module]:
    """Returns a convolution of ``width`` × ``width`` pixels, and its batch norm.

    Its padding keeps the size of an image, but for the stride.
    """
    return [
        nn.Conv2d(inputs, outputs, width, stride, padding=width // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Bottleneck(nn.Module):
    """A residual block: 1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        is_changed = stride > 1 or inputs != outputs
        shortcut = convolution(inputs, outputs, 1, stride) if is_changed else []
        self.shortcut = nn.Sequential(*shortcut)
        self.residual = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [samples, inputs, height, width] to [samples, outputs, height, width]."""
        return functional.relu(self.residual(x) + self.shortcut(x))


def backbone(stages: tuple[tuple[int, int, int], ...]) -> nn.Sequential:
    """Returns the first convolution, its pooling, and stages of blocks, as ``STAGES`` has them."""
    layers = [*convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    inputs = 64
    for width, blocks, stride in stages:
        first = Bottleneck(inputs, width, stride)
        inputs = EXPANSION * width
        following = (Bottleneck(inputs, width, 1) for _ in range(blocks - 1))
        layers.append(nn.Sequential(first, *following))
    return nn.Sequential(*layers)


class ResNet(nn.Module):
    """A backbone, the mean over all pixels, and a linear head."""

    def __init__(
        self, stages: tuple[tuple[int, int, int], ...] = STAGES, classes: int = CLASSES
    ) -> None:
        super().__init__()
        self.backbone = backbone(stages)
        self.head = nn.Linear(EXPANSION * stages[-1][0], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps [samples, 3, height, width] to logits [samples, classes]."""
        return self.head(self.backbone(images).mean(dim=(2, 3)))


def resnet_50() -> ModelBatchLoss:
    """Makes ResNet-50 v1.5 on images of 224 × 224 pixels: 25,557,032 parameters."""
    batch = {"images": torch.randn(IMAGES, 3, PIXELS, PIXELS), "labels": torch.arange(IMAGES)}
    return ResNet(), batch, loss_of


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the mean cross-entropy."""
    return functional.cross_entropy(module(batch["images"]), batch["labels"])
