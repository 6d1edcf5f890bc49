"""The memory of a training step by component: predicted byte by byte, and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch

from common.benchmarks.one_device.memory_tracker import (
    AllocatorPeak,
    TrackedPeak,
    measure_peak,
    saved_by_layer,
    track_step,
)
from common.errors import UserError
from common.perfmodel.one_device.memory import (
    estimated_states,
    predict_memory,
    saved_bytes_by_layer,
)
from common.perfmodel.one_device.memory_fit import largest_batch, more_loss_chunks, what_would_fit
from common.perfmodel.one_device.moments import STATE, MemoryPrediction, Moment
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES
from common.perfmodel.one_device.workload import Workload
from common.runtime.machine.memory_limit import available_memory_bytes
from common.runtime.records.recorder import Recorder, record_run, single_device
from common.settings import DeviceOptions, Positive

MIB = 2**20
GB = 10**9


@dataclass(frozen=True)
class MemoryAnalysis(DeviceOptions, Workload):
    """Account for the memory of a training step, component by component.

    Recipe: uv run python assignments/assignment0/memory_analysis.py --model gpt2-xl
    Prints the predicted peak beside the measured one. On a GPU the step runs and the allocator is
    read; elsewhere the step is followed operator by operator on fake tensors, which takes seconds
    and no memory to speak of. Writes memory-peak.csv, memory-moments.csv, memory-components.csv,
    memory-layers.csv and largest-batch.csv. Settings may also come from --config FILE.
    """

    optimizer_implementation: str = "fused"
    """for-loop, foreach or fused: PyTorch's three implementations of an optimizer."""
    sharding: str = "none"
    """none, DDP, ZERO1, SHARD_GRAD_OP or FULL_SHARD: also predict what one of --ranks ranks has."""
    ranks: int = 1
    """Ranks that share the work with --sharding."""
    run_step: bool = False
    """On the CPU: run the step for real too, and read PyTorch's CPU allocator."""
    capacity_gb: Annotated[tuple[float, ...], Positive] = (24, 40, 80, 141)
    """Memory sizes (in 10⁹ bytes) for which the largest batch is predicted."""
    output_dir: str = "outputs/assignment0"

    def __post_init__(self) -> None:
        super().__post_init__()
        Sharding(self.sharding, self.ranks)
        if self.compile:
            raise UserError(
                "compile: the analysis is of eager execution (a compiled step needs less); leave "
                "out --compile"
            )


def main(settings: MemoryAnalysis) -> None:
    """Predicts, measures, and prints one beside the other."""
    with single_device("memory_analysis", settings.device) as worker:
        on_gpu = worker.device.type == "cuda"
        if not on_gpu and settings.run_step:
            check_fits(settings)
        with record_run(settings, "memory_analysis", worker) as recorder:
            _analyse(settings, worker.device, recorder)


def _analyse(settings: MemoryAnalysis, device: torch.device, recorder: Recorder) -> None:
    prediction = predict_memory(settings)
    snapshot = recorder.run.path / "task1_memory_snapshot.pickle"
    allocator = None
    if device.type == "cuda" or settings.run_step:
        allocator = _measure(settings, device, snapshot)
    tracked = track_step(settings)
    recorder.run.write_table("memory-peak.csv", peak_table(prediction, tracked, allocator))
    recorder.run.write_table("memory-moments.csv", moments_table(prediction))
    components = components_table(prediction.peak, tracked)
    recorder.run.write_table("memory-components.csv", components)
    layers = layers_table(settings)
    recorder.run.write_table("memory-layers.csv", layers)
    batches = largest_batches(settings)
    recorder.run.write_table("largest-batch.csv", batches)
    _print_course_block(settings, device, snapshot, tracked, allocator)
    _print_peak(prediction, components)
    _print_layers(layers, settings.activation_checkpointing)
    _print_allocator(tracked, allocator)
    if settings.sharding != "none":
        _print_sharded(settings, recorder)
    print("\n--- Largest batch, predicted ---")
    print(batches.to_string(index=False))
    print(f"Written to {recorder.run.path}")


