"""Floating-point operations of training a GPT-2, and what this device could do with them.

The counts are those of exercise A0.2, which says where they come from. A kernel that skips the half
of attention that is masked reaches a higher MFU for it, as the whole is counted.

The time in which this device would train a model of 10¹² parameters on 10¹³ tokens has two
estimates. The course's scales the measured tokens per second by the number of parameters. The other
counts operations: it assumes that the large model reaches the same operations per second, which is
the same share of the peak (MFU), and so takes into account that attention is a smaller part of a
wide model. Both suppose that the model fits and that devices scale perfectly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.exercises import step_flops
from common.perfmodel.one_device.architecture import GPT2Config


def matrix_parameters(config: GPT2Config) -> int:
    """Counts N, the weights of matrix products; others are 0.1 % of gpt2's weights."""
    return step_flops.matrix_weights(config.n_layer, config.n_embd, config.vocab_size)


def training_flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Counts operations of both passes per token: 6N + 12 · layers · width · length.

    It counts what the model needs, whatever the implementation: neither the recomputation of
    activation checkpointing nor the rows of a padded vocabulary, so give the model's own sizes.
    """
    return step_flops.training_flops(config.n_layer, config.n_embd, config.vocab_size, seq_len)


def mfu(tokens_per_s: float, config: GPT2Config, seq_len: int, peak_flops_per_s: float) -> float:
    """Computes model FLOPs utilisation: operations that training needs, over the peak's."""
    per_token = training_flops_per_token(config, seq_len)
    return step_flops.utilisation(tokens_per_s, per_token, peak_flops_per_s)


PARAMETERS = 1e12
TOKENS = 10e12
DAY_S = 86_400
YEAR_DAYS = 365

ONE_TRILLION = GPT2Config(
    vocab_size=51_200, n_positions=2048, n_layer=128, n_head=160, n_embd=25_600
)
"""The model of 1,008.0 billion parameters of Narayanan et al. 2021 (arXiv 2104.04473, table 1)."""
ONE_TRILLION_SOURCE = "Narayanan et al. 2021, table 1"


@dataclass(frozen=True)
class Extrapolation:
    """Training for ``TOKENS`` tokens on one device at ``tokens_per_s``."""

    tokens_per_s: float

    @property
    def days(self) -> float:
        """Returns the days on one device."""
        return TOKENS / self.tokens_per_s / DAY_S

    @property
    def years(self) -> float:
        """Returns the years of 365 days on one device."""
        return self.days / YEAR_DAYS

    def devices_for(self, days: float) -> int:
        """Returns the number of devices that finish in ``days`` if they scale perfectly."""
        return math.ceil(self.days / days)


def by_parameters(tokens_per_s: float, parameters: int) -> Extrapolation:
    """Extrapolates as the course does: tokens per second fall as parameters rise, to 10¹²."""
    return Extrapolation(tokens_per_s * parameters / PARAMETERS)


def by_operations(flops_per_s: float) -> Extrapolation:
    """Extrapolates at an achieved rate, by the operations of a token of ``ONE_TRILLION``."""
    per_token = training_flops_per_token(ONE_TRILLION, ONE_TRILLION.n_positions)
    return Extrapolation(flops_per_s / per_token)
