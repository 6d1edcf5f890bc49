"""Activations of a transformer's parts, from their sizes: attention, feed-forward, block, head.

Written-out attention is that of the transformers library (``eager``). A fused kernel keeps queries,
keys, values, its output and one number for each token and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.perfmodel.architectures.activations import (
    FUSED,
    FUSED_LOSS,
    PLAIN_LOSS,
    WRITTEN,
    Activations,
    Piece,
    computed,
    dropout,
    exact,
    negative,
    norm_input,
    streamed,
)
from common.perfmodel.architectures.architecture import Tensor
from common.perfmodel.architectures.parts import Attention, Experts, FeedForward, LatentAttention


@dataclass(frozen=True)
class Style:
    """The choices of a block that change what it keeps.

    Attributes:
        norm: kind of its norms.
        rotates: whether queries and keys are rotated, and so copied out of a fused projection.
        float32_softmax: whether written-out scores go through softmax in float32 under autocast.
        dropout: whether there is dropout behind each part.
        attention_dropout: whether there is dropout on the scores.
        inner_dropout: whether there is dropout behind the feed-forward part's activation (T5).
        one_input: whether both parts read the block's input (GPT-NeoX's parallel residual).
    """

    norm: str
    rotates: bool = False
    float32_softmax: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    inner_dropout: bool = False
    one_input: bool = False


def attention_activations(
    attention: Attention | LatentAttention, tokens: int, keys: int, style: Style
) -> list[Piece]:
    """Returns what attention keeps of a sample: ``tokens`` queries that look at ``keys`` tokens."""
    heads = attention.heads
    if isinstance(attention, LatentAttention):
        query = heads * (attention.head_width + attention.rotary_width)
        key, value, mixed = query, heads * attention.value_width, heads * attention.value_width
        latents = attention.key_value_rank + attention.rotary_width + (attention.query_rank or 0)
        pieces = [computed("attention", 2 * tokens * latents)]  # down's output and its norm
        pieces += [computed("attention", tokens * (key + value), FUSED)]  # parts of one projection
        repeated = key, value
    else:
        query = mixed = heads * attention.head_width
        key = value = attention.key_value_heads * attention.head_width
        repeated = query, query
        pieces = []
        if attention.query_key_norms:
            elements = tokens * query + keys * key
            pieces += [exact("attention", elements), computed("attention", elements)]
        if attention.fused and style.rotates:
            # Values are a view of the whole projection, and the mixture is copied in another order.
            pieces.append(computed("attention", tokens * (query + key + mixed), FUSED))
    scores = heads * tokens * keys
    softmax = (4 * scores, (6 if style.float32_softmax else 2) * scores, 2 * scores)
    pieces += [
        computed("attention", tokens * (query + mixed)),
        computed("attention", keys * (key + value), FUSED),
        computed("attention", keys * sum(repeated), WRITTEN),
        exact("attention scores", heads * tokens, FUSED),
        Piece("attention scores", softmax, (WRITTEN,)),
    ]
    if style.attention_dropout:
        pieces += dropout(scores, WRITTEN)
        pieces.append(computed("attention scores", scores, WRITTEN))
    return pieces


def feed_forward_activations(part: FeedForward | Experts, tokens: int, width: int) -> list[Piece]:
    """Returns what a feed-forward part keeps of ``tokens`` tokens of ``width``."""
    if isinstance(part, Experts):
        sent = tokens * part.active
        # A token's copy, what the experts make of it, and that times its weight.
        pieces = [computed("feed-forward", sent * (2 * width + 4 * part.width))]
        pieces.append(exact("feed-forward", 2 * tokens * part.total))
        if part.shared_width:
            shared = FeedForward(width=part.shared_width, gated=True)
            pieces += feed_forward_activations(shared, tokens, width)
        return pieces
    # Before and after the activation, the gate's partner, and their product. ReLU keeps its output.
    tables = (4 if part.gated else 2) - part.relu
    return [computed("feed-forward", tables * tokens * part.width)]


def block_activations(
    attention: Sequence[tuple[Attention | LatentAttention, int]],
    feed_forward: FeedForward | Experts,
    tokens: int,
    width: int,
    style: Style,
    linears: Sequence[Tensor],
) -> Activations:
    """Returns the activations of a block.

    Args:
        attention: the block's attentions in order, each with the tokens that it looks at.
        feed_forward: the block's feed-forward part.
        tokens: tokens of a sample.
        width: width of the residual stream.
        style: further choices that decide what is kept.
        linears: weights of its linear layers [out, in], in the order of the forward pass.
    """
    stream = tokens * width
    kept: list[Piece] = []
    for number, (part, keys) in enumerate(attention):
        fused = isinstance(part, Attention) and part.fused
        readers = 1 if fused else 2 if isinstance(part, LatentAttention) else 3
        crosses = number > 0
        kept += norm_input(tokens, width, style.norm)
        kept.append(computed("norm outputs", stream, copies=1 if crosses else readers))
        if crosses:  # keys and values read the encoder's output, under autocast by a copy each
            kept.append(Piece("norm outputs", (0, 4 * keys * width, 0)))
        kept += attention_activations(part, tokens, keys, style)
        kept += dropout(stream) if style.dropout else []
    readers = 2 if getattr(feed_forward, "gated", False) and not feed_forward.fused else 1
    second = norm_input(tokens, width, style.norm)
    if style.one_input:
        second = [piece for piece in second if piece.part != "residual stream"]
    second.append(computed("norm outputs", stream, copies=readers))
    second += feed_forward_activations(feed_forward, tokens, width)
    if style.inner_dropout:
        inner = tokens * feed_forward.width
        second += [*dropout(inner), computed("feed-forward", inner)]
    kept += second + (dropout(stream) if style.dropout else [])
    scores = sum(part.heads * tokens * keys for part, keys in attention)
    return Activations(
        kept=tuple(kept),
        entering=(streamed("residual stream", stream),),
        selected=tuple(_selected(attention, linears, tokens)),
        forward=(
            streamed("temporary buffers", stream),
            computed("temporary buffers", scores, WRITTEN),
        ),
        backward=(
            tuple(_feed_forward_backward(feed_forward, tokens, width)),
            (
                *_stream_backward(stream),
                computed("temporary buffers", 2 * scores, WRITTEN),
                *negative(second),
            ),
        ),
    )


def _stream_backward(stream: float) -> list[Piece]:
    """Returns the residual stream's gradient, and its cast where a product reads it."""
    return [Piece("temporary buffers", (4 * stream, 6 * stream, 2 * stream))]


