"""Memory of training steps of any model: predicted from a configuration, or by following a module.

The allocator under real steps on a CPU is the judge. Formulas were looked at beside the cases that
are not held out; the others were written down before any of them was measured. Convolutions are
run by PyTorch's own kernels, as oneDNN keeps copies of its own.
"""

from __future__ import annotations

import torch

from common.benchmarks.one_device.memory_tracker import peak_of_step
from common.perfmodel.architectures.activations import CPU, Numerics
from common.perfmodel.one_device.training_memory import Passes, predict_training_memory
from common.studies.model_cases import ModelCase, bert, llama
from common.studies.model_steps import architecture_of_case, build
from common.training.step import time_steps

SMALL_BERT = bert(256, 4, 4) | {"vocab_size": 4000}
SMALL_LLAMA = llama(256, 4, 8, 688, 2) | {"vocab_size": 4000}
SMALL_NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 4000,
}
SMALL_RESNET = {
    "model_type": "resnet",
    "embedding_size": 32,
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "num_labels": 100,
}
QWEN3 = SMALL_LLAMA | {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 32}
DROPOUT = {"hidden_dropout_prob": 0.1}
CASES = (
    ModelCase("llama", SMALL_LLAMA, 8, 128, "float32"),
    ModelCase("llama-bfloat16", SMALL_LLAMA, 8, 128),
    ModelCase("llama-checkpointing", SMALL_LLAMA, 8, 128, "float32", checkpointing=True),
    ModelCase("bert-dropout", SMALL_BERT | DROPOUT, 8, 128, "float32"),
    ModelCase("bert-dropout-bfloat16", SMALL_BERT | DROPOUT, 8, 128),
    ModelCase("neox", SMALL_NEOX, 8, 128, "float32"),
    ModelCase("llama-wide", llama(512, 3, 8, 1024), 2, 384, "float32", held_out=True),
    ModelCase("llama-wide-bfloat16", llama(512, 3, 8, 1024), 2, 384, held_out=True),
    ModelCase("llama-long", SMALL_LLAMA, 2, 1024, held_out=True),
    ModelCase(
        "llama-bfloat16-checkpointing", SMALL_LLAMA, 6, 256, checkpointing=True, held_out=True
    ),
    ModelCase("qwen3", QWEN3, 8, 128, "float32", held_out=True),
    ModelCase("qwen3-bfloat16", QWEN3, 4, 200, held_out=True),
    ModelCase("bert", bert(384, 3, 6), 4, 256, "float32", held_out=True),
    ModelCase("bert-bfloat16", bert(384, 3, 6), 4, 256, held_out=True),
    ModelCase(
        "bert-checkpointing",
        SMALL_BERT | DROPOUT,
        16,
        200,
        "float32",
        checkpointing=True,
        held_out=True,
    ),
    ModelCase("neox-bfloat16", SMALL_NEOX, 4, 300, held_out=True),
    ModelCase("resnet", SMALL_RESNET, 4, 0, "float32", held_out=True),
    ModelCase("resnet-bfloat16", SMALL_RESNET, 4, held_out=True),
    ModelCase("resnet-batch-16", SMALL_RESNET, 16, 0, "float32", held_out=True),
)


def allocated(case: ModelCase) -> int:
    """Measures the peak of a real step on the CPU, in bytes, its batch included."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with torch.backends.mkldnn.flags(enabled=False):
        step, batch = build(case, device)
        batches = iter(lambda: batch, None)
        time_steps(step, batches, 2)
        peak = peak_of_step(step, batches).allocated_bytes
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in batch}
    return peak + sum(storages.values())


def described(case: ModelCase) -> dict:
    """Returns a case as a row, with the predicted peak of its step and the moment of the peak."""
    casts = "float32" if case.precision == "float32" else "autocast"
    checkpointing = "block" if case.checkpointing else "none"
    numerics = Numerics(casts, device=CPU)
    passes = Passes(architecture_of_case(case), case.batch_size, numerics, checkpointing)
    peak = predict_training_memory(passes).peak
    return {
        "case": case.name,
        "model": case.config["model_type"],
        "batch_size": case.batch_size,
        "seq_len": case.seq_len,
        "precision": case.precision,
        "checkpointing": case.checkpointing,
        "held_out": case.held_out,
        "moment": peak.name,
        "predicted_bytes": peak.total_bytes,
    }
