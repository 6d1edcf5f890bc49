"""A process group whose operations go through the check (``exchange``); runs in a rank's process.

It is registered as the backend ``judged``. ``torch.distributed`` calls its methods as it calls
those of gloo, so that an exercise sees no difference but one: what an operation receives is there
after ``wait``, and never before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "judged"
BATCH = dist.batch_isend_irecv.__code__


class Pending(dist._Work):
    """An operation under way.

    Args:
        collect: waits, returns what came, and is called once.
        outputs: where it goes, in order.
        has_come: returns True if ``collect`` would not wait.
    """

    def __init__(
        self,
        collect: Callable[[], list[Tensor]],
        outputs: Sequence[Tensor],
        has_come: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.collect: Callable[[], list[Tensor]] | None = collect
        self.outputs, self.has_come = outputs, has_come

    def wait(self, timeout: object = None) -> bool:
        """Waits for the other ranks, and writes what came."""
        if self.collect is not None:
            collect, self.collect = self.collect, None
            with torch.no_grad():
                for output, tensor in zip(self.outputs, collect(), strict=False):
                    output.detach().copy_(tensor.view(output.shape))
        return True

    def is_completed(self) -> bool:
        """Returns True if nothing is waited for."""
        if self.collect is not None and self.has_come():
            self.wait()
        return self.collect is None

    is_success = is_completed  # what fails raises

    def result(self) -> list[Tensor]:
        """Returns what was written."""
        self.wait()
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future:
        """Returns what was written as a future; waits for it."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


class JudgedGroup(dist.ProcessGroup):
    """Ranks that exchange by way of the check.

    Args:
        options: what ``torch.distributed`` makes a group of.
        exchange: functions of the other side: ``launch``, ``wait``, ``has_come``.
    """

    in_order = False
    """True if a message waits for its peer, as over NCCL, unless it belongs to a batch."""

    def __init__(self, options: Any, exchange: dict[str, Callable]) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.exchange = exchange
        self.ranks = list(options.global_ranks_in_group or range(options.group_size))
        self.called = str(options.group_id)

    def start(
        self,
        operation: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *settings: object,
    ) -> Pending:
        """Launches an operation."""
        parts = [tensor.detach() for tensor in tensors]
        launched = [self.called, self.ranks, operation, list(settings), parts]
        ticket = self.exchange["launch"](*launched)
        return Pending(
            lambda: self.exchange["wait"](ticket),
            outputs,
            lambda: self.exchange["has_come"](ticket),
        )

    def getBackendName(self) -> str:
        """Returns the backend's name."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Returns the name of the group."""
        return self.called

    def _get_backend(self, _: torch.device) -> JudgedGroup:
        return self

    def allreduce(self, tensors: Any, opts: Any = None) -> Pending:
        """Reduces tensors in place."""
        tensors = as_list(tensors)
        return self.start("all_reduce", tensors, tensors, reduction(opts))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> Pending:
        """Sends the root's tensors."""
        tensors = as_list(tensors)
        return self.start("broadcast", tensors, tensors, 0 if opts is None else opts.rootRank)

    def reduce(self, tensors: Any, opts: Any) -> Pending:
        """Reduces tensors on the root."""
        outputs = tensors if self.rank() == opts.rootRank else ()
        return self.start("all_reduce", tensors, outputs, reduction(opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """Gathers all ranks' tensors."""
        return self.start("all_gather", as_list(inputs), flat(outputs))

    gather = allgather  # of which all but the root have no outputs

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Pending:
        """Sends each rank its own of the root's tensors."""
        parts = flat(inputs) or [torch.zeros_like(outputs[0]) for _ in self.ranks]
        received = [torch.empty_like(parts[0]) for _ in self.ranks]
        work = self.start("all_to_all", parts, received)
        return Pending(lambda: [work.result()[opts.rootRank]], outputs, work.is_completed)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """Reduces tensors, of which each rank gets one."""
        return self.start("reduce_scatter", flat(inputs), as_list(outputs), reduction(opts))

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> Pending:
        """Gathers all ranks' tensors in one."""
        pieces = [piece.view(part.shape) for piece in output.view(len(self.ranks), -1)]
        return self.start("all_gather", [part], pieces)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Pending:
        """Reduces a tensor, of which each rank gets a piece."""
        pieces = [piece.view(output.shape) for piece in tensor.view(len(self.ranks), -1)]
        return self.start("reduce_scatter", pieces, [output], reduction(opts))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """Sends a tensor to each rank."""
        return self.start("all_to_all", inputs, outputs)

    def barrier(self, opts: Any = None) -> Pending:
        """Waits for all ranks."""
        return self.start("barrier", (), ())

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Pending:
        """Sends a message to a rank of the group."""
        message = (self.ranks[self.rank()], self.ranks[peer], tag)
        return self.held(self.start("send", tensors, (), *message), "send")

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Pending:
        """Receives a message from a rank of the group."""
        message = (self.ranks[peer], self.ranks[self.rank()], tag)
        return self.held(self.start("recv", tensors, tensors, *message), "recv")

    def held(self, work: Pending, name: str) -> Pending:
        """Waits for the peer where messages are in order and this one is in no batch."""
        if self.in_order and not is_in_batch():
            try:
                work.wait()
            except Exception as error:
                raise RuntimeError(f"deadlock over NCCL: a {name} waits for its peer") from error
        return work

    # Names that these operations have in other versions of PyTorch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def as_list(tensors: Any) -> list[Tensor]:
    """Returns a list of one tensor or of several."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def flat(lists: Any) -> list[Tensor]:
    """Returns the tensors of a list of lists."""
    return [tensor for tensors in lists for tensor in as_list(tensors)]


def reduction(options: Any) -> str:
    """Returns the name of a reduction."""
    if options is None:
        return "SUM"
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    return next(name for name in names if options.reduceOp == getattr(dist.ReduceOp, name))


def is_in_batch() -> bool:
    """Returns True if ``torch.distributed.batch_isend_irecv`` is among the callers."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not BATCH:
        frame = frame.f_back
    return frame is not None


def join(exchange: dict[str, Callable], **settings: Any) -> None:
    """Joins the group of all ranks, and makes every further group of the same kind."""

    def create(options: Any, _: object) -> JudgedGroup:
        return JudgedGroup(options, exchange)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(BACKEND, **settings)
