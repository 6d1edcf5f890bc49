"""One rank of the trainings that test_equivalence.py looks at.

``equivalence_worker.py FOLDER CASE…``: all run in one process group, and write run directories and
checkpoints below FOLDER. Rank r draws its first weights with seed 42 + r, so they are alike only
if the strategy makes them so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.runtime.group.process_group import process_group
from common.training.config import OWN_STRATEGIES, TrainingConfig, config_of
from common.training.trainer import train

STEPS, WARMUP_STEPS, GLOBAL_BATCH = 6, 2, 16
KINDS = ("DDP", "FULL_SHARD", "MY_ZERO1")
"""Strategies that stand for all in a quick run."""
STRATEGIES = ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", *OWN_STRATEGIES)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        strategy, precision, micro_batch: as in the settings.
        own_weights: rank 0's weights are kept from the other rank.
        recomputed: activations are computed again, and checkpoints made in between as well.
    """

    strategy: str
    precision: str = "float64"
    micro_batch: int = 8
    own_weights: bool = False
    recomputed: bool = False

    @property
    def name(self) -> str:
        """Returns the name of its run directory, which is a test's id, too."""
        own = "-own-weights" if self.own_weights else ""
        again = "-recomputed" if self.recomputed else ""
        return f"{self.strategy}-{self.precision}-{self.micro_batch}{own}{again}"

    @property
    def is_quick(self) -> bool:
        """Returns whether it accumulates plainly in float64 and is of one that stands for all."""
        if self.own_weights:
            return self.strategy == "DDP"
        return self.micro_batch < 8 and not self.recomputed and self.strategy in KINDS

    @property
    def steps(self) -> int:
        """Counts all steps, or those to the first after warm-up: they share learning rates."""
        return WARMUP_STEPS + 1 if self.own_weights else STEPS

    @property
    def saved(self) -> bool:
        """Returns whether its final weights are kept."""
        return self.precision == "float64" and not self.own_weights

    def config(self, folder: Path) -> TrainingConfig:
        """Makes its settings; data and output are below ``folder``."""
        options = {
            "data": str(folder / "tokens"),
            "model": "gpt2-pico",
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": self.micro_batch,
            "seq_len": 8,
            "num_steps": self.steps,
            "lr": 3e-3,
            "warmup_steps": WARMUP_STEPS,
            "precision": self.precision,
            "log_every": STEPS,
            "profile": False,
            "device": "cpu",
            "activation_checkpointing": self.recomputed,
            "save_every": 4 if self.recomputed else 0,
            "checkpoint_dir": str(folder / "checkpoints" / self.name) if self.saved else "",
            "output_dir": str(folder / "runs"),
            "run_id": self.name,
        }
        return config_of(self.strategy, **options)


RECOMPUTED = ("DDP", "FULL_SHARD", "MY_FSDP")
EXACT = (
    *(Case(strategy, micro_batch=m) for strategy in STRATEGIES for m in (8, 4)),
    *(Case(strategy, micro_batch=4, recomputed=True) for strategy in RECOMPUTED),
)
ROUNDED = tuple(Case(strategy, "float32") for strategy in STRATEGIES)
DIFFERENT = (Case("DDP", own_weights=True), Case("FULL_SHARD", own_weights=True))
CASES = (*EXACT, *ROUNDED, *DIFFERENT)


class UnsyncedDdp(DistributedDataParallel):
    """DDP that leaves every rank the weights it has."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options, init_sync=False)


@contextmanager
def every_rank_keeps_its_weights() -> Iterator[None]:
    """Keeps every rank's weights: DDP, which sends in C++, gets an option; nothing is broadcast."""
    with (
        mock.patch("common.training.ddp.DistributedDataParallel", UnsyncedDdp),
        mock.patch.object(dist, "broadcast"),
    ):
        yield


def main() -> None:
    """Trains one case after another."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    with process_group("cpu", "gloo"):
        for case in CASES:
            with every_rank_keeps_its_weights() if case.own_weights else nullcontext():
                if case.name in names:
                    train(case.config(folder))


if __name__ == "__main__":
    main()
