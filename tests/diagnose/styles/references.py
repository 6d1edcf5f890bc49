"""An image classifier as torchvision's references train one: a parser, epochs, a metric logger.

Faults: decode (images are decoded in the loop's own process), reduce (each metric is reduced after
each step, as in huggingface/trl#3838), evaluate (rank 0 alone evaluates every ten steps, as in
pytorch/examples#461).
"""

import argparse
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, count, compressed):
        draw = torch.Generator().manual_seed(3)
        pixels = (torch.randint(0, 9, (count, 3, 32, 32), generator=draw) * 28).to(torch.uint8)
        self.files = [zlib.compress(image.numpy().tobytes(), 9) for image in pixels]
        self.pixels, self.compressed = pixels, compressed

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = self.pixels[index]
        if self.compressed:
            pixels = bytearray(zlib.decompress(self.files[index]))
            image = torch.frombuffer(pixels, dtype=torch.uint8).view(3, 32, 32)
            shift = torch.randint(-3, 4, (2,)).tolist()
            for _ in range(4):  # crop, flip, blur, convert
                image = torch.roll(image, shift, (1, 2)).flip(2).contiguous()
        return image.float() / 255, index % 10


def conv(inputs, outputs, stride=1):
    layers = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, nn.ReLU())


class MetricLogger:
    def __init__(self, synchronised):
        self.synchronised, self.sums = synchronised, {}

    def update(self, **values):
        for name, value in values.items():
            total = torch.tensor([float(value), 1.0], dtype=torch.float64)
            if self.synchronised:
                dist.barrier()
                dist.all_reduce(total)
            self.sums[name] = self.sums.get(name, 0) + total


@torch.no_grad()
def evaluate(model, images):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(images, 64))
    model.train()
    return right / len(images)


def train_one_epoch(model, optimizer, loader, logger, args, step, held_out):
    for images, targets in loader:
        output = model(images)
        loss = nn.functional.cross_entropy(output, targets, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        top1 = (output.argmax(1) == targets).float().mean()
        top5 = (output.topk(5).indices == targets[:, None]).any(1).float().mean()
        lr = optimizer.param_groups[0]["lr"]
        logger.update(loss=loss.item(), top1=top1, top5=top5, lr=lr, images=len(images))
        step += 1
        if args.fault == "evaluate" and step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: {evaluate(model.module, held_out):.3f}")
        if step >= args.steps:
            break
    return step


def get_args_parser():
    parser = argparse.ArgumentParser(description="classification")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", "--batch_size", type=int, default=24)
    parser.add_argument("--fault", default="none")
    return parser


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = Images(4096, compressed=args.fault == "decode")
    sampler = DistributedSampler(images)
    loader = DataLoader(images, args.batch_size, sampler=sampler, drop_last=True)
    body = [conv(3, 24), conv(24, 48, 2), conv(48, 96, 2), conv(96, 96)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    logger = MetricLogger(synchronised=args.fault == "reduce")
    held_out, step, epoch = Images(256, compressed=False), 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        step = train_one_epoch(model, optimizer, loader, logger, args, step, held_out)
        schedule.step()
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main(get_args_parser().parse_args())
