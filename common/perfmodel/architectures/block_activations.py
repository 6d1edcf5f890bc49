"""A transformer's blocks and heads from their parts: operations, and what passes hold of each.

Written-out attention is that of the transformers library (``eager``). A fused kernel keeps queries,
keys, values, its output and one number for each token and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
from common.perfmodel.architectures.architecture import Layer, Tensor
from common.perfmodel.architectures.parts import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    linear,
    linear_flops,
)


@dataclass(frozen=True)
class Style:
    """The choices of a block that change what it keeps.

    Attributes:
        norm: kind of its norms.
        rotates: whether queries and keys are rotated, and so copied out of a fused projection;
            written-out scores then go through softmax in float32 under autocast.
        dropout: whether there is dropout behind each part.
        attention_dropout: whether there is dropout on the scores.
        inner_dropout: whether there is dropout behind the feed-forward part's activation (T5).
        one_input: whether both parts read the block's input (GPT-NeoX's parallel residual).
    """

    norm: str
    rotates: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    inner_dropout: bool = False
    one_input: bool = False


def attention_activations(
    attention: Attention | LatentAttention, tokens: int, style: Style
) -> list[Piece]:
    """Returns what attention keeps of a sample: ``tokens`` queries that look at as many tokens."""
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
            elements = tokens * (query + key)
            pieces += [exact("attention", elements), computed("attention", elements)]
        if attention.fused and style.rotates:
            # Values are a view of the whole projection, and the mixture is copied in another order.
            pieces.append(computed("attention", tokens * (query + key + mixed), FUSED))
    scores = heads * tokens**2
    softmax = (4 * scores, (6 if style.rotates else 2) * scores, 2 * scores)
    pieces += [
        computed("attention", tokens * (query + mixed)),
        computed("attention", tokens * (key + value), FUSED),
        computed("attention", tokens * sum(repeated), WRITTEN),
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


def block_layer(
    name: str,
    tensors: Sequence[Tensor],
    attention: Attention | LatentAttention,
    feed_forward: FeedForward | Experts,
    tokens: int,
    width: int,
    style: Style,
    *,
    attentions: int = 1,
) -> Layer:
    """Returns a block with its operations and activations.

    Args:
        tensors: parameters in the order of the forward pass; weights of linear layers [out, in].
        tokens: tokens of a sample.
        width: width of the residual stream.
        style: further choices that decide what is kept.
        attentions: number of attentions; the second looks at what the encoder has made.
    """
    stream, scores = tokens * width, attentions * attention.heads * tokens**2
    kept: list[Piece] = []
    for number in range(attentions):
        kept += _attention_part(attention, tokens, width, style, crosses=number > 0)
    second = _feed_forward_part(feed_forward, tokens, width, style)
    kept += second + (dropout(stream) if style.dropout else [])
    activations = Activations(
        kept=tuple(kept),
        entering=(streamed("residual stream", stream),),
        selected=tuple(_selected(attention, attentions, tensors, tokens)),
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
    attention_flops = attentions * attention.core_attention_flops(tokens)
    flops = linear_flops(tensors, tokens) + attention_flops
    if isinstance(feed_forward, Experts):
        flops += feed_forward.expert_flops(width, tokens)
    return Layer(
        name,
        tuple(tensors),
        flops,
        is_block=True,
        attention_flops=attention_flops,
        activations=activations,
    )


def _attention_part(
    attention: Attention | LatentAttention, tokens: int, width: int, style: Style, crosses: bool
) -> list[Piece]:
    fused = isinstance(attention, Attention) and attention.fused
    readers = 1 if fused or crosses else 2 if isinstance(attention, LatentAttention) else 3
    stream = tokens * width
    kept = norm_input(tokens, width, style.norm)
    kept.append(computed("norm outputs", stream, copies=readers))
    if crosses:  # keys and values read the encoder's output, under autocast by a copy each
        kept.append(Piece("norm outputs", (0, 4 * stream, 0)))
    kept += attention_activations(attention, tokens, style)
    return kept + (dropout(stream) if style.dropout else [])


def _feed_forward_part(
    part: FeedForward | Experts, tokens: int, width: int, style: Style
) -> list[Piece]:
    readers = 2 if getattr(part, "gated", False) and not part.fused else 1
    kept = norm_input(tokens, width, style.norm)
    if style.one_input:
        kept = [piece for piece in kept if piece.part != "residual stream"]
    kept.append(computed("norm outputs", tokens * width, copies=readers))
    kept += feed_forward_activations(part, tokens, width)
    if style.inner_dropout:
        inner = tokens * part.width
        kept += [*dropout(inner), computed("feed-forward", inner)]
    return kept


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
    attention: Attention | LatentAttention, attentions: int, tensors: Iterable[Tensor], tokens: int
) -> list[Piece]:
    """Returns what torchtitan's selective checkpointing keeps beside a block's input.

    That is the output of every second matrix product, from the first, and of the attention
    kernels (pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py).
    """
    linears = [tensor for tensor in tensors if len(tensor.shape) == 2]
    pieces = [computed("selected", tokens * linear.shape[0]) for linear in linears[::2]]
    is_latent = isinstance(attention, LatentAttention)
    width = attention.value_width if is_latent else attention.head_width
    kernel = computed("selected", tokens * attention.heads * width, FUSED)
    return pieces + attentions * [kernel, exact("selected", tokens * attention.heads, FUSED)]


def head_layer(tokens: int, width: int, scores: int, *, bias: bool = False) -> Layer:
    """Returns a linear layer from ``width`` to ``scores``, and the cross-entropy of its scores.

    ``tokens`` of a sample are scored.
    """
    tensors = tuple(linear("head", width, scores, bias))
    activations = head_activations(tokens, width, scores)
    return Layer("head", tensors, linear_flops(tensors, tokens), activations=activations)


def tied(head: Layer) -> Layer:
    """Returns a head that has another layer's weight in place of its own."""
    return replace(head, tensors=(), shared_elements=head.elements)


def head_activations(
    tokens: int, width: int, scores: int, before: Iterable[Piece] = ()
) -> Activations:
    """Returns the activations of a head; ``before`` are those of layers that come before it."""
    part, table = "logits and loss", tokens * scores
    log_softmax = exact(part, table, PLAIN_LOSS)
    logits = computed(part, table, FUSED_LOSS)
    kept = (*before, computed(part, tokens * width), log_softmax, logits)
    return Activations(
        kept=(*kept, exact(part, tokens, FUSED_LOSS)),
        forward=(exact(part, table, PLAIN_LOSS),),  # the logits, in float32
        backward=(
            (exact(part, 2 * table, PLAIN_LOSS), logits),  # gradients, as large as logits
            (
                *negative((log_softmax, logits)),
                computed(part, table),
                computed("temporary buffers", tokens * width),
            ),
        ),
    )
