"""The predictor that is judged: ``predict_scale_out`` for jobs whose model is a GPT-2.

MPT's published sizes are taken as those of a GPT-2: MosaicML's configurations differ from it in
biases and in the kind of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from common.errors import UserError
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.scale_out import predict_scale_out
from common.perfmodel.one_device.architecture import CONFIGS, GPT2Config
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.workload import Workload
from common.studies.public.hardware import MEMORY_GIB, PEAK_NAMES, cluster_name
from common.studies.public.jobs import Forecast, Job

MPT_VOCABULARY = 50368
MPT = {
    "MPT-125m": (12, 12, 768),
    "MPT-350m": (24, 16, 1024),
    "MPT-760m": (24, 12, 1536),
    "MPT-1b": (24, 16, 2048),
    "MPT-3b": (32, 20, 2560),
    "MPT-7b": (32, 32, 4096),
    "MPT-13b": (40, 40, 5120),
    "MPT-30b": (48, 56, 7168),
    "MPT-70b": (80, 64, 8192),
}
"""Layers, heads and width (mosaicml/llm-foundry, scripts/train/yamls/pretrain)."""
GPT2 = {"GPT-2 124M": "gpt2", "GPT-2 XL": "gpt2-xl"}
"""Beginning of a published name → name of the configuration."""
PRECISIONS = {
    "fp32": ("float32", False),
    "tf32": ("float32", True),
    "bf16": ("bfloat16", False),
    "amp_bf16 DEFAULT": ("bfloat16", False),
    "fp16 amp": ("float16", False),
    "amp fp16": ("float16", False),
}
"""Published precision → precision of a workload, and whether TF32 is on."""
GPU_OVERHEAD_BYTES = 10**9
"""Memory that is left to the CUDA context and the libraries."""
STRATEGIES = {
    "DDP": "DDP",
    "DDP AMP": "DDP",
    "apex/torch DDP": "DDP",
    "FSDP FULL_SHARD": "FULL_SHARD",
    "FSDP2 FULL_SHARD": "FULL_SHARD",
    "FSDP SHARD_GRAD_OP": "SHARD_GRAD_OP",
}


@dataclass(frozen=True)
class PublishedWorkload(Workload):
    """A step of a GPT-2 of any sizes, which ``model`` does not name."""

    sizes: GPT2Config = field(default_factory=GPT2Config)
    """Sizes of the model."""

    def __post_init__(self) -> None:
        """Checks nothing: a job's numbers were checked when its table was read."""

    @property
    def unpadded(self) -> GPT2Config:
        """Returns the sizes of the model."""
        return self.sizes


def predict(job: Job) -> Forecast:
    """Predicts a job's throughput by ``predict_scale_out``.

    A job that accumulates is one whose global batch is divided over its GPUs and micro-batches
    (strong scaling): under weak scaling accumulation is not modelled.

    Raises UserError with the reason where the job cannot be predicted.
    """
    if job.is_model_parallel:
        raise UserError("tensor, pipeline or context parallelism is not modelled")
    sizes = _sizes(job)
    if job.precision not in PRECISIONS:
        raise UserError(f"precision not modelled: {job.precision or 'not published'}")
    if job.strategy not in STRATEGIES:
        raise UserError(f"strategy not modelled: {job.strategy or 'not published'}")
    if job.act_ckpt not in ("", "none"):
        raise UserError("activation checkpointing is not modelled")
    if job.micro_batch_per_gpu is None:
        raise UserError("micro-batch not published")
    precision, tf32 = PRECISIONS[job.precision]
    strategy, passes = STRATEGIES[job.strategy], job.grad_accum or 1
    samples = job.micro_batch_per_gpu * passes
    workload = PublishedWorkload(
        model=job.model,
        batch_size=job.micro_batch_per_gpu,
        seq_len=job.seq_len,
        precision=precision,
        tf32=tf32,
        optimizer_implementation="fused",
        sizes=sizes,
    )
    predicted = predict_scale_out(
        workload=workload,
        cluster=load_cluster(cluster_name(job)),
        gpus=[job.gpus],
        global_batch_size=samples * job.gpus,
        strategies=[strategy],
    )
    step = predicted.rows("weak" if passes == 1 else "strong", strategy).iloc[0]
    rates = [samples / step[column] for column in ("step_s", "step_high_s", "step_low_s")]
    memory = predict_memory(
        replace(workload, gradient_accumulation=passes), Sharding(strategy, job.gpus)
    ).peak_bytes
    capacity = MEMORY_GIB[PEAK_NAMES[job.gpu]] * 2**30
    return Forecast(
        samples_per_s=rates[0],
        low=rates[1],
        high=rates[2],
        memory_bytes=memory,
        fits=memory + GPU_OVERHEAD_BYTES <= capacity,
    )


def assumption() -> str:
    """Returns what throughput assumes beyond hardware and configuration, in a sentence."""
    mfu = Assumptions().mfu.text("{:.0%}")
    return f"throughput assumes that every GPU computes at {mfu} of its peak (MFU)"


def _sizes(job: Job) -> GPT2Config:
    named = [config for start, config in GPT2.items() if job.model.startswith(start)]
    if not named and job.model not in MPT:
        raise UserError(f"model not known: {job.model}")
    if job.seq_len is None:
        raise UserError("sequence length not published")
    if named:
        return replace(CONFIGS[named[0]], n_positions=job.seq_len)
    layers, heads, width = MPT[job.model]
    return GPT2Config(MPT_VOCABULARY, job.seq_len, layers, heads, width)
