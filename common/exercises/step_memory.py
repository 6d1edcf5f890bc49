"""A0.1: the bytes that a training step keeps: weights, their states, and what autograd saves.

States follow from the number of parameters (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", section 3.1). What a GPT-2 saves for its backward pass
is counted operation by operation, from what each needs for its own gradients (Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1). All figures are
bytes. Parameters are float32 and so is the residual stream; matrix products compute in
``compute_bytes`` a number, 4 or, under autocast, 2.
"""

from __future__ import annotations

FLOAT32 = 4
INT64 = 8


def state_bytes(parameters: int, optimizer: str = "adamw") -> dict[str, int]:
    """Returns the bytes of ``parameters``, ``gradients`` and ``optimizer states``, by that name.

    Args:
        parameters: their number.
        optimizer: adamw, which keeps two numbers for each, or sgd without momentum.
    """
    # BEGIN SOLUTION A0.1
    states_each = {"adamw": 2, "sgd": 0}[optimizer]
    return {
        "parameters": FLOAT32 * parameters,
        "gradients": FLOAT32 * parameters,
        "optimizer states": FLOAT32 * parameters * states_each,
    }
    # END SOLUTION


def norm_saves(tokens: int, width: int, compute_bytes: int = FLOAT32) -> int:
    """Returns the bytes that are kept around a layer norm for the backward pass.

    Its float32 input, a mean and a deviation for each token, and its output, which the matrix
    behind it needs.

    Args:
        tokens: of all sequences of the batch.
        width: channels of the residual stream.
        compute_bytes: of a number in matrix products.
    """
    # BEGIN SOLUTION A0.1
    return FLOAT32 * tokens * (width + 2) + compute_bytes * tokens * width
    # END SOLUTION


def block_saves(
    tokens: int,
    seq_len: int,
    width: int,
    heads: int,
    *,
    compute_bytes: int = FLOAT32,
    fused_attention: bool = True,
) -> dict[str, int]:
    """Returns the bytes that one block of a GPT-2 saves, without dropout.

    A block is a norm, attention (queries, keys and values from one matrix, then a projection), a
    norm, and two layers with a GELU between them, four times as wide. With a single sequence, or a
    single head, and attention that is not fused, PyTorch keeps something else, as views become
    copies and copies views.

    Args:
        tokens: of all sequences of the batch.
        seq_len: tokens of a sequence.
        width: channels of the residual stream.
        heads: of the attention.
        compute_bytes: of a number in matrix products.
        fused_attention: it keeps a float32 per token and head in place of the scores.

    Returns:
        the bytes of ``residual stream`` (the norms' inputs), ``norm outputs`` (with what a norm
        keeps of each token), ``attention`` (queries, keys, values and their mixture), ``attention
        scores`` and ``feed-forward``, by that name.
    """
    # BEGIN SOLUTION A0.1
    channels = compute_bytes * tokens * width
    scores = FLOAT32 * tokens * heads
    if not fused_attention:
        scores = compute_bytes * tokens * heads * seq_len
    residual = FLOAT32 * tokens * width
    norms = 2 * norm_saves(tokens, width, compute_bytes)
    return {
        "residual stream": 2 * residual,
        "norm outputs": norms - 2 * residual,
        "attention": 4 * channels,
        "attention scores": scores,
        "feed-forward": 8 * channels,  # before and after the GELU
    }
    # END SOLUTION


def loss_saves(tokens: int, vocabulary: int) -> int:
    """Returns the bytes that the cross-entropy saves, log-probabilities in float32.

    Besides the targets there is the number that the mean divides by.
    """
    # BEGIN SOLUTION A0.1
    return FLOAT32 * tokens * vocabulary + INT64 * tokens + FLOAT32  # and the sum of the weights
    # END SOLUTION
