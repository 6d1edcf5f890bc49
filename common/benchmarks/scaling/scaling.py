"""The synthetic scaling benchmark: DDP on an MLP whose data is made outside of what is timed.

``--sweep`` goes through world sizes, strong and weak, in one job (``sweep``). Without it
one configuration is run on the ranks there are: first DDP as it is, which gives the step time and
the throughput; then a few steps whose buckets are watched, and the probes, which say what the time
went to and what a change would bring.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from common.analysis.step_parts import decompose
from common.benchmarks.scaling.sweep import (
    SweepPlan,
    micro_batches,
    probe_workload,
    run_step,
    settle,
    sweep,
)
from common.benchmarks.scaling.workloads import (
    MlpSizes,
    Workload,
    mlp_workload,
    replay_workload,
    text_workload,
)
from common.csv_tables import read_table
from common.diagnose.diagnosis import diagnosis_lines
from common.errors import UserError
from common.runtime.group.process_group import Worker, process_group
from common.runtime.machine.kept_memory import kept_memory
from common.runtime.paths import relative_to_project
from common.runtime.records.recorder import Recorder, record_run
from common.settings import (
    AtLeast,
    NonNegative,
    OneOf,
    Positive,
    RankOptions,
    RoundOptions,
    Seed,
    SomeOf,
    part_of,
)
from common.training.precision import set_tf32
from common.training.recording.tracing import traced_steps
from common.training.scaling.data_parallel_step import DataParallelStep, StepOptions
from common.training.scaling.log import ScalingLog, StepKey, single_arm
from common.training.scaling.probes import ProbePlan

WORKLOADS = ("mlp", "text", "replay")
REGIMES = ("strong", "weak")
PRINTED = (
    "batch_size",
    "steps_per_epoch",
    "epochs",
    "warmup_steps",
    "input_dim",
    "hidden_dim",
    "num_layers",
    "output_dim",
    "backend",
    "device",
    "bucket_cap_mb",
    "broadcast_buffers",
    "static_graph",
    "gradient_as_bucket_view",
    "accumulation",
    "compression",
    "precision",
)
"""Settings that a report of one configuration shows."""


@dataclass(frozen=True)
class ScalingBenchmark(RoundOptions, RankOptions):
    """Measure how DDP scales, on a synthetic MLP.

    Recipe: uv run python assignments/assignment4/benchmark.py --epochs 1 --steps-per-epoch 10
    --warmup-steps 2 on one device, and uv run torchrun --nproc_per_node=2
    assignments/assignment4/benchmark.py on several; --device cpu --backend gloo without GPUs.
    With --sweep the job's ranks measure every number of ranks up to their own, in turn.
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    batch_size: Annotated[int, Positive] = 256
    """Samples of a micro-batch, per rank."""
    steps_per_epoch: Annotated[int, Positive] = 20
    """Steps of an epoch."""
    epochs: Annotated[int, Positive] = 5
    """Epochs of a run."""
    warmup_steps: Annotated[int, NonNegative] = 5
    """Number of first steps that are not counted."""
    input_dim: Annotated[int, Positive] = 4096
    """Width of the MLP's input."""
    hidden_dim: Annotated[int, Positive] = 4096
    """Width of the hidden layers."""
    num_layers: Annotated[int, Positive] = 3
    """Hidden layers."""
    output_dim: Annotated[int, Positive] = 2048
    """Width of the output."""
    bucket_cap_mb: float | None = 50
    """DDP's bucket cap in MiB; None is DDP's own default."""
    broadcast_buffers: bool = False
    """Send rank 0's buffers to all ranks before each forward pass."""
    static_graph: bool = True
    """DDP's static_graph: the same parameters get gradients in every step."""
    gradient_as_bucket_view: bool = True
    """DDP's gradient_as_bucket_view: gradients are views of the buckets."""
    accumulation: int = 1
    """Micro-batches per step; gradients are exchanged after the last one."""
    compression: str = "none"
    """Send gradients as none (as they are), fp16 or bf16."""
    precision: str = "float32"
    """float32, or autocast to bfloat16 or float16."""
    timed_steps: Annotated[int, NonNegative] = 10
    """Steps whose buckets are timed, after the other steps; 0 for none, and no probes."""
    profile: bool = False
    """Write a trace of two steps of rank 0 for Perfetto, trace.json.gz."""
    sweep: bool = False
    """Go through world sizes, regimes and batches."""
    workload: Annotated[str, OneOf(WORKLOADS)] = "mlp"
    """Workload of a sweep: mlp, text or replay."""
    regimes: Annotated[tuple[str, ...], SomeOf(REGIMES, "regime")] = REGIMES
    """strong (the global batch stays) and weak (the batch per rank stays)."""
    world_sizes: Annotated[tuple[int, ...], AtLeast(1)] = ()
    """World sizes of a sweep, up to all ranks of the job; by default 1, 2, 4 … and all ranks."""
    batch_sizes: Annotated[tuple[int, ...], AtLeast(1)] = ()
    """Batches per rank of a sweep, at its largest world size; by default batch_size."""
    rounds: Annotated[int, Positive] = 4
    """Rounds of a sweep, at least; each measures every case once."""
    steps_per_visit: Annotated[int, Positive] = 6
    """Timed steps of a world size in each round of a sweep."""
    plain: bool = True
    """Measure every case of a sweep twice: DDP as it is, and with its buckets timed; else only the
    latter, which for a replay is the same."""
    text_experiment: str = "ag_news_ddp_4gpu_20ep"
    """Experiment whose model, data and optimizer the workload text has."""
    dataset: str = "synthetic"
    """Data of the workload text: synthetic (texts as long as the experiment's), or the experiment's
    data set."""
    dataset_dir: str = "datasets"
    """Folder of the experiment's data set."""
    text_samples: Annotated[int, Positive] = 4000
    """Number of texts that the workload text draws batches from."""
    replay: str = "umd-2x4-a100"
    """Recorded backward pass of the workload replay."""
    replay_factor: float = 64
    """Divide the gradient sizes of the recording (--replay) by this."""
    replay_time_factor: float = 1.0
    """Divide the times of the recording (--replay) by this."""
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights and of the synthetic data."""
    output_dir: str = "outputs/assignment4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workload != "mlp" and not self.sweep:
            raise UserError(f"--workload {self.workload} is for --sweep")
        if self.profile and (self.sweep or not self.timed_steps):
            raise UserError("--profile traces watched steps: not with --sweep or --timed-steps 0")
        if not self.sweep and self.warmup_steps >= self.epochs * self.steps_per_epoch:
            raise UserError(
                f"warmup_steps {self.warmup_steps}: of {self.epochs} × {self.steps_per_epoch} steps"
                " none would be left to measure"
            )
        self.options()

    def options(self) -> StepOptions:
        """Returns the options of a step: accumulation, precision, compression and DDP's own."""
        return part_of(StepOptions, vars(self), sync_buffers=self.broadcast_buffers)

    def open_workload(self, device: torch.device) -> Workload:
        """Makes the workload that is trained, on ``device``."""
        if self.workload == "text":
            return text_workload(
                experiment=self.text_experiment,
                dataset=self.dataset,
                dataset_dir=self.dataset_dir,
                samples=self.text_samples,
                device=device,
                seed=self.seed,
            )
        if self.workload == "replay":
            return replay_workload(
                name=self.replay,
                factor=self.replay_factor,
                time_factor=self.replay_time_factor,
                batch_size=self.batch_size,
            )
        return mlp_workload(part_of(MlpSizes, vars(self)), device, self.seed)

    def sweep_plan(self, ranks: int) -> SweepPlan:
        """Returns the plan of a sweep on a job's ``ranks``, which the probes are of.

        Raises UserError for a world size above them, or none that is all of them.
        """
        powers = [2**k for k in range(ranks.bit_length())]
        sizes = self.world_sizes or tuple(sorted({*powers, ranks}))
        beyond = [size for size in sizes if size > ranks]
        if beyond:
            raise UserError(f"world_sizes {beyond[0]}: the job has {ranks} ranks")
        if ranks not in sizes:
            raise UserError(
                f"world_sizes {max(sizes)} at most: the job has {ranks} ranks, on which passes and "
                f"all-reduces are measured apart; add {ranks}, or start the job on {max(sizes)}"
            )
        return SweepPlan(
            world_sizes=tuple(sorted(set(sizes))),
            regimes=self.regimes,
            batch_sizes=self.batch_sizes or (self.batch_size,),
            options=self.options(),
            rounds=self,
            steps_per_visit=self.steps_per_visit,
            kinds=("plain", "timed") if self.plain else ("timed",),
        )