def check_fits(settings: MemoryAnalysis) -> None:
    """Raises UserError when a real step on the CPU would need more memory than is free."""
    needed, free = predict_memory(settings).peak_bytes, available_memory_bytes()
    if needed > free:
        raise UserError(
            f"batch_size {settings.batch_size}: the step needs {needed / GB:.1f} GB and "
            f"{free / GB:.1f} GB are free; {what_would_fit(settings, free)}; or leave out "
            "--run_step, which needs no such memory"
        )


def _measure(settings: MemoryAnalysis, device: torch.device, snapshot: Path) -> AllocatorPeak:
    try:
        return measure_peak(settings, device, snapshot if device.type == "cuda" else None)
    except torch.OutOfMemoryError:
        capacity = torch.cuda.get_device_properties(device).total_memory
        advice = what_would_fit(settings, capacity - LIBRARIES_BYTES)
        raise UserError(
            f"batch_size {settings.batch_size}: out of memory on "
            f"{torch.cuda.get_device_name(device)} ({capacity / GB:.0f} GB); {advice}"
        ) from None


def peak_table(
    prediction: MemoryPrediction, tracked: TrackedPeak, allocator: AllocatorPeak | None
) -> pd.DataFrame:
    """Returns the step's peak in bytes from each source; ``phase`` says when it is reached."""
    rows = [
        ("predicted", prediction.peak_bytes, None, prediction.peak.name),
        ("tracked", tracked.total_bytes, None, tracked.phase),
    ]
    if allocator:
        rows.append(("allocator", allocator.allocated_bytes, allocator.reserved_bytes, None))
    columns = ["source", "peak_bytes", "reserved_bytes", "phase"]
    return pd.DataFrame(rows, columns=columns).astype({"reserved_bytes": "Int64"})


def moments_table(prediction: MemoryPrediction) -> pd.DataFrame:
    """Returns the predicted bytes of every component at each moment of the step, in its order."""
    rows = [
        {"moment": moment.name, "component": name, "predicted_bytes": size}
        for moment in prediction.moments
        for name, size in moment.components.items()
    ]
    return pd.DataFrame(rows)


def components_table(peak: Moment, tracked: TrackedPeak) -> pd.DataFrame:
    """Returns the peak's components in bytes, as predicted and as the tracker sorts them.

    The tracker knows parameters, gradients and optimizer states, and of the rest only in which
    pass it was made; ``residual`` is what remains between the two.
    """
    transient = {k: v for k, v in peak.components.items() if k not in STATE}
    rows = [(name, peak.components.get(name, 0), tracked.categories[name]) for name in STATE]
    rows.append(
        (
            "activations and temporaries",
            sum(transient.values()),
            tracked.total_bytes - sum(tracked.categories[name] for name in STATE),
        )
    )
    rows.append(("total", peak.total_bytes, tracked.total_bytes))
    table = pd.DataFrame(rows, columns=["component", "predicted_bytes", "measured_bytes"])
    table["residual_bytes"] = table.measured_bytes - table.predicted_bytes
    return table


def layers_table(workload: Workload) -> pd.DataFrame:
    """Returns the bytes that each layer keeps for the backward pass, predicted and measured.

    They are measured on fake tensors. With activation checkpointing the table shows what would be
    kept without it.
    """
    workload = replace(workload, activation_checkpointing=False)
    measured = saved_by_layer(workload)
    predicted = pd.DataFrame(
        saved_bytes_by_layer(workload).items(), columns=["layer", "predicted_bytes"]
    )
    table = predicted.merge(measured, on="layer", how="outer", sort=False)
    return table.rename(columns={"saved_bytes": "measured_bytes"})


def largest_batches(settings: MemoryAnalysis) -> pd.DataFrame:
    """Returns the largest batch in each memory size, as asked for and with what saves memory."""
    chunks = more_loss_chunks(settings)
    ways: Mapping[str, dict] = {
        "as_asked": {},
        "chunked_loss": {"loss_chunks": chunks},
        "checkpointing": {"activation_checkpointing": True},
        "both": {"loss_chunks": chunks, "activation_checkpointing": True},
    }
    rows = []
    for size in settings.capacity_gb:
        usable = size * GB - LIBRARIES_BYTES
        largest = {k: largest_batch(replace(settings, **way), usable) for k, way in ways.items()}
        rows.append({"memory_gb": size} | largest)
    return pd.DataFrame(rows)


