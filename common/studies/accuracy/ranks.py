"""A job of ``ddplab study accuracy`` on its ranks: one model, all its networks in one rotation.

All cases are calibrated first, with what ``ddplab predict`` and ``tune`` calibrate with, and their
predictions written down. Then the *judged* bucketings are measured, in rounds of rotated order,
each visit in a new DDP instance; among them is the step without DDP, a witness of how much faster
or slower the machine has become. A network is set by the hosts themselves, which limit their own
links, and is a case with a run directory of its own (``rounds``).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from common.benchmarks.buckets.latency_hook import added_latency
from common.benchmarks.buckets.overlap_lab import OverlapLab
from common.cluster.links import limit_own_link
from common.errors import UserError
from common.runtime.group.process_group import Worker, process_group
from common.runtime.records.recorder import record_run
from common.runtime.script import run_script
from common.studies.accuracy.models import accuracy_step
from common.studies.accuracy.networks import LOOPBACK, parse_network
from common.studies.accuracy.rounds import CaseRounds, RoundSettings, computation_s, take_turns


@dataclass(frozen=True, kw_only=True)
class JobSettings(RoundSettings):
    """One model: what predicts it and judged bucketings, on every network, in one rotation."""

    model: str = "gpt2-nano"
    batch_size: int = 4
    networks: tuple[str, ...] = (LOOPBACK,)
    """Regimes, as balanced, or balanced+4ms; rates follow from the model. Or loopback."""
    replay_factor: float = 1.0
    replay_time_factor: float = 1.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
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
            lab = OverlapLab(step)
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
                case_settings = replace(settings, run_id=f"{settings.run_id}-{network.name}")
                recorder = stack.enter_context(
                    record_run(
                        settings=case_settings,
                        label="accuracy_case",
                        worker=worker,
                        recorded_settings=dict(step.recorded_settings or {}) | facts,
                    )
                )
                cases.append(
                    CaseRounds(
                        case_settings,
                        partial(set_links, worker, rate),
                        lab,
                        recorder,
                        hook=hook if network.added_latency_ms else None,
                        latency_s=network.added_latency_ms / 1e3,
                        # A replay's sleep takes as long whatever runs beside it.
                        contention=settings.model != "replay",
                    )
                )
            take_turns(settings, cases, worker)


def set_links(worker: Worker, rate_mbit: float) -> None:
    """Limits the links of all ranks' hosts together, in Mbit/s; 0 leaves them alone."""
    if rate_mbit:
        worker.barrier()
        limit_own_link(rate_mbit * 1e6)
        worker.barrier()


if __name__ == "__main__":
    run_script(main, JobSettings)
