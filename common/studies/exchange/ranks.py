"""A job of ``ddplab study exchange`` on its one rank: a model, and all its exchanges in rotation.

The parts are those of the accuracy study (``accuracy/rounds.py``): each exchange is calibrated, its
bucketings are predicted, and only then measured.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from common.benchmarks.buckets.overlap_lab import OverlapLab
from common.benchmarks.steps import StepSettings, make_step
from common.errors import UserError
from common.runtime.group.process_group import process_group
from common.runtime.machine.device import choose_device
from common.runtime.records.recorder import record_run
from common.runtime.script import run_script
from common.settings import part_of
from common.studies.accuracy.rounds import CaseRounds, RoundSettings, computation_s, take_turns
from common.studies.exchange.emulated_group import EMULATED, Exchange, connect, register

ALPHA_US, BLOCKS = 30.0, 24
NAME = re.compile(r"(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?)us)?(?:x(\d+))?(-stalls)?")


@dataclass(frozen=True)
class Wanted:
    """An exchange beside a model: the all-reduce of all gradients over the backward pass.

    Attributes:
        name: ``0.5``, with another latency ``0.5+300us``, with other thread blocks ``0.5x8``, where
            ``get_future`` waits ``0.5-stalls``.
    """

    name: str
    ratio: float
    alpha_us: float
    blocks: int
    stalls: bool

    @classmethod
    def named(cls, name: str) -> Wanted:
        """Reads a name. Raises UserError for one that is not legal."""
        match = NAME.fullmatch(name)
        if not match or not float(match[1]):
            raise UserError(
                f"exchange {name!r}: all-reduce over backward pass, as 0.5, then +300us (latency), "
                "x8 (thread blocks), -stalls"
            )
        return cls(
            name=name,
            ratio=float(match[1]),
            alpha_us=float(match[2] or ALPHA_US),
            blocks=int(match[3] or BLOCKS),
            stalls=bool(match[4]),
        )

    def exchange(self, backward_s: float, gradient_bytes: int) -> Exchange:
        """Returns the exchange whose all-reduce of all gradients takes ``ratio`` of the pass.

        Raises UserError: the latency alone takes longer.
        """
        alpha_s = self.alpha_us / 1e6
        moved_s = self.ratio * backward_s - alpha_s
        if moved_s <= 0:
            raise UserError(
                f"exchange {self.name}: {self.ratio:g} of a backward pass of "
                f"{backward_s * 1e3:.3g} ms is less than the latency, {self.alpha_us:g} µs"
            )
        return Exchange(alpha_s, gradient_bytes / moved_s, self.blocks, stalls=self.stalls)


@dataclass(frozen=True, kw_only=True)
class ExchangeJob(RoundSettings):
    """One model: what predicts it and judged bucketings, over every exchange, in one rotation."""

    model: str = "gpt2-nano"
    batch_size: int = 4
    max_seq_len: int = 64
    dtype: str = "float32"
    exchanges: tuple[str, ...] = ("0.5",)
    device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.exchanges or len(set(self.exchanges)) < len(self.exchanges):
            raise UserError(f"exchanges {self.exchanges}: at least one, each once")
        for name in self.exchanges:
            Wanted.named(name)

    def step_settings(self) -> StepSettings:
        """Returns the step, whose weights stand still."""
        return part_of(StepSettings, vars(self), optimizer="sgd", lr=0.0)


def main(settings: ExchangeJob) -> None:
    """Measures the cases of the job: its model over each exchange."""
    device = choose_device(settings.device)
    register(device)
    with process_group(device, EMULATED) as worker, ExitStack() as stack:
        step = make_step(settings.step_settings(), worker)
        lab = OverlapLab(step)
        backward_s = computation_s(step, worker)
        cases = []
        for wanted in map(Wanted.named, settings.exchanges):
            exchange = wanted.exchange(backward_s, lab.gradient_bytes)
            facts = {
                "regime": wanted.name,
                "rate_mbit_per_s": exchange.bytes_per_s * 8 / 1e6,
                "added_latency_ms": 0.0,  # none besides the exchange's own
                "replay_factor": 1.0,
                "replay_time_factor": 1.0,
            }
            case_settings = replace(settings, run_id=f"{settings.run_id}-{wanted.name}")
            recorder = stack.enter_context(
                record_run(
                    settings=case_settings,
                    label="exchange_case",
                    worker=worker,
                    recorded_settings=facts,
                    network=exchange.name,
                )
            )
            cases.append(CaseRounds(case_settings, partial(connect, exchange), lab, recorder))
        take_turns(settings, cases, worker)


if __name__ == "__main__":
    run_script(main, ExchangeJob)
