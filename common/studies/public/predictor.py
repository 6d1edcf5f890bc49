"""The predictor that is judged: ``predict_scale_out``, asked as ``predict --cluster`` asks it.

What a published row leaves open is taken from its source's defaults, in the tables below.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache

from common.errors import UserError
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.published_sizes import architecture_of
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.scale_out import predict_scale_out
from common.perfmodel.one_device.peaks import known_peak
from common.studies.public.hardware import cluster_name
from common.studies.public.jobs import Forecast, PublishedJob
from common.studies.public.published_memory import Memory, memory_of

PRECISIONS = {
    "fp32": "float32",
    "tf32": "tf32",
    "fp32 (TF32 on Ampere and later)": "tf32",
    "bf16": "bfloat16",
    "bf16 PURE": "bfloat16",
    "amp_bf16 DEFAULT": "bfloat16",
    "fp16 amp": "float16",
    "amp fp16": "float16",
}
"""Published precision → precision of a job; tf32 is float32 on GPUs without it."""
FUSED_BY_HAND = ("mosaicml/llm-foundry",)
"""Sources whose own kernels join operators: attention, norms in 16 bits, cross-entropy."""
ALL_IN_16_BITS = ("bf16 PURE",)
"""Precisions in which gradients are exchanged in 16 bits, too."""
STRATEGIES = {
    "DDP": "DDP",
    "DDP AMP": "DDP",
    "apex/torch DDP": "DDP",
    "FSDP": "FULL_SHARD",
    "FSDP FULL_SHARD": "FULL_SHARD",
    "FSDP SHARD_GRAD_OP": "SHARD_GRAD_OP",
    "FSDP2": "FULL_SHARD",
    "FSDP2 FULL_SHARD": "FULL_SHARD",
    "DeepSpeed ZeRO-3": "FULL_SHARD",
    "SimpleFSDP 8, manual bucketing (aot_eager)": "FULL_SHARD",
    "HSDP": "HYBRID_SHARD",
}
NOT_MODELLED = (
    (r"LoRA|DoRA|distillation", "adapters and distillation are not modelled"),
    (r"\bEP \d", "expert parallelism is not modelled"),
    (r"offload", "offloading to the CPU is not modelled"),
)
"""Words of a model or strategy → reason of a refusal."""
MODEL_PARALLEL = "tensor, pipeline or context parallelism is not modelled"
CHECKPOINTING = {"": "none", "none": "none", "full": "block", "selective": "selective"}
MODELS = {
    "BERT-Large SQuAD": ("bert-large-squad", 384),
    "BERT-Large pretraining": ("bert-large-pretraining", None),
    "bert_base_squad": ("bert-base-squad", 384),
    "bert_large_squad": ("bert-large-squad", 384),
    "GPT-2 124M": ("gpt2", 1024),
    "GPT-2 XL": ("gpt2-xl", 1024),
    "GPT-2 XL 1.6B": ("gpt2-xl", 1024),
    "FSDP2 full fine-tuning Llama-3.1-8B": ("llama-3.1-8b", None),
    "Llama 3 8B": ("llama-3-8b", None),
    "Llama3 8B": ("llama-3-8b", None),
}
"""Published name, without what is in brackets → name of a size, and the tokens of a sample that
its source trains with by default (BERT for SQuAD: NVIDIA/DeepLearningExamples, scripts)."""


def predict(job: PublishedJob) -> Forecast:
    """Predicts a published job's throughput and memory.

    FSDP is taken to reduce gradients in every micro-batch, as it does unless it is told otherwise.
    Memory is also said where throughput is not: under context parallelism, which divides a sequence
    over GPUs that share the weights, and for float8, whose activations are kept in 16 bits.

    Raises UserError with the reason where neither can be predicted.
    """
    for words, reason in NOT_MODELLED:
        if re.search(words, f"{job.model} {job.strategy}"):
            raise UserError(reason)
    strategy = _strategy(job)
    work = _work(job)
    memory = _memory(job, work, strategy)
    try:
        rates = _rates(job, work, strategy)
        reason = ""
    except UserError as error:
        if memory is None:
            raise
        rates, reason = (math.nan,) * 3, str(error)
    if memory is None:
        return Forecast(*rates)
    return Forecast(*rates, memory.peak_bytes, memory.fits, memory.largest_micro_batch, reason)


def _rates(job: PublishedJob, work: Job, strategy: str) -> tuple[float, ...]:
    """Returns samples per second and GPU: predicted, and the ends of the interval."""
    if job.is_model_parallel:
        raise UserError(MODEL_PARALLEL)
    precision = _named(PRECISIONS, "precision", job.precision)
    cluster = load_cluster(cluster_name(job))
    has_tf32 = "tf32" in known_peak(cluster.gpu).flops_per_s
    work = replace(work, tf32=precision == "tf32" and has_tf32)
    predicted = predict_scale_out(work, cluster, [job.gpus], strategies=[strategy])
    step = predicted.rows("weak", strategy).iloc[0]
    samples = work.batch_size * work.accumulation
    columns = ("step_s", "step_high_s", "step_low_s")
    return tuple(samples / step[column] for column in columns)


def _work(job: PublishedJob) -> Job:
    """Returns the work of a GPU; a precision that is not known is taken to be 16 bits."""
    if job.micro_batch_per_gpu is None:
        raise UserError("micro-batch not published")
    precision = PRECISIONS.get(job.precision, "bfloat16")
    return Job(
        architecture=_architecture(job),
        batch_size=job.micro_batch_per_gpu,
        precision="float32" if precision == "tf32" else precision,
        checkpointing=_checkpointing(job),
        accumulation=job.grad_accum or 1,
        compile=job.compile == "yes" or job.source_repo in FUSED_BY_HAND,
        reduces_each=True,
        gradient_bytes=2 if job.precision in ALL_IN_16_BITS else 4,
    )


def _memory(job: PublishedJob, work: Job, strategy: str) -> Memory | None:
    """Returns a job's memory; None under tensor and pipeline parallelism, or of unknown layers."""
    if replace(job, cp=1).is_model_parallel:
        return None
    try:
        return memory_of(job, work, strategy)
    except UserError:
        return None


