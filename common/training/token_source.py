"""The tokens a run trains on: a user's shards, or synthetic text that is made when first needed."""

from __future__ import annotations

from pathlib import Path

from common.data.markov_text import synthetic_shards
from common.data.token_shards import TokenShards
from common.errors import UserError
from common.runtime.process_group import Worker
from common.training.config import TrainingConfig


def open_data(config: TrainingConfig, worker: Worker) -> TokenShards:
    """Opens the run's token shards on every rank; makes synthetic ones if none are given.

    Raises:
        UserError: no shards there, a file that is none, or synthetic text that cannot be written.
    """
    if config.data:
        return TokenShards.open(config.data)
    folder = Path(config.output_dir) / "tokens"
    problem = None
    if worker.ranks.local_rank == 0:  # on each node, as nodes need not share a file system
        try:
            synthetic_shards(folder)
        except UserError as error:  # may be of this node only, so the others are told
            problem = str(error)
    problems = [found for found in worker.gather(problem) if found]
    if problems:
        raise UserError(problems[0])
    return TokenShards.open(synthetic_shards(folder))