def _feed_forward_backward(part: FeedForward | Experts, tokens: int, width: int) -> list[Piece]:
    """Returns the gradients that are there when the activation's is made, beside what is kept.

    Of a gate the gradients of both factors and of their product live at once, the product itself
    is gone.
    """
    if isinstance(part, Experts):
        way = 2 * tokens * part.active * part.width + 2 * tokens * part.active * width
    else:
        way = (2 if part.gated else 1) * tokens * part.width
    return [*_stream_backward(tokens * width), computed("temporary buffers", way)]


def _selected(
    attention: Sequence[tuple[Attention | LatentAttention, int]],
    linears: Iterable[Tensor],
    tokens: int,
) -> list[Piece]:
    """Returns what torchtitan's selective checkpointing keeps beside a block's input.

    That is the output of every second matrix product, from the first, and of the attention
    kernels (pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py).
    """
    pieces = [
        computed("selected", tokens * linear.shape[0])
        for index, linear in enumerate(linears)
        if index % 2 == 0
    ]
    for part, _ in attention:
        width = part.value_width if isinstance(part, LatentAttention) else part.head_width
        pieces.append(computed("selected", tokens * part.heads * width, FUSED))
        pieces.append(exact("selected", tokens * part.heads, FUSED))
    return pieces


def head_activations(tokens: int, width: int, scores: int, before: Iterable[Piece]) -> Activations:
    """Returns the activations of a head and of the cross-entropy of its scores.

    Args:
        tokens: tokens of a sample that are scored.
        width: width of the head's input.
        scores: scores of a token.
        before: pieces that layers before the last one keep, without the last one's input.
    """
    part, table = "logits and loss", tokens * scores
    log_softmax = exact(part, table, PLAIN_LOSS)
    logits = computed(part, table, FUSED_LOSS)
    kept = (*before, computed(part, tokens * width), log_softmax, logits)
    gradient = computed("logits and loss", table, FUSED_LOSS)
    return Activations(
        kept=(*kept, exact(part, tokens, FUSED_LOSS)),
        forward=(exact(part, table, PLAIN_LOSS),),  # the logits, in float32
        backward=(
            (exact(part, 2 * table, PLAIN_LOSS), gradient),
            (
                *negative((log_softmax, logits)),
                computed(part, table),
                computed("temporary buffers", tokens * width),
            ),
        ),
    )
