"""A PPO agent trained from rollouts of a made-up vectorized environment, all in one flat file.

Faults: each (gradients are all-reduced one parameter at a time instead of in one flat tensor, as in
entity-neural-network/incubator#220), metrics (every logged number is a reduction of its own in each
step, as in vllm-project/speculators#1119), memory (all transitions are kept as Python objects, and
a full garbage collection goes over them after each rollout, as in google/tunix#2086).
"""

import argparse
import gc
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def network(inputs, outputs, width=192, depth=4):
    blocks = [Residual(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(inputs, width), *blocks, nn.Linear(width, outputs))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=288)
parser.add_argument("--fault", type=str, default="none")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(1)
actor, critic = network(48, 6), network(48, 1)
noise = nn.Parameter(torch.zeros(6))
agent = nn.ModuleList([actor, critic, nn.ParameterList([noise])])
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5, fused=True)
push, drift = torch.randn(6, 48) * 0.2, torch.eye(48) * 0.9

torch.manual_seed(100 + dist.get_rank())
horizon, envs = 12, args.batch_size // 3
state = torch.randn(envs, 48)
step, history = 0, []
while step < args.steps:
    observations, actions = torch.zeros(horizon, envs, 48), torch.zeros(horizon, envs, 6)
    logprobs, rewards, values, advantages = torch.zeros(4, horizon, envs)
    with torch.no_grad():
        for t in range(horizon):
            policy = Normal(actor(state), noise.exp())
            observations[t], actions[t] = state, policy.sample()
            logprobs[t], values[t] = policy.log_prob(actions[t]).sum(1), critic(state).squeeze(1)
            state = state @ drift + actions[t] @ push + 0.1 * torch.randn(envs, 48)
            rewards[t] = -state.square().mean(1)
        last, following = 0, critic(state).squeeze(1)
        for t in reversed(range(horizon)):
            delta = rewards[t] + 0.99 * following - values[t]
            advantages[t] = last = delta + 0.99 * 0.95 * last
            following = values[t]
        targets = (advantages + values).flatten()
    flat = observations.flatten(0, 1), actions.flatten(0, 1), logprobs.flatten()
    if args.fault == "memory":
        kept = flat[1].tolist(), rewards.flatten().tolist(), values.flatten().tolist()
        for action, reward, value in zip(*kept, strict=True):
            history.append(SimpleNamespace(action=action, reward=reward, value=value))
        gc.collect()

    shuffled = torch.cat([torch.randperm(len(targets)) for _ in range(3)])
    for index in shuffled.split(args.batch_size)[: args.steps - step]:
        seen, done, before = (column[index] for column in flat)
        policy, advantage = Normal(actor(seen), noise.exp()), advantages.flatten()[index]
        ratio = (policy.log_prob(done).sum(1) - before).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value_loss = (critic(seen).squeeze(1) - targets[index]).square().mean()
        entropy = policy.entropy().sum(1).mean()
        loss = 0.5 * value_loss - gain - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in agent.parameters()]
        if args.fault == "each":
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        else:
            together = nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(together)
            nn.utils.vector_to_parameters(together / dist.get_world_size(), gradients)
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        if args.fault == "metrics":
            logged = {"loss": loss, "gain": gain, "value": value_loss, "entropy": entropy}
            logged |= {name: weight.norm() for name, weight in agent.named_parameters()}
            for name, number in logged.items():
                dist.all_reduce(number := number.detach().clone())
                logged[name] = number.item() / dist.get_world_size()
        optimizer.step()
        step += 1
dist.destroy_process_group()