def _print_course_block(
    settings: MemoryAnalysis,
    device: torch.device,
    snapshot: Path,
    tracked: TrackedPeak,
    allocator: AllocatorPeak | None,
) -> None:
    """Prints what the course's script printed, with MiB called by their name."""
    states = estimated_states(settings)
    estimated = sum(states.values())
    peak = allocator.allocated_bytes if allocator else tracked.total_bytes
    how = "" if allocator else " (tracked on fake tensors; nothing was allocated)"
    print(f"Model: {settings.title}")
    print(f"Batch size: {settings.batch_size}")
    print(f"Sequence length: {settings.seq_len}")
    print(f"Device: {device.type.upper()}")
    print(f"Model parameters: {settings.config.num_parameters():,}")
    if device.type == "cuda":
        print(f"Memory snapshot saved: {snapshot}")
        print("View at: https://pytorch.org/memory_viz")
    print("\n--- Memory Breakdown ---")
    print("Estimated Memory:")
    for name, size in states.items():
        print(f"  {name.title()}: {size / MIB:.2f} MiB")
    print(f"  Total Estimated: {estimated / MIB:.2f} MiB")
    print("Actual Memory:")
    print(f"  Peak Allocated: {peak / MIB:.2f} MiB{how}")
    if allocator and allocator.reserved_bytes is not None:
        print(f"  Reserved: {allocator.reserved_bytes / MIB:.2f} MiB")
    else:
        print("  Reserved: none; only the allocator of a GPU reserves")
    print("Difference:")
    print(f"  Allocated vs Estimated: {(peak - estimated) / MIB:.2f} MiB")


def _print_peak(prediction: MemoryPrediction, components: pd.DataFrame) -> None:
    print(f"\n--- The peak, at the moment {prediction.peak.name!r} ---")
    for name, size in prediction.peak.components.items():
        print(f"  {name + ':':<20}{size / MIB:>12,.2f} MiB")
    print(f"  {'predicted:':<20}{prediction.peak_bytes / MIB:>12,.2f} MiB\n")
    table = components.set_index("component") / MIB
    table.columns = ["predicted MiB", "tracked MiB", "residual MiB"]
    print(table.to_string(float_format="{:,.2f}".format))


def _print_layers(layers: pd.DataFrame, checkpointing: bool) -> None:
    without = ", if it were not computed again" if checkpointing else ""
    print(f"\n--- Kept for the backward pass, by layer{without} ---")
    table = layers[["predicted_bytes", "measured_bytes"]] / MIB
    table.insert(0, "layer", layers.layer)
    same = table.layer.str.startswith("block") & ~table.drop(columns="layer").duplicated()
    table = table[same | ~table.layer.str.startswith("block")]  # one of the blocks that are alike
    table.loc[same, "layer"] = f"each of {layers.layer.str.startswith('block').sum()} blocks"
    table.columns = ["layer", "predicted MiB", "seen MiB"]
    print(table.to_string(index=False, float_format="{:,.2f}".format))


def _print_allocator(tracked: TrackedPeak, allocator: AllocatorPeak | None) -> None:
    if not allocator:
        return
    beyond = allocator.allocated_bytes - tracked.total_bytes
    why = "workspaces of libraries, and rounding" if allocator.reserved_bytes else "inside kernels"
    print(f"\nAllocator beyond the tracker ({why}): {beyond / MIB:.2f} MiB")
    if allocator.reserved_bytes is not None:
        held = allocator.reserved_bytes - allocator.allocated_bytes
        print(f"Reserved beyond allocated (freed blocks kept for reuse): {held / MIB:.2f} MiB")


def _print_sharded(settings: MemoryAnalysis, recorder: Recorder) -> None:
    sharded = predict_memory(settings, Sharding(settings.sharding, settings.ranks))
    recorder.run.write_table("memory-sharded.csv", moments_table(sharded))
    print(f"\n--- One of {settings.ranks} ranks, {settings.sharding}, predicted ---")
    for name, size in sharded.peak.components.items():
        print(f"  {name + ':':<20}{size / MIB:>12,.2f} MiB")
    print(f"  {'peak:':<20}{sharded.peak_bytes / MIB:>12,.2f} MiB at {sharded.peak.name!r}")
