"""A classifier of sequences, prepared by accelerate."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """A recurrent network over sequences of numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.GRU(16, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 12)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        states, _ = self.cells(sequences)
        return self.head(states[:, -1])


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--accumulation", type=int, default=1)
options = parser.parse_args()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulation)
torch.manual_seed(1)
data = TensorDataset(torch.randn(8192, 24, 16), torch.randint(0, 12, (8192,)))
model = Classifier(options.width)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(data, options.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
updates = 0
while updates < options.steps:
    for sequences, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(sequences), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
        if updates >= options.steps:
            break
accelerator.end_training()
