"""SSD300 (Liu et al. 2015, arXiv 1512.02325) on ResNet-50, which finds objects in images.

Sizes are those of NVIDIA/DeepLearningExamples, PyTorch/Detection/SSD: the first three stages of
ResNet-50, of which the third keeps 38 × 38 pixels, then five pairs of convolutions down to one
pixel. Two heads look at each of the six feature maps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.published.resnet import STAGES, backbone, convolution
from common.models.traced import ModelBatchLoss

CHANNELS = (1024, 512, 512, 256, 256, 256)
"""Channels of the feature maps, which have 38, 19, 10, 5, 3 and 1 pixels a side."""
BETWEEN = (256, 256, 128, 128, 128)
"""Channels between the two convolutions that lead to the next map."""
HALVED = 3
"""Maps that are made with stride 2; those after them lose a pixel at each border instead."""
BOXES = (4, 6, 6, 6, 4, 4)
"""Default boxes at a pixel of each map."""
CLASSES = 81
IMAGES, PIXELS = 4, 300


class Ssd300(nn.Module):
    """A backbone, further feature maps, and heads for places and classes of boxes."""

    def __init__(self) -> None:
        super().__init__()
        (width, blocks, _), kept = STAGES[2], STAGES[:2]
        self.backbone = backbone((*kept, (width, blocks, 1)))
        self.further = nn.ModuleList(
            nn.Sequential(
                *convolution(inputs, between, 1),
                nn.ReLU(inplace=True),
                *self._next(between, outputs, is_halved=number < HALVED),
                nn.ReLU(inplace=True),
            )
            for number, (inputs, between, outputs) in enumerate(
                zip(CHANNELS[:-1], BETWEEN, CHANNELS[1:], strict=True)
            )
        )
        sizes = list(zip(CHANNELS, BOXES, strict=True))
        self.places = nn.ModuleList(nn.Conv2d(n, 4 * boxes, 3, padding=1) for n, boxes in sizes)
        self.classes = nn.ModuleList(
            nn.Conv2d(n, CLASSES * boxes, 3, padding=1) for n, boxes in sizes
        )

    @staticmethod
    def _next(inputs: int, outputs: int, is_halved: bool) -> list[nn.Module]:
        if is_halved:
            return convolution(inputs, outputs, 3, stride=2)
        return [nn.Conv2d(inputs, outputs, 3, bias=False), nn.BatchNorm2d(outputs)]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [samples, 3, 300, 300] to places [samples, 4, boxes] and logits of classes."""
        maps = [self.backbone(images)]
        for layer in self.further:
            maps.append(layer(maps[-1]))
        outputs = [
            (places(features).flatten(1), classes(features).flatten(1))
            for features, places, classes in zip(maps, self.places, self.classes, strict=True)
        ]
        places, classes = (torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True))
        return places.unflatten(1, (4, -1)), classes.unflatten(1, (CLASSES, -1))


def ssd_300() -> ModelBatchLoss:
    """Makes SSD300 on ResNet-50 for COCO's 80 classes and the background."""
    boxes = sum(count * side**2 for count, side in zip(BOXES, (38, 19, 10, 5, 3, 1), strict=True))
    batch = {
        "images": torch.randn(IMAGES, 3, PIXELS, PIXELS),
        "places": torch.zeros(IMAGES, 4, boxes),
        "classes": torch.zeros(IMAGES, boxes, dtype=torch.long),
    }
    return Ssd300(), batch, loss_of


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss of all boxes, without the search for the hardest background."""
    places, classes = module(batch["images"])
    error = functional.smooth_l1_loss(places, batch["places"])
    return error + functional.cross_entropy(classes, batch["classes"])
