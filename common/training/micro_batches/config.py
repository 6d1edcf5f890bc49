"""Settings of training runs on texts of varying length: checks, and defaults by device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from common.data.text_sources import DATASETS
from common.data.text_splits import TextOptions, ignored_data_settings
from common.errors import UserError
from common.exercises.loss_scale import LOSS_MEANS
from common.runtime.group.process_group import Worker
from common.scheduling.modes import MODES
from common.settings import (
    AtLeast,
    Fraction,
    NonNegative,
    OneOf,
    Positive,
    RankOptions,
    Seed,
    is_changed,
    part_of,
)
from common.training.precision import PRECISION_NAMES, resolved_precision

COST_TYPES = ("tokens", "tokens_sq", "calibrated")


@dataclass(frozen=True)
class TextSettings(RankOptions):
    """Settings that the scripts on texts of varying length share: data, model, batch."""

    dataset: Annotated[str, OneOf(DATASETS)] = "sst2"
    """sst2, ag_news, imdb (from --dataset_dir, else the hub or its cache), or synthetic."""
    dataset_dir: str = "datasets"
    """Folder of local files: GLUE TSV, AG News CSV, label,text CSV or parquet."""
    synthetic_like: str = "sst2"
    """The data set whose lengths synthetic texts have."""
    model_name: str = "distilbert-base-uncased"
    """A transformers model, a local folder with one, or small (an encoder of 4 layers)."""
    vocab_size: Annotated[int, Positive] = 4096
    """Vocabulary of the WordPiece that is trained for the model small."""
    dropout: Annotated[float | None, Fraction] = None
    """Dropout; by default the model's own, and 0 for small, so that a loss depends on the samples
    only."""
    global_batch: Annotated[int, Positive] = 32
    """Texts per step, over all ranks."""
    max_length: Annotated[int, AtLeast(3, "[CLS], a token, [SEP]")] = 256
    """Tokens that a text is cut at."""
    max_train_samples: Annotated[int, NonNegative] = 10_000
    """Texts drawn from the training split; 0 for all."""
    max_tokens: Annotated[int, NonNegative] = 0
    """Padded tokens of a micro-batch under token_budget; by default as many as make a mean
    micro-batch one of global_batch / ranks texts."""
    loss_mean: Annotated[str, OneOf(LOSS_MEANS)] = "samples"
    """Unit over which the loss is a mean: samples or tokens."""
    precision: Annotated[str, OneOf(PRECISION_NAMES)] = "auto"
    """auto, fp32, bf16, fp16 or fp64; auto is bf16 where it is supported, else fp16, and fp32 on a
    CPU."""
    max_local_batch_cap: Annotated[int, NonNegative] = 0
    """Most texts of a micro-batch; 0 to probe what memory holds."""
    probe_max_batch: Annotated[int, Positive] = 64
    """Most texts of a micro-batch that is tried to see what memory holds."""
    speed_tolerance: Annotated[float, NonNegative] = 0.1
    """Under cost_type calibrated (compare_modes: dynamic_calibrated): share by which speeds of
    ranks may differ and still be planned for as alike; 0.1 is 10 %."""
    refine_every: Annotated[int, Positive] = 10
    """Under cost_type calibrated: steps after which ranks tell each other their times, and correct
    the costs that plans go by."""
    bucket_cap_mb: Annotated[float | None, Positive] = None
    """DDP's bucket cap in MiB; by default a first bucket of 1 MiB, then 25."""
    seed: Annotated[int, Seed] = 42
    """Seed of the samples' order and of the initial weights."""
    output_dir: str = "outputs"

    def texts(self, eval_samples: int) -> TextOptions:
        """Returns which texts a run takes, ``eval_samples`` of the validation split."""
        return part_of(
            TextOptions, vars(self), train_samples=self.max_train_samples, eval_samples=eval_samples
        )

    def without_effect(self) -> list[str]:
        """Returns the settings of data, model and limits that a run ignores, with the reason."""
        ignored = list(ignored_data_settings(self))
        takes_size = self.dataset == "synthetic" or self.model_name == "small"
        if not takes_size and is_changed(self, "vocab_size"):
            ignored.append(f"vocab_size: the model {self.model_name} has its own vocabulary")
        if self.max_local_batch_cap and is_changed(self, "probe_max_batch"):
            ignored.append("probe_max_batch: with max_local_batch_cap nothing is probed")
        return ignored

    def check_ranks(self, world_size: int) -> None:
        """Raises UserError for a global batch that leaves a rank without a text."""
        if self.global_batch < world_size:
            raise UserError(
                f"global_batch {self.global_batch} on {world_size} ranks: each rank needs at least "
                "one text"
            )


