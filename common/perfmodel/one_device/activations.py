"""Activation memory: the bytes that a GPT-2's forward pass saves for the backward pass.

Autograd's nodes say what they save (derivatives.yaml of PyTorch); under mixed precision autocast's
rules decide in which type. Korthikanti et al. 2022 (arXiv 2205.05198) count in the same way.
"""

from __future__ import annotations

from common.perfmodel.one_device.workload import Workload

FLOAT32 = 4
"""Bytes of a float32, in which parameters, gradients and states are kept."""


def block_activations(workload: Workload) -> dict[str, int]:
    """Computes the bytes that one block saves for its backward pass, without checkpointing.

    Per token, in widths of the model: the input of each norm (float32, 2), the norms' outputs (2),
    queries, keys and values (3) and the mixed values (1), and on both sides of the GELU (4 + 4).
    SDPA adds one float32 per token and head, written-out attention the weights of every pair of
    tokens in every head.
    """
    config, tokens = workload.config, workload.batch_size * workload.seq_len
    width = tokens * config.n_embd
    size = compute_size(workload)
    if workload.attention == "sdpa":
        scores = FLOAT32 * tokens * config.n_head
    else:
        scores = size * tokens * config.n_head * workload.seq_len
    return {
        "residual stream": 2 * FLOAT32 * width,
        "norm outputs": 2 * size * width + 4 * FLOAT32 * tokens,  # and two means, two deviations
        "attention": 4 * size * width,
        "attention scores": scores,
        "feed-forward": 8 * size * width,
    }


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
    head = tokens * (config.n_embd * (FLOAT32 + size) + 2 * FLOAT32)
    weight = mixed * config.vocab_size * config.n_embd
    logits = FLOAT32 * tokens * config.vocab_size + 8 * tokens + FLOAT32
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
