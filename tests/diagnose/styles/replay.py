"""TD3 with behaviour cloning from a replay buffer, offline, in one file as in CleanRL.

Faults: sync_norms (the critics' norms average their statistics over the ranks, though each rank's
batch is large enough, as in Lightning-AI/pytorch-lightning#4632), unfrozen (the actor's loss fills
gradients of the critics too, which DDP exchanges and the next turn throws away, a cost like that in
vwxyzjn/cleanrl#270), percentile (gradients are clipped at a percentile, for which they are sorted).
"""

import argparse
import copy
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

OBS, ACT, TRANSITIONS, ACTOR = 64, 8, 40_000, (256, 256)
CRITIC = (640, 640, 256)  # each width has a norm ("sync_norms"), and "unfrozen" costs with the size
STRIDE = 4  # every n-th gradient is among those sorted with "percentile"
PERCENTILE, MAX_NORM, GAMMA, TAU, ALPHA = 0.999, 10.0, 0.99, 0.005, 2.5


class ReplayBuffer:  # a rank's share of transitions of a noisy controller in a linear system
    def __init__(self, rank, world):
        rng = torch.Generator().manual_seed(0)
        shapes = (TRANSITIONS, OBS), (OBS, ACT), (TRANSITIONS, ACT), (ACT, OBS)
        obs, gains, noise, push = (torch.randn(shape, generator=rng) for shape in shapes)
        actions = (0.1 * obs @ gains + 0.3 * noise).tanh()
        next_obs = 0.9 * obs + 0.3 * actions @ push
        rewards, dones = -next_obs.square().mean(1), (obs[:, 0] > 2.3).float()
        transitions = (obs, actions, rewards, next_obs, dones)
        self.data = [field[rank::world].contiguous() for field in transitions]
        self.rng = torch.Generator().manual_seed(rank)

    def sample(self, batch_size):
        indices = torch.randint(len(self.data[0]), (batch_size,), generator=self.rng)
        return [field[indices] for field in self.data]


class SyncNorm(nn.BatchNorm1d):  # nn.SyncBatchNorm is for GPUs only
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        count = all_reduce(torch.tensor(float(len(x))))
        mean = all_reduce(x.sum(0)) / count
        var = all_reduce((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


def mlp(widths, outputs, norm=None):
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), norm(after) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


class Critics(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.qf1, self.qf2 = (mlp((OBS + ACT, *CRITIC), 1, norm) for _ in range(2))

    def forward(self, obs, actions):
        x = torch.cat([obs, actions], dim=1)
        return self.qf1(x)[:, 0], self.qf2(x)[:, 0]


def update(optimizer, weights, loss, fault):
    optimizer.zero_grad()
    loss.backward()
    if fault == "percentile":
        sizes = torch.cat([w.grad.flatten()[::STRIDE] for w in weights]).abs()
        limit = sizes.sort().values[int(PERCENTILE * len(sizes))].item()
        for w in weights:
            w.grad.clamp_(-limit, limit)
    else:
        nn.utils.clip_grad_norm_(weights, MAX_NORM)
    optimizer.step()


parser = argparse.ArgumentParser()
for flag, default in {"--steps": 60, "--batch-size": 80, "--fault": "none"}.items():
    parser.add_argument(flag, type=type(default), default=default)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())  # DDP starts from the weights of rank 0
buffer = ReplayBuffer(dist.get_rank(), dist.get_world_size())
norm = SyncNorm if args.fault == "sync_norms" else nn.BatchNorm1d
actor = DistributedDataParallel(nn.Sequential(mlp((OBS, *ACTOR), ACT), nn.Tanh()))
critics = DistributedDataParallel(Critics(norm), broadcast_buffers=False)
target_actor, target_critics = copy.deepcopy(actor.module), copy.deepcopy(critics.module).eval()
weights, q_weights = list(actor.parameters()), list(critics.parameters())
target_weights = [*target_actor.parameters(), *target_critics.parameters()]
optimizer = torch.optim.Adam(weights, lr=3e-4, fused=True)
q_optimizer = torch.optim.Adam(q_weights, lr=3e-4, fused=True)
for _ in range(args.steps):
    obs, actions, rewards, next_obs, dones = buffer.sample(args.batch_size)
    with torch.no_grad():
        noise = (0.2 * torch.randn_like(actions)).clamp(-0.5, 0.5)
        next_actions = (target_actor(next_obs) + noise).clamp(-1, 1)
        next_q = torch.minimum(*target_critics(next_obs, next_actions))
        targets = rewards + GAMMA * (1 - dones) * next_q
    qf_loss = sum(F.mse_loss(q, targets) for q in critics(obs, actions))
    update(q_optimizer, q_weights, qf_loss, args.fault)
    judges = critics if args.fault == "unfrozen" else critics.module.requires_grad_(False)
    policy = actor(obs)
    values = torch.minimum(*judges(obs, policy))
    cloning = F.mse_loss(policy, actions) * values.detach().abs().mean() / ALPHA
    update(optimizer, weights, cloning - values.mean(), args.fault)
    critics.requires_grad_(True)
    with torch.no_grad():  # Polyak
        torch._foreach_lerp_(target_weights, weights + q_weights, TAU)
        for target, statistic in zip(target_critics.buffers(), critics.buffers(), strict=True):
            target.copy_(statistic)
dist.destroy_process_group()
