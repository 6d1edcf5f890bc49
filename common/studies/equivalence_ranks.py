"""The ranks of ``ddplab study equivalence``, 1, 2 or 4: the trainer under each strategy.

All cases of one number of ranks run one after another in one process group. Each leaves its run
directory and, as its last checkpoint, the final weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import UserError
from common.runtime.process_group import process_group
from common.runtime.script import run_script
from common.training.config import (
    DDP_STRATEGIES,
    FSDP_STRATEGIES,
    MY_FSDP,
    FsdpConfig,
    TrainingConfig,
    config_of,
)
from common.training.trainer import train


@dataclass(frozen=True)
class Cases:
    """Runs to make; they share everything that the numbers may depend on."""

    output_dir: str
    model: str = "gpt2-pico"
    global_batch_size: int = 16
    seq_len: int = 32
    num_steps: int = 20
    accumulations: tuple[int, ...] = (1, 2)
    precisions: tuple[str, ...] = ("float64", "float32")

    def configs(self, ranks: int) -> Iterator[TrainingConfig]:
        """Yields the runs on ``ranks`` ranks, named ``strategy-ranks-accumulation-precision``."""
        for precision in self.precisions:
            for accumulation in self.accumulations:
                for strategy in strategies(ranks):
                    name = f"{strategy}-{ranks}-{accumulation}-{precision}"
                    yield config_of(
                        strategy,
                        model=self.model,
                        global_batch_size=self.global_batch_size,
                        micro_batch_size=self.global_batch_size // (ranks * accumulation),
                        seq_len=self.seq_len,
                        num_steps=self.num_steps,
                        lr=1e-3,
                        precision=precision,
                        log_every=self.num_steps,
                        profile=False,
                        checkpoint_dir=f"{self.output_dir}/checkpoints/{name}",
                        device="cpu",
                        output_dir=self.output_dir,
                        run_id=name,
                    )


def strategies(ranks: int) -> tuple[str, ...]:
    """Returns the strategies that ``ranks`` ranks can run; HYBRID_SHARD needs 4."""
    if ranks == 1:
        return ("single",)
    sharded = FSDP_STRATEGIES if ranks >= 4 else FSDP_STRATEGIES[:2]
    return (*DDP_STRATEGIES, *sharded, MY_FSDP)


def main(cases: Cases) -> None:
    """Runs all cases; on 2 ranks also tries HYBRID_SHARD, which must be refused."""
    with process_group("cpu") as worker:
        for config in cases.configs(worker.world_size):
            train(config)
        if worker.world_size == 2:
            try:
                train(FsdpConfig(strategy="HYBRID_SHARD", device="cpu"))
            except UserError as refusal:
                if worker.is_main:
                    print(f"refused: {refusal}")


if __name__ == "__main__":
    run_script(main, Cases)
