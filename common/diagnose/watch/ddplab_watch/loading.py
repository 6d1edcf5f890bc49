"""Keeps how a script loads its batches, so that the same can be loaded with other workers.

The indices of the window's last batches are kept, and none is asked of the script's sampler. Worker
processes have a data set of their own. Where the script has none, batches are loaded in its own
process, from a copy of the data set: one that draws random numbers or counts what it gives must not
be left another. What the file system has cached since the batches were first loaded stays cached,
in all trials alike.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddplab_watch import torch_internals
from ddplab_watch.files import read_memory_bytes

SEEN = 64
"""Batches whose indices are kept."""
MOST_COPIED_BYTES = 2**30
SHARE_OF_FREE = 4
"""A copy may take one of so many parts of the free memory."""
PATIENCE_S = 30.0
"""A worker that gives nothing for so long is given up."""


@dataclass(frozen=True)
class Loading:
    """A script's way of loading its batches.

    Attributes:
        data: the data set.
        workers: processes that load; 0 for the script's own.
        batches: indices of the last batches, the oldest first.
        arguments: arguments of the script's DataLoader, but for these.
    """

    data: Any
    workers: int
    batches: Sequence[Any]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, iterator: Any, batches: Sequence[Any]) -> Loading:
        """Reads how a DataLoader's iterator loads, and copies the data set where it has to.

        Args:
            iterator: iterator that fed the training last; None where none was seen.
            batches: indices that it was asked for, batch by batch, the oldest first.

        Raises:
            RuntimeError: it cannot be asked for the same batches again.
            Exception: whatever a data set raises that cannot be copied.
        """
        if iterator is None:
            raise RuntimeError("no DataLoader was seen")
        if torch_internals.is_endless_sampler(iterator) or not batches:
            raise RuntimeError("the data set has no indices")
        workers = torch_internals.workers(iterator)
        data = torch_internals.data_set(iterator)
        arguments = torch_internals.loader_arguments(iterator)
        if workers == 0:
            if "fork" not in multiprocessing.get_all_start_methods():
                raise RuntimeError("workers would run the script once more")
            arguments["multiprocessing_context"] = "fork"
            data, arguments["collate_fn"] = copied((data, arguments["collate_fn"]))
        return cls(data, workers, tuple(batches), arguments)

    def fetches(self, workers: int, count: int) -> Iterator[Any]:
        """Returns an iterator over ``count`` batches; at its end the workers are gone.

        Args:
            workers: processes that load them.
            count: batches; those of the window come again and again.
        """
        batches = [*itertools.islice(itertools.cycle(self.batches), count)]
        arguments = dict(self.arguments)
        if arguments.pop("is_batched"):
            arguments["batch_sampler"] = batches
        else:
            arguments |= {"sampler": batches, "batch_size": None}
        if workers == 0:
            for name in ("multiprocessing_context", "prefetch_factor", "worker_init_fn"):
                arguments.pop(name)
        else:
            arguments["timeout"] = PATIENCE_S
        return iter(DataLoader(self.data, num_workers=workers, **arguments))


def copied(value: Any) -> Any:
    """Returns a copy of a value, made by pickling it.

    Raises:
        RuntimeError: the copy may not fit into memory.
        Exception: whatever pickling raises, as of an open file or of a lambda.
    """
    room = (read_memory_bytes()[0] or 0) // SHARE_OF_FREE
    sink = _Sink(min(MOST_COPIED_BYTES, room))
    _Pickler(sink, protocol=5).dump(value)
    return pickle.loads(sink.getvalue())


class _Sink(io.BytesIO):
    """Memory that takes no more than so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.most_bytes = most_bytes

    def reserve(self, size_bytes: int) -> None:
        """Raises where there is no room for so many bytes more."""
        if self.tell() + size_bytes > self.most_bytes:
            raise RuntimeError(f"a copy of the data set takes more than {self.most_bytes:.2g} B")

    def write(self, data: Any) -> int:
        self.reserve(memoryview(data).nbytes)
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Pickles, but refuses a large tensor before it is made into bytes."""

    def __init__(self, sink: _Sink, protocol: int) -> None:
        super().__init__(sink, protocol)
        self.sink = sink

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.sink.reserve(value.untyped_storage().nbytes())  # all of it, of a view, too
        return NotImplemented
