"""Attention and feed-forward parts of a transformer's block: their parameters and operations.

Each part lists its tensors in the order of its forward pass. Names are this project's; a module's
parameters are ``module.weight`` and ``module.bias``. A linear layer's weight is [out, in].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Literal

from common.errors import UserError
from common.perfmodel.architectures.architecture import Tensor
from common.settings import Bound, Settings


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


Whole = Bound("a whole number, at least 1", lambda number: _is_whole(number) and number >= 1)
Depth = Bound(
    "a whole number from 1 to 10000", lambda number: _is_whole(number) and 1 <= number <= 10_000
)
"""Number of layers: each is predicted by itself, so that millions would take hours."""
Count = Bound("a whole number, at least 0", lambda number: _is_whole(number) and number >= 0)
NormKind = Literal["layer", "layer_no_bias", "rms"]


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> list[Tensor]:
    """Returns the parameters of ``nn.Linear(inputs, outputs)``."""
    weight = Tensor(f"{name}.weight", (outputs, inputs))
    return [weight, Tensor(f"{name}.bias", (outputs,))] if bias else [weight]


def norm(name: str, width: int, kind: NormKind) -> list[Tensor]:
    """Returns the parameters of a norm: a weight, and a bias where it is ``layer``."""
    weight = Tensor(f"{name}.weight", (width,))
    return [weight, Tensor(f"{name}.bias", (width,))] if kind == "layer" else [weight]


def linear_flops(tensors: Iterable[Tensor], tokens: int) -> int:
    """Returns the operations of all linear layers among ``tensors``: 2 · in · out a token."""
    weights = (tensor for tensor in tensors if tensor.name.endswith(".weight"))
    return 2 * tokens * sum(weight.elements for weight in weights if len(weight.shape) == 2)


@dataclass(frozen=True, kw_only=True)
class Attention(Settings):
    """Attention in which groups of query heads share a key and a value head.

    Attributes:
        key_value_heads: key heads, and as many value heads.
        input_bias, output_bias: whether projections to queries, keys and values, and that from the
            heads, have biases.
        query_key_norms: whether each query and key head is normalised (RMS, as Qwen3's).
        sinks: whether each head has a learned score that takes attention off all tokens (gpt-oss).
        fused: whether one linear layer computes queries, keys and values.
    """

    heads: Annotated[int, Whole]
    key_value_heads: Annotated[int, Whole]
    head_width: Annotated[int, Whole]
    input_bias: bool = False
    output_bias: bool = False
    query_key_norms: bool = False
    sinks: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.key_value_heads:
            groups = f"{self.key_value_heads} key-value heads"
            raise UserError(f"{self.heads} heads are no multiple of {groups}")

    def tensors(self, width: int, name: str = "attention") -> list[Tensor]:
        """Returns the parameters in a block of ``width``; their names begin with ``name``."""
        queries = self.heads * self.head_width
        keys = self.key_value_heads * self.head_width
        bias = self.input_bias
        if self.fused:
            inputs = linear(f"{name}.query_key_value", width, queries + 2 * keys, bias)
        else:
            norms = {
                part: norm(f"{name}.{part}_norm", self.head_width, "rms")
                if self.query_key_norms
                else []
                for part in ("query", "key")
            }
            inputs = [
                *linear(f"{name}.query", width, queries, bias),
                *norms["query"],
                *linear(f"{name}.key", width, keys, bias),
                *norms["key"],
                *linear(f"{name}.value", width, keys, bias),
            ]
        sinks = [Tensor(f"{name}.sinks.weight", (self.heads,))] if self.sinks else []
        return [*inputs, *sinks, *linear(f"{name}.output", queries, width, self.output_bias)]

    def core_attention_flops(self, seq_len: int) -> int:
        """Returns the forward FLOPs of QKᵀ and of mixing the values; shared heads save none."""
        return 4 * seq_len**2 * self.heads * self.head_width


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Settings):
    """Multi-head latent attention, in which keys and values come from a narrow vector.

    Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1). It is trained with keys and values written
    out, as counted here.

    Attributes:
        query_rank: width of the vector that queries come from; None: from the hidden state.
        key_value_rank: width of the vector that keys and values come from.
        head_width: width of a head's query and key without the part that is rotated.
        rotary_width: width of the part that is rotated, whose key all heads share.
        value_width: width of a head's value.
        bias: whether the projections down and from the heads have biases.
    """

    heads: Annotated[int, Whole]
    query_rank: Annotated[int, Whole] | None
    key_value_rank: Annotated[int, Whole]
    head_width: Annotated[int, Whole]
    rotary_width: Annotated[int, Whole]
    value_width: Annotated[int, Whole]
    bias: bool = False

    def tensors(self, width: int, name: str = "attention") -> list[Tensor]:
        """Returns the parameters in a block of ``width``; their names begin with ``name``."""
        rank, latent = self.query_rank, self.key_value_rank
        queries = self.heads * (self.head_width + self.rotary_width)
        keys_and_values = self.heads * (self.head_width + self.value_width)
        if rank is None:
            from_input = linear(f"{name}.query", width, queries)
        else:
            from_input = [
                *linear(f"{name}.query_down", width, rank, self.bias),
                *norm(f"{name}.query_norm", rank, "rms"),
                *linear(f"{name}.query_up", rank, queries),
            ]
        return [
            *from_input,
            *linear(f"{name}.key_value_down", width, latent + self.rotary_width, self.bias),
            *norm(f"{name}.key_value_norm", latent, "rms"),
            *linear(f"{name}.key_value_up", latent, keys_and_values),
            *linear(f"{name}.output", self.heads * self.value_width, width, self.bias),
        ]

    def core_attention_flops(self, seq_len: int) -> int:
        """Returns the forward FLOPs of QKᵀ and of mixing the values, without a causal mask."""
        widths = self.head_width + self.rotary_width + self.value_width
        return 2 * seq_len**2 * self.heads * widths


@dataclass(frozen=True, kw_only=True)
class FeedForward(Settings):
    """Two linear layers with an activation between, or three where one gates another.

    Attributes:
        width: width between the layers.
        gated: whether a third layer's output multiplies the first's (SwiGLU, GEGLU).
        bias: whether the layers have biases.
        fused: whether the gate and the layer that it multiplies are one.
        relu: whether the activation is ReLU, whose backward pass needs its output alone.
    """

    width: Annotated[int, Whole]
    gated: bool = False
    bias: bool = False
    fused: bool = False
    relu: bool = False

    def tensors(self, width: int, name: str = "feed_forward") -> list[Tensor]:
        """Returns the parameters in a block of ``width``; their names begin with ``name``."""
        if self.gated and self.fused:
            first = linear(f"{name}.gate_up", width, 2 * self.width, self.bias)
        else:
            names = ("gate", "up") if self.gated else ("up",)
            first = [
                tensor
                for layer in names
                for tensor in linear(f"{name}.{layer}", width, self.width, self.bias)
            ]
        return [*first, *linear(f"{name}.down", self.width, width, self.bias)]


@dataclass(frozen=True, kw_only=True)
class Experts(Settings):
    """Gated feed-forward parts, of which a router chooses some for each token.

    All experts' weights are in two tensors, [experts, out, in], as transformers 5 keeps them.

    Attributes:
        active: experts that a token is sent to.
        width: width between an expert's layers.
        shared_width: width of a gated part that all tokens go through; 0: there is none.
        bias: whether router and experts have biases.
        transposed: whether the experts' weights are [experts, in, out] (gpt-oss).
    """

    total: Annotated[int, Whole]
    active: Annotated[int, Whole]
    width: Annotated[int, Whole]
    shared_width: Annotated[int, Count] = 0
    bias: bool = False
    transposed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.total:
            raise UserError(
                f"{self.active} active experts are more than the {self.total} there are"
            )

    def tensors(self, width: int, name: str = "feed_forward") -> list[Tensor]:
        """Returns the parameters in a block of ``width``; their names begin with ``name``."""
        shared = FeedForward(width=self.shared_width, gated=True) if self.shared_width else None
        return [
            *linear(f"{name}.router", width, self.total, self.bias),
            *self._expert_tensors(width, name),
            *(shared.tensors(width, f"{name}.shared") if shared else []),
        ]

    def expert_flops(self, width: int, tokens: int) -> int:
        """Returns the operations of the active experts, which drop no token."""
        return 2 * tokens * self.active * 3 * self.width * width

    def _expert_tensors(self, width: int, name: str) -> list[Tensor]:
        tensors = []
        for layer, inputs, outputs in (
            ("gate_up", width, 2 * self.width),
            ("down", self.width, width),
        ):
            shape = (inputs, outputs) if self.transposed else (outputs, inputs)
            tensors.append(Tensor(f"{name}.experts.{layer}", (self.total, *shape)))
            if self.bias:
                tensors.append(Tensor(f"{name}.experts.{layer}_bias", (self.total, outputs)))
        return tensors
