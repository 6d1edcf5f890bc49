"""The batches that feed the training: their loaders, epochs and samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from ddplab_watch import torch_internals
from ddplab_watch.batches import checksums, content_hashes, counts, tensors_in
from ddplab_watch.loading import SEEN, Loading
from ddplab_watch.steps import Fetch

MOST_IDENTITIES = 200_000


class Feed:
    """Tells fetches apart, counts epochs, and keeps which samples steps were made of."""

    def __init__(self) -> None:
        self.iterator: Any = None
        """Iterator that gave the newest batch."""
        self.on_host: bool | None = None
        """True if the first batch had tensors in the host's memory; None without a tensor."""
        self.brief = False
        """True while nobody asks which samples a batch has."""
        self.counts_tokens = False
        """True if a model's own batches cannot be read without waiting for a GPU."""
        self.lengths: dict[int, set[int]] = {}
        """Lengths of texts so far by the number that pads them, as far as batches have no mask."""
        self._tokens: dict[tuple[int, int], int] = {}
        """Real tokens of the newest batch of each shape, (texts, their padded length)."""
        self._is_first = True
        self._asked: list[Any] = []
        """Indices that the iterator was asked for of late, batch by batch."""
        self._epochs: dict[Any, int] = {}
        """Passes over each data set so far; ``_epoch_of``: which of them an iterator makes."""
        self._epoch_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._sampled: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """What an iterator takes its samples' indices from, in this pass over its data."""
        self._identities: dict[int, list[int]] = {}
        self._identities_left = MOST_IDENTITIES
        self._hashed: set[int] = set()
        """Epochs whose samples are told apart by their content."""
        self._by_weight: set[int] = set()
        """Epochs whose sampler draws by weights, with replacement."""
        self._checksums: dict[int, list[list[int]]] = {}
        """Checksums of some samples of each epoch, as ``batches.checksums`` has them."""

    def count_epochs(self, iterator: Any) -> None:
        """Begins an epoch where an iterator is new, or goes over its sampler anew."""
        sampled = torch_internals.sampler_pass(iterator)
        if iterator not in self._epoch_of or self._sampled[iterator] is not sampled:
            data = _kind(torch_internals.data_set(iterator))
            self._epoch_of[iterator] = self._epochs[data] = self._epochs.get(data, -1) + 1
            self._sampled[iterator] = sampled

    def fetch(self, iterator: Any, ids: Any, batch: Any) -> Fetch:
        """Returns a batch's fetch, whose moments the loop adds; its epoch has been counted.

        ``ids`` are the indices of the batch's samples; None where the data set has none.
        """
        self._remember(iterator, ids)
        if self._is_first:
            devices = {tensor.device.type for _, tensor in tensors_in(batch)}
            self.on_host = "cpu" in devices if devices else None
            self._is_first = False
        loader, epoch = torch_internals.loader_of(iterator), self._epoch_of[iterator]
        fetch = Fetch(loader=loader, began=None, began_s=0.0, ended_s=0.0, epoch=epoch)
        if self.brief:
            return fetch
        if self.counts_tokens:
            counted = counts(batch, self.lengths)
            self._tokens[counted["samples"], counted["longest"]] = counted["tokens"]
        fetch.identities = content_hashes(batch) if ids is None else _indices(ids)
        fetch.is_hashed = ids is None
        if torch_internals.draws_by_weight(iterator):
            self._by_weight.add(epoch)
        if not fetch.is_hashed and fetch.identities:
            with contextlib.suppress(Exception):  # tensors of kinds that have no octets
                fetch.checksums = checksums(batch, fetch.identities)
        return fetch

    def tokens_of(self, counted: dict[str, int]) -> int:
        """Returns the real tokens of a model's batch: of the newest of its shape that was loaded.

        ``counted`` are its counts (``batches.counts``).
        """
        return self._tokens.get((counted["samples"], counted["longest"]), counted["tokens"])

    def _remember(self, iterator: Any, ids: Any) -> None:
        """Keeps which iterator gave the newest batch, and for which indices."""
        if self.iterator is not None and (
            torch_internals.loader_of(self.iterator) != torch_internals.loader_of(iterator)
        ):
            self._asked = []
        if ids is not None:
            self._asked = [*self._asked[1 - SEEN :], ids]
        self.iterator = iterator

    def keep(self, fetch: Fetch) -> None:
        """Keeps which samples a step's batch was made of, of so many samples in all."""
        identities = (fetch.identities or [])[: self._identities_left]
        self._identities_left -= len(identities)
        self._identities.setdefault(fetch.epoch, []).extend(identities)
        if identities:
            self._checksums.setdefault(fetch.epoch, []).extend(fetch.checksums)
        if fetch.is_hashed:
            self._hashed.add(fetch.epoch)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a row for each epoch with the samples that were kept."""
        for epoch, identities in sorted(self._identities.items()):
            if identities:
                row = {"epoch": epoch, "samples": identities, "is_hashed": epoch in self._hashed}
                row["by_weight"] = epoch in self._by_weight
                yield row | {"checksums": self._checksums[epoch]}

    def loading(self) -> Loading:
        """Reads how the newest batches were loaded; raises as ``Loading.of``."""
        return Loading.of(self.iterator, self._asked)

    def forget(self) -> None:
        """Lets go of the script's loader."""
        self.iterator, self._asked = None, []


def _kind(data: Any) -> Any:
    """Returns what tells a data set from others, but not from a copy.

    A loop may make a loader anew for each epoch, and its data set as well.
    """
    try:
        return type(data), len(data)
    except TypeError:  # a stream has no length
        return id(data)


def _indices(ids: Any) -> list[int] | None:
    """Returns a batch's indices as a list; None if its sampler gives something else."""
    indices = list(ids) if isinstance(ids, list | tuple) else [ids]
    return indices if indices and isinstance(indices[0], int) else None