def _strategy(job: PublishedJob) -> str:
    """Returns a strategy; FSDP over so many replicas ("FSDP2 8") is FULL_SHARD."""
    return _named(STRATEGIES, "strategy", re.sub(r"^(FSDP2) \d+$", r"\1", job.strategy))


def _checkpointing(job: PublishedJob) -> str:
    """Returns what is computed again; torchtitan's default is selective."""
    published = job.act_ckpt.split(" (")[0]
    if not published and job.source_repo == "pytorch/torchtitan":
        published = "selective"
    return _named(CHECKPOINTING, "checkpointing", published)


def _named(names: dict[str, str], kind: str, published: str) -> str:
    if published not in names:
        raise UserError(f"{kind} not modelled: {published or 'not published'}")
    return names[published]


def _architecture(job: PublishedJob) -> Architecture:
    name = re.sub(r" \(.*\)| \d-node", "", job.model)
    size, by_default = MODELS.get(name, (name, None))
    seq_len = job.seq_len or by_default
    seq_len = seq_len and seq_len // job.cp
    if seq_len is None and size in MODELS:
        raise UserError("sequence length not published")
    return _published(size, seq_len, job.model)


@cache
def _published(size: str, seq_len: int | None, model: str) -> Architecture:
    try:
        return architecture_of(size, seq_len)
    except UserError as error:
        unknown = str(error).startswith("unknown model")
        raise UserError(f"model not known: {model}" if unknown else str(error)) from None


def assumption() -> str:
    """Returns the assumption that throughput rests on, in words."""
    return (
        f"throughput assumes passes {Assumptions().pass_rate.text()} times as fast as pass_time's"
    )