def main(settings: ScalingBenchmark) -> None:
    """Runs the benchmark and prints what it found."""
    with process_group(settings.device, settings.backend) as worker, kept_memory():
        set_tf32(True)
        workload = settings.open_workload(worker.device)
        label = "assignment4-sweep" if settings.sweep else "assignment4-benchmark"
        plan = settings.sweep_plan(worker.world_size) if settings.sweep else None
        facts = {"world_size": worker.world_size, "model": workload.model, "data": workload.data}
        with record_run(
            settings, label, worker, recorded_settings=facts, notes=(workload.note,)
        ) as recorder:
            if plan:
                sweep(plan, workload, recorder)
            else:
                measure(settings, workload, recorder)
        if worker.is_main:
            print(f"Written to {relative_to_project(recorder.run.path)}")
            if not settings.sweep:
                print_findings(recorder.run.path)


def measure(settings: ScalingBenchmark, workload: Workload, recorder: Recorder) -> None:
    """Measures one configuration: plain steps, timed steps, probes.

    With accumulation DDP's buckets settle first: a static graph must not begin without an exchange.
    """
    worker, options = recorder.worker, settings.options()
    print(placement_line(worker), flush=True)
    arm = single_arm(worker.world_size, settings.batch_size, options)
    log, total = ScalingLog(worker, recorder, [arm]), settings.epochs * settings.steps_per_epoch
    model = workload.build(settings.batch_size)
    optimizer = workload.make_optimizer(model.parameters())

    def open_step(timed: bool) -> DataParallelStep:
        return DataParallelStep(model, optimizer, workload.loss_of, worker, options, timed=timed)

    def run(step: DataParallelStep, key: StepKey) -> float:
        times, used = run_step(step, workload, settings.batch_size, key.step)
        if key.step == 0:
            log.facts(step, used[0], model=workload.model, data=workload.data)
        log.pause()
        log.add(times, used, key)
        return times.step_s

    step, times_s = open_step(timed=False), []
    if settings.accumulation > 1:
        settle(step, workload)
    for index in range(total):
        epoch, warmup = index // settings.steps_per_epoch, index < settings.warmup_steps
        times_s.append(run(step, StepKey(step=index, kind="plain", epoch=epoch, warmup=warmup)))
        if (index + 1) % settings.steps_per_epoch == 0:
            log.end_epoch(epoch)
            log.write()
    report(settings, worker, times_s)
    step.close()
    if not settings.timed_steps:
        return
    step = open_step(timed=True)
    settle(step, workload)
    for index in range(total, total + settings.timed_steps + 1):
        run(step, StepKey(step=index, epoch=settings.epochs, warmup=index == total))
    log.write()
    if settings.profile:
        path = recorder.run.path / "trace.json.gz" if recorder.run else None
        with traced_steps(path, worker.device, wait=0, warmup=1, active=2) as step_done:
            for _ in range(4):
                step.run(micro_batches(step, workload, settings.batch_size, 0).__next__)
                step_done()
    step.close()
    probe_workload(workload, model, settings.batch_size, options, recorder, ProbePlan())


