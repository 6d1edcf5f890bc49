"""The time of a training step on one device: a profile, its categories and a roofline.

A few steps run under torch.profiler and leave a trace; everything else is read from the trace
(``common/traces/attribution.py``). As many steps run without the profiler, half of them before and
half after, so that what the profiler itself costs is known. One more step, not timed, counts the
operations and bytes of every operator.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch

from common.analysis.one_device.profile import open_profile
from common.analysis.one_device.profile_text import summary
from common.benchmarks.one_device.device_peak import peak_of, peak_table
from common.benchmarks.one_device.operator_costs import count_costs
from common.data.batches import BatchStream
from common.errors import UserError
from common.perfmodel.one_device.roofline import Roof, roofline_table
from common.perfmodel.one_device.workload import Workload
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, record_run, single_device
from common.runtime.timing import clock_for
from common.settings import DeviceOptions, NonNegative, Positive, Seed
from common.traces.attribution import attribute
from common.traces.profiler_trace import Event, read_trace
from common.training.recording.tracing import traced_steps
from common.training.step import TrainingStep

logger = logging.getLogger(__name__)

TRACE = "trace.json.gz"


@dataclass(frozen=True)
class ProfileTraining(DeviceOptions, Workload):
    """Profile a GPT-2's training step on one device: categories, phases, and a roofline.

    Writes trace.json.gz for https://ui.perfetto.dev, and per step profile-operators.csv,
    profile-categories.csv, profile-phases.csv and profile-steps.csv; for the operators
    roofline.csv, with the device's peaks in device-peak.csv.
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    wait_steps: Annotated[int, NonNegative] = 2
    """Steps before any is timed; a compiled model is compiled in the first."""
    warmup_steps: Annotated[int, NonNegative] = 2
    """Steps with the profiler on whose records are thrown away."""
    active_steps: Annotated[int, Positive] = 6
    """Steps that are profiled; as many are timed without the profiler."""
    trace: bool = True
    """Keep the profiler's trace in the run directory."""
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights and of the random tokens."""
    output_dir: str = "outputs/assignment0"


def main(settings: ProfileTraining) -> None:
    """Profiles, writes the tables and prints what they say."""
    with single_device("profile_training", settings.device) as worker:
        device = worker.device
        for reason in settings.without_effect(device.type):
            logger.warning("without effect: %s", reason)
        if settings.compile and device.type == "cpu":
            import torch._inductor.config

            # Otherwise the kernels that torch.compile writes for a CPU are in no profile.
            torch._inductor.config.cpp.enable_kernel_profile = True
        step = TrainingStep(settings, device, seed=settings.seed)
        with record_run(settings, "profile_training", worker) as recorder:
            measure(settings, step, recorder)
            print(summary(open_profile(recorder.run.path)))
            if settings.trace:
                print(f"Trace saved: {recorder.run.path / TRACE}")
                print("View at: https://ui.perfetto.dev")
            print(f"Written to {recorder.run.path}")


def measure(settings: ProfileTraining, step: TrainingStep, recorder: Recorder) -> None:
    """Runs the steps and writes all tables."""
    run, device = recorder.run, step.device
    batches = BatchStream(
        batch_size=settings.batch_size,
        seq_len=settings.seq_len,
        vocab_size=settings.config.vocab_size,
        device=device,
        asynchronous=settings.async_batches,
    )
    run.write_table("profile-steps.csv", run_steps(settings, step, batches, run.path / TRACE))
    operators = attribute(read_device_trace(run.path / TRACE, device))
    if not settings.trace:
        (run.path / TRACE).unlink()
    run.write_table("profile-operators.csv", operators)
    for name, keys in (("categories", ["phase", "category"]), ("phases", ["phase"])):
        times_ms = operators.groupby(["step", *keys])["time_us"].sum() / 1e3
        run.write_table(f"profile-{name}.csv", times_ms.rename("time_ms").reset_index())
    step.loss_of = step.model  # a compiled model would not show its operators
    with count_costs() as costs:
        step.run(batches)
    peak = peak_of(device, (settings.precision,))
    run.write_table("device-peak.csv", peak_table(peak))
    roof = Roof.of(peak, settings.precision, settings.tf32)
    run.write_table("roofline.csv", roofline_table(operators, costs.table(), roof))


def run_steps(
    settings: ProfileTraining, step: TrainingStep, batches: BatchStream, trace: Path
) -> pd.DataFrame:
    """Runs all steps; those that are profiled write ``trace``.

    Returns one row per timed step: step, profiled (bool), time_ms.
    """
    clock = clock_for(step.device)
    # In this order: untimed steps, half of those without the profiler, the profiler's warm-up (from
    # ``warm``), the profiled ones (from ``first`` to ``last``), the other half without it.
    before = -(-settings.active_steps // 2)
    warm = settings.wait_steps + before
    first = warm + settings.warmup_steps
    last = first + settings.active_steps
    total = last + settings.active_steps - before
    progress = Progress(total)
    marks = []
    with traced_steps(
        trace, step.device, warm, settings.warmup_steps, settings.active_steps
    ) as step_done:
        for index in range(total):
            start = clock.mark()
            step.run(batches)
            marks.append((start, clock.mark()))
            if index + 1 == first:
                clock.wait()  # no kernel of a step before the profile runs in it
            step_done()
            progress.step("profiled step" if first <= index < last else "step")
    clock.wait()
    timed = [index for index in range(settings.wait_steps, total) if not warm <= index < first]
    rows = [(index, first <= index < last, clock.elapsed_s(*marks[index]) * 1e3) for index in timed]
    return pd.DataFrame(rows, columns=["step", "profiled", "time_ms"])


def read_device_trace(path: Path, device: torch.device) -> list[Event]:
    """Reads the trace's events. Raises UserError for a GPU's trace without kernels."""
    events = read_trace(path)
    if device.type == "cuda" and not any(event.kind == "kernel" for event in events):
        raise UserError(
            "the profiler recorded no kernels of the GPU: the driver may keep its counters for "
            "administrators (NVreg_RestrictProfilingToAdminUsers), or another profiler is on it; "
            "--device cpu works"
        )
    return events
