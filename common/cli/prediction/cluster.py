"""``ddplab predict --cluster``: a step on 8 or 16,384 GPUs, from sizes and data sheets alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from common.cli.flags import check_output, refuse_given, write_output
from common.cli.printed import console_of, print_lines, print_notes
from common.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from common.perfmodel.cluster.assumptions import Assumptions
    from common.perfmodel.cluster.job import Job
    from common.perfmodel.cluster.scale_out import ScaleOut

WIDTH = 140
TIMES = {" s": 1.0, " ms": 1e-3}
MEMORY_FLAGS = (
    *("model", "batch_size", "seq_len", "precision", "checkpointing", "accumulation"),
    *("gpus", "strategies", "capacity_gb"),
)
WITHOUT_CLUSTER = {"--model": MEMORY_FLAGS, "--gradient-mib": ("gpus", "csv")}
"""Flag → fields of ``ClusterQuestion`` that have an effect with it and no cluster."""
COUNTS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


@dataclass(frozen=True)
class ClusterQuestion:
    """With --cluster: a training step of any model on many GPUs. Nothing has to be measured.

    With --model and no cluster: the memory of a training step, part by part, and the largest
    micro-batch that fits.

    A quantity that takes three numbers has a likeliest value, a lowest and a highest one, from
    which the bands come; a single number is taken as certain.
    """

    cluster: str | None = None
    """Cluster: a name of data/clusters (h100-ib, h100-roce, h200-ib, a100-ib, a100-roce, a100-pcie,
    gh200-alps, v100-dgx1 and others), or a YAML file of yours."""
    gpus: str | None = None
    """Numbers of GPUs: 8,16,64, or 8..16384, which doubles."""
    model: str | None = None
    """Name of a published size, such as gpt2-large, llama-3.1-8b or resnet-50; a Hugging Face
    config.json; or MODULE:FUNCTION that returns (module, batch, loss), followed on fake tensors."""
    batch_size: int | None = None
    """Sequences of a micro-batch of one GPU, by default 8."""
    accumulation: int | None = None
    """Micro-batches of a step under weak scaling, by default 1."""
    checkpointing: str | None = None
    """Activations that are computed again: none (the default), selective (every second matrix
    product) or block."""
    strategies: tuple[str, ...] = ()
    """Strategies to predict, by default DDP SHARD_GRAD_OP FULL_SHARD; also ZERO1, and HYBRID_SHARD
    (sharded inside a node)."""
    global_batch_size: int | None = None
    """Sequences of a step on all GPUs, for strong scaling, by default 16384."""
    seq_len: int | None = None
    """Tokens of a sequence, by default 1024."""
    precision: str | None = None
    """bfloat16 (the default), float16 or float32."""
    tf32: bool = False
    """Let float32 products use TensorFloat-32."""
    mfu: tuple[float, ...] = ()
    """Likeliest, lowest and highest share of the GPU's peak that computation reaches, such as 0.4
    0.3 0.5; a single number is certain. By default the time of matrix products and of what moves
    through memory is computed apart."""
    pass_rate: tuple[float, ...] = ()
    """Likeliest, lowest and highest speed of the passes relative to that time, by default 1 0.6
    1.55; a single number is certain."""
    compile: bool = False
    """A compiler joins operators (torch.compile), so that less moves through memory."""
    network_speed: tuple[float, ...] = ()
    """Likeliest, lowest and highest speed of collectives relative to the model of NCCL, or to what
    was measured; by default 1 0.5 1.1, and 1 on the number of GPUs that was measured. A single
    number is certain."""
    work: str | None = None
    """equal (the default) where all ranks have the same work, or texts where they have texts of
    unequal lengths: which spread and distribution the next two have, where they are not given."""
    straggler_spread: tuple[float, ...] = ()
    """Likeliest, lowest and highest standard deviation of a GPU's computation, as a share of it; by
    default 0.006 0.005 0.009 of equal work, 0.12 0.1 0.14 of texts. A single number is certain."""
    straggler_distribution: str | None = None
    """lognormal (the default of equal work), gumbel (of texts), normal or exponential."""
    overlap_slowdown: tuple[float, ...] = ()
    """Likeliest, lowest and highest factor by which communication slows computation down; by
    default 1.19 1 1.4. A single number is certain."""
    draws: int | None = None
    """Number of draws that the bands come from, by default 64."""
    seed: int | None = None
    """Seed of the draws, by default 0."""
    csv: str | None = None
    """With --cluster or --gradient-mib: write every column of the prediction to this file."""
    capacity_gb: tuple[float, ...] = ()
    """Without --cluster: memories whose largest micro-batch is said, in 10⁹ bytes; by default cards
    of 24, 40, 80 and 141 GiB."""

    def run(self, allreduce: str | None = None, from_traces: str | None = None) -> None:
        """Predicts and prints. Raises UserError for what the cluster, or the model, has not.

        Args:
            allreduce: table of all-reduces that were measured there, if any.
            from_traces: traces of a job there, whose all-reduces are taken, if any.
        """
        if self.capacity_gb:
            raise UserError("--capacity-gb has no effect with --cluster, whose GPU has a memory")
        check_output("--csv", self.csv)
        predicted = self.predict(allreduce, from_traces)
        if self.csv is not None:
            write_output("--csv", self.csv, predicted.table.to_csv(index=False))
        console = console_of(WIDTH)
        print_prediction(predicted, console)
        if self.csv is not None:
            print_notes(console, [f"all columns: {self.csv}"])

    def refuse_without_cluster(self, leave_out: Collection[str] = ()) -> None:
        """Raises UserError for the first given flag, and names what the flag has an effect with."""
        for name in (field.name for field in fields(self) if field.name not in leave_out):
            needed = [flag for flag, names in WITHOUT_CLUSTER.items() if name in names]
            if name != "capacity_gb":
                needed = ["--cluster", *needed]
            why = f"has an effect with {' or '.join(needed)} only"
            refuse_given(self, why, only=[name])

    def print_memory(self) -> None:
        """Prints the memory of a step of the model, on one GPU or on --gpus. Raises UserError."""
        from common.cli.prediction.memory import print_memory
        from common.perfmodel.cluster.scale_out import STRATEGIES, parse_gpus

        self.refuse_without_cluster(leave_out=MEMORY_FLAGS)
        gpus = parse_gpus(self.gpus) if self.gpus else [1]
        if self.strategies and max(gpus) == 1:
            raise UserError("--strategies has an effect on several --gpus only")
        print_memory(
            job=self._job(),
            gpus=gpus,
            strategies=self.strategies or STRATEGIES,
            capacities_gb=self.capacity_gb,
            console=console_of(WIDTH),
        )

    def predict(self, allreduce: str | None = None, from_traces: str | None = None) -> ScaleOut:
        """Computes the prediction that these flags ask for; arguments are those of ``run``."""
        from common.cli.prediction.network import measured_cluster
        from common.perfmodel.cluster.clusters import load_cluster
        from common.perfmodel.cluster.scale_out import (
            GLOBAL_BATCH_SIZE,
            STRATEGIES,
            parse_gpus,
            predict_scale_out,
        )

        for flag, value in (("--model", self.model), ("--gpus", self.gpus)):
            if value is None:
                example = "--model gpt2-large --cluster h100-ib --gpus 8..16384"
                raise UserError(f"--cluster needs {flag}, as in {example}")
        gpus = parse_gpus(self.gpus)
        cluster = measured_cluster(load_cluster(self.cluster), allreduce, from_traces)
        if self.network_speed:  # of what was measured, too
            cluster = replace(cluster, measured_gpus=0)
        batch = GLOBAL_BATCH_SIZE if self.global_batch_size is None else self.global_batch_size
        return predict_scale_out(
            job=self._job(),
            cluster=cluster,
            gpus=gpus,
            global_batch_size=batch,
            assumptions=self._assumptions(),
            strategies=self.strategies or STRATEGIES,
        )

    def _job(self) -> Job:
        from common.cli.prediction.asked_model import asked_model
        from common.perfmodel.cluster.job import Job

        flags = {
            name: value
            for name in ("batch_size", "precision", "accumulation", "checkpointing")
            if (value := getattr(self, name)) is not None
        }
        architecture, _ = asked_model(self.model, self.seq_len)
        return Job(architecture=architecture, tf32=self.tf32, compile=self.compile, **flags)

    def _assumptions(self) -> Assumptions:
        from common.perfmodel.cluster.assumptions import Assumptions, Range

        bounds = {
            "mfu": (0.001, 1.0),
            "pass_rate": (0.01, 100.0),
            "network_speed": (0.01, 10.0),
            "straggler_spread": (0.0, 0.5),
            "overlap_slowdown": (1.0, 10.0),
        }
        changed: dict = {
            name: Range.of(f"--{name.replace('_', '-')}", values, *limits)
            for name, limits in bounds.items()
            if (values := getattr(self, name))
        }
        for name in ("work", "straggler_distribution", "draws", "seed"):
            if getattr(self, name) is not None:
                changed[name] = getattr(self, name)
        for flag, value in (("--pass-rate", self.pass_rate), ("--compile", self.compile)):
            if self.mfu and value:
                raise UserError(f"{flag} has no effect with --mfu, which is a rate of its own")
        return Assumptions(**changed)


def print_prediction(predicted: ScaleOut, console: Console) -> None:
    """Prints tables of DDP and FSDP, weak and strong, and everything they assume."""
    from common.perfmodel.cluster.scale_out import stated_assumptions

    about = (
        f"{predicted.job.architecture.name} on {predicted.cluster.name}, predicted, not measured. "
        "Brackets: 5 % to 95 % of the draws; within 1 %: caps (MiB) whose step is; default: DDP's "
        "own caps against b*"
    )
    print_lines(console, [about])
    rate = "tokens/s" if predicted.job.tokens_per_sample > 1 else "samples/s"
    for strategies, table in (
        (("DDP", "ZERO1"), _ddp_table),
        (("SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"), _fsdp_table),
    ):
        for scaling in ("weak", "strong"):
            for strategy in strategies:
                if len(rows := predicted.rows(scaling, strategy)):
                    console.print(table(rows, strategy, scaling, rate))
    assumed = (f"assumed: {text}" for text in stated_assumptions(predicted))
    print_notes(console, (*_notes(predicted), *assumed))


def _ddp_table(rows: pd.DataFrame, strategy: str, scaling: str, rate: str) -> Table:
    table = _table(f"{strategy} at b*, {scaling} scaling")
    names = ("step", "exposed", "efficiency (%)", rate, "b* (MiB)")
    for name in ("GPUs", *names, "within 1 %", "default"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows.itertuples():
        cells = [f"{row.gpus:,}", *_common_cells(row)]
        if row.gpus > 1:
            cells += [
                _band(
                    row.bucket_cap_mib,
                    row.bucket_cap_low_mib,
                    row.bucket_cap_high_mib,
                    _three,
                ),
                f"{_three(row.near_low_mib)}–{_three(row.near_high_mib)}",
                f"{row.default_step_s / row.step_s - 1:+.1%}",
            ]
        table.add_row(*cells)
    return table


def _fsdp_table(rows: pd.DataFrame, strategy: str, scaling: str, rate: str) -> Table:
    table = _table(f"FSDP, {scaling} scaling: {strategy}")
    for name in ("GPUs", "step", "exposed", "efficiency (%)", rate):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows.itertuples():
        table.add_row(f"{row.gpus:,}", *_common_cells(row))
    return table


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))


def _common_cells(row) -> list[str]:
    return [
        _in_units(row.step_s, row.step_low_s, row.step_high_s, TIMES),
        _in_units(row.exposed_s, row.exposed_low_s, row.exposed_high_s, TIMES),
        _band(
            100 * row.efficiency,
            100 * row.efficiency_low,
            100 * row.efficiency_high,
            _percent,
        ),
        _in_units(row.tokens_per_s, row.tokens_per_s_low, row.tokens_per_s_high, COUNTS),
    ]


def _notes(predicted: ScaleOut) -> list[str]:
    from common.perfmodel.cluster.scale_out import without_room
    from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES

    strategy = predicted.table["strategy"].iloc[0]
    weak = predicted.rows("weak", strategy)
    last = weak.iloc[-1]
    parts = {
        "computation": last.computation_s,
        "waiting for the slowest GPU": last.straggler_s,
        "copies": last.copies_s,
        "computation slowed": last.slowed_s,
        "exposed communication": last.exposed_s,
    }
    shares = ", ".join(f"{name} {part / last.step_s:.1%}" for name, part in parts.items())
    notes = [f"{strategy}, weak, {last.gpus:,} GPUs: {shares}"]
    for strategy, peaks in without_room(predicted).items():
        gigabytes = predicted.peak.memory_bytes / 1e9
        eager = ", as if it were not compiled" if predicted.job.compile else ""
        notes.append(
            f"{strategy} on {_listed(list(peaks))} GPUs does not fit{eager}: a step takes "
            f"{min(peaks.values()) / 1e9:.0f} GB or more, and libraries take "
            f"{LIBRARIES_BYTES / 1e9:g} GB, of a GPU's {gigabytes:.0f} GB; its times are those of "
            "a GPU with more memory"
        )
    left_out = set(weak["gpus"]) - set(predicted.rows("strong", strategy)["gpus"])
    if left_out:
        notes.append(
            f"strong scaling stops before {min(left_out):,} GPUs: a batch of "
            f"{predicted.global_batch_size:,} sequences has none for some of them"
        )
    return notes


def _listed(gpus: list[int]) -> str:
    return f"{gpus[0]:,}" if len(gpus) == 1 else f"{gpus[0]:,} to {gpus[-1]:,}"


def _band(value: float, low: float, high: float, form: Callable[[float], str]) -> str:
    return f"{form(value)} ({form(low)}–{form(high)})"


def _in_units(value: float, low: float, high: float, units: dict[str, float]) -> str:
    """Formats a value with its unit and, in the same unit, its band: ``131 ms (119–160)``."""
    # The largest unit that the value reaches, or else the smallest: units come from large to small.
    name, unit = next((n, u) for n, u in units.items() if value >= u or u == min(units.values()))
    return f"{_three(value / unit)}{name} ({_three(low / unit)}–{_three(high / unit)})"


def _three(value: float) -> str:
    """Formats a value with three figures, without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"
