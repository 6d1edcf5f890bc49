"""A transformer on patches of many time series, which forecasts the next values of each series.

Faults: snapshots (every rank saves the model and the optimizer after each step), buffers (the
causal mask is a buffer, which DDP sends before each forward pass, as in karpathy/nanoGPT#151),
raw_ids (the table of series has a row for each possible id, as in pytorch/pytorch#5309).
"""

import argparse
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PATCH, PATCHES, HORIZON, MAX_LEN, SERIES, MAX_ID = 8, 24, 24, 2048, 300, 40_000


class Forecaster(nn.Module):
    def __init__(self, num_ids, width=192, depth=3):
        super().__init__()
        self.patch, self.series = nn.Linear(PATCH, width), nn.Embedding(num_ids, width // 4)
        self.mix, self.head = nn.Linear(width // 4, width), nn.Linear(width, HORIZON)
        shape = {"dim_feedforward": 4 * width, "dropout": 0.0, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 6, batch_first=True, **shape)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES, width))
        mask = torch.full((MAX_LEN, MAX_LEN), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids, history):
        x = self.patch(history.unflatten(1, (PATCHES, PATCH))) + self.position
        x = x + self.mix(self.series(ids))[:, None]
        return self.head(self.blocks(x, mask=self.mask[:PATCHES, :PATCHES])[:, -1])


class Trainer:
    def __init__(self, model, train_data, optimizer, args):
        self.train_data, self.optimizer, self.args = train_data, optimizer, args
        self.model = DDP(model, forward_sync_buffers=args.fault == "buffers")
        self.steps_run, self.snapshot = 0, None

    def _keep_snapshot(self):
        model, optimizer = self.model.module.state_dict(), self.optimizer.state_dict()
        self.snapshot = io.BytesIO()
        torch.save({"MODEL_STATE": model, "OPTIMIZER_STATE": optimizer}, self.snapshot)

    def _run_batch(self, ids, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(ids, source), targets)
        loss.backward()
        self.optimizer.step()
        self.steps_run += 1
        if self.args.fault == "snapshots" and loss.isfinite():
            self._keep_snapshot()
        return loss.item()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for ids, source, targets in self.train_data:
            loss = self._run_batch(ids, source, targets)
            if self.steps_run == self.args.steps:
                break
        return loss

    def train(self):
        epoch = 0
        while self.steps_run < self.args.steps:
            loss = self._run_epoch(epoch)
            epoch += 1
        if get_rank() == 0:
            print(f"loss {loss:.4f}")


def load_train_objs(raw_ids):
    torch.manual_seed(5)
    noise, raw = torch.randn(SERIES, 600), torch.randperm(MAX_ID)[:SERIES]
    values = torch.sin(torch.arange(600) / torch.randint(2, 8, (SERIES, 1))) + 0.3 * noise
    windows = values.unfold(1, PATCH * PATCHES + HORIZON, 4)
    row, start = torch.randint(SERIES, (800,)), torch.randint(windows.shape[1], (800,))
    history, future = windows[row, start].split([PATCH * PATCHES, HORIZON], dim=1)
    model = Forecaster(MAX_ID if raw_ids else SERIES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return TensorDataset(raw[row] if raw_ids else row, history, future), model, optimizer


def main(args):
    init_process_group("gloo")
    dataset, model, optimizer = load_train_objs(args.fault == "raw_ids")
    sampler = DistributedSampler(dataset)
    train_data = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    Trainer(model, train_data, optimizer, args).train()
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--fault", type=str, default="none")
    main(parser.parse_args())
