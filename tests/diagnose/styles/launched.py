"""A classifier of sounds under accelerate, with accumulation, metrics and keyword handlers.

Faults: buckets (each parameter has a bucket of its own), every (gradients of all micro-batches are
exchanged, as in huggingface/accelerate#1153), metrics (predictions are gathered from all ranks
after each micro-batch, as in facebookresearch/detectron2#4785).
"""

import argparse

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sounds(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.stem = nn.Conv1d(8, width, 5, padding=2)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(blocks))
        self.head = nn.Linear(width, 20)

    def forward(self, waves):
        waves = self.stem(waves)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            waves = waves + torch.relu(norm(block(waves)))
        return self.head(waves.mean(2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    cap = 0.0005 if args.fault == "buckets" else 25
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=1 if args.fault == "every" else args.accumulation,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=cap)],
    )
    torch.manual_seed(6)
    data = TensorDataset(torch.randn(4096, 8, 64), torch.randint(0, 20, (4096,)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = Sounds(args.width, args.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = updates = 0
    while updates < args.updates:
        for waves, labels in loader:
            with accelerator.accumulate(model):
                outputs = model(waves)
                accelerator.backward(nn.functional.cross_entropy(outputs, labels))
                batches += 1
                if args.fault != "every" or batches % args.accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if args.fault == "metrics":
                for tensor in (outputs.argmax(1), labels, outputs.max(1).values):
                    accelerator.gather_for_metrics(tensor)
                    accelerator.wait_for_everyone()
            updates = batches // args.accumulation
            if updates >= args.updates:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
