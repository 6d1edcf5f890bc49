"""A one-stage detector on rendered scenes, with an engine that trains one epoch at a time.

Faults: workers (the loader starts its worker anew in each epoch, and that renders all scenes again,
as in metatensor/metatrain#1271), crowd (the scenes of rank 1 hold many more boxes, each of which
is assigned in a loop, as in V2AI/Det3D#168), threads (each rank sets more threads than there are
cores, as in Lightning-AI/pytorch-lightning#18677).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIZE, GRID, CLASSES = 128, 8, 6


class Scenes(Dataset):
    def __init__(self, count, per_scene):
        self.count, self.per_scene, self.images = count, per_scene, None

    def __len__(self):
        return self.count

    def render(self):
        rng = torch.Generator().manual_seed(5)
        corners, extent = torch.rand(2, self.count, self.per_scene, 2, generator=rng)
        self.boxes = torch.cat([corners * 0.7, corners * 0.7 + extent * 0.2 + 0.05], 2)
        self.labels = torch.randint(CLASSES, (self.count, self.per_scene), generator=rng)
        self.images = torch.empty(self.count, 3, SIZE, SIZE, dtype=torch.uint8)
        for i in range(self.count):
            scene = torch.rand(3, SIZE, SIZE, generator=rng) / 4
            for cells in (3, 9, 27):
                rough = torch.rand(1, 3, cells, cells, generator=rng) / 4
                scene += F.interpolate(rough, size=SIZE, mode="bicubic")[0].clamp(0, 0.25)
            corners = (self.boxes[i] * SIZE).int().tolist()
            for (x0, y0, x1, y1), label in zip(corners, self.labels[i].tolist(), strict=True):
                scene[label % 3, y0:y1, x0:x1] = label / CLASSES
            self.images[i] = scene * 255

    def __getitem__(self, i):
        if self.images is None:
            self.render()
        return self.images[i], self.boxes[i], self.labels[i]


def conv(inputs, outputs, stride):
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


def detector(w):
    stages = [conv(3, w, 2)]
    for width in (w, 2 * w, 4 * w):
        stages += [conv(width, 2 * width, 2), conv(2 * width, 2 * width, 1)]
    return nn.Sequential(*stages, nn.Conv2d(8 * w, 5 + CLASSES, 1))


def criterion(output, boxes, labels):
    target = torch.zeros(len(boxes), GRID, GRID, 5)
    classes = torch.full((len(boxes), GRID, GRID), -1)
    for i in range(len(boxes)):
        for box, label in zip(boxes[i], labels[i], strict=True):
            column, row = ((box[:2] + box[2:]) / 2 * GRID).int().clamp(max=GRID - 1).tolist()
            target[i, row, column] = torch.cat([torch.ones(1), box])
            classes[i, row, column] = label
    found = classes >= 0
    presence = F.binary_cross_entropy_with_logits(output[..., 0], target[..., 0])
    place = F.smooth_l1_loss(output[found][:, 1:5].sigmoid(), target[found][:, 1:])
    return presence + 4 * place + F.cross_entropy(output[found][:, 5:], classes[found])


def train_one_epoch(model, optimizer, loader, most):
    for step, (images, boxes, labels) in enumerate(loader, start=1):
        loss = criterion(model(images.float() / 255).permute(0, 2, 3, 1), boxes, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == most:
            break
    return step


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=6)
parser.add_argument("--fault", type=str, default="none")
args = parser.parse_args()
dist.init_process_group("gloo")
if args.fault == "threads":
    torch.set_num_threads(8)
crowded = args.fault == "crowd" and dist.get_rank() == 1
scenes = Scenes(240, 80 if crowded else 4)
sampler, keep = DistributedSampler(scenes), args.fault != "workers"
loader = DataLoader(scenes, args.batch_size, False, sampler, num_workers=1, persistent_workers=keep)
model = DistributedDataParallel(detector(16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
done = 0
while done < args.steps:
    sampler.set_epoch(done)
    done += train_one_epoch(model, optimizer, loader, args.steps - done)
dist.destroy_process_group()
