"""Micro-batches come in the order asked for, padded to the longest text of their own rank."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from common.data.text_tokens import TokenizedTexts
from common.errors import UserError
from common.scheduling.loader import AheadLoader, collate
from common.scheduling.modes import StepPlan

TOKENS = [[5, 6, 7], [8], [9, 9], [4, 3, 2, 1]]
DATA = TokenizedTexts(
    np.array([3, 1, 2, 4]), TOKENS, np.array([0, 1, 2, 1]), 10, 0, 3, "four", "here"
)
PLAN = StepPlan(((1, 2), (3, 0)), DATA.lengths)


def test_a_rank_pads_to_its_own_longest_text():
    short, long = collate(DATA, PLAN, 0), collate(DATA, PLAN, 1)
    assert short.input_ids.tolist() == [[8, 0], [9, 9]]
    assert short.attention_mask.tolist() == [[True, False], [True, True]]
    assert long.input_ids.tolist() == [[4, 3, 2, 1], [5, 6, 7, 0]]
    assert (short.labels.tolist(), long.labels.tolist()) == ([1, 2], [1, 0])
    assert (short.tokens, short.longest, long.tokens, long.longest) == (3, 2, 7, 4)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8])
def test_parts_of_a_batch_hold_each_text_once(pieces):
    batch = collate(DATA, StepPlan(((0, 1, 2, 3),), DATA.lengths), 0)
    parts = batch.split(pieces)
    assert len(parts) == min(pieces, 4)
    assert max(len(part.labels) for part in parts) - min(len(part.labels) for part in parts) <= 1
    assert torch.cat([part.input_ids for part in parts]).equal(batch.input_ids)
    assert torch.cat([part.labels for part in parts]).equal(batch.labels)


def test_requests_are_served_in_order_by_another_thread():
    threads = set()

    def plan(index: int) -> StepPlan:
        threads.add(threading.get_ident())
        return StepPlan(((index,), (index,)), DATA.lengths)

    with AheadLoader(DATA, rank=1) as loader:
        for index in range(4):
            loader.request(lambda index=index: plan(index), tag=index)
        taken = [loader.take() for _ in range(4)]
    assert [batch.tag for batch in taken] == [0, 1, 2, 3]
    assert [batch.input_ids.shape[1] for batch in taken] == [3, 1, 2, 4]
    assert threading.get_ident() not in threads
    assert all(batch.work_s > 0 for batch in taken)


def test_an_error_in_a_plan_reaches_who_takes_it():
    def plan() -> StepPlan:
        raise UserError("5 samples for 8 ranks")

    with AheadLoader(DATA, rank=0) as loader:
        loader.request(plan)
        with pytest.raises(UserError, match="5 samples for 8 ranks"):
            loader.take()
