"""The list of systems: the reader's newest run, recorded runs, published tables, the clusters.

Opening a run reads thousands of samples, so the list holds functions that open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from common.analysis.buckets.measurements import WRITTEN_BY, Assignment2Run, open_run
from common.analysis.buckets.networks import NetworkRun, open_networks
from common.analysis.buckets.sweep import BucketSweep
from common.analysis.runs import choose_folder, is_recorded, recorded_assignment
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.explore.systems import ClusterCommand, Placed, RunCommand, System, on_a_ring
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.cluster.assumptions import STRAGGLER_SPREAD
from common.perfmodel.cluster.clusters import COURSE_CLUSTERS, load_cluster
from common.perfmodel.cluster.computed_profile import computed_model, predicted_profile
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.nccl import NcclAllReduce
from common.perfmodel.cluster.steps import ADAMW_BYTES, default_caps_mib
from common.perfmodel.cluster.stragglers import slowest_of
from common.perfmodel.ddp.step import StepParts
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.peaks import known_peak
from common.perfmodel.one_device.workload import Workload
from common.perfmodel.published import DATA, UMD_A100, load_recorded
from common.perfmodel.tables import read_step_parts
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import find_table, read_environment

Opener = Callable[[], System]

CLUSTER_MODEL, CLUSTER_GPUS = "gpt2-large", 64
"""The model and the number of GPUs that a cluster starts with."""


def known_systems(run_dir: str | Path | None = None) -> dict[str, Opener]:
    """Returns a function that opens each system, by its name; the first is shown first.

    Args:
        run_dir: Run of assignment 2; by default the newest complete one. Recorded runs come
            after it.

    Raises:
        UserError: there is no such folder, or no complete run of assignment 2 in it.
    """
    recorded = recorded_assignment("assignment2")
    chosen = choose_folder(run_dir, "assignment2", tuple(WRITTEN_BY))
    openers: dict[str, Opener] = {}
    for folder in dict.fromkeys([chosen.resolve(), recorded.resolve()]):
        openers |= _of_run(folder)
    openers["published: gpt2-large on 2 × 4 A100"] = published
    for name in COURSE_CLUSTERS:
        openers[f"computed: {CLUSTER_MODEL} on {name}"] = partial(on_cluster, name)
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
    for below in sorted(folder.glob("emulated-*")):
        table = find_table(below, "ddp-times.csv")
        if table and find_table(below, "allreduce-samples.csv"):
            network = read_environment(table.parent)["network"]
            name = f"{whose}: {network}"
            openers[name] = partial(over_emulated, name, folder, below, network)
    return openers


def over_own_network(name: str, folder: Path) -> System:
    """Opens a run of assignment 2."""
    run = open_run(folder)
    return _measured(
        name=name,
        run=run,
        model=run.model,
        caption=run.caption,
        sweep=run.sweep,
        local=find_table(folder, "local-times.csv", WRITTEN_BY["local-times.csv"]),
        command=RunCommand(("--run-dir", relative_to_project(folder))),
    )


def over_emulated(name: str, folder: Path, below: Path, network: str) -> System:
    """Opens what a run of assignment 2 measured on emulated hosts, in its folder ``below``."""
    run = open_run(folder)
    runs: dict[str, NetworkRun] = {run.name: run for run in open_networks(folder).runs}
    emulated = runs[network]
    ready = find_table(folder, "gradient-ready-times.csv", WRITTEN_BY["gradient-ready-times.csv"])
    flags = ("--run-dir", relative_to_project(below), "--ready-times", relative_to_project(ready))
    has_costs = find_table(below, "overlap-times.csv") is not None
    return _measured(
        name=name,
        run=run,
        model=emulated.model,
        caption=emulated.caption,
        sweep=emulated.sweep,
        local=find_table(below, "local-times.csv"),
        command=RunCommand(flags, lacks=() if has_costs else ("DDP's copies",)),
    )


def _measured(
    name: str,
    run: Assignment2Run,
    model: DdpModel,
    caption: str,
    sweep: BucketSweep,
    local: Path,
    command: RunCommand,
) -> System:
    parts = replace(read_step_parts(local), local_backward_s=model.profile.backward_s)
    whose = "recorded" if run.recorded else "your own"
    return System(
        name=name,
        caption=f"{run.settings['model']}, measured, {whose}: {caption}",
        ranks=sweep.world_size,
        on=cache(on_a_ring(model, parts, sweep.world_size)),
        alone=parts,
        command=command,
        measured_ms=tuple((cap, time * 1e3) for cap, time in sweep.measured_s().items()),
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
    workload = Workload(
        model=recorded.settings["model"],
        batch_size=recorded.settings["batch_size"],
        precision=recorded.settings["dtype"],
    )
    return System(
        name="published: gpt2-large on 2 × 4 A100",
        caption=f"{workload.model}, {recorded.caption}",
        ranks=recorded.world_size,
        on=cache(on_a_ring(model, parts, recorded.world_size)),
        alone=parts,
        command=ClusterCommand("a100-ib", workload, is_this=False),
    )


def on_cluster(name: str) -> System:
    """Computes a GPT-2 on a cluster that nobody measured, as ``ddplab predict --cluster`` does."""
    cluster = load_cluster(name)
    workload = Workload(model=CLUSTER_MODEL, precision="bfloat16")
    peak = known_peak(cluster.gpu)
    config = workload.config
    profile = predicted_profile(Job.of(workload), peak, workload.batch_size)
    alone = StepParts(
        forward_s=profile.backward_s / 2,
        update_s=ADAMW_BYTES * config.num_parameters() / peak.memory_bytes_per_s,
        local_backward_s=profile.backward_s,
    )

    def on(gpus: int) -> Placed:
        slowest = float(slowest_of(gpus, STRAGGLER_SPREAD.value))
        parts = StepParts(alone.forward_s * slowest, alone.update_s * slowest)
        network = NcclAllReduce(cluster, gpus)
        model = computed_model(profile.scaled(compute=slowest), network, peak.memory_bytes_per_s)
        return Placed(model, parts)

    return System(
        name=f"computed: {CLUSTER_MODEL} on {name}",
        caption=f"{CLUSTER_MODEL}, {workload.batch_size} sequences a GPU, {workload.precision}, on "
        f"{cluster.gpus_per_node} × {cluster.gpu} a node over {cluster.network}; computed, not "
        "measured: passes by pass_time, all-reduces by a model of NCCL",
        ranks=CLUSTER_GPUS,
        on=cache(on),
        alone=alone,
        command=ClusterCommand(name, workload),
        caps_mib=tuple(default_caps_mib(profile.total_bytes).tolist()),
    )
