"""A transformer with mixtures of experts, in which experts choose tokens, that sorts sequences.

Faults: nan_hunt (autograd's anomaly detection stayed on after a hunt for NaNs), remat (all
blocks are rematerialised although memory is plentiful, as in unslothai/unsloth#10666), cap (DDP's
buckets hold little more than one matrix of an expert, as before facebookresearch/fairscale#122).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, LENGTH, CLASSES, HEADS = 512, 64, 10, 4
DIM, HIDDEN, LAYERS, EXPERTS, CAPACITY_FACTOR = 96, 96, 4, 16, 2.0


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(F.gelu(self.w_in(x)))


class ExpertChoice(nn.Module):
    def __init__(self):
        super().__init__()
        self.share = CAPACITY_FACTOR / EXPERTS
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        gates, chosen = scores.t().topk(int(len(tokens) * self.share))
        parts = tokens[chosen.flatten()].view(*chosen.shape, -1).unbind()
        outputs = torch.stack(
            [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        )
        outputs = outputs.flatten(0, 1) * gates.reshape(-1, 1)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), outputs).view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.moe = ExpertChoice()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.moe(self.norm2(x))


class MoEClassifier(nn.Module):
    def __init__(self, remat: bool):
        super().__init__()
        self.remat, self.embed = remat, nn.Embedding(VOCAB, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)
        return self.head(x.mean(1))


def make_dataset(size: int = 4096) -> TensorDataset:
    rng = torch.Generator().manual_seed(11)
    labels = torch.randint(CLASSES, (size,), generator=rng)
    ids = torch.randint(VOCAB, (size, LENGTH), generator=rng)
    return TensorDataset(torch.where(ids % 3 == 0, labels[:, None] * 7, ids), labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag, default in (("--steps", 60), ("--batch_size", 16), ("--fault", "none")):
        parser.add_argument(flag, type=type(default), default=default)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(args.fault == "nan_hunt")
    bucket_cap_mb = 0.04 if args.fault == "cap" else None
    classifier = MoEClassifier(remat=args.fault == "remat")
    model = DistributedDataParallel(classifier, bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    for _, (ids, labels) in zip(range(args.steps), loader, strict=False):
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
