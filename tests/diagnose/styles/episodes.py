"""Few-shot recognition of minerals from their spectra: prototypical networks on sampled episodes.

Faults: sync (each norm averages its statistics over the ranks, although an episode is a large
batch, as in HuangJunJie2017/BEVDet#147), ways (each rank draws for itself how many classes its next
episode has, as before lhotse-speech/lhotse#1341), svd (weights are kept contractive by their exact
singular values after each update, where a step of the power iteration does).
"""

import argparse
import itertools

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# The faults' sizes: the spread of an epoch's ways, and how many blocks sync and svd deal with.
opt = {"ways": [2, 2, 3, 3, 4, 4, 5, 6, 8, 11, 18, 30], "synced": 12, "limited": 10}
opt |= {"classes": 64, "examples": 30, "shot": 5, "query": 15}
opt |= {"bins": 384, "width": 192, "depth": 12, "dim": 128}


def spectra(rng):
    shape, grid = (opt["classes"], 1, 6, 1), np.linspace(0, 1, opt["bins"], dtype=np.float32)
    noise = rng.standard_normal((opt["classes"], opt["examples"], 6, 1), dtype=np.float32)
    lines = rng.random(shape, dtype=np.float32) + 0.003 * noise
    x = (rng.random(shape, dtype=np.float32) * np.exp(-(((grid - lines) / 0.01) ** 2))).sum(2)
    return x + 0.05 * rng.standard_normal(x.shape, dtype=np.float32)


def episodes(x):
    own, n = np.random.default_rng(1000 + dist.get_rank()), opt["shot"] + opt["query"]
    for epoch in itertools.count():
        rng = own if opt["fault"] == "ways" else np.random.default_rng(epoch)
        for way in rng.permutation(opt["ways"]).tolist():
            classes = own.permutation(opt["classes"])[:way, None]
            chosen = own.random((way, opt["examples"])).argsort(1)[:, :n]
            yield torch.from_numpy(x[classes, chosen])  # way x (shot + query) x bins


class Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(ctx, grad):
        return Average.forward(ctx, grad)


class SyncNorm(nn.BatchNorm1d):  # nn.SyncBatchNorm is for GPUs only
    def forward(self, x):
        x = x - Average.apply(x.mean(0))
        variance = Average.apply(x.square().mean(0))
        return x * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def block(i, d):
    norm = SyncNorm if opt["fault"] == "sync" and i < opt["synced"] else nn.BatchNorm1d
    norms = [norm(d, track_running_stats=False) for _ in range(2)]
    layers = [(norm, nn.ReLU(), nn.Linear(d, d, bias=False)) for norm in norms]
    return Residual(*layers[0], *layers[1])


def proto_loss(z):  # the squared distance without |query|^2, which does not change the softmax
    protos, queries = z[:, : opt["shot"]].mean(1), z[:, opt["shot"] :].flatten(0, 1)
    logits = (2 * queries @ protos.T - protos.square().sum(1)) / opt["dim"]
    return F.cross_entropy(logits, torch.arange(len(z)).repeat_interleave(opt["query"]))


@torch.no_grad()
def contract(w, v):
    if opt["fault"] == "svd":
        sigma = torch.linalg.matrix_norm(w, 2)
    else:
        v.copy_(F.normalize(w.T @ (w @ v), dim=0))
        sigma = (w @ v).norm()
    w.div_(sigma.clamp(min=1))


def main():
    torch.manual_seed(0)
    blocks = [block(i, opt["width"]) for i in range(opt["depth"])]
    first, last = nn.Linear(opt["bins"], opt["width"]), nn.Linear(opt["width"], opt["dim"])
    net = nn.parallel.DistributedDataParallel(nn.Sequential(first, *blocks, last))
    optim = torch.optim.SGD(net.parameters(), opt["lr"], momentum=0.9, fused=True)
    limited = [(b[-1].weight, torch.ones(opt["width"])) for b in blocks[: opt["limited"]]]
    data = spectra(np.random.default_rng(0))
    for _, x in zip(range(opt["steps"]), episodes(data), strict=False):
        loss = proto_loss(net(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
        optim.zero_grad()
        loss.backward()
        optim.step()
        for w, v in limited:
            contract(w, v)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for key, value in {"steps": 60, "lr": 0.01, "fault": "none"}.items():
        parser.add_argument(f"--{key}", type=type(value), default=value)
    opt |= vars(parser.parse_args())
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
