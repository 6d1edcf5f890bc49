"""A0.2: the floating-point operations of a token, their share of a device's peak, and a long run.

Operations are those of matrix products, a multiplication and an addition for each weight that a
token meets, and of attention's two products, which are *not* halved for the causal mask (Chowdhery
et al. 2022, "PaLM", appendix B; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", appendix).
"""

from __future__ import annotations


def matrix_weights(layers: int, width: int, vocabulary: int) -> int:
    """Returns N, the weights of a GPT-2's matrix products: blocks' and head's.

    A block has a matrix for queries, keys and values, one behind attention, and two that are four
    times as wide. The head is the token embedding, counted once: to look tokens up takes no
    operations, and so for position embeddings; biases and norms take too few to count.
    """
    # BEGIN SOLUTION A0.2
    return layers * 12 * width**2 + vocabulary * width
    # END SOLUTION


def attention_flops(layers: int, width: int, seq_len: int) -> int:
    """Returns the operations a token of queries times keys and of weights times values, forward."""
    # BEGIN SOLUTION A0.2
    return layers * 2 * (2 * width * seq_len)
    # END SOLUTION


def forward_flops(layers: int, width: int, vocabulary: int, seq_len: int) -> int:
    """Returns the operations a token of a forward pass over sequences of ``seq_len`` tokens."""
    # BEGIN SOLUTION A0.2
    return 2 * matrix_weights(layers, width, vocabulary) + attention_flops(layers, width, seq_len)
    # END SOLUTION


def training_flops(layers: int, width: int, vocabulary: int, seq_len: int) -> int:
    """Returns the operations a token of forward and backward pass, nothing computed again."""
    # BEGIN SOLUTION A0.2
    # Each product's backward pass has two of its size: for its inputs and for its weights.
    return 3 * forward_flops(layers, width, vocabulary, seq_len)
    # END SOLUTION


def utilisation(tokens_per_s: float, flops_per_token: int, peak_flops_per_s: float) -> float:
    """Returns MFU, the share of the peak that a training run's operations take, as a fraction."""
    # BEGIN SOLUTION A0.2
    return tokens_per_s * flops_per_token / peak_flops_per_s
    # END SOLUTION


def training_days(tokens: float, flops_per_token: int, flops_per_s: float) -> float:
    """Returns the days for ``tokens`` tokens at ``flops_per_s`` operations that training achieves.

    For a larger model than the one that was measured it supposes that both reach the same share of
    the peak.
    """
    # BEGIN SOLUTION A0.2
    return tokens / (flops_per_s / flops_per_token) / 86_400
    # END SOLUTION
