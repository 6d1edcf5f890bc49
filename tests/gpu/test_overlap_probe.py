"""The process group of this project's runs over NCCL, tried on a device."""

from __future__ import annotations

import pytest
import torch

from common.runtime.group.overlap_probe import try_group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_an_all_reduce_of_our_runs_goes_on_beside_what_follows_get_future() -> None:
    found = try_group()
    assert not found.waits, found.group
