"""The tokens a run trains on: a user's shards, or synthetic text that is made when first needed."""

from __future__ import annotations

from pathlib import Path

from common.data.markov_text import synthetic_shards
from common.data.token_shards import TokenShards
from common.runtime.group.process_group import Worker
from common.training.config import TrainingConfig


def open_data(config: TrainingConfig, worker: Worker) -> TokenShards:
    """Opens the run's token shards on every rank; makes synthetic ones if none are given.

    Raises:
        UserError: no shards there, a file that is none, or synthetic text that cannot be written.
    """
    if config.data:
        with worker.mistakes_shared():
            return TokenShards.open(config.data)
    folder = Path(config.output_dir) / "tokens"
    with worker.mistakes_shared():
        if worker.ranks.local_rank == 0:  # on each node, as nodes need not share a file system
            synthetic_shards(folder)
    return TokenShards.open(synthetic_shards(folder))