@dataclass(frozen=True)
class MicroBatchConfig(TextSettings):
    """Fine-tune a text classifier with DDP, every rank's micro-batch chosen by a mode.

    static gives all ranks as many texts; dynamic chooses micro-batches so that the ranks finish
    together; karmarkar_karp balances their tokens at equal counts. These make their steps from the
    same texts. length_grouped and token_budget change which texts make up a step.
    Writes metrics/rank<r>.csv, losses.csv and evaluations.csv.
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    mode: Annotated[str, OneOf(MODES)] = "static"
    """How the texts of a step are put into micro-batches, as above: static, dynamic,
    karmarkar_karp, length_grouped or token_budget."""
    cost_type: Annotated[str, OneOf(COST_TYPES)] = "tokens"
    """Cost of a micro-batch under dynamic: tokens, tokens_sq or calibrated (measured at the start,
    and corrected as steps are measured)."""
    steps: Annotated[int, Positive] = 300
    """Optimizer steps of the run."""
    lr: Annotated[float, Positive] = 3e-5
    """Learning rate of AdamW."""
    weight_decay: Annotated[float, NonNegative] = 0.01
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, NonNegative] = 20
    """Steps in which the learning rate rises; it then falls to 0 in a straight line."""
    buffer_size: Annotated[int, Positive] = 32
    """Texts that are planned and put together ahead of the step; at least a global batch."""
    eval_samples: Annotated[int, NonNegative] = 200
    """Texts of the validation split; 0 for all."""
    eval_every: Annotated[int, NonNegative] = 0
    """Steps between evaluations; 0 for one at the end."""
    discard_steps: Annotated[int, NonNegative] = 5
    """Number of first steps that no statistic counts."""
    slow_rank: int = -1
    """Slow this rank down on purpose (CPU only), to see what a mode makes of it; -1 for none."""
    slow_factor: float = 2.0
    """Factor on the slow rank's compute time."""
    log_every: Annotated[int, Positive] = 20
    """Steps between printed lines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.slow_factor < float("inf"):
            raise UserError(f"slow_factor is {self.slow_factor}; it must be at least 1 and finite")
        if self.slow_rank < -1:
            raise UserError(f"slow_rank is {self.slow_rank}; a rank, or -1 for none")
        if self.buffer_size < self.global_batch:
            # The default of one flag must not forbid another.
            object.__setattr__(self, "buffer_size", self.global_batch)

    def without_effect(self) -> list[str]:
        """Returns the settings that this run ignores, each with the reason."""
        ignored = super().without_effect()
        if self.mode != "dynamic" and self.cost_type != "tokens":
            ignored.append(f"cost_type, which only mode dynamic has (this is {self.mode})")
        if self.mode != "token_budget" and self.max_tokens:
            ignored.append(f"max_tokens, which only mode token_budget has (this is {self.mode})")
        if (self.mode, self.cost_type) != ("dynamic", "calibrated"):
            ignored += [
                f"{name}, which only mode dynamic with cost_type calibrated has "
                f"(this is {self.mode} with {self.cost_type})"
                for name in ("refine_every", "speed_tolerance")
                if is_changed(self, name)
            ]
        if self.slow_rank < 0 and is_changed(self, "slow_factor"):
            ignored.append("slow_factor: no slow_rank is given")
        return ignored

    def resolved(self, worker: Worker) -> MicroBatchConfig:
        """Returns the settings with the precision that ``worker``'s device computes in.

        Raises:
            UserError: a global batch below the number of ranks, or a rank that cannot be slowed.
        """
        self.check_ranks(worker.world_size)
        slow_factor_of(worker, self.slow_rank, self.slow_factor)
        return dataclasses.replace(
            self, precision=resolved_precision(self.precision, worker.device)
        )


def slow_factor_of(worker: Worker, slow_rank: int, factor: float) -> float:
    """Returns ``factor`` on the rank ``slow_rank`` (-1: none), whose compute time it multiplies.

    It is 1 on all other ranks.

    Raises:
        UserError: a rank that is not there, or a GPU, where sleeping slows nothing.
    """
    if slow_rank < 0:
        return 1.0
    if slow_rank >= worker.world_size:
        raise UserError(f"slow_rank {slow_rank}: there are {worker.world_size} ranks, from 0")
    if worker.device.type != "cpu":
        raise UserError(f"slow_rank on {worker.device.type}: for CPUs only; use --device cpu")
    return factor if slow_rank == worker.rank else 1.0
