"""The predictor that is judged: ``predict_scale_out``, asked as ``predict --cluster`` asks it.

What a published row leaves open is taken from its source, in ``jobs`` and the tables below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from common.errors import UserError
from common.models.published.gnmt import gnmt
from common.models.published.resnet import resnet_50
from common.models.published.ssd import ssd_300
from common.models.published.transformer_big import transformer_big
from common.models.published.transformer_xl import transformer_xl_base, transformer_xl_large
from common.models.traced import traced_architecture
from common.perfmodel.architectures.activations import Numerics
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.published_sizes import architecture_of
from common.perfmodel.architectures.variants import in_float8, with_adapters
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.scale_out import predict_scale_out
from common.perfmodel.one_device.memory_fit import largest_micro_batch, reserved_bytes
from common.perfmodel.one_device.peaks import has_float8, known_peak
from common.perfmodel.one_device.sharding import sharding_on
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES, predict_training_memory
from common.studies.public.hardware import PEAK_NAMES, cluster_name
from common.studies.public.jobs import Forecast, PublishedJob, bare_name

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
FUSED_BY_HAND = ("mosaicml/llm-foundry", "BERT-Large pretraining", "Transformer big (translation)")
"""Sources and models whose own kernels join operators: attention, norms, GELU with its bias."""
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
    # ZeRO-3 in chunks (arXiv 2108.05818); they stay on the GPUs where these have room.
    "ColossalAI Gemini": "FULL_SHARD",
}
NOT_MODELLED = (
    (r"DoRA|DPO|distillation", "weight-decomposed adapters, DPO and distillation are not modelled"),
    (r"\bEP (\d|of)", "expert parallelism is not modelled"),
    (r"offload", "offloading to the CPU is not modelled"),
)
"""Words of a model or strategy → reason of a refusal."""
ADAPTER_RANK = 8
"""Rank of LoRA's adapters: NVIDIA-NeMo/Automodel, recipes of its examples."""
MODEL_PARALLEL = "tensor, pipeline or context parallelism is not modelled"
UNSTATED_CHECKPOINTING = ("NVIDIA-NeMo/Automodel",)
"""Sources that say of no row whether it checkpoints: memory follows from that."""
CHECKPOINTING = {"": "none", "none": "none", "full": "block", "selective": "selective"}
OF_SOURCE = {
    # scripts/train.sh: selective_checkpointing 1, a share of the blocks, is all of them.
    ("foundation-model-stack/fms-fsdp", "selective"): "full",
    # benchmark/gpt/train.py: activations are checkpointed unless --no_activation_ckpt is given.
    ("hpcaitech/ColossalAI-Pytorch-lightning", ""): "full",
    ("hpcaitech/ColossalAI-Pytorch-lightning", "none"): "full",
    ("pytorch/torchtitan", ""): "selective",
}
"""Source and checkpointing as published → what its defaults compute again."""
SIZES = {
    "BERT-Large SQuAD": "bert-large-squad",
    "BERT-Large pretraining": "bert-large-pretraining",
    "bert_base_squad": "bert-base-squad",
    "bert_large_squad": "bert-large-squad",
    "GPT-2 124M": "gpt2",
    "GPT-2 XL": "gpt2-xl",
    "GPT-2 XL 1.6B": "gpt2-xl",
    "Llama 3 8B": "llama-3-8b",
    "Llama3 8B": "llama-3-8b",
    "Llama3 70B": "llama-3-70b",
}
"""Published name, without what is in brackets → name of a size."""
FOLLOWED = {
    "ResNet-50 v1.5": resnet_50,
    "resnet50": resnet_50,
    "SSD300 ResNet-50": ssd_300,
    "ssd": ssd_300,
    "gnmt": gnmt,
    "Transformer big": transformer_big,
    "Transformer-XL base": transformer_xl_base,
    "Transformer-XL large": transformer_xl_large,
}
"""Published name → maker of a module that is followed on fake tensors."""
OF_TEXTS = ("Transformer big",)
"""Models whose micro-batches are texts of unequal lengths. The big Transformer's hold sentences up
to a number of tokens; GNMT's are drawn from one range of lengths on all GPUs, and all others have
one length. Chosen on the development rows, whose losses go with the step's time, not with bytes."""
FUSED_LOSS = ("mosaicml/llm-foundry",)
"""Sources whose cross-entropy is one kernel: flash-attn's."""
WRITTEN_ATTENTION = ("NVIDIA/DeepLearningExamples", "lambdal/deeplearning-benchmark")
"""Sources whose BERT writes out its attention. FSDP casts all units to 16 bits in any source."""
PUBLISHES_RESERVED = ("pytorch/torchtitan",)
"""Sources that publish what their allocator has reserved. torchtitan compiled its loss where the
model is compiled, but for December 2024 (commit e8977b0 turned it off)."""
LOSS_COMPILED_SINCE = 202504
"""Month since which torchtitan's compiled jobs compile the loss (commit bbb1b61)."""


