"""Settings of a text classification run of the scaling study: checks, and defaults by device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from common.data.text_lengths import recorded_lengths
from common.data.text_sources import DATASETS
from common.data.text_splits import TextOptions, ignored_data_settings
from common.errors import UserError
from common.models.text_classifier import TextClassifierConfig
from common.runtime.group.process_group import Worker
from common.settings import Fraction, NonNegative, OneOf, Positive, RankOptions, Seed, part_of
from common.training.ddp import COMPRESSIONS
from common.training.precision import PRECISION_NAMES, resolved_precision
from common.training.scaling.data_parallel_step import StepOptions

PADDINGS = ("longest", "max_length")


@dataclass(frozen=True)
class TextScalingConfig(RankOptions):
    """Train a Transformer encoder that sorts texts into classes, on one rank or with DDP.

    A step takes ranks × accumulation × batch_size texts; what is left of an epoch then is dropped,
    so that runs on different numbers of ranks see the same texts. Each epoch ends with the
    accuracy on the validation split. Writes metrics.csv (the original's columns), epochs.csv,
    losses.csv, steps.csv and what the diagnosis reads.
    Settings also come from --experiment NAME (one of configs/) or --config FILE, an experiment of
    one's own or a preset; flags win over the file, a preset over the experiment that it names.
    """

    experiment: str = ""
    """ag_news_single_gpu_20ep, ag_news_ddp_4gpu_20ep, ag_news_single_gpu_optimized,
    ag_news_ddp_4gpu_20ep_optimized, imdb_single_gpu_20ep, imdb_ddp_single_node_20ep, or a file."""
    experiment_name: str = ""
    """Name of the run in tables; by default the data set and the number of ranks."""
    output_dir: str = "outputs/assignment4/text"
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights and of the samples' order; rank r draws its dropout with seed +
    r."""

    d_model: Annotated[int, Positive] = 128
    """Width of the encoder's layers."""
    n_head: Annotated[int, Positive] = 4
    """Attention heads."""
    n_layer: Annotated[int, Positive] = 2
    """Layers of the encoder."""
    d_ff: Annotated[int, Positive] = 256
    """Width of the feed-forward parts."""
    dropout: Annotated[float, Fraction] = 0.1
    """Share of activations that are dropped in training."""
    vocab_size: int = 20_000
    """Numbers that words are hashed to, padding's among them."""
    max_length: int = 128
    """Words that a text is cut at, and positions of the model."""

    dataset: Annotated[str, OneOf(DATASETS)] = "ag_news"
    """ag_news, imdb, sst2 (from --dataset_dir, else the hub or its cache), or synthetic."""
    dataset_dir: str = "datasets"
    """Folder of local files: AG News CSV, label,text CSV, GLUE TSV or parquet."""
    synthetic_like: Annotated[str, OneOf(recorded_lengths())] = "ag_news"
    """The data set whose lengths synthetic texts have."""
    max_train_samples: Annotated[int, NonNegative] = 0
    """Texts drawn from the training split; 0 for all."""
    eval_samples: Annotated[int, NonNegative] = 0
    """Texts of the validation split; 0 for all."""
    data_seed: Annotated[int, Seed] = 42
    """Seed of the choice of texts, where not all are taken."""
    pad: Annotated[str, OneOf(PADDINGS)] = "longest"
    """Fill up every text to the micro-batch's longest one, or to max_length."""
    workers: Annotated[int, NonNegative] = 2
    """Processes per rank that put batches together; 0 does it in the step."""
    persistent_workers: bool = False
    """Keep the loader's processes from one epoch to the next."""

    epochs: Annotated[int, Positive] = 20
    """Epochs of a run."""
    batch_size: Annotated[int, Positive] = 32
    """Texts of a micro-batch, per rank; configuration files call it batch_size_per_rank."""
    accumulation: Annotated[int, Positive] = 1
    """Micro-batches per step; gradients are exchanged after the last one."""
    total_batch_size: Annotated[int, NonNegative] = 0
    """Texts that a step must have over all ranks, or the run is refused; 0 checks nothing."""
    lr: Annotated[float, Positive] = 1e-3
    """AdamW's learning rate after warm-up; it then falls to 0 in a straight line."""
    weight_decay: Annotated[float, NonNegative] = 0.01
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, NonNegative] = 500
    """Steps in which the learning rate rises."""
    max_gradient_norm: Annotated[float, NonNegative] = 1.0
    """Largest norm of all gradients together; 0 for no limit."""
    precision: Annotated[str, OneOf(PRECISION_NAMES)] = "auto"
    """auto, fp32, bf16, fp16 or fp64; auto is bf16 where it is supported, else fp16, and fp32 on a
    CPU. fp16 comes with a loss scaler."""
    cudnn_benchmark: bool = False
    """Let cuDNN try its algorithms at first and keep the fastest."""
    discard_steps: Annotated[int, NonNegative] = 5
    """Number of first steps that no statistic of step times counts."""
    log_every: Annotated[int, Positive] = 50
    """Steps between printed lines."""
    probe_repeats: Annotated[int, NonNegative] = 5
    """Repetitions of the probes of passes, all-reduces and copies before training, at up to twice
    the batch; 0 for none."""

    bucket_cap_mb: Annotated[float | None, Positive] = None
    """DDP's bucket cap in MiB; by default a first bucket of 1 MiB, then 25."""
    compression: Annotated[str, OneOf(COMPRESSIONS)] = "none"
    """Send gradients as none (as they are), fp16 or bf16."""
    static_graph: bool = False
    """Tell DDP that every step uses the same parameters."""
    gradient_as_bucket_view: bool = True
    """Let gradients lie in DDP's buckets instead of being copied there."""
    threads: Annotated[int, NonNegative] = 0
    """Threads that a rank computes with on a CPU; 0 for OMP_NUM_THREADS. One rank that computes
    with all cores is no base for several that have one each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 2:
            raise UserError(f"vocab_size {self.vocab_size}: at least 2 (padding, and a word)")
        if self.max_length < 1:
            raise UserError(f"max_length {self.max_length}: at least 1 token")
        if self.d_model % self.n_head:
            raise UserError(f"d_model {self.d_model} is not a multiple of n_head {self.n_head}")

    def texts(self) -> TextOptions:
        """Returns which texts the run takes."""
        return part_of(
            TextOptions, vars(self), train_samples=self.max_train_samples, seed=self.data_seed
        )

    @property
    def width(self) -> int:
        """Returns the tokens that texts are filled up to; 0 for those of the batch's longest."""
        return self.max_length if self.pad == "max_length" else 0

    def classifier(self, num_labels: int) -> TextClassifierConfig:
        """Returns the sizes of the model."""
        return part_of(TextClassifierConfig, vars(self), num_labels=num_labels)

    def step_options(self) -> StepOptions:
        """Returns the options of a step.

        Under float64 the weights have that type, and no autocast is needed: the option is float32.
        """
        return part_of(
            StepOptions,
            vars(self),
            precision="float32" if self.precision == "float64" else self.precision,
            max_gradient_norm=self.max_gradient_norm or None,
        )

    def global_batch(self, world_size: int) -> int:
        """Returns the number of texts per step, over all ranks."""
        return world_size * self.accumulation * self.batch_size

    def resolved(self, worker: Worker) -> TextScalingConfig:
        """Returns the settings with the precision and the name that depend on device and ranks.

        Raises:
            UserError: the total batch size that was stated is not what the parts come to.
        """
        ranks, total = worker.world_size, self.global_batch(worker.world_size)
        if self.total_batch_size not in (0, total):
            raise UserError(
                f"total_batch_size {self.total_batch_size}: {ranks} rank{'s' * (ranks > 1)} × "
                f"accumulation {self.accumulation} × {self.batch_size} texts per rank are {total}; "
                "change one of them, or leave out total_batch_size"
            )
        return dataclasses.replace(
            self,
            precision=resolved_precision(self.precision, worker.device),
            experiment_name=self.experiment_name or f"{self.dataset}_{ranks}_ranks",
        )

    def without_effect(self, world_size: int, device: str, steps: int) -> Iterator[str]:
        """Yields the settings that change nothing in this run, each with the reason.

        Args:
            device: the type of device, ``cpu`` or ``cuda``.
        """
        if self.persistent_workers and not self.workers:
            yield "persistent_workers: workers is 0"
        if self.cudnn_benchmark and device == "cpu":
            yield "cudnn_benchmark: this runs on a CPU"
        if world_size == 1:
            if self.compression != "none":
                yield f"compression {self.compression}: one rank sends nothing"
            if self.bucket_cap_mb is not None:
                yield "bucket_cap_mb: one rank sends nothing"
            if self.static_graph:
                yield "static_graph: one rank sends nothing"
        yield from ignored_data_settings(self)
        if self.warmup_steps >= steps:
            yield (
                f"lr {self.lr:g} is not reached: the run has {steps} steps, and the learning rate "
                f"rises for {self.warmup_steps} (warmup_steps)"
            )
