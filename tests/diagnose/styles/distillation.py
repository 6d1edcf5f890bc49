"""A small vision transformer that is distilled from a larger, frozen one.

Faults: teacher (the teacher is not frozen and its forward pass tracks gradients, which nothing
uses, as in huggingface/trl#6526), saves (rank 0 writes checkpoints every few steps while the others
wait, as in NVIDIA/Megatron-LM#651), recompute (the student's blocks are checkpointed although
memory is plentiful, as in Nerogar/OneTrainer#40).
"""

import argparse
import tempfile
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    steps: int = 60
    batch_size: int = 16
    temperature: float = 2.0
    hard_weight: float = 0.3
    fault: str = "none"


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class VisionTransformer(nn.Module):
    def __init__(self, width: int, depth: int, recompute: bool = False):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head, self.recompute = nn.Linear(width, 20), recompute

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x.mean(1))


def soft_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    logs, wanted = F.log_softmax(student / temperature, 1), F.log_softmax(teacher / temperature, 1)
    return F.kl_div(logs, wanted, reduction="batchmean", log_target=True) * temperature**2


def distill(config: Config, folder: str) -> None:
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(960, 3, 32, 32), torch.randint(0, 20, (960,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, config.batch_size, sampler=sampler, drop_last=True)
    teacher = VisionTransformer(width=192, depth=2).eval()
    teacher.requires_grad_(config.fault == "teacher")
    network = VisionTransformer(width=128, depth=4, recompute=config.fault == "recompute")
    student = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, fused=True)
    step = 0
    while True:
        sampler.set_epoch(step)
        for images, labels in loader:
            with torch.set_grad_enabled(config.fault == "teacher"):
                wanted = teacher(images)
            logits = student(images)
            loss = (1 - config.hard_weight) * soft_loss(logits, wanted, config.temperature)
            loss += config.hard_weight * F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if config.fault == "saves" and step % 2 == 0:
                if dist.get_rank() == 0:
                    state = {"student": student.state_dict(), "adam": optimizer.state_dict()}
                    torch.save(state, f"{folder}/last.pt")
                dist.barrier()
            if step == config.steps:
                return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        distill(Config(**vars(parser.parse_args())), folder)
    dist.destroy_process_group()
