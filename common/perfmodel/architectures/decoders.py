"""Makers of the families that descend from Llama: rotary positions, RMS norms, gated parts."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UserError
from common.perfmodel.architectures.configuration import Sizes
from common.perfmodel.architectures.parts import (
    Attention,
    Count,
    Experts,
    FeedForward,
    LatentAttention,
)
from common.perfmodel.architectures.transformer import Transformer

PROJECTIONS = (
    *("attention.sinks", "attention.query", "attention.key", "attention.value"),
    *("attention.output", "attention"),
)
"""Modules of attention as Llama and most others register them."""
GROUPS = ("num_key_value_heads",)
NORMS_LAST = ("feed_forward", "attention_norm", "feed_forward_norm")


def decoder(
    sizes: Sizes,
    attention: Attention | LatentAttention,
    feed_forward: FeedForward | None,
    tied: bool = False,
    **overrides: object,
) -> Transformer:
    """Makes a model whose sizes have Llama's names; ``overrides`` are fields that differ from it.

    The head is ``tied`` or not where the configuration does not say.
    """
    return Transformer(
        name=sizes.name,
        layers=sizes.layers("num_hidden_layers"),
        width=sizes.whole("hidden_size"),
        vocabulary=sizes.whole("vocab_size"),
        attention=attention,
        feed_forward=feed_forward,
        **{"head": sizes.head(tied), "registration": (*PROJECTIONS, *NORMS_LAST)} | overrides,
    )


def _attention(
    sizes: Sizes, default: bool = False, stated: Sequence[str] = (), **kinds: bool
) -> Attention:
    bias = sizes.flag("attention_bias", default)
    return sizes.attention(stated=stated, input_bias=bias, output_bias=bias, **kinds)


def _gated(sizes: Sizes, **kinds: bool) -> FeedForward:
    return sizes.feed_forward(gated=True, **kinds)


def llama(sizes: Sizes) -> Transformer:
    """Makes a Llama."""
    bias = sizes.flag("mlp_bias", False)
    return decoder(sizes, _attention(sizes), _gated(sizes, bias=bias))


def mistral(sizes: Sizes) -> Transformer:
    """Makes a Mistral. Its attention is counted whole where a window limits it."""
    return decoder(sizes, sizes.attention(stated=GROUPS), _gated(sizes))


def gemma(sizes: Sizes) -> Transformer:
    """Makes a Gemma of the first generation."""
    attention = _attention(sizes, stated=(*GROUPS, "head_dim"))
    return decoder(sizes, attention, _gated(sizes), tied=True)


def phi3(sizes: Sizes) -> Transformer:
    """Makes a Phi-3."""
    attention, order = sizes.attention(fused=True), ("attention.output", "attention", *NORMS_LAST)
    return decoder(sizes, attention, _gated(sizes, fused=True), registration=order)


def qwen2(sizes: Sizes) -> Transformer:
    """Makes a Qwen2 or Qwen2.5."""
    return decoder(sizes, sizes.attention(stated=GROUPS, input_bias=True), _gated(sizes))


def qwen3(sizes: Sizes) -> Transformer:
    """Makes a Qwen3."""
    attention = _attention(sizes, stated=(*GROUPS, "head_dim"), query_key_norms=True)
    return decoder(sizes, attention, _gated(sizes))


def qwen3_moe(sizes: Sizes) -> Transformer:
    """Makes a Qwen3 with experts in every ``decoder_sparse_step``-th block but some."""
    every = sizes.whole("decoder_sparse_step", 1)
    # transformers 5 writes the second name.
    total = "num_experts" if "num_experts" in sizes.values else "num_local_experts"
    dense = set(sizes.listed("mlp_only_layers"))
    dense |= {index for index in range(sizes.layers("num_hidden_layers")) if (index + 1) % every}
    return decoder(
        sizes,
        _attention(sizes, stated=GROUPS, query_key_norms=True),
        _gated(sizes) if dense else None,
        experts=_experts(sizes, total, "moe_intermediate_size"),
        dense_layers=tuple(sorted(dense)),
        registration=(*PROJECTIONS, "feed_forward.experts", *NORMS_LAST),
    )


def mixtral(sizes: Sizes) -> Transformer:
    """Makes a Mixtral."""
    experts = _experts(sizes, "num_local_experts", "intermediate_size")
    return decoder(sizes, sizes.attention(stated=GROUPS), None, experts=experts)


def gpt_oss(sizes: Sizes) -> Transformer:
    """Makes a gpt-oss. Attention is counted whole in the blocks that have a window, too."""
    attention = _attention(sizes, default=True, stated=(*GROUPS, "head_dim"), sinks=True)
    kinds = {"bias": True, "transposed": True}
    experts = _experts(sizes, "num_local_experts", "intermediate_size", **kinds)
    return decoder(sizes, attention, None, experts=experts)


def deepseek_v3(sizes: Sizes) -> Transformer:
    """Makes a DeepSeek V3 or a Kimi K2, without the part that predicts a second token."""
    dense = tuple(range(sizes.whole("first_k_dense_replace", 3, Count)))
    shared = sizes.whole("n_shared_experts") * sizes.whole("moe_intermediate_size")
    if "q_lora_rank" not in sizes.values:
        raise UserError("q_lora_rank is missing")
    keys = ("n_routed_experts", "moe_intermediate_size")
    return decoder(
        sizes,
        LatentAttention(
            heads=sizes.whole("num_attention_heads"),
            query_rank=sizes.whole("q_lora_rank", 0) or None,  # null: straight from the input
            key_value_rank=sizes.whole("kv_lora_rank"),
            head_width=sizes.whole("qk_nope_head_dim"),
            rotary_width=sizes.whole("qk_rope_head_dim"),
            value_width=sizes.whole("v_head_dim"),
            bias=sizes.flag("attention_bias", False),
        ),
        _gated(sizes),
        experts=_experts(sizes, *keys, shared_width=shared),
        dense_layers=dense,
        registration=("attention", "feed_forward.experts", *NORMS_LAST),
    )


def _experts(sizes: Sizes, total: str, width: str, **overrides: int) -> Experts:
    return Experts(
        total=sizes.whole(total),
        active=sizes.whole("num_experts_per_tok"),
        width=sizes.whole(width),
        **overrides,
    )
