"""The cost of each operator of a training step: operations, and bytes that have to be moved.

Counted while one step runs, below autograd, where every operator is one that has a kernel. The
operations of matrix products and attention are those of ``torch.utils.flop_counter`` (attention
without its causal mask: kernels that skip the masked half can seem to exceed the peak). Those of
others are counted by ``ARITHMETIC``, which decides nothing: they are bound by memory by far.

The bytes are the least that must be moved: each input read once, each output written once. A view
moves nothing, a tensor changed in place is read and written, a broadcast one read once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from common.traces.profiler_trace import shapes_text, tensor_shapes

# Arithmetic per element of the first output, roots and exponentials counted as one operation.
ARITHMETIC = {
    "add": 1,
    "sub": 1,
    "mul": 1,
    "div": 1,
    "sqrt": 1,
    "exp": 1,
    "neg": 1,
    "sum": 1,
    "mean": 1,
    "amax": 1,
    "lerp": 3,
    "addcmul": 3,
    "addcdiv": 3,
    "masked_fill": 1,
    "where": 1,
    "gelu": 9,
    "gelu_backward": 20,
    "native_dropout": 2,
    "native_layer_norm": 7,
    "native_layer_norm_backward": 13,
    "_softmax": 4,
    "_softmax_backward_data": 4,
    "logsumexp": 4,
    "_log_softmax": 5,
    "_log_softmax_backward_data": 4,
    "_fused_adamw": 14,
    "_fused_sgd": 2,
    "_foreach_add": 1,
    "_foreach_mul": 1,
    "_foreach_lerp": 3,
    "_foreach_addcmul": 3,
    "_foreach_addcdiv": 3,
    "_foreach_div": 1,
    "_foreach_sqrt": 1,
}
REDUCTIONS = {"sum", "mean", "amax", "logsumexp"}
"""Operators whose arithmetic is per element of the input."""
LOOKUPS = {"embedding": 0, "nll_loss_forward": 0, "gather": 0, "index_select": 0}
"""Index of the input of which only as many elements are read as come out."""
LIKE = {"nll_loss_backward": 1, "zeros_like": 0, "ones_like": 0, "full_like": 0}
"""Index of the input that is looked at for its shape only."""
OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""Operators in place that do not read what was there before."""
READ_ONLY = {"_fused_adamw_": {"grads"}, "_fused_adam_": {"grads"}, "_fused_sgd_": {"grads"}}
"""Inputs that the schema marks as changed, for a gradient scaler's sake; here they are read."""


@dataclass
class Cost:
    """Totals over the calls of one operator with the same shapes."""

    calls: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass
class OperatorCosts:
    """Costs by (operator as ``aten::mm``, shapes as ``256x768 768x256``)."""

    by_call: Mapping[tuple[str, str], Cost] = field(default_factory=lambda: defaultdict(Cost))

    def table(self) -> pd.DataFrame:
        """Returns totals per operator and shapes: operator, shapes, calls, flops, bytes."""
        rows = [(*key, cost.calls, cost.flops, cost.bytes) for key, cost in self.by_call.items()]
        return pd.DataFrame(rows, columns=["operator", "shapes", "calls", "flops", "bytes"])


@contextmanager
def count_costs() -> Iterator[OperatorCosts]:
    """Counts the cost of every operator called in the block, of any model. Not for timing."""
    costs = OperatorCosts()
    with _Counting(costs):
        yield costs


class _Counting(TorchDispatchMode):
    def __init__(self, costs: OperatorCosts) -> None:
        super().__init__()
        self.costs = costs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        call = _Call(func, args, kwargs, result)
        if not call.is_view():
            shapes = tensor_shapes([list(tensor.shape) for _, tensor in call.inputs])
            cost = self.costs.by_call[func._schema.name, shapes_text(shapes)]
            cost.calls += 1
            cost.flops += call.flops()
            cost.bytes += call.moved_bytes()
        return result


class _Call:
    """One call of an operator, with its schema's knowledge of what is changed in place."""

    def __init__(
        self, func: torch._ops.OpOverload, args: Sequence, kwargs: Mapping, result: object
    ) -> None:
        self.func = func
        self.args, self.kwargs, self.result = args, kwargs, result
        self.name = func._schema.name.removeprefix("aten::")
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        self.inputs = [
            (argument, tensor)
            for argument in func._schema.arguments
            for tensor in _tensors((by_name | dict(kwargs)).get(argument.name))
        ]
        old = {_storage(tensor) for _, tensor in self.inputs}
        self.outputs = [t for t in _tensors(result) if _storage(t) not in old]

    def is_view(self) -> bool:
        """Returns True if the call only gives another shape to memory that was there."""
        return not self.outputs and not self.func._schema.is_mutable

    def flops(self) -> int:
        """Returns the number of operations; a multiplication and an addition are two."""
        packet = self.func._overloadpacket
        if self.name == "addmm_":
            packet = torch.ops.aten.addmm
        if packet in flop_registry:
            return flop_registry[packet](*self.args, **self.kwargs, out_val=self.result)
        base = self.name.removesuffix("_")
        if base in REDUCTIONS or base.startswith(("_foreach", "_fused")):
            counted = _tensors(self.args[0])
        else:
            written = [tensor for argument, tensor in self.inputs if _is_written(argument)]
            counted = (written or self.outputs)[:1]
        return ARITHMETIC.get(base, 0) * sum(tensor.numel() for tensor in counted)

    def moved_bytes(self) -> int:
        """Returns the bytes read and written."""
        if self.name.startswith(("empty", "new_empty")):
            return 0
        fresh = sum(map(_bytes, self.outputs))
        return fresh + sum(
            self._input_bytes(index, argument, tensor)
            for index, (argument, tensor) in enumerate(self.inputs)
        )

    def _input_bytes(self, index: int, argument: torch.Argument, tensor: Tensor) -> int:
        size = _bytes(tensor)
        if LIKE.get(self.name) == index:
            return 0
        if LOOKUPS.get(self.name) == index:
            elements = sum(t.numel() for t in self.outputs[:1])
            if self.name == "nll_loss_forward":
                elements = self.inputs[1][1].numel()
            return min(size, elements * tensor.element_size())
        if not _is_written(argument) or argument.name in READ_ONLY.get(self.name, ()):
            return size
        only_written = argument.is_out or self.name in OVERWRITING
        return size if only_written else 2 * size


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of memory behind a tensor's elements; a broadcast dimension counts once."""
    elements = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements if tensor.numel() else 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: object) -> list[Tensor]:
    """Returns the tensors in a tensor, a list or tuple of them, or neither."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
