"""A rank's micro-batches, planned and collated by a thread while the step before is computed.

Every rank plans for all ranks from the same data, seed and cost, so that nothing is sent. A plan
may also depend on the cost of a rank that has become slow: it is given with the request, at a step
that is the same on every rank.
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
    from common.data.text_tokens import TokenizedTexts


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one rank in one step.

    ``input_ids`` (int64) and ``attention_mask`` (bool) are [batch, longest], ``labels`` (int64) is
    [batch]. ``work_s`` is the time of planning and collation, in seconds.
    """

    plan: StepPlan
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    work_s: float = 0.0
    tag: Any = None
    """Tag of the request that this batch answers."""

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest sample, to which all are padded."""
        return self.input_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Returns the number of tokens without padding."""
        return int(self.attention_mask.sum())

    def to(self, device: torch.device) -> MicroBatch:
        """Returns the same micro-batch on ``device``."""
        if device.type == self.input_ids.device.type:
            return self
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, pieces: int) -> list[MicroBatch]:
        """Splits the samples into at most ``pieces`` parts of nearly equal size, none empty."""
        count = len(self.labels)
        edges = np.linspace(0, count, min(pieces, count) + 1).round().astype(int)
        spans = pairwise(edges)
        return [self._with(lambda tensor, at=slice(*span): tensor[at]) for span in spans]

    def first_tokens(self) -> MicroBatch:
        """Returns the first sample's first 4 tokens at most, just enough to run a model."""
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
    """Collates the rank's samples of ``plan``, padded to the longest of them."""
    group = plan.groups[rank]
    longest = max(len(data.tokens[index]) for index in group)
    input_ids = np.full((len(group), longest), data.pad_id, dtype=np.int64)
    mask = np.zeros((len(group), longest), dtype=bool)
    for row, index in enumerate(group):
        tokens = data.tokens[index]
        input_ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    labels = np.asarray(data.labels)[list(group)].astype(np.int64)
    return MicroBatch(
        plan=plan,
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(mask),
        labels=torch.from_numpy(labels),
    )


class AheadLoader:
    """A queue of requests for micro-batches, which a thread serves in order, ahead of their use.

    A context manager. An error in a plan is raised by the ``take`` that would have returned it.
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
        """Requests the micro-batch of ``plan()``, with a tag, of the loader's texts or others."""
        self._ahead.append(self._thread.submit(self._prepare, plan, tag, data or self.data))

    def take(self) -> MicroBatch:
        """Returns the oldest requested micro-batch; waits until it is ready."""
        return self._ahead.popleft().result()

    def __len__(self) -> int:
        """Returns the number of requests that have not been taken."""
        return len(self._ahead)

    def _prepare(self, plan: Callable[[], StepPlan], tag: Any, data: TokenizedTexts) -> MicroBatch:
        began = time.perf_counter()
        batch = collate(data, plan(), self.rank)
        if self.pin:
            batch = batch._with(Tensor.pin_memory)
        return replace(batch, work_s=time.perf_counter() - began, tag=tag)
