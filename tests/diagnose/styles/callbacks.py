"""A regression with a Trainer class of its own and callbacks, as in-house frameworks have them.

Faults: average (weights are averaged parameter by parameter, at six rates, as in
ecmwf/WeatherGenerator#2520), save (rank 0 writes a checkpoint every third step, as in
instructlab/training#566), history (outputs of all steps are kept, as in
Lightning-AI/pytorch-lightning#5735).
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Callback:
    def on_step_end(self, trainer, outputs):
        pass


class AverageWeights(Callback):
    """Moves an average of the weights towards the weights."""

    def __init__(self, rates):
        self.rates, self.averages = rates, {}

    @torch.no_grad()
    def on_step_end(self, trainer, outputs):
        for rate in self.rates:
            for name, weight in trainer.model.module.state_dict().items():
                average = self.averages.setdefault((rate, name), weight.clone())
                average.copy_(rate * average + (1 - rate) * weight)


class Checkpoint(Callback):
    def __init__(self, every):
        self.every = every
        self.path = os.path.join(tempfile.mkdtemp(), "last.pt")

    def on_step_end(self, trainer, outputs):
        if trainer.step % self.every == 0 and dist.get_rank() == 0:
            state = {
                "model": trainer.model.state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
            }
            for kept in range(3):  # the last, the best, and one by its step
                torch.save(state, f"{self.path}.{kept}")
                with open(f"{self.path}.{kept}", "rb+") as file:
                    os.fsync(file.fileno())


class History(Callback):
    def __init__(self):
        self.outputs = []

    def on_step_end(self, trainer, outputs):
        self.outputs.append(outputs.detach().repeat(1, 40))


class Trainer:
    def __init__(self, model, loader, callbacks, max_steps):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.loader, self.callbacks, self.max_steps = loader, callbacks, max_steps
        self.step = 0

    def training_step(self, batch):
        inputs, targets = batch
        outputs = self.model(inputs)
        nn.functional.huber_loss(outputs, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        for callback in self.callbacks:
            callback.on_step_end(self, outputs)

    def fit(self):
        epoch = 0
        while self.step < self.max_steps:
            self.loader.sampler.set_epoch(epoch)
            epoch += 1
            for batch in self.loader:
                self.training_step(batch)
                if self.step >= self.max_steps:
                    return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--fault", default="none")
    options = parser.parse_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(8192, 64), torch.randn(8192, 32))
    loader = DataLoader(data, batch_size=options.batch_size, sampler=DistributedSampler(data))
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU()) for _ in range(10)]
    model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 32))
    rates = [1 - 0.5**power for power in range(4, 10)]
    callbacks = {
        "average": [AverageWeights(rates)],
        "save": [Checkpoint(every=3)],
        "history": [History()],
    }
    Trainer(model, loader, callbacks.get(options.fault, []), options.steps).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
