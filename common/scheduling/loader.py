"""A rank's micro-batches, planned and put together by a thread while the step before is computed.

Every rank plans for all ranks from the same data, seed and cost, so that nothing is sent. What a
plan may depend on (the cost of a rank that has become slow) is handed over with the request, at a
step that is the same on every rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.scheduling.modes import StepPlan

if TYPE_CHECKING:
    from common.data.text import TokenizedTexts


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one rank in one step.

    ``input_ids`` (int64) and ``attention_mask`` (bool) are [batch, longest], ``labels`` (int64) is
    [batch]. ``work_s`` is what plan and collation took.
    """

    plan: StepPlan
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    work_s: float = 0.0
    tag: Any = None
    """What the request was marked with."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample: what all are padded to."""
        return self.input_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.attention_mask.sum())

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``."""
        if device.type == self.input_ids.device.type:
            return self
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, pieces: int) -> list[MicroBatch]:
        """The samples in at most so many parts of nearly equal size, each with one at least."""
        count = len(self.labels)
        edges = np.linspace(0, count, min(pieces, count) + 1).round().astype(int)
        spans = pairwise(edges)
        return [self._with(lambda tensor, at=slice(*span): tensor[at]) for span in spans]

    def first_tokens(self) -> MicroBatch:
        """The first sample's first few tokens: enough to run a model, and no more."""
        few = slice(0, min(4, self.longest))
        return replace(
            self,
            input_ids=self.input_ids[:1, few],
            attention_mask=self.attention_mask[:1, few],
            labels=self.labels[:1],
        )

    def _with(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        return replace(
            self,
            input_ids=change(self.input_ids),
            attention_mask=change(self.attention_mask),
            labels=change(self.labels),
        )


def collate(data: TokenizedTexts, plan: StepPlan, rank: int) -> MicroBatch:
    """The rank's samples of ``plan``, padded to the longest of them."""
    group = plan.groups[rank]
    longest = max(len(data.tokens[index]) for index in group)
    input_ids = np.full((len(group), longest), data.pad_id, dtype=np.int64)
    mask = np.zeros((len(group), longest), dtype=bool)
    for row, index in enumerate(group):
        tokens = data.tokens[index]
        input_ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    labels = np.asarray(data.labels)[list(group)].astype(np.int64)
    return MicroBatch(plan, *map(torch.from_numpy, (input_ids, mask, labels)))


class AheadLoader:
    """Serves requests in order, each by a thread while the ones before are being computed.

    Use as a context. An error in a plan is raised by the ``take`` that would have returned it.
    """

    def __init__(self, data: TokenizedTexts, rank: int, pin: bool = False) -> None:
        self.data, self.rank, self.pin = data, rank, pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._ahead: deque[Future[MicroBatch]] = deque()

    def __enter__(self) -> AheadLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def request(
        self, plan: Callable[[], StepPlan], tag: Any = None, data: TokenizedTexts | None = None
    ) -> None:
        """Ask for the micro-batch of the plan that ``plan()`` will return.

        ``tag`` comes back with it; ``data`` are other texts than the loader's.
        """
        self._ahead.append(self._thread.submit(self._prepare, plan, tag, data or self.data))

    def take(self) -> MicroBatch:
        """The oldest micro-batch that was asked for; waits until it is there."""
        return self._ahead.popleft().result()

    def __len__(self) -> int:
        """Requests that have not been taken."""
        return len(self._ahead)

    def _prepare(self, plan: Callable[[], StepPlan], tag: Any, data: TokenizedTexts) -> MicroBatch:
        began = time.perf_counter()
        batch = collate(data, plan(), self.rank)
        if self.pin:
            batch = batch._with(Tensor.pin_memory)
        return replace(batch, work_s=time.perf_counter() - began, tag=tag)
