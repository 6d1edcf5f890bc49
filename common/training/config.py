"""Settings of the three training scripts: checks, and defaults that depend on device and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.errors import UserError
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.workload import Workload
from common.runtime.group.process_group import Worker
from common.runtime.machine.placement import own_placement, split_groups
from common.runtime.wording import counted
from common.settings import (
    NonNegative,
    OneOf,
    Positive,
    RankOptions,
    Seed,
    dividing_batch,
    is_changed,
)

DDP_STRATEGIES = ("DDP", "MY_DDP", "MY_BUCKETS", "MY_ZERO1")
FSDP_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
MY_FSDP = "MY_FSDP"
OWN_STRATEGIES = (*DDP_STRATEGIES[1:], MY_FSDP)
"""Strategies of the exercises: A1.3, A2.4, A1.4 (states sharded, gradients by DDP) and A1.5."""
ASYNCHRONOUS = ("auto", "on", "off")
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
GLOBAL_BATCH_SIZE = 32
MICRO_BATCH_SIZE = 8


@dataclass(frozen=True)
class TrainingConfig(RankOptions):
    """Train a GPT-2 on token shards with AdamW and a cosine schedule.

    A step consumes ``global_batch_size`` sequences whatever the number of ranks; each rank takes
    them in micro-batches and exchanges gradients after the last one. With checkpoints on, the same
    command goes on where a run that was cut off had saved; so it does after SIGTERM or SIGUSR1,
    which make a checkpoint and end the run with exit status 75.
    Writes training-steps.csv (one row per step and rank), memory.csv and traces.
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    strategy: ClassVar[str] = "single"

    data: str = ""
    """Folder of GPT-2 token shards (.bin), or one of them; by default synthetic text of known
    entropy. `ddplab data tokens` makes shards."""
    model: str = ""
    """gpt2-pico, gpt2-nano, gpt2, gpt2-medium, gpt2-large or gpt2-xl; by default gpt2-large on a
    GPU and gpt2-nano on a CPU."""
    vocab_size: int = 0
    """Give the model a vocabulary of this many tokens; 0 keeps its own."""
    global_batch_size: Annotated[int, NonNegative] = 0
    """Sequences per step, over all ranks; by default 32, or fewer that the ranks divide."""
    micro_batch_size: Annotated[int, NonNegative] = 0
    """Sequences per forward pass of a rank; by default 8, or fewer that divide a rank's share."""
    seq_len: Annotated[int, NonNegative] = 0
    """Tokens per sequence; by default 1024, or as many as the model has positions."""
    num_steps: Annotated[int, Positive] = 20
    """Optimizer steps of the run."""
    optimizer: str = "adamw"
    """adamw or sgd."""
    optimizer_implementation: str = ""
    """for-loop, foreach or fused; by default fused, or foreach for sgd under FSDP."""
    lr: Annotated[float, Positive] = 3e-4
    """Learning rate after warm-up, from which a cosine falls to min_lr."""
    min_lr: Annotated[float, NonNegative] = 0.0
    """Learning rate that the cosine ends in."""
    warmup_steps: Annotated[int, NonNegative] = 0
    """Steps in which the learning rate rises linearly."""
    weight_decay: Annotated[float, NonNegative] = 0.1
    """AdamW's weight decay."""
    grad_clip: Annotated[float, NonNegative] = 1.0
    """Largest norm of all gradients together; 0 for no limit."""
    precision: Annotated[str, OneOf(PRECISIONS)] = "float32"
    """float32, bfloat16 or float16 (by autocast, weights stay float32), or float64."""
    tf32: bool = False
    """Let float32 matrix products use TensorFloat-32 (Ampere GPUs and later)."""
    attention: str = "sdpa"
    """sdpa or eager."""
    activation_checkpointing: bool = False
    """Keep each block's input only, and compute the rest again in the backward pass."""
    loss_chunks: int = 1
    """Compute logits and loss in this many pieces of a micro-batch."""
    compile: bool = False
    """torch.compile the model (each block of it under FSDP)."""
    log_every: Annotated[int, Positive] = 10
    """Steps between printed lines."""
    profile: bool = True
    """Trace some steps with torch.profiler."""
    profile_wait: Annotated[int, NonNegative] = 2
    """Steps before the profiler starts."""
    profile_warmup: Annotated[int, NonNegative] = 2
    """Steps with the profiler on whose records are thrown away."""
    profile_active: Annotated[int, Positive] = 6
    """Steps that are traced."""
    measure_memory: bool = False
    """On a CPU, measure the peak by following the allocations of the third step; traced steps come
    after it. On a GPU the allocator's peak is always known."""
    save_every: Annotated[int, NonNegative] = 0
    """Steps after which a checkpoint is made; 0 for none before the end. With this or
    --checkpoint_dir the end makes a checkpoint, too, and so do SIGTERM and SIGUSR1."""
    keep_checkpoints: Annotated[int, Positive] = 2
    """Newest checkpoints that are kept."""
    checkpoint_dir: str = ""
    """Folder of the checkpoints, from which an interrupted run resumes. Naming it turns checkpoints
    on, as --save_every does, whose default is a folder of the strategy's (or --run_id's) name below
    output_dir."""
    async_checkpoints: Annotated[str, OneOf(ASYNCHRONOUS)] = "auto"
    """Write checkpoints while training goes on: on, off, or auto (on a GPU)."""
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights: rank r draws with seed + r, then takes rank 0's weights."""
    output_dir: str = "outputs/assignment1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile and self.strategy in OWN_STRATEGIES:
            raise UserError(f"compile: not with strategy {self.strategy}")
        if self.min_lr > self.lr:
            raise UserError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.warmup_steps >= self.num_steps:
            raise UserError(
                f"warmup_steps {self.warmup_steps}: must be below num_steps {self.num_steps}"
            )

    def without_effect(self) -> Iterator[str]:
        """Yields the settings that change nothing beside others, each with the reason."""
        if self.optimizer == "sgd" and is_changed(self, "weight_decay"):
            yield "weight_decay: sgd has none here"
        if not self.checkpointing and is_changed(self, "keep_checkpoints"):
            yield "keep_checkpoints: none are made without save_every or checkpoint_dir"
        for name in ("profile_wait", "profile_warmup", "profile_active"):
            if not self.profile and is_changed(self, name):
                yield f"{name}: no step is traced"

    @property
    def title(self) -> str:
        """Returns the run's name in the line that says that it is completed."""
        if self.strategy in OWN_STRATEGIES:
            return f"Training with {self.strategy}"
        return {"single": "Baseline training", "DDP": "DDP training"}.get(
            self.strategy, f"FSDP training with {self.strategy}"
        )

    @property
    def folder(self) -> str:
        """Returns the name of its folder of traces and checkpoints, such as fsdp_full_shard."""
        if self.strategy in OWN_STRATEGIES:
            return self.strategy.lower()
        names = {"single": "baseline", "DDP": "ddp"}
        return names.get(self.strategy, f"fsdp_{self.strategy.lower()}")

    @property
    def chosen_implementation(self) -> str:
        """Returns the optimizer's implementation: for-loop, foreach or fused."""
        return self.optimizer_implementation or "fused"

    @property
    def checkpointing(self) -> bool:
        """Returns True if checkpoints are made."""
        return bool(self.save_every or self.checkpoint_dir)

    def resolved(self, worker: Worker) -> TrainingConfig:
        """Returns the settings with the defaults filled in that depend on device and ranks.

        Raises:
            UserError: a number of ranks that the strategy does not allow.
        """
        on_gpu = worker.device.type == "cuda"
        model = self.model or ("gpt2-large" if on_gpu else "gpt2-nano")
        asynchronous = self.async_checkpoints
        if asynchronous == "auto":
            asynchronous = "on" if on_gpu else "off"
        global_batch_size, micro_batch_size = self._batch_sizes(worker.world_size)
        checkpoint_dir = self.checkpoint_dir
        if self.save_every and not checkpoint_dir:
            checkpoint_dir = f"{self.output_dir}/checkpoints/{self.run_id or self.folder}"
        complete = dataclasses.replace(
            self,
            model=model,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            optimizer_implementation=self.chosen_implementation,
            seq_len=self.seq_len or min(1024, GPT2Config.named(model).n_positions),
            async_checkpoints=asynchronous,
            checkpoint_dir=checkpoint_dir,
        )
        if self.strategy == "single" and worker.world_size > 1:
            raise UserError(
                f"train_baseline is for one device, and was started on {worker.world_size} ranks; "
                "start it with python, or use train_ddp.py or train_fsdp.py"
            )
        return complete

    def _batch_sizes(self, ranks: int) -> tuple[int, int]:
        """Returns sequences per step and per forward pass; those that are not set fit the ranks."""
        at_once = ranks * (self.micro_batch_size or 1)
        total = self.global_batch_size or dividing_batch(GLOBAL_BATCH_SIZE, at_once)
        sizes = range(MICRO_BATCH_SIZE, 1, -1)
        fitting = next((size for size in sizes if total % (ranks * size) == 0), 1)
        return total, self.micro_batch_size or fitting

    def workload(self, gradient_accumulation: int) -> Workload:
        """Returns one rank's computation in a step of ``gradient_accumulation`` micro-batches."""
        return Workload.of(
            vars(self),
            batch_size=self.micro_batch_size,
            precision="float32" if self.precision == "float64" else self.precision,
            optimizer_implementation=self.chosen_implementation,
            gradient_accumulation=gradient_accumulation,
        )


