"""A training script that is sent the signal STOP_SIGNAL in its fourth step, on rank STOP_RANK."""

from __future__ import annotations

import os
import signal

from common.data.token_shards import TokenBatches
from common.runtime.script import run_script
from common.training.config import BaselineConfig, DdpConfig
from common.training.trainer import train

STEP = 4
is_ddp = "RANK" in os.environ
steps_begun = 0
next_step = TokenBatches.next_step


def next_step_or_signal(batches: TokenBatches) -> list:
    """Returns the batches of a step; in the fourth one the signal is on its way, too."""
    global steps_begun
    steps_begun += 1
    if steps_begun == STEP and os.environ.get("STOP_RANK") == os.environ.get("RANK", "0"):
        os.kill(os.getpid(), signal.Signals[os.environ["STOP_SIGNAL"]])
    return next_step(batches)


TokenBatches.next_step = next_step_or_signal
run_script(train, DdpConfig if is_ddp else BaselineConfig)
