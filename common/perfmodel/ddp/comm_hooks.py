"""Communication hooks of DDP: the bytes sent for a bucket, and the time that making them takes.

DDP fills buckets by the bytes of the gradients, whatever the hook then sends. With a hook DDP
copies gradients in without dividing; the stock hooks divide themselves. Compression runs on the
thread that launches, decompression in a callback once the exchange is over, beside the next one.

Sources: default_hooks.py and powerSGD_hook.py in torch/distributed/algorithms/ddp_comm_hooks/;
PowerSGD is by Vogels, Karimireddy and Jaggi (arXiv 1905.13727).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError, require_known, unknown_name
from common.perfmodel.ddp.profile import BackwardProfile

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
CASTS = {"fp16": "float16", "bf16": "bfloat16"}


class CommHook(Protocol):
    """Anything that says what is sent for a bucket.

    ``compress_s_per_byte`` and ``decompress_s_per_byte``: seconds before and after the exchange,
    per byte of the bucket's gradients.
    """

    @property
    def compress_s_per_byte(self) -> float: ...

    @property
    def decompress_s_per_byte(self) -> float: ...

    def message_bytes(self, profile: BackwardProfile, buckets: Sequence[Sequence[int]]) -> NDArray:
        """Returns bytes on the wire [buckets, messages], sent in turn; 0 for an empty message."""
        ...


@dataclass(frozen=True)
class CastHook:
    """``fp16_compress_hook`` and ``bf16_compress_hook``: cast and divide, all-reduce, copy back."""

    name: str
    compress_s_per_byte: float = 0.0
    decompress_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        require_known("hook", self.name, CASTS)
        _check_costs(self)

    def message_bytes(self, profile: BackwardProfile, buckets: Sequence[Sequence[int]]) -> NDArray:
        """Returns the bytes of each bucket [buckets, 1], at two bytes an element."""
        sent = profile.sizes_bytes / item_bytes(profile) * ITEM_BYTES[CASTS[self.name]]
        return np.array([[sent[list(bucket)].sum()] for bucket in buckets])


@dataclass(frozen=True)
class PowerSgdHook:
    """``powerSGD_hook`` once it compresses, after ``start_powerSGD_iter`` iterations.

    A matrix M of n rows and m columns is sent as P (n × r) and Q (m × r) where that saves enough,
    everything else as it is. For each bucket first the uncompressed gradients are reduced, then
    all P, then all Q. What is computed between them counts as decompression.

    Over gloo such a step may deadlock: the callbacks that wait for P and Q run on the two threads
    that would have to reduce them, and with two buckets in flight both may wait for good (seen on
    PyTorch 2.15). One bucket is safe.

    Attributes:
        shapes: shape of every parameter, in the profile's order.
        rank: r, ``matrix_approximation_rank``.
        min_compression_rate: a matrix is compressed if (n + m)·r times this is below n·m.
    """

    shapes: tuple[tuple[int, ...], ...]
    rank: int = 1
    min_compression_rate: float = 2.0
    compress_s_per_byte: float = 0.0
    decompress_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.min_compression_rate > 0:
            raise UserError(
                f"PowerSGD of rank {self.rank} and min_compression_rate "
                f"{self.min_compression_rate:g}: the rank is at least 1, the rate above 0"
            )
        _check_costs(self)

    def message_bytes(self, profile: BackwardProfile, buckets: Sequence[Sequence[int]]) -> NDArray:
        """Returns the bytes of uncompressed gradients, P and Q of each bucket [buckets, 3].

        Raises UserError where the shapes are not those of the profile's gradients.
        """
        items = item_bytes(profile)
        elements = profile.sizes_bytes / items
        if len(self.shapes) != len(elements):
            raise UserError(f"{len(self.shapes)} shapes for {len(elements)} gradients")
        for name, shape, count in zip(profile.names, self.shapes, elements, strict=True):
            if prod(shape) != count:
                raise UserError(f"gradient {name} has {count:.0f} elements; its shape is {shape}")
        sent = np.array([self._elements(shape) for shape in self.shapes]) * items[:, None]
        return np.array([sent[list(bucket)].sum(axis=0) for bucket in buckets])

    def _elements(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        rows = shape[0] if shape else 1
        columns = prod(shape[1:])
        rank = min(rows, columns, self.rank)
        if (rows + columns) * rank * self.min_compression_rate < rows * columns:
            return 0, rows * rank, columns * rank
        return rows * columns, 0, 0


def item_bytes(profile: BackwardProfile) -> NDArray:
    """Returns each gradient's bytes per element, by its dtype; float32's 4 without dtypes."""
    kinds = profile.kinds or ("float32",) * len(profile.names)
    names = [kind.removeprefix("torch.") for kind in kinds]
    if unknown := set(names) - set(ITEM_BYTES):
        raise UserError(unknown_name("dtype of a gradient", min(unknown), ITEM_BYTES))
    return np.array([ITEM_BYTES[name] for name in names], dtype=float)


def _check_costs(hook: CastHook | PowerSgdHook) -> None:
    if not (hook.compress_s_per_byte >= 0 and hook.decompress_s_per_byte >= 0):
        raise UserError("compression and decompression must not take less than no time")