def placement_line(worker: Worker) -> str:
    """Returns the line that says where this rank runs, as the original printed it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    where = "device=cpu"
    if worker.device.type == "cuda":
        name = torch.cuda.get_device_name(worker.device)
        where = f"current_device={worker.device}, name={name}"
    local_rank = worker.ranks.local_rank
    return f"[Rank {worker.rank}] CUDA_VISIBLE_DEVICES={visible}, LOCAL_RANK={local_rank}, {where}"


def report(settings: ScalingBenchmark, worker: Worker, times_s: list[float]) -> None:
    """Prints what the original printed, on rank 0; a step's time is the slowest rank's."""
    slowest = [max(times) for times in zip(*worker.gather(times_s), strict=True)]
    if not worker.is_main:
        return
    measured = slowest[settings.warmup_steps :]
    per_step = worker.world_size * settings.batch_size * settings.accumulation
    mean_s, median_s = statistics.fmean(measured), statistics.median(measured)
    lines = {
        "World size": worker.world_size,
        "Device": worker.device,
        "Config": {name: getattr(settings, name) for name in PRINTED},
        "Warmup steps": settings.warmup_steps,
        "Measured steps": f"{len(measured)} / {len(slowest)}",
        "Avg step time": f"{mean_s * 1e3:.2f} ms",
        "Median step time": f"{median_s * 1e3:.2f} ms",
        "Throughput": f"{per_step / mean_s:,.0f} samples/s",
        "Measured samples": f"{per_step * len(measured):,}",
    }
    print("=== DDP Scaling Benchmark ===")
    for name, value in lines.items():
        print(f"{name:<17}: {value}")


def print_findings(folder: Path) -> None:
    """Prints the parts of the step and what limits it, where steps were watched."""
    steps = read_table(folder / "steps.csv", ("kind",))
    if (steps["kind"] == "timed").any():
        parts = decompose(steps)
        print("--- Where the time goes (ms, watched steps) ---")
        for name, value in parts.parts_ms.items():
            print(f"{name:<17}: {value:.2f} ({value / parts.step_ms:.0%})")
        print("--- Diagnosis ---")
        print("\n".join(diagnosis_lines(folder)))
