"""Activation memory: the bytes that a GPT-2's forward pass saves for the backward pass.

Autograd's nodes say what they save (derivatives.yaml of PyTorch); under mixed precision autocast's
rules decide in which type. Korthikanti et al. 2022 (arXiv 2205.05198) count in the same way.
"""

from __future__ import annotations

from common.exercises.step_memory import FLOAT32, block_saves, loss_saves, norm_saves
from common.perfmodel.one_device.workload import Workload


def block_activations(workload: Workload) -> dict[str, int]:
    """Computes the bytes that one block saves for its backward pass, without checkpointing."""
    config = workload.config
    return block_saves(
        workload.batch_size * workload.seq_len,
        workload.seq_len,
        config.n_embd,
        config.n_head,
        compute_bytes=compute_size(workload),
        fused_attention=workload.attention == "sdpa",
    )


def saved_per_layer(workload: Workload) -> dict[str, int]:
    """Computes the bytes that each layer saves for the backward pass, copies of weights included.

    ``embeddings`` keep the tokens and positions they looked up, ``head and loss`` the last norm's
    input and output, the log-softmax of every logit and the targets.
    """
    config, tokens = workload.config, workload.batch_size * workload.seq_len
    size = compute_size(workload)
    mixed = 2 if size < FLOAT32 else 0  # bytes of a weight's copy
    block = sum(block_activations(workload).values())
    block += mixed * config.matrix_parameters_per_layer()
    head = norm_saves(tokens, config.n_embd, size)
    weight = mixed * config.vocab_size * config.n_embd
    logits = loss_saves(tokens, config.vocab_size)
    if workload.loss_chunks > 1:  # its gradients are made already
        logits = tokens * config.n_embd * size + 8
        weight = FLOAT32 * config.vocab_size * config.n_embd
        head -= tokens * config.n_embd * size
    layers = {"embeddings": 8 * (tokens + workload.seq_len)}
    layers |= {f"block {index}": block for index in range(config.n_layer)}
    return layers | {"head and loss": head + weight + logits}


def compute_size(workload: Workload) -> int:
    """Returns the bytes of a number in matrix products: 4 in float32, else 2."""
    return FLOAT32 if workload.precision == "float32" else 2