def predict(job: PublishedJob) -> Forecast:
    """Predicts a published job's throughput and memory.

    FSDP is taken to reduce gradients in every micro-batch, as it does unless it is told otherwise.
    Memory is also said where throughput is not: under context parallelism, which divides a sequence
    over GPUs that share the weights, and for float8, whose activations are kept in 16 bits.

    Raises UserError with the reason where neither can be predicted.
    """
    if replace(job, cp=1).is_model_parallel:
        raise UserError(MODEL_PARALLEL)
    for words, reason in NOT_MODELLED:
        if re.search(words, f"{job.model} {job.strategy}"):
            raise UserError(reason)
    strategy = _strategy(job)
    work = _work(job, strategy)
    memory = _memory(job, work, strategy)
    try:
        return Forecast(*_rates(job, work, strategy), **memory)
    except UserError as error:
        if not memory:
            raise
        return Forecast(math.nan, math.nan, math.nan, **memory, reason=str(error))


def _rates(job: PublishedJob, work: Job, strategy: str) -> tuple[float, ...]:
    """Returns samples per second and GPU: predicted, and the ends of the interval."""
    if job.is_model_parallel:
        raise UserError(MODEL_PARALLEL)
    cluster = load_cluster(cluster_name(job))
    published = job.precision
    if published.startswith("float8"):
        if not has_float8(cluster.gpu):
            raise UserError(f"precision not modelled: {published} on {job.gpu}")
        work, published = replace(work, architecture=in_float8(work.architecture)), "bf16"
    if _has_adapters(job) and strategy != "DDP" and job.gpus > 1:
        raise UserError("adapters whose frozen weights are sharded are not modelled")
    precision = _named(PRECISIONS, "precision", published)
    has_tf32 = "tf32" in known_peak(cluster.gpu).flops_per_s
    work = replace(work, tf32=precision == "tf32" and has_tf32)
    predicted = predict_scale_out(
        job=work,
        cluster=cluster,
        gpus=[job.gpus],
        assumptions=Assumptions(work="texts" if bare_name(job.model) in OF_TEXTS else "equal"),
        strategies=[strategy],
    )
    step = predicted.rows("weak", strategy).iloc[0]
    # Nobody states another bucket cap than DDP's own; the band is known at the best cap alone.
    at_default = step.get("default_step_s", math.nan) / step["step_s"]
    slower = 1.0 if math.isnan(at_default) else at_default
    samples = work.batch_size * work.accumulation
    columns = ("step_s", "step_high_s", "step_low_s")
    return tuple(samples / step[column] / slower for column in columns)


def _work(job: PublishedJob, strategy: str) -> Job:
    """Returns the work of a GPU; a precision that is not known is taken to be 16 bits."""
    if job.micro_batch_per_gpu is None:
        raise UserError("micro-batch not published")
    precision = PRECISIONS.get(job.precision, "bfloat16")
    precision = "float32" if precision == "tf32" else precision
    architecture = _architecture(job)
    if _has_adapters(job):
        architecture = with_adapters(architecture, ADAPTER_RANK)
    return Job(
        architecture=architecture,
        batch_size=job.micro_batch_per_gpu,
        precision=precision,
        checkpointing=_checkpointing(job),
        accumulation=job.grad_accum or 1,
        compile=job.compile == "yes" or not {job.source_repo, job.model}.isdisjoint(FUSED_BY_HAND),
        reduces_each=True,
        gradient_bytes=2 if job.precision in ALL_IN_16_BITS else 4,
        types=numerics_of(job, precision, strategy),
    )


