"""Communication hooks of DDP that cast: the bytes sent for a bucket, and the time of the casts.

DDP fills buckets by the bytes of the gradients, whatever the hook then sends. With a hook DDP
copies gradients in without dividing; the stock hooks divide themselves. Compression runs on the
thread that launches, decompression in a callback once the exchange is over, beside the next one.

Source: default_hooks.py in torch/distributed/algorithms/ddp_comm_hooks/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError, require_known, unknown_name
from common.perfmodel.ddp.profile import BackwardProfile

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
CASTS = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class CastHook:
    """``fp16_compress_hook`` and ``bf16_compress_hook``: cast and divide, all-reduce, copy back.

    ``compress_s_per_byte`` and ``decompress_s_per_byte``: seconds before and after the exchange,
    per byte of the bucket's gradients.
    """

    name: str
    compress_s_per_byte: float = 0.0
    decompress_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        require_known("hook", self.name, CASTS)
        if not (self.compress_s_per_byte >= 0 and self.decompress_s_per_byte >= 0):
            raise UserError("compression and decompression must not take less than no time")

    def message_bytes(self, profile: BackwardProfile, buckets: Sequence[Sequence[int]]) -> NDArray:
        """Returns the bytes on the wire of each bucket [buckets], at two bytes an element."""
        sent = profile.sizes_bytes / item_bytes(profile) * ITEM_BYTES[CASTS[self.name]]
        return np.array([sent[list(bucket)].sum() for bucket in buckets])


def item_bytes(profile: BackwardProfile) -> NDArray:
    """Returns each gradient's bytes per element, by its dtype; float32's 4 without dtypes."""
    kinds = profile.kinds or ("float32",) * len(profile.names)
    names = [kind.removeprefix("torch.") for kind in kinds]
    if unknown := set(names) - set(ITEM_BYTES):
        raise UserError(unknown_name("dtype of a gradient", min(unknown), ITEM_BYTES))
    return np.array([ITEM_BYTES[name] for name in names], dtype=float)
