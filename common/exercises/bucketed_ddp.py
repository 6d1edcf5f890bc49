"""A2.4: data parallelism whose all-reduces take whole buckets of gradients.

An all-reduce costs a latency besides its bytes, and overlaps only what is computed after it begins.
Buckets trade one for the other (Li et al., "PyTorch Distributed", VLDB 2020).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.exercises.bucket_assignment import assign_buckets
from common.exercises.naive_ddp import NaiveDDP

MIB = 2**20


class BucketedDDP(NaiveDDP):
    """A model whose gradients are averaged in buckets, during the backward pass.

    Buckets are those of A2.1 over the parameters in the reverse of their registration, and are
    launched in that order on every rank. Contracts are those of ``OverlappedDDP``.

    Args:
        module: the model; its parameters stay the objects that they are.
        bucket_cap_mb: when a bucket closes, in MiB; None as PyTorch's default, a first bucket of
            1 MiB and then 25. Buckets hold one dtype each.
        group: the ranks that train together; None for all.

    Raises:
        UserError: on all ranks, where models differ, a parameter is not floating, or there is none.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(module, group)
        self.exchanging = True
        self.buckets: list[list[nn.Parameter]] = []
        """The parameters of each bucket, in the order of their all-reduces."""
        # BEGIN SOLUTION A2.4
        parameters = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        caps = (MIB, 25 * MIB) if bucket_cap_mb is None else (int(bucket_cap_mb * MIB),)
        assigned = assign_buckets(
            [parameter.numel() * parameter.element_size() for parameter in parameters],
            caps,
            kinds=[(parameter.dtype, parameter.device) for parameter in parameters],
        )
        self.buckets = [[parameters[index] for index in bucket] for bucket in assigned]
        self.missing = [len(bucket) for bucket in self.buckets]
        """Number of gradients of each bucket that are not final yet."""
        self.final: set[nn.Parameter] = set()
        """Parameters whose gradient is final."""
        self.sent: list[tuple[Tensor, dist.Work]] = []
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                hook = functools.partial(self.note_ready, index)
                parameter.register_post_accumulate_grad_hook(hook)
        # END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets the gradients of backward passes inside the block add up without an exchange."""
        # BEGIN SOLUTION A2.4
        before, self.exchanging = self.exchanging, False
        try:
            yield
        finally:
            self.exchanging = before
        # END SOLUTION

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Waits for the averages; all ranks call it between backward pass and update."""
        # BEGIN SOLUTION A2.4
        self.launch_until(len(self.buckets))  # what this rank has not used: zeros
        for (flat, work), bucket in zip(self.sent, self.buckets, strict=True):
            work.wait()
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, part in zip(bucket, flat.split(sizes), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))
        self.sent.clear()
        self.final.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        # END SOLUTION

    # BEGIN SOLUTION A2.4
    def note_ready(self, index: int, parameter: nn.Parameter) -> None:
        """Notes that a gradient is final; launches the buckets that need wait no longer."""
        if self.exchanging:
            if parameter in self.final:
                raise RuntimeError("gradients of the pass before have not been exchanged")
            self.final.add(parameter)
            self.missing[index] -= 1
            end = len(self.sent)
            while end < len(self.missing) and not self.missing[end]:
                end += 1
            self.launch_until(end)

    @torch.no_grad()
    def launch_until(self, end: int) -> None:
        """Launches the all-reduces that have not been, of the buckets before ``end``."""
        for bucket in self.buckets[len(self.sent) : end]:
            parts = [
                (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                ).flatten()
                for parameter in bucket
            ]
            flat = torch.cat(parts)
            flat /= dist.get_world_size(self.group)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.sent.append((flat, work))

    # END SOLUTION
