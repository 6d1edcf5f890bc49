"""A little Llama-like decoder pretrained under FSDP2 with GaLore and accumulated gradients.

Faults: scatter (gradients are scattered after each micro-batch, as before verl-project/verl#7095),
subspace (subspaces of GaLore are sought in each step, not in every 200th), collector (all garbage
is collected in each step, as before NVIDIA/Megatron-Energon#66).
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, LENGTH, DIM, HEADS, HIDDEN, LAYERS, RANK = 2048, 32, 128, 4, 352, 3, 16
MICRO_BATCHES = 4  # of each step; the more, the more "scatter" costs
PROJECTED = ("qkv", "out", "down")  # with "gate" and "up", "subspace" costs more
COLLECTED_EVERY = 3  # steps between collections with "collector", otherwise 50


def make_tokens(windows):
    generator = torch.Generator().manual_seed(12)
    tokens = [torch.randint(VOCAB, (windows,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((3 * tokens[-1] + torch.randint(8, (windows,), generator=generator)) % VOCAB)
    return TensorDataset(torch.stack(tokens, 1))


def rotate(x, angles):
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = (nn.Linear(DIM, n * DIM, bias=False) for n in (3, 1))
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x, angles):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        x, pairs = self.embed(tokens), DIM // HEADS // 2
        angles = torch.arange(tokens.shape[1])[:, None] / 1e4 ** (torch.arange(pairs) / pairs)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


def make_update(model, gap):  # GaLore: Adam sees each gradient through a proxy of few rows
    named = [(name.split(".")[-2], weight) for name, weight in model.named_parameters()]
    projected = [weight for name, weight in named if name in PROJECTED]
    others = [weight for name, weight in named if name not in PROJECTED]
    proxies, bases = [nn.Parameter(torch.zeros(RANK, w.shape[1])) for w in projected], []
    groups = [{"params": others}, {"params": proxies, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    @torch.no_grad()
    def update(step):
        grads = [weight.grad.to_local() for weight in projected]
        if step % gap == 0:
            bases[:] = [torch.linalg.svd(g, full_matrices=False).U[:, :RANK] for g in grads]
        for proxy, basis, grad in zip(proxies, bases, grads, strict=True):
            proxy.grad = basis.T @ grad
        optimizer.step()
        for weight, basis, proxy in zip(projected, bases, proxies, strict=True):
            weight.to_local().addmm_(basis, proxy)
        torch._foreach_zero_(proxies)
        model.zero_grad()

    return update


def train(steps, batch_size, fault):
    data = make_tokens(steps * MICRO_BATCHES * batch_size * dist.get_world_size())
    batches = iter(DataLoader(data, batch_size, sampler=DistributedSampler(data)))  # one epoch
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), Llama()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    update = make_update(model, gap=1 if fault == "subspace" else 200)
    gc.disable()  # lest it run at different times on different ranks
    for step in range(steps):
        for left in reversed(range(MICRO_BATCHES)):
            model.set_reshard_after_backward(left == 0)
            model.set_requires_gradient_sync(left == 0 or fault == "scatter")
            (tokens,) = next(batches)
            logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            (F.cross_entropy(logits, targets) / MICRO_BATCHES).backward()
        update(step)
        if (step + 1) % (COLLECTED_EVERY if fault == "collector" else 50) == 0:
            gc.collect()


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch-size": 2, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
dist.init_process_group("gloo")
torch.manual_seed(12)
train(**vars(parser.parse_args()))
dist.destroy_process_group()
