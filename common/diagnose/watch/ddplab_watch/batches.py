"""Counts of a batch: samples, tokens and padding, from what the model is called with."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MASKS = ("attention_mask", "mask", "padding_mask")
LEAST_ROWS, LEAST_LENGTH, LEAST_RUN = 4, 8, 4
"""A batch with fewer texts or shorter ones, or whose longest padding is shorter, shows no padding
without a mask: a few equal numbers at the ends of rows may mean anything."""
HASHED_BYTES = 512
"""Most bytes hashed of each sample, for its identity where a data set has no indices."""


def tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in arguments or a batch, with the names that they have in dictionaries."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            for inner, tensor in tensors_in(item):
                yield inner or str(name), tensor
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from tensors_in(item)


def counts(inputs: Any) -> dict[str, int]:
    """Returns samples, tokens, padded_tokens, longest and elements of a model's arguments.

    A two-dimensional tensor of whole numbers is taken for texts, one in each row, and a mask of
    its shape, or else what stands at the ends of its rows, says which of its tokens are real.
    Anything else has samples only. Reading a tensor on a GPU would wait for it, so there all tokens
    count as real. Elements are those of the texts, or of the first tensor.
    """
    tensors = [(name, tensor) for name, tensor in tensors_in(inputs) if tensor.dim()]
    if not tensors:
        return {"samples": 0, "tokens": 0, "padded_tokens": 0, "longest": 0, "elements": 0}
    first = tensors[0][1]
    samples = int(first.shape[0])
    texts = next((t for _, t in tensors if t.dim() == 2 and is_whole(t)), None)
    if texts is None:
        row = {"samples": samples, "tokens": samples, "padded_tokens": samples, "longest": 1}
        return row | {"elements": first.numel()}
    padded = texts.numel()
    masks = (t for name, t in tensors if name in MASKS and t.shape == texts.shape)
    mask = next(masks, None)
    tokens = padded
    if mask is not None and mask.device.type == "cpu":
        tokens = int(torch.count_nonzero(mask))
    elif mask is None and texts.device.type == "cpu":
        tokens -= padding_at_ends(texts)
    return {
        "samples": int(texts.shape[0]),
        "tokens": tokens,
        "padded_tokens": padded,
        "longest": int(texts.shape[1]),
        "elements": padded,
    }


def elements(inputs: Any) -> int:
    """Returns the elements of a model's arguments, as ``counts`` has them, without reading any."""
    first = 0
    for _, tensor in tensors_in(inputs):
        if tensor.dim() == 2 and is_whole(tensor):
            return tensor.numel()
        first = first or (tensor.numel() if tensor.dim() else 0)
    return first


def padding_at_ends(texts: Tensor) -> int:
    """Counts the numbers at the ends of rows that are padding; 0 where they may be something else.

    They are padding if one number ends most of the rows, after texts of different lengths, and
    stands nowhere within a text. Pixels, labels and features have it elsewhere, too, or in one
    column alone.

    Args:
        texts: [rows, length], whole numbers in the host's memory.
    """
    rows, length = texts.shape
    if rows < LEAST_ROWS or length < LEAST_LENGTH:
        return 0
    numbers, counted = texts[:, -1].unique(return_counts=True)
    if int(counted.max()) * 2 <= rows:
        return 0
    is_text = texts != numbers[counted.argmax()]
    lengths = (is_text * torch.arange(1, length + 1)).amax(1)
    stands_within = int(is_text.sum()) != int(lengths.sum())
    if stands_within or len(lengths.unique()) < 2 or length - int(lengths.min()) < LEAST_RUN:
        return 0
    return texts.numel() - int(lengths.sum())


def is_whole(tensor: Tensor) -> bool:
    """Returns True for a tensor of whole numbers."""
    return tensor.dtype in (torch.int32, torch.int64)


def content_hashes(batch: Any) -> list[int] | None:
    """Returns a number for each sample that depends on what is in it alone; None for no tensor.

    The same sample has the same number on every rank. It is a checksum of 32 bits over all tensors
    of the batch (a label by itself is the same for many samples), of large ones over columns spread
    evenly: the sample cannot be had back from it. Tensors on a GPU are left alone.
    """
    hashes: list[int] | None = None
    for _, tensor in tensors_in(batch):
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not (is_plain and tensor.dim() and tensor.numel()):
            continue
        rows = tensor.detach().reshape(len(tensor), -1)
        kept = max(1, HASHED_BYTES // rows.element_size())
        every = -(-rows.shape[1] // kept)
        octets = rows[:, ::every].contiguous().view(torch.uint8)
        hashes = [0] * len(octets) if hashes is None else hashes
        if len(octets) == len(hashes):
            hashes = [
                zlib.crc32(row.numpy().tobytes(), so_far)
                for row, so_far in zip(octets, hashes, strict=True)
            ]
    return hashes


def halved(value: Any, samples: int, factor: float) -> Any:
    """Returns arguments for ``factor`` (½, 1 or 2) times the samples: part of each, or each twice.

    Raises TypeError: a batch whose parts this function does not know.
    """
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.shape[0] != samples or factor == 1:
            return value
        if factor < 1:
            return value[: max(1, round(samples * factor))]
        return torch.cat([value] * round(factor))
    if isinstance(value, Mapping):
        return type(value)({k: halved(v, samples, factor) for k, v in value.items()})
    if type(value) in (list, tuple):
        return type(value)(halved(item, samples, factor) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if factor == 1:
        return value
    raise TypeError(f"a batch of {type(value).__name__}")
