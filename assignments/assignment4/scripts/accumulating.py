"""Images, micro-batches, bfloat16 and a learning-rate schedule, in functions of one's own."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    """Random images that are drawn when they are asked for."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 16, 16, generator=generator)
        return {"image": image, "label": torch.tensor(index % 10)}


def network(channels: int) -> nn.Module:
    """Returns a convolutional network with a norm after each layer."""
    layers: list[nn.Module] = []
    for before, after in ((3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 10))


def train(options: argparse.Namespace) -> None:
    """Trains for so many updates."""
    data = Images()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    model = DDP(network(options.channels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    batches = iter(loader)
    for _ in range(options.steps):
        for micro in range(options.accumulation):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            last = micro == options.accumulation - 1
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=bool(options.bfloat16)):
                    outputs = model(batch["image"])
                loss = nn.functional.cross_entropy(outputs.float(), batch["label"])
                (loss / options.accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=48)
    parser.add_argument("--channels", type=int, default=24)
    parser.add_argument("--bfloat16", type=int, default=0)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    train(parser.parse_args())
    dist.destroy_process_group()