def _memory(job: PublishedJob, work: Job, strategy: str) -> dict[str, float | None]:
    """Returns a job's memory; empty of unknown layers, and of frozen ones, which are not listed."""
    unstated = job.source_repo in UNSTATED_CHECKPOINTING and not job.act_ckpt
    if _has_adapters(job) or unstated:
        return {}
    try:
        return memory_of(job, work, strategy)
    except UserError:
        return {}


def memory_of(job: PublishedJob, work: Job, strategy: str) -> dict[str, float | None]:
    """Predicts the memory of a published job, by the names of a ``Forecast``.

    Raises UserError where the activations of its model are not known.
    """
    sharding = sharding_on(strategy, job.gpus, job.gpus_per_node or job.gpus)
    predicted = predict_training_memory(work.passes, sharding)
    peak = predicted.peak_bytes
    if job.source_repo in PUBLISHES_RESERVED:
        peak = reserved_bytes(work.passes, predicted)
    gpu = known_peak(PEAK_NAMES.get(job.gpu, job.gpu))
    if gpu is None or gpu.memory_bytes is None:
        return {"memory_bytes": peak}
    capacity = gpu.memory_bytes - LIBRARIES_BYTES
    return {
        "memory_bytes": peak,
        "fits": predicted.peak_bytes <= capacity,
        "largest_micro_batch": largest_micro_batch(work.passes, capacity, sharding),
    }


def numerics_of(job: PublishedJob, precision: str, strategy: str) -> Numerics:
    """Returns the types and kernels that a source trains with, in this precision of a ``Job``."""
    fused_loss = job.source_repo in FUSED_LOSS
    if job.source_repo in PUBLISHES_RESERVED and job.compile == "yes":
        month = re.search(r"_(20\d\d)-?(\d\d)\b|_(20\d\d)(\d\d)_", job.source_path)
        digits = int("".join(part for part in month.groups() if part)) if month else 0
        fused_loss = digits >= LOSS_COMPILED_SINCE
    in_half = strategy not in ("DDP", "ZERO1") or job.source_repo in WRITTEN_ATTENTION
    casts = "half" if in_half else "autocast"
    return Numerics(
        casts="float32" if precision == "float32" else casts,
        fused_attention=job.source_repo not in WRITTEN_ATTENTION,
        fused_loss=fused_loss,
    )


def _strategy(job: PublishedJob) -> str:
    """Returns a strategy; FSDP over so many replicas ("FSDP2 8", "FSDP2 8 EP -") is FULL_SHARD."""
    return _named(STRATEGIES, "strategy", re.sub(r"^(FSDP2) \d+( EP -)?$", r"\1", job.strategy))


def _has_adapters(job: PublishedJob) -> bool:
    return "LoRA" in job.model


def _checkpointing(job: PublishedJob) -> str:
    """Returns what is computed again."""
    published = job.act_ckpt.split(" (")[0]
    published = OF_SOURCE.get((job.source_repo, published), published)
    return _named(CHECKPOINTING, "checkpointing", published)


def _named(names: dict[str, str], kind: str, published: str) -> str:
    if published not in names:
        raise UserError(f"{kind} not modelled: {published or 'not published'}")
    return names[published]


def _architecture(job: PublishedJob) -> Architecture:
    name = bare_name(job.model)
    size = SIZES.get(name, name)
    if job.seq_len is None and name in SIZES:
        raise UserError("sequence length not published")
    return _published(size, job.seq_len and job.seq_len // job.cp, job.model)


def _published(size: str, seq_len: int | None, model: str) -> Architecture:
    if size in FOLLOWED:
        return _followed(FOLLOWED[size], seq_len)
    try:
        return architecture_of(size, seq_len)
    except UserError as error:
        unknown = str(error).startswith("unknown model")
        raise UserError(f"model not known: {model}" if unknown else str(error)) from None


@cache
def _followed(make: Callable, seq_len: int | None) -> Architecture:
    """Follows a model, which takes seconds, once whatever its names."""
    return traced_architecture(partial(make, seq_len) if seq_len else make, make.__name__)


def assumption() -> str:
    """Returns the assumption that throughput rests on, in words."""
    rate = Assumptions().pass_rate.text()
    return f"throughput: passes {rate} times as fast as products and memory let them be"