@dataclass(frozen=True)
class BaselineConfig(TrainingConfig):
    __doc__ = f"""{TrainingConfig.__doc__}
    One device. Recipe: uv run python assignments/assignment1/train_baseline.py
    """


@dataclass(frozen=True)
class DdpConfig(TrainingConfig):
    __doc__ = f"""{TrainingConfig.__doc__}
    Data parallel with DDP. Recipe: uv run torchrun --nproc_per_node=2
    assignments/assignment1/train_ddp.py
    """

    strategy: Annotated[str, OneOf(DDP_STRATEGIES)] = "DDP"
    """DDP, or one of the exercises: MY_DDP (an all-reduce per gradient, A1.3), MY_BUCKETS (A2.4) or
    MY_ZERO1 (DDP with optimizer states spread over the ranks, A1.4)."""
    bucket_cap_mb: Annotated[float | None, Positive] = None
    """Bucket cap of DDP and MY_BUCKETS in MiB; by default a first bucket of 1 MiB, then 25."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of DDP's buckets: one copy and their memory less."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_cap_mb is not None and self.strategy == "MY_DDP":
            raise UserError("bucket_cap_mb: MY_DDP has no buckets")

    def without_effect(self) -> Iterator[str]:
        """Yields the settings that change nothing beside others, each with the reason."""
        yield from super().without_effect()
        if self.strategy in ("MY_DDP", "MY_BUCKETS") and is_changed(
            self, "gradient_as_bucket_view"
        ):
            yield f"gradient_as_bucket_view: an option of DDP's own, not of {self.strategy}"


@dataclass(frozen=True)
class FsdpConfig(TrainingConfig):
    __doc__ = f"""{TrainingConfig.__doc__}
    Data parallel with FSDP2, parameters and states spread over the ranks. Recipe: uv run torchrun
    --nproc_per_node=2 assignments/assignment1/train_fsdp.py --strategy SHARD_GRAD_OP
    """

    strategy: Annotated[str, OneOf((*FSDP_STRATEGIES, MY_FSDP))] = "FULL_SHARD"
    """FULL_SHARD (parameters are gathered for each use), SHARD_GRAD_OP (once a step),
    HYBRID_SHARD (FULL_SHARD within groups of shard_size ranks, DDP between them) or MY_FSDP (as
    FULL_SHARD, by exercise A1.5)."""
    shard_size: Annotated[int, NonNegative] = 0
    """Ranks that share one copy under HYBRID_SHARD; by default those of a node, or half of them
    where there is one node only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.optimizer, self.optimizer_implementation) == ("sgd", "fused"):
            raise UserError("optimizer_implementation fused: not for sgd under FSDP; use foreach")
        if self.shard_size and self.strategy != "HYBRID_SHARD":
            raise UserError(f"shard_size {self.shard_size}: only HYBRID_SHARD has groups")
        if self.precision == "float16":
            raise UserError(
                "precision float16: a scaled loss is not supported under FSDP; use bfloat16"
            )

    @property
    def chosen_implementation(self) -> str:
        """Returns the optimizer's implementation; fused SGD does not know sharded parameters."""
        default = "foreach" if self.optimizer == "sgd" else "fused"
        return self.optimizer_implementation or default

    def workload(self, gradient_accumulation: int) -> Workload:
        """Returns the base class's workload, uncompiled: ``parallelise`` compiles the blocks."""
        return dataclasses.replace(super().workload(gradient_accumulation), compile=False)

    def resolved(self, worker: Worker) -> FsdpConfig:
        """Returns the base class's settings, with the size of HYBRID_SHARD's groups filled in.

        Raises:
            UserError: the ranks do not divide into 2 or more groups of 2 or more, or a group that
                one host has room for is on several.
        """
        complete = super().resolved(worker)
        if self.strategy != "HYBRID_SHARD":
            return complete
        ranks, on_node = worker.world_size, worker.ranks.local_world_size
        size = self.shard_size or (on_node if on_node < ranks else ranks // 2)
        if not 1 < size < ranks or ranks % size:
            raise UserError(
                f"HYBRID_SHARD with shard_size {size} on {counted(ranks, 'rank')}: "
                "it takes at least 4 ranks, in 2 or more groups of 2 or more"
            )
        split = split_groups(worker.gather(own_placement().host), size)
        if split:
            raise UserError(f"HYBRID_SHARD with shard_size {size}: {split[0]}")
        return dataclasses.replace(complete, shard_size=size)


def config_of(strategy: str, **settings: object) -> TrainingConfig:
    """Returns the configuration of a strategy: single, or one of train_ddp's or train_fsdp's.

    Raises:
        UserError: a setting that is not legal, or an unknown strategy.
    """
    if strategy == BaselineConfig.strategy:
        return BaselineConfig(**settings)
    kind = DdpConfig if strategy in DDP_STRATEGIES else FsdpConfig
    return kind(**settings, strategy=strategy)
