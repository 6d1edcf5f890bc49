"""The list of systems: the reader's newest run, recorded runs, published tables, the clusters.

Opening a run reads thousands of samples, so the list holds functions that open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from common.analysis.buckets.measurements import WRITTEN_BY, Assignment2Run, open_run
from common.analysis.buckets.networks import NetworkRun, emulated_in, open_networks
from common.analysis.replay.job import read_job
from common.analysis.replay.system import checked_system
from common.analysis.runs import choose_folder, is_recorded, recorded_assignment
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.explore.chosen_model import DEFAULT_MODEL, ChosenModel, named_model
from common.explore.systems import ClusterCommand, Placed, RunCommand, System, on_a_ring
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.cluster.assumptions import STRAGGLER_SPREAD
from common.perfmodel.cluster.clusters import COURSE_CLUSTERS, load_cluster
from common.perfmodel.cluster.computed_profile import computed_model, predicted_profile
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.nccl import NcclAllReduce
from common.perfmodel.cluster.pass_time import adamw_s, forward_s
from common.perfmodel.cluster.steps import default_caps_mib
from common.perfmodel.cluster.stragglers import slowest_of
from common.perfmodel.ddp.step import StepParts
from common.perfmodel.one_device.peaks import known_peak
from common.perfmodel.published import DATA, UMD_A100, load_recorded
from common.perfmodel.replay.engine import run
from common.perfmodel.replay.gate import gate_of
from common.perfmodel.tables import read_step_parts
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import find_table, read_environment

Opener = Callable[[], System]

CLUSTER_GPUS = 64
"""The number of GPUs that a cluster starts with."""


def known_systems(
    run_dir: str | Path | None = None,
    model: ChosenModel | None = None,
    traces: str | Path | None = None,
) -> dict[str, Opener]:
    """Returns a function that opens each system, by its name; the first is shown first.

    Args:
        run_dir: Run of assignment 2; by default the newest complete one. Recorded runs come
            after it.
        model: Model on the computed clusters; by default gpt2-large.
        traces: Folder with a job's traces, which is shown first.

    Raises:
        UserError: there is no such folder, or no complete run of assignment 2 in it.
    """
    recorded = recorded_assignment("assignment2")
    chosen = choose_folder(run_dir, "assignment2", tuple(WRITTEN_BY))
    openers: dict[str, Opener] = {}
    if traces:
        name = f"traces: {Path(traces).name}"
        openers[name] = partial(from_traces, name, Path(traces))
    for folder in dict.fromkeys([chosen.resolve(), recorded.resolve()]):
        openers |= _of_run(folder)
    openers["published: gpt2-large on 2 × 4 A100"] = published
    model = model or named_model(DEFAULT_MODEL)
    for name in COURSE_CLUSTERS:
        openers[f"computed: {model.name} on {name}"] = partial(on_cluster, name, model)
    return openers


def _of_run(folder: Path) -> dict[str, Opener]:
    """Returns the systems of one run: over the network it ran on, then over emulated ones."""
    whose = "your run"
    if is_recorded(folder):
        is_usual = folder == recorded_assignment("assignment2").resolve()
        whose = "recorded" if is_usual else f"recorded on {folder.parent.name}"
    for name, label in WRITTEN_BY.items():
        if find_table(folder, name, label) is None:
            raise UserError(f"{relative_to_project(folder)}: no complete run with {name}")
    sweep = find_table(folder, "ddp-times.csv", WRITTEN_BY["ddp-times.csv"])
    network = read_environment(sweep.parent).get("network", "its network")
    name = f"{whose}: {network}" if is_recorded(folder) else f"{whose} {folder.name}: {network}"
    openers: dict[str, Opener] = {name: partial(over_own_network, name, folder)}
    for below in emulated_in(folder):
        network = read_environment(find_table(below, "ddp-times.csv").parent)["network"]
        name = f"{whose}: {network}"
        openers[name] = partial(over_emulated, name, folder, below, network)
    return openers


def over_own_network(name: str, folder: Path) -> System:
    """Opens a run of assignment 2."""
    opened = open_run(folder)
    local = find_table(folder, "local-times.csv", WRITTEN_BY["local-times.csv"])
    command = RunCommand(("--run-dir", relative_to_project(folder)))
    return _measured(name, opened, opened, local, command)


def over_emulated(name: str, folder: Path, below: Path, network: str) -> System:
    """Opens what a run of assignment 2 measured on emulated hosts, in its folder ``below``."""
    run = open_run(folder)
    runs: dict[str, NetworkRun] = {run.name: run for run in open_networks(folder).runs}
    ready = find_table(folder, "gradient-ready-times.csv", WRITTEN_BY["gradient-ready-times.csv"])
    flags = ("--run-dir", relative_to_project(below), "--ready-times", relative_to_project(ready))
    local = find_table(below, "local-times.csv")
    return _measured(name, run, runs[network], local, RunCommand(flags))


def _measured(
    name: str,
    run: Assignment2Run,
    over: Assignment2Run | NetworkRun,
    local: Path,
    command: RunCommand,
) -> System:
    """Returns what a run measured over a network, its own or an emulated one."""
    parts = replace(read_step_parts(local), local_backward_s=over.model.profile.backward_s)
    whose = "recorded" if run.recorded else "your own"
    ranks = over.sweep.world_size
    return System(
        name=name,
        caption=f"{run.settings['model']}, measured, {whose}: {over.caption}",
        ranks=ranks,
        on=cache(on_a_ring(over.model, parts, ranks)),
        alone=parts,
        command=command,
        measured_ms=tuple((cap, time * 1e3) for cap, time in over.sweep.measured_s().items()),
    )


def from_traces(name: str, folder: Path) -> System:
    """Opens a job's traces, as ``ddplab predict --from-traces`` does.

    Raises UserError where the replay, or the model at the trace's own buckets, is off.
    """
    job = read_job(folder)
    gate = gate_of(run(job.program))
    gate.check()
    system = checked_system(job)
    ranks, backward_s = job.world_size, float(system.measured_s.mean())
    update_s = max(
        sum(span.end_us - span.start_us for span in part.trace.updates)
        / len(part.trace.steps)
        / 1e6
        for part in job.lanes
    )
    model = system.calibration.model()
    forward_s = max(0.0, gate.measured_s - backward_s - update_s)
    parts = StepParts(forward_s, update_s, local_backward_s=model.profile.backward_s)
    where = "GPUs" if job.on_device else "CPUs"
    return System(
        name=name,
        caption=f"a job of yours on {ranks} {where}, from its traces: {'; '.join(system.assumed)}",
        ranks=ranks,
        on=cache(on_a_ring(model, parts, ranks)),
        alone=parts,
        command=RunCommand(("--from-traces", str(folder))),
    )


def published() -> System:
    """Opens the published tables of gpt2-large on eight A100s."""
    recorded = load_recorded(UMD_A100)
    path = DATA / UMD_A100 / "phases.csv"
    phases = read_table(path, ["phase", "time_median_ms"]).set_index("phase")
    phase_s = numbers(phases, "time_median_ms", path, above=0) / 1e3
    parts = StepParts(
        forward_s=float(phase_s["forward"]),
        update_s=float(phase_s["step"]),
        local_backward_s=recorded.profile.backward_s,
    )
    model = calibrated_model(recorded.profile, recorded.all_reduce)
    settings = recorded.settings
    flags = ("--model", settings["model"], "--batch-size", f"{settings['batch_size']}")
    flags += ("--precision", settings["dtype"])
    return System(
        name="published: gpt2-large on 2 × 4 A100",
        caption=f"{settings['model']}, {recorded.caption}",
        ranks=recorded.world_size,
        on=cache(on_a_ring(model, parts, recorded.world_size)),
        alone=parts,
        command=ClusterCommand("a100-ib", flags, is_this=False),
    )


def on_cluster(name: str, chosen: ChosenModel) -> System:
    """Computes a model on a cluster that nobody measured, as ``ddplab predict --cluster`` does."""
    cluster, job = load_cluster(name), Job(chosen.architecture)
    peak = known_peak(cluster.gpu)
    profile = predicted_profile(job, peak, job.batch_size)
    layers = chosen.architecture.layers
    sample_s = sum(layer.count * forward_s(job, layer, peak) for layer in layers)
    alone = StepParts(
        forward_s=job.batch_size * sample_s,
        update_s=adamw_s(chosen.architecture.num_trained, peak.memory_bytes_per_s),
        local_backward_s=profile.backward_s,
    )

    def on(gpus: int) -> Placed:
        slowest = float(slowest_of(gpus, STRAGGLER_SPREAD.value))
        parts = StepParts(alone.forward_s * slowest, alone.update_s * slowest)
        network = NcclAllReduce(cluster, gpus)
        model = computed_model(profile.scaled(compute=slowest), network, peak.memory_bytes_per_s)
        return Placed(model, parts)

    flags = (*chosen.flags, "--batch-size", f"{job.batch_size}", "--precision", job.precision)
    return System(
        name=f"computed: {chosen.name} on {name}",
        caption=f"{chosen.name}, {job.micro_batch_words} a GPU, {job.precision}, on "
        f"{cluster.gpus_per_node} × {cluster.gpu} a node over {cluster.network}; computed, not "
        "measured: passes by pass_time, all-reduces by a model of NCCL",
        ranks=CLUSTER_GPUS,
        on=cache(on),
        alone=alone,
        command=ClusterCommand(name, flags),
        caps_mib=tuple(default_caps_mib(profile.total_bytes).tolist()),
    )
