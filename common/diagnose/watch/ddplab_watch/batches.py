"""Counts of a batch: samples, tokens and padding, from what the model is called with."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

MASKS = ("attention_mask", "mask", "padding_mask")
LEAST_ROWS, LEAST_LENGTH, LEAST_RUN = 4, 8, 4
"""A batch with fewer texts or shorter ones, or whose longest padding is shorter, shows no padding
without a mask: a few equal numbers at the ends of rows may mean anything."""
READ_NUMBERS = 16
"""Numbers of a vector, spread evenly, by which it is told from one of zeros."""
HASHED_BYTES = 512
"""Most bytes hashed of each sample."""
CHECKED_SAMPLES, LOOKED_AT, CHECKED_TENSORS, BEGINNING = 8, 256, 16, 8
"""Most samples of a batch with checksums, out of so many; most of its tensors, of which a batch in
lists may have one for each word; and a text's numbers that count."""


def tensors_in(value: Any, samples: int = -1) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in arguments or a batch, with the names that they have in dictionaries.

    Args:
        samples: size of the batch; a sequence of so many items, one for each sample, is left out.
            As many fields, such as images and labels of two samples, have as many rows each.
    """
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            for inner, tensor in tensors_in(item, samples):
                yield inner or str(name), tensor
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value if len(value) != samples or _are_fields(value, samples) else ():
            yield from tensors_in(item, samples)


def _are_fields(value: Any, rows: int) -> bool:
    """Returns True if a value's tensors have so many rows each and, unlike samples, differ in kind.

    Three images of three channels have three rows each, too.
    """
    kinds = set()
    for _, tensor in tensors_in(value):
        if not tensor.dim() or len(tensor) != rows:
            return False
        kinds.add((tensor.dim(), tensor.dtype))
    return len(kinds) > 1


def counts(inputs: Any, lengths: dict[int, set[int]] | None = None) -> dict[str, int]:
    """Returns samples, tokens, padded_tokens, longest and elements of a model's arguments.

    A two-dimensional tensor of whole numbers is taken for texts, one in each row, and a mask of
    its shape, or else what stands at the ends of its rows, says which of its tokens are real.
    Without a mask, all are where most of the arguments is no text, such as sound with its words.
    Where there is no text, the numbers of a first tensor of vectors in rows, such as spectrograms,
    count as tokens, and vectors of zeros at the ends of its rows as padding. Anything else has
    samples only. Reading a tensor on a GPU would wait for it, so there all tokens count as real.
    Elements are those of the texts, or of the first tensor.

    Args:
        lengths: lengths of earlier texts, to which these are added; see ``padding_at_ends``.
    """
    tensors = [(name, tensor) for name, tensor in tensors_in(inputs) if tensor.dim()]
    if not tensors:
        return {"samples": 0, "tokens": 0, "padded_tokens": 0, "longest": 0, "elements": 0}
    first = tensors[0][1]
    samples = int(first.shape[0])
    texts = next((t for _, t in tensors if t.dim() == 2 and is_whole(t)), None)
    if texts is None:
        row = {"samples": samples, "tokens": samples, "padded_tokens": samples, "longest": 1}
        if first.dim() == 3 and first.is_floating_point() and first.numel():
            tokens = padded = first.numel()
            if is_readable(first) and not first.is_nested:
                tokens -= _numbers_in_padding(first, {} if lengths is None else lengths)
            row |= {"tokens": tokens, "padded_tokens": padded, "longest": padded // samples}
        return row | {"elements": first.numel()}
    padded = texts.numel()
    masks = (t for name, t in tensors if name in MASKS and t.shape == texts.shape)
    mask = next(masks, None)
    tokens = padded
    if mask is not None and mask.device.type == "cpu":
        tokens = int(torch.count_nonzero(mask))
    elif mask is None and texts.device.type == "cpu":
        largest = max((tensor for _, tensor in tensors), key=Tensor.numel)
        if not largest.is_floating_point():
            tokens -= padding_at_ends(texts, {} if lengths is None else lengths)
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


def padding_at_ends(texts: Tensor, lengths: dict[int, set[int]]) -> int:
    """Counts the numbers at one end of rows that are padding; 0 where they may be something else.

    They are padding if one number ends most of the rows, after texts of different lengths, and
    stands nowhere within a text. Pixels, labels and features have it elsewhere, too, or in one
    column alone. Batches whose texts are equally long show padding by differing from each other.

    Args:
        texts: [rows, length], whole numbers in the host's memory.
        lengths: lengths of earlier texts by the number that pads them; these are added.
    """
    rows, length = texts.shape
    if rows < LEAST_ROWS or length < LEAST_LENGTH:
        return 0
    from_start = torch.arange(1, length + 1, device="cpu")
    for end, distances in (-1, from_start), (0, from_start.flip(0)):
        numbers, counted = texts[:, end].unique(return_counts=True)
        if int(counted.max()) * 2 <= rows:
            continue
        number = int(numbers[counted.argmax()])
        is_text = texts != number
        of_rows = (is_text * distances).amax(1)
        total, shortest = int(of_rows.sum()), int(of_rows.min())
        if int(is_text.sum()) == total > 0 and length - shortest >= LEAST_RUN:
            lengths.setdefault(number, set()).update(of_rows.tolist())
            return texts.numel() - total if len(lengths[number]) > 1 else 0
    return 0


def _numbers_in_padding(vectors: Tensor, lengths: dict[int, set[int]]) -> int:
    """Counts the numbers of vectors of zeros at the ends of rows; see ``padding_at_ends``.

    Args:
        vectors: [rows, length, size] or [rows, size, length], in the host's memory.
    """
    for ordered in (vectors, vectors.transpose(1, 2)):
        _, length, size = ordered.shape
        every = -(-size // READ_NUMBERS)
        is_there = (ordered[:, :, ::every] != 0).any(2)
        # Numbered, so that the only number that ends rows of different lengths is 0.
        numbered = is_there * torch.arange(1, length + 1, device="cpu")
        if padded := padding_at_ends(numbered, lengths):
            return padded * size
    return 0


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
        if not is_readable(tensor):
            continue
        octets = _octets(tensor)
        hashes = [0] * len(octets) if hashes is None else hashes
        if len(octets) == len(hashes):
            hashes = [zlib.crc32(row, hash_) for row, hash_ in zip(octets, hashes, strict=True)]
    return hashes


def checksums(batch: Any, indices: Sequence[int]) -> list[list[int]]:
    """Returns of a few samples the index, then a checksum of 8 bits by each tensor of the batch.

    The samples are picked by their indices, so that ranks that share samples pick the same ones.
    Of texts the beginnings count, as their padding depends on the batch. A tensor without a row for
    each sample has no checksums. Where no tensor has such rows, as when ``collate_fn`` gives a rank
    its part of what was fetched, the whole batch counts as one sample; a number below zero stands
    for all its indices.
    """
    rows = range(min(len(indices), LOOKED_AT))
    picked = sorted(rows, key=lambda row: zlib.crc32(b"%d" % indices[row]))[:CHECKED_SAMPLES]
    by_tensor = []
    tensors = tensors_in(batch, samples=len(indices))
    for _, tensor in islice(tensors, CHECKED_TENSORS):
        if is_readable(tensor) and len(tensor) == len(indices):
            is_text = tensor.dim() == 2 and is_whole(tensor)
            octets = _octets(tensor[:, :BEGINNING] if is_text else tensor, picked)
            by_tensor.append([zlib.crc32(row) & 0xFF for row in octets])
    if not by_tensor:
        all_indices = -zlib.crc32(str(list(indices)).encode()) - 1
        tensors = islice((tensor for _, tensor in tensors_in(batch)), CHECKED_TENSORS)
        as_rows = (_octets(tensor[None]) for tensor in tensors if is_readable(tensor))
        sums = [zlib.crc32(row) & 0xFF for (row,) in as_rows]
        return [[all_indices, *sums]] if sums else []
    return [[indices[row], *sums] for row, *sums in zip(picked, *by_tensor, strict=True)]


def is_readable(tensor: Tensor) -> bool:
    """Returns True for a tensor with rows in the host's memory."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return bool(is_plain and tensor.dim() and tensor.numel())


def _octets(tensor: Tensor, picked: Sequence[int] | None = None) -> Any:
    """Returns the octets of each row; of a large one, those of columns spread evenly.

    Args:
        tensor: one that can be read.
        picked: rows that are wanted, if not all.
    """
    if picked is not None and not tensor.is_contiguous():  # flattening copies all there is
        tensor, picked = tensor[picked], None
    rows = tensor.detach().reshape(len(tensor), -1)
    every = -(-rows.shape[1] // max(1, HASHED_BYTES // rows.element_size()))
    columns = rows[:, ::every]
    chosen = columns if picked is None else columns[picked]
    return chosen.contiguous().view(torch.uint8).numpy()


def resized_batch(value: Any, samples: int, factor: float) -> Any:
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
        return type(value)({k: resized_batch(v, samples, factor) for k, v in value.items()})
    if type(value) in (list, tuple):
        return type(value)(resized_batch(item, samples, factor) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if factor == 1:
        return value
    raise TypeError(f"a batch of {type(value).__name__}")
