"""The strategies: which cannot be had is said before anything is exchanged."""

from __future__ import annotations

import pytest
import torch

from common.errors import UserError
from common.models.gpt2 import GPT2, GPT2Config
from common.runtime.process_group import Worker
from common.runtime.ranks import Ranks
from common.training.config import FsdpConfig
from common.training.parallel import parallelise


def test_fsdp_on_gpus_is_refused_over_gloo_which_torch_would_replace_by_nccl() -> None:
    worker = Worker(Ranks(0, 2, 0, 2, "torchrun"), torch.device("cuda", 0), "gloo", 2)
    with pytest.raises(UserError, match="over NCCL, not over gloo"):
        parallelise(GPT2(GPT2Config.named("gpt2-pico")), FsdpConfig(), worker)
