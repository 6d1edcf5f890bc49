"""A stream of texts that each rank takes its share of, and a transformer's encoder."""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Texts without end; rank r of R has every R-th, beginning with the r-th."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __iter__(self) -> Iterator[Tensor]:
        index = dist.get_rank()
        while True:
            generator = torch.Generator().manual_seed(index)
            yield torch.randint(0, 1000, (self.tokens,), generator=generator)
            index += dist.get_world_size()


class Encoder(nn.Module):
    """Predicts each token from all others that come before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, texts: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        return self.head(self.layers(self.embedding(texts), mask=mask, is_causal=True))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--batch_size", type=int, default=12)
parser.add_argument("--tokens", type=int, default=48)
parser.add_argument("--width", type=int, default=128)
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Encoder(options.width))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, texts in enumerate(DataLoader(Stream(options.tokens), options.batch_size)):
    outputs = model(texts[:, :-1])
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), texts[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 >= options.steps:
        break
dist.destroy_process_group()
