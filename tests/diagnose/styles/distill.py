"""A small image classifier that learns from a larger one, in a framework much like Lightning.

Faults: sync_dist (each metric is averaged over the ranks whenever it is logged, as in
sb-ai-lab/RePlay#100), unfrozen (the teacher still requires gradients, which are computed and
exchanged, as in lightly-ai/lightly-train#352), reload (for each epoch the loader is made anew, and
with it the data set, for which all photographs are decoded, as in amaralibey/MixVPR#11).
"""

import argparse
import io
from itertools import islice, pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, TEMPERATURE = 64, 3.0  # a metric for each class: "sync_dist" costs in proportion
TEACHER, STUDENT = (28, 56, 112, 224), (24, 48, 96, 192)  # a wide TEACHER makes "unfrozen" dear
FULL, SIDE = 560, 32  # sides of photographs, stored and used: "reload" costs with FULL's square


def take_photographs(number):
    rng, files = np.random.default_rng(2), []
    patterns = rng.integers(40, 216, (CLASSES, 8, 8, 3))
    for label in np.arange(number) % CLASSES:
        pattern = (patterns[label] + rng.normal(0, 25, (8, 8, 3))).clip(0, 255).astype(np.uint8)
        photograph = Image.fromarray(pattern).resize((FULL, FULL), Image.Resampling.BICUBIC)
        photograph.save(file := io.BytesIO(), "JPEG", quality=95)
        files.append((file.getvalue(), int(label)))
    return files


def convnet(widths):
    layers, convolutions = [], [(3, widths[0], 1)]
    for inputs, outputs in pairwise(widths):
        convolutions += [(inputs, outputs, 2), (outputs, outputs, 1)]
    for inputs, outputs, stride in convolutions:
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)]
    return nn.Sequential(*layers)


class TrainModule(nn.Module):
    def forward(self, *batch):  # DDP wraps the module, and so the step
        return self.training_step(*batch)

    def log(self, name, value, sync_dist=False):
        if sync_dist:
            value = value.clone()
            dist.barrier()
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.metrics[name] = self.metrics.get(name, 0) + value


class Trainer:
    def __init__(self, max_steps, reload_dataloaders_every_n_epochs=0):
        self.max_steps, self.reload_every = max_steps, reload_dataloaders_every_n_epochs

    def fit(self, module):
        wrapped = DistributedDataParallel(module, broadcast_buffers=False)
        optimizer, loader = module.configure_optimizers(), module.train_dataloader()
        for epoch, start in enumerate(range(0, self.max_steps, len(loader))):
            if epoch and self.reload_every and epoch % self.reload_every == 0:
                loader = module.train_dataloader()
            loader.sampler.set_epoch(epoch)
            module.metrics = {}
            for batch in islice(loader, self.max_steps - start):
                optimizer.zero_grad()
                wrapped(*batch).backward()
                optimizer.step()


class Distillation(TrainModule):
    def __init__(self, files, **hp):
        super().__init__()
        self.files, self.hp = files, argparse.Namespace(**hp)
        self.student, self.teacher = convnet(STUDENT), convnet(TEACHER).eval()
        self.teacher.requires_grad_(not self.hp.freeze_teacher)

    def train_dataloader(self):
        photographs = (Image.open(io.BytesIO(content)) for content, _ in self.files)
        small = [np.asarray(p.resize((SIDE, SIDE), Image.Resampling.BOX)) for p in photographs]
        images = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).contiguous()
        data = TensorDataset(images, torch.tensor([label for _, label in self.files]))
        sampler = DistributedSampler(data)
        return DataLoader(data, self.hp.batch_size, sampler=sampler, drop_last=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=1e-3, fused=True)

    def training_step(self, images, labels):
        images = images / 64.0 - 2
        with torch.set_grad_enabled(not self.hp.freeze_teacher):
            teacher = self.teacher(images)
        student = self.student(images)
        soft, hard = ((t / TEMPERATURE).log_softmax(1) for t in (student, teacher))
        distilled = F.kl_div(soft, hard, reduction="batchmean", log_target=True)
        agree = (student.argmax(1) == teacher.argmax(1)).float()
        for label, hits in enumerate(torch.zeros(CLASSES).index_add_(0, labels, agree).unbind()):
            self.log(f"train/agreement_{label}", hits, sync_dist=self.hp.sync_dist)
        return F.cross_entropy(student, labels) + TEMPERATURE**2 * distilled


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch-size": 8, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(4)
switches = {"freeze_teacher": args.fault != "unfrozen", "sync_dist": args.fault == "sync_dist"}
module = Distillation(take_photographs(192), batch_size=args.batch_size, **switches)
Trainer(args.steps, int(args.fault == "reload")).fit(module)
print(f"rank {dist.get_rank()}: {sum(module.metrics.values()):.0f} agreements in the last epoch")
dist.destroy_process_group()
