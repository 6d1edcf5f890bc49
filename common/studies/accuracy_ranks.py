"""A job of ``ddplab study accuracy`` on its ranks: one model, all its networks in one rotation.

All cases are calibrated first, with what ``ddplab predict`` and ``tune`` calibrate with, and their
predictions written down. Then the *judged* bucketings are measured, in rounds of rotated order,
each visit in a new DDP instance; among them is the step without DDP, a witness of how much faster
or slower the machine has become. A network is set by the hosts themselves, which limit their own
links, and is a case with a run directory of its own. Rounds of a case go on until its bucketings
are known to ``noise``, or the time is up.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from common.benchmarks.ddp import timed_step
from common.benchmarks.latency_hook import added_latency
from common.benchmarks.overlap_lab import OverlapLab
from common.benchmarks.rounds import rotated
from common.errors import UserError
from common.runtime.process_group import Worker, process_group
from common.runtime.progress import Progress
from common.runtime.recorder import record_run, require_positive
from common.runtime.script import run_script
from common.studies.accuracy_models import accuracy_step
from common.studies.accuracy_networks import LOOPBACK, parse_network
from common.studies.accuracy_rounds import CaseRounds

INITIAL_STEPS = 12


@dataclass(frozen=True)
class JobSettings:
    """One model: what predicts it and judged bucketings, on every network, in one rotation."""

    model: str = "gpt2-nano"
    batch_size: int = 4
    networks: tuple[str, ...] = (LOOPBACK,)
    """Regimes, as balanced, or balanced+4ms; rates follow from the model. Or loopback."""
    replay_factor: float = 1.0
    replay_time_factor: float = 1.0
    judged: int = 3
    """Distinct bucketings to judge, beside DDP's default."""
    max_buckets: int = 48
    """No bucketing has more: caps below that lead to it are left out."""
    sizes: int = 7
    """Message sizes of the all-reduce curve."""
    steps: int = 3
    """Measured steps of each visit: few, as visits differ by more than the steps of one."""
    probes: int = 3
    """Measured repetitions of all-reduces and watched passes in each round."""
    warmup_steps: int = 3
    calibration_rounds: int = 6
    rounds: int = 8
    max_rounds: int = 80
    noise: float = 0.01
    """Rounds go on after ``rounds`` while the standard error of a judged median is above this."""
    budget_s: float = 90.0
    """No further round is begun that would end after this time; the first two always."""
    device: str = "cpu"
    output_dir: str = "outputs/studies"
    run_id: str = ""
    """Before the name of each network, the name of its run directory."""

    def __post_init__(self) -> None:
        require_positive(self, "judged", "sizes", "steps", "probes", "rounds", "max_rounds")
        require_positive(self, "budget_s", "calibration_rounds")
        networks = [parse_network(name) for name in self.networks]
        if len({network.name for network in networks}) < len(networks) or not networks:
            raise UserError(f"networks {self.networks}: at least one, each once")
        if len(networks) > 1 and LOOPBACK in self.networks:
            raise UserError(f"networks {self.networks}: loopback is no link whose rate can be set")


def main(settings: JobSettings) -> None:
    """Measures the cases of the job: its model on each network."""
    with process_group(settings.device, "gloo") as worker:
        if worker.world_size < 2:
            raise UserError("accuracy case on 1 rank: there is nothing to exchange")
        step = accuracy_step(
            name=settings.model,
            batch_size=settings.batch_size,
            worker=worker,
            factor=settings.replay_factor,
            time_factor=settings.replay_time_factor,
        )
        networks = [parse_network(name) for name in settings.networks]
        latency_ms = max(network.added_latency_ms for network in networks)
        with added_latency(latency_ms, worker.device) as hook, ExitStack() as stack:
            lab = OverlapLab(step, worker)
            backward_s = computation_s(step, worker)
            cases = []
            for network in networks:
                rate = network.rate_mbit(backward_s, lab.gradient_bytes, worker.world_size)
                facts = {
                    "model": settings.model,
                    "batch_size": settings.batch_size,
                    "regime": network.regime,
                    "added_latency_ms": network.added_latency_ms,
                    "rate_mbit_per_s": rate,
                }
                own = replace(settings, run_id=f"{settings.run_id}-{network.name}")
                recorder = stack.enter_context(
                    record_run(
                        settings=own,
                        label="accuracy_case",
                        worker=worker,
                        recorded_settings=dict(step.recorded_settings or {}) | facts,
                    )
                )
                own_hook = hook if network.added_latency_ms else None
                latency_s = network.added_latency_ms / 1e3
                cases.append(CaseRounds(own, rate, lab, recorder, own_hook, latency_s))
            take_turns(settings, cases, worker)


def computation_s(step, worker: Worker) -> float:
    """Returns the median time of a backward pass without DDP, in seconds; it also warms up."""
    rows = [timed_step(step, step.forward_model, worker, index) for index in range(INITIAL_STEPS)]
    times_ms = [row["backward_time_ms"] for row in rows[INITIAL_STEPS // 3 :]]
    gc.collect()
    gc.freeze()  # a collection after every visit then takes hardly any time
    # A step takes as long as its slowest rank: first the maximum over ranks, then the median.
    return float(np.median(np.max(worker.gather(times_ms), axis=0))) / 1e3


def take_turns(settings: JobSettings, cases: list[CaseRounds], worker: Worker) -> None:
    """Calibrates and predicts all cases, then judges them until each is known well enough."""
    progress = Progress(settings.calibration_rounds + settings.max_rounds, worker.is_main)
    started = time.monotonic()
    for round_ in range(settings.calibration_rounds):
        for case in rotated(cases, round_):
            case.calibrate(round_)
        progress.step(f"calibration, round {round_ + 1} of {len(cases)} cases")
    for case in cases:
        case.predict()
    judging = time.monotonic()
    for round_ in range(settings.max_rounds):
        for case in rotated(cases, round_):
            case.judge(round_)
        progress.step(f"round {round_ + 1} of {len(cases)} cases")
        if round_ == 0:
            continue  # one round does not show the noise
        now = time.monotonic()
        # The moment at which a further round would end, if it took as long as the mean so far.
        next_s = now - started + (now - judging) / (round_ + 1)
        if worker.broadcast(next_s) > settings.budget_s:
            break
        if round_ + 1 >= settings.rounds:
            known = worker.broadcast([case.known() for case in cases])
            cases = [case for case, enough in zip(cases, known, strict=True) if not enough]
            if not cases:
                break


if __name__ == "__main__":
    run_script(main, JobSettings)
