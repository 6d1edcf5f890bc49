"""The predictor that is judged: ``predict_scale_out``, asked as ``predict --cluster`` asks it.

What a published row leaves open is taken from its source's defaults, in the tables below.
"""

from __future__ import annotations

import re
from functools import cache

from common.errors import UserError
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.published_sizes import architecture_of
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.scale_out import predict_scale_out, without_room
from common.perfmodel.one_device.peaks import known_peak
from common.studies.public.hardware import cluster_name
from common.studies.public.jobs import Forecast, PublishedJob

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
    """Predicts a published job's throughput, and whether its states fit.

    FSDP is taken to reduce gradients in every micro-batch, as it does unless it is told otherwise.

    Raises UserError with the reason where the job cannot be predicted.
    """
    if job.is_model_parallel:
        raise UserError("tensor, pipeline or context parallelism is not modelled")
    for words, reason in NOT_MODELLED:
        if re.search(words, f"{job.model} {job.strategy}"):
            raise UserError(reason)
    cluster = load_cluster(cluster_name(job))
    precision = _named(PRECISIONS, "precision", job.precision)
    strategy = _named(STRATEGIES, "strategy", job.strategy)
    if job.micro_batch_per_gpu is None:
        raise UserError("micro-batch not published")
    has_tf32 = "tf32" in known_peak(cluster.gpu).flops_per_s
    work = Job(
        architecture=_architecture(job),
        batch_size=job.micro_batch_per_gpu,
        precision="float32" if precision == "tf32" else precision,
        tf32=precision == "tf32" and has_tf32,
        checkpointing=_named(CHECKPOINTING, "checkpointing", job.act_ckpt.split(" (")[0]),
        accumulation=job.grad_accum or 1,
        reduces_each=True,
        gradient_bytes=2 if job.precision in ALL_IN_16_BITS else 4,
    )
    predicted = predict_scale_out(work, cluster, [job.gpus], strategies=[strategy])
    step = predicted.rows("weak", strategy).iloc[0]
    samples = work.batch_size * work.accumulation
    rates = [samples / step[column] for column in ("step_s", "step_high_s", "step_low_s")]
    return Forecast(*rates, fits=not without_room(predicted))


def _named(names: dict[str, str], kind: str, published: str) -> str:
    if published not in names:
        raise UserError(f"{kind} not modelled: {published or 'not published'}")
    return names[published]


def _architecture(job: PublishedJob) -> Architecture:
    name = re.sub(r" \(.*\)| \d-node", "", job.model)
    size, by_default = MODELS.get(name, (name, None))
    seq_len = job.seq_len or by_default
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
    return f"throughput assumes an MFU of {Assumptions().mfu.text('{:.0%}')}"
