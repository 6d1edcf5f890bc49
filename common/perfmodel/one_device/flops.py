"""Floating-point operations of training, per token, and their share of a device's peak.

A token meets every weight of a matrix product once: a multiplication and an addition forward, twice
that backward, so 6 operations for each of N weights. The two products of attention add 12 per
layer, channel of its width and token of context. This is the count of PaLM (Chowdhery et al. 2022,
arXiv 2204.02311, appendix B), and without recomputation that of Megatron-LM (Narayanan et al. 2021,
arXiv 2104.04473, appendix). As in both, attention is *not* halved for the causal mask: a kernel
that skips the masked half reaches a higher MFU for it.
"""

from __future__ import annotations

from common.perfmodel.one_device.architecture import GPT2Config


def matrix_parameters(config: GPT2Config) -> int:
    """Counts N, the weights of matrix products: four in each block, and the head's.

    The head is the token embedding, which is counted once: looking tokens up takes no operations.
    Nor do position embeddings; biases and norms take too few to count (0.1 % of gpt2's weights).
    """
    blocks = config.n_layer * config.matrix_parameters_per_layer()
    return blocks + config.vocab_size * config.n_embd


def forward_flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Counts the forward pass's operations for each of ``seq_len`` tokens: 2N and attention."""
    return 2 * matrix_parameters(config) + _attention_flops(config, seq_len)


def training_flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Counts operations of both passes per token: 6N + 12 · layers · width · length.

    It counts what the model needs, whatever the implementation: neither the recomputation of
    activation checkpointing nor the rows of a padded vocabulary, so give the model's own sizes.
    """
    return 3 * forward_flops_per_token(config, seq_len)


def recomputed_flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Counts operations per token that checkpointing repeats: the blocks', but not the head's.

    With these on top a device's own utilisation (HFU) is higher than MFU. PyTorch stops a block's
    second pass when all it needs is there, which leaves out the block's last product.
    """
    last_product = config.n_layer * 4 * config.n_embd**2
    weights = config.n_layer * config.matrix_parameters_per_layer() - last_product
    return 2 * weights + _attention_flops(config, seq_len)


def mfu(tokens_per_s: float, config: GPT2Config, seq_len: int, peak_flops_per_s: float) -> float:
    """Computes model FLOPs utilisation: operations that training needs, over the peak's."""
    return tokens_per_s * training_flops_per_token(config, seq_len) / peak_flops_per_s


def _attention_flops(config: GPT2Config, seq_len: int) -> int:
    """Counts QKᵀ and its product with V, forward, per token: 2 · 2 · layers · width · length."""
    return 4 * config.n_layer * config.n_embd * seq_len
