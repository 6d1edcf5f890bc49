"""One rank of the trainer study, as ``common.studies.trainer`` starts it and describes it."""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from common.benchmarks.rounds import rotated_rounds
from common.runtime.process_group import Worker, process_group
from common.runtime.recorder import RankStream, record_run
from common.runtime.script import run_script
from common.studies.trainer import CHECKPOINTS, OURS, THEIRS, TIMES, TrainerStudy
from common.studies.trainer_arms import Seen, run_ours, run_theirs
from common.training.config import DdpConfig, FsdpConfig

VISIT_COLUMNS = ("arm", "accumulation", "round", "iteration", "rank")
STEP_COLUMNS = ("step", "step_time_ms", "save_ms", "writing_ms", "disturbed", "warmup")
MODES = {"synchronous": "off", "asynchronous": "on"}


@dataclass(frozen=True)
class RankSettings(TrainerStudy):
    """The study, and the part of it that is measured here."""

    part: str = "speed"
    """speed or checkpoints."""
    output_dir: str = ""
    run_id: str = ""


def measure(settings: RankSettings) -> None:
    """Measures a part of the study on this rank."""
    torch.set_num_threads(1)
    part = measure_speed if settings.part == "speed" else measure_checkpoints
    with process_group("cpu", "gloo") as worker, record_run(settings, "rank", worker) as recorder:
        name, columns = {
            "speed": (TIMES, (*VISIT_COLUMNS, "step_time_ms", "loss", "warmup")),
            "checkpoints": (CHECKPOINTS, ("strategy", "mode", "round", "rank", *STEP_COLUMNS)),
        }[settings.part]
        part(settings, worker, recorder.stream(name, columns))


def measure_speed(settings: RankSettings, worker: Worker, table: RankStream) -> None:
    """Times both trainers in rotated rounds; the one before the first, -1, counts as warm-up."""
    for accumulation in settings.accumulations:
        for round_, arm in rotated_rounds((OURS, THEIRS), settings.rounds, first=-1):
            if worker.is_main:
                print(f"{arm}, {accumulation} micro-batches, round {round_}", flush=True)
            config = DdpConfig(
                **common(settings),
                global_batch_size=accumulation * settings.micro_batch_size * worker.world_size,
                num_steps=settings.warmup_steps + settings.steps + 1,  # the last has no next
                run_id=f"ours-{accumulation}-{round_}",
            )
            seen = (run_ours if arm == OURS else run_theirs)(config, worker)
            visit = {"arm": arm, "accumulation": accumulation, "round": round_}
            warmup_steps = settings.warmup_steps if round_ >= 0 else config.num_steps
            table.write([visit | row for row in speed_rows(seen, warmup_steps)])
            gc.collect()


def speed_rows(seen: Seen, warmup_steps: int) -> list[dict]:
    """Returns a row per step but the last, whose end is not seen."""
    return [
        {"iteration": index, "step_time_ms": time_ms, "loss": loss, "warmup": index < warmup_steps}
        for index, (time_ms, loss) in enumerate(
            zip(seen.step_times_ms(), seen.losses, strict=False)
        )
    ]


def measure_checkpoints(settings: RankSettings, worker: Worker, table: RankStream) -> None:
    """Times runs that make three checkpoints each, in rotated rounds; their files are removed."""
    arms = [(strategy, mode) for strategy in settings.strategies for mode in MODES]
    for round_, (strategy, mode) in rotated_rounds(arms, settings.checkpoint_rounds):
        if worker.is_main:
            print(f"{strategy}, {mode}, round {round_}", flush=True)
        folder = Path(settings.output_dir) / "checkpoints" / f"{strategy}-{mode}-{round_}"
        options = common(settings) | {
            "global_batch_size": settings.global_batch_size,
            "num_steps": 3 * settings.steps_between,
            "save_every": settings.steps_between,
            "checkpoint_dir": str(folder),
            "async_checkpoints": MODES[mode],
            "run_id": f"{strategy}-{mode}-{round_}",
        }
        if strategy == "DDP":
            config = DdpConfig(**options)
        else:
            config = FsdpConfig(**options, strategy=strategy)
        seen = run_ours(config, worker)
        named = {"strategy": strategy, "mode": mode, "round": round_}
        table.write([named | row for row in checkpoint_rows(seen)])
        worker.barrier()
        if worker.is_main:
            shutil.rmtree(folder)
        gc.collect()


def common(settings: RankSettings) -> dict:
    """Returns the settings of all runs of our trainer: nothing is printed or traced."""
    return {
        "model": settings.model,
        "seq_len": settings.seq_len,
        "micro_batch_size": settings.micro_batch_size,
        "log_every": 10**6,
        "profile": False,
        "device": "cpu",
        "output_dir": f"{settings.output_dir}/trainings",
    }


def checkpoint_rows(seen: Seen) -> list[dict]:
    """Returns a row per step: its time without ``save``, whose own time stands beside it.

    A step is disturbed if a checkpoint was being written during any part of it. Where a step ends
    in ``save``, only the part before ``save`` counts.
    """
    rows = []
    for index, time_ms in enumerate(seen.step_times_ms()):
        begin, end = seen.begins[index : index + 2]
        save_ms, writing_ms = None, None
        if index + 1 in seen.saves:
            called, returned = seen.saves[index + 1]
            save_ms, end = (returned - called) * 1e3, called
            time_ms -= save_ms
            writing_ms = (seen.writes[index + 1][1] - seen.writes[index + 1][0]) * 1e3
        disturbed = any(began < end and begin < ended for began, ended in seen.writes.values())
        measured = (index, time_ms, save_ms, writing_ms, disturbed, index < 2)
        rows.append(dict(zip(STEP_COLUMNS, measured, strict=True)))
    return rows


if __name__ == "__main__":
    run_script(measure, RankSettings)
