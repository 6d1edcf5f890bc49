"""The moment each gradient of GPT-2 becomes ready in the backward pass, and each layer's time.

Every rank trains on its own, without communication, at the same time: the compute side of DDP.
A hook on each parameter marks the moment its gradient is final (for the tied embedding: after
both of its uses). The marks are CUDA events on a GPU and clock readings on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
from torch import nn

from common.benchmarks.buckets.calibration import PASS_COLUMNS, watch_pass
from common.benchmarks.steps import FixedBatchStep, UpdatedStepOptions, recorded_step
from common.errors import UserError, naming_os_errors
from common.models.gpt2 import GPT2
from common.runtime.group.gradient_marks import READY_COLUMNS, ready_marks, ready_rows
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder
from common.runtime.records.run_directory import RunDirectory, write_atomically
from common.runtime.timing import clock_for
from common.settings import NonNegative, Positive


@dataclass(frozen=True)
class LayerBenchmark(UpdatedStepOptions):
    """Time forward, each layer's gradient, and the optimizer step of a GPT-2 on one device.

    Writes layer-sizes.csv and layer-times.csv (seconds; the course's columns), and raw:
    gradient-ready-times.csv (one row per rank, step and parameter) and local-step-times.csv.
    A replay has gradients but no layers: its run has the two raw tables only.
    Under torchrun every rank measures at the same time and the slowest counts.
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    warmup_steps: Annotated[int, NonNegative] = 5
    """Untimed steps before the timed ones."""
    num_steps: Annotated[int, Positive] = 15
    """Timed steps."""
    gradient_accumulation: Annotated[int, Positive] = 1
    """Micro-batches per step; the last one is timed."""
    layer_size_output: str = ""
    """Write layer-sizes.csv to this path too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay and self.layer_size_output:
            raise UserError("--layer_size_output with --replay: a replay has no layers")
        self.step_settings()


def main(settings: LayerBenchmark) -> None:
    """Runs the benchmark and prints where its tables are."""
    with recorded_step(settings, "train_benchmark") as (step, recorder):
        sizes = None if settings.replay else layer_sizes(step.model)
        if recorder.run and settings.layer_size_output:
            path = Path(settings.layer_size_output)
            with naming_os_errors(f"layer_size_output {path}"):
                write_atomically(path, sizes.to_csv())
        layers = measure(settings, step, recorder)
        if recorder.run:
            _report(recorder.run, sizes, layers)
            print(f"Written to {recorder.run.path}")


def _report(run: RunDirectory, sizes: pd.DataFrame | None, durations: pd.DataFrame) -> None:
    """Writes and prints the course's layer tables; a replay has no layers, only gradients."""
    if sizes is None:
        median_ms = durations["backward"].median() * 1e3
        print(f"Backward pass: {median_ms:.3f} ms (median). A replay has no layer tables.")
        return
    times = layer_times(durations)
    run.write_table("layer-sizes.csv", sizes, index=True)
    run.write_table("layer-times.csv", times)
    print(times.to_string(index=False, float_format="%.6f"))


def measure(settings: LayerBenchmark, step: FixedBatchStep, recorder: Recorder) -> pd.DataFrame:
    """Times the steps and streams the raw samples.

    Returns on rank 0 the duration in seconds of every layer's gradient, of ``forward``,
    ``backward`` and ``step``: one row per measured iteration, the slowest rank's. Elsewhere empty.
    """
    worker = recorder.worker
    clock = clock_for(worker.device)
    ready = recorder.stream("gradient-ready-times.csv", READY_COLUMNS)
    steps = recorder.stream("local-step-times.csv", PASS_COLUMNS)
    progress = Progress(settings.warmup_steps + settings.num_steps, worker.is_main)
    durations = []
    show_hidden = not settings.compile and not settings.replay
    with gradient_marks(step.model, clock, hidden=show_hidden) as marks:
        for iteration in range(-settings.warmup_steps, settings.num_steps):
            step.zero_grad()
            for _ in range(settings.gradient_accumulation):
                last = watch_pass(step, clock, marks, barrier_before="backward")
            optimizer_start = clock.mark()
            step.optimize()
            optimizer_end = clock.mark()
            clock.wait()
            progress.step("warm-up step" if iteration < 0 else "measured step")
            if iteration < 0:
                continue
            times = last.read(clock)
            optimizer_s = clock.elapsed_s(optimizer_start, optimizer_end)
            ready.write(ready_rows(step.model, times.ready_s, iteration))
            steps.write([times.row(iteration, optimizer_s)])
            phases = {"forward": times.forward_s, "backward": times.backward_s, "step": optimizer_s}
            slowest = pd.DataFrame(worker.gather(times.ready_s | phases)).max()
            layers = layer_durations(slowest[list(times.ready_s)].to_dict(), slowest["backward"])
            durations.append(pd.Series(layers | slowest[list(phases)].to_dict(), name=iteration))
    return pd.DataFrame(durations) if worker.is_main else pd.DataFrame()


@contextmanager
def gradient_marks(model: nn.Module, clock, hidden: bool = True) -> Iterator[dict]:
    """Marks when each parameter's gradient is final, and when that of the logits' input is.

    Yields what ``ready_marks`` does, with ``hidden``, the gradient that leaves the LM head, which
    neither a compiled model nor a replay shows.
    """

    def mark_hidden(_module, _inputs, output) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: marks.__setitem__("hidden", clock.mark()))

    hook = model.ln_f.register_forward_hook(mark_hidden) if hidden else nullcontext()
    with hook, ready_marks(model, clock) as marks:
        yield marks


def layer_durations(ready_s: dict[str, float], backward_s: float) -> dict[str, float]:
    """Returns the seconds of each layer's part of the backward pass; their sum is ``backward_s``.

    A layer's part ends when the last of its gradients is ready. The embeddings' part is what
    remains after the first block: the tied weight is counted there, where it becomes final.
    """
    layers = {"lm_head grad": ready_s["hidden"]} if "hidden" in ready_s else {}
    for name, at in ready_s.items():
        if name.startswith("ln_f."):
            layers["ln_f grad"] = max(layers.get("ln_f grad", 0.0), at)
        elif name.startswith("blocks."):
            block = f"block_{name.split('.')[1]} grad"
            layers[block] = max(layers.get(block, 0.0), at)
    layers["embedding grad"] = backward_s
    # Layers follow one another: a part begins where the one before ends, the first one at 0.
    ends = sorted(layers.items(), key=lambda item: item[1])
    starts = [0.0] + [end for _, end in ends[:-1]]
    return {name: end - start for (name, end), start in zip(ends, starts, strict=True)}


def layer_sizes(model: GPT2) -> pd.DataFrame:
    """Returns the course's ``layer-sizes.csv``: parameters per layer, the tied weight once."""
    rows = [("Token embedding", model.wte.weight.numel())]
    rows.append(("Position embedding", model.wpe.weight.numel()))
    for index, block in enumerate(model.blocks):
        rows.append((f"Block {index}", sum(p.numel() for p in block.parameters())))
    rows.append(("LayerNorm final", sum(p.numel() for p in model.ln_f.parameters())))
    return pd.DataFrame(rows, columns=["Name", "No. Params"])


def layer_times(durations: pd.DataFrame) -> pd.DataFrame:
    """Returns the course's ``layer-times.csv``: min, max, mean, std and median (s) per name."""
    table = durations.agg(["min", "max", "mean", "std", "median"]).T
    return table.rename_axis("Name").reset_index().sort_values("Name", ignore_index=True)
