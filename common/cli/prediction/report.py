"""The report of ``ddplab predict``: T(b) by cap, b*, and the error of the prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.analysis.buckets.choice import cap_or_ties, near_text
from common.analysis.buckets.measurements import WRITTEN_BY, added_latency_s, check_comparable
from common.analysis.buckets.sweep import Accuracy, BucketSweep, read_sweep
from common.cli.prediction.question import TableQuestion
from common.cli.prediction.trace import TraceRequest, trace_request
from common.cli.printed import print_lines, print_notes
from common.errors import UserError
from common.perfmodel.buckets import cap_label, parse_cap
from common.perfmodel.calibration import calibrated_model, read_calibration
from common.perfmodel.collectives import PLAUSIBLE_ALPHA_S, MeasuredAllReduce, scaled, with_latency
from common.perfmodel.ddp.best_cap import BestCap
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile
from common.perfmodel.ddp.step import BUCKET_VIEW
from common.perfmodel.expected_error import expectation
from common.perfmodel.layer_tables import profile_from_layers, read_layer_tables
from common.perfmodel.samples import OverlapSamples
from common.perfmodel.tables import (
    has_samples,
    read_all_reduce,
    read_overlap_samples,
    read_ready_times,
)
from common.perfmodel.uncertainty import Chance, chance_at
from common.runtime.records.run_directory import find_table, read_environment, why_broken_off

SUSPICIOUS_ALPHA_S = 1e-3
LATENCY_BYTES = 64 * 2**10
"""Size up to which a message's time is taken for a latency."""
ALL_REDUCES = "allreduce-samples.csv"


class Report:
    """The inputs of one prediction and the printing of its results."""

    def __init__(self, question: TableQuestion) -> None:
        caps = [parse_cap(text) for text in question.bucket_cap_mb]
        question, settings = with_tables_of_run(question)
        if not question.allreduce:
            lacking = lacking_all_reduces(question.run_dir)
            raise UserError(f"no all-reduce table: {lacking}give --allreduce FILE or --run-dir DIR")
        if question.alpha_us is not None and not 0 < question.alpha_us < float("inf"):
            raise UserError(f"--alpha-us {question.alpha_us}: a latency is above 0 and finite")
        self.trace: TraceRequest | None = None
        if question.trace is not None:
            self.trace = trace_request(
                question.trace, tuple(caps), question.run_dir, question.measured
            )
        self.question = question
        self.notes: list[str] = []
        profile = self._read_profile()
        table = read_all_reduce(question.allreduce)
        self.curve: MeasuredAllReduce = table.curve
        smallest = table.curve.sizes_bytes[0]
        self.without_latency = (
            f"{question.allreduce} begins at {smallest / 2**10:,.0f} KiB, more than "
            f"{LATENCY_BYTES // 2**10}: it does not tell the latency"
            if smallest > LATENCY_BYTES
            else None
        )
        if question.alpha_us is not None and self.without_latency:
            raise UserError(f"--alpha-us {question.alpha_us:g}: {self.without_latency}")
        self.world_size = table.world_size
        self.backend: str | None = settings.get("backend")
        overlap = read_overlap_samples(question.overlap, self.backend) if question.overlap else None
        costs = overlap.costs() if overlap else NO_COSTS
        latency_s = added_latency_s(settings)
        self.has_views = bool(settings.get(BUCKET_VIEW))
        self.model = calibrated_model(
            profile,
            table.curve,
            costs,
            crowded=table.crowded,
            backend=self.backend,
            added_latency_s=latency_s,
            gradient_as_bucket_view=self.has_views,
        )
        self.notes += contention_notes(overlap)
        if latency_s:
            self.notes.append(f"every bucket waits {latency_s * 1e3:g} ms in addition, as it did")
        self.sweep: BucketSweep | None = (
            read_sweep(question.measured) if question.measured else None
        )
        if self.sweep and self.world_size != self.sweep.world_size:
            raise UserError(
                f"{question.allreduce} was measured on {self.world_size} ranks and "
                f"{question.measured} on {self.sweep.world_size}: they cannot be compared"
            )
        if self.sweep:
            self.sweep.check_buckets(profile)
        self.caps = caps or self._default_caps()

    def print(self, console: Console) -> None:
        """Prints everything, in the order a reader wants it."""
        best = self.model.best_cap()
        accuracy = self.sweep.accuracy_of(self.model.backward_s) if self.sweep else None
        if self.trace:
            self.notes.append(self.trace.write(self.model, best.cap_mib, self.sweep))
        console.print(self._table(accuracy))
        self._print_best(console, best)
        if accuracy:
            self._print_accuracy(console, accuracy)
        chance = self._chance(best)
        about = (self._expected(best, chance), chance and chance.text())
        print_lines(console, filter(None, about))
        assumed = (f"assumed: {text}" for text in self.model.profile.assumptions)
        print_notes(console, (*self.notes, *assumed))

    def _expected(self, best: BestCap, chance: Chance | None) -> str | None:
        """Returns a line with the expected error of the prediction; None without a backend."""
        if self.backend is None:
            return None
        environment = read_environment(Path(self.question.allreduce).parent)
        network = str(environment.get("network"))
        share = chance.share if chance else 0.0
        return expectation(self.model, self.backend, network, best.total_s, share)

    def _chance(self, best: BestCap) -> Chance | None:
        """Returns what chance does to the prediction; None without raw samples."""
        question = self.question
        if not (question.ready_times and has_samples(question.allreduce)):
            return None
        calibration = read_calibration(
            question.ready_times,
            question.allreduce,
            question.overlap,
            backend=self.backend,
            added_latency_s=self.model.added_latency_s,
            gradient_as_bucket_view=self.has_views,
        )
        return chance_at(calibration, best.cap_mib)

    def _read_profile(self) -> BackwardProfile:
        question = self.question
        if question.ready_times:
            return read_ready_times(question.ready_times)
        if not (question.layer_sizes and question.layer_times):
            raise UserError(
                "no gradients: give --layer-sizes and --layer-times, or --ready-times, or --run-dir"
            )
        tables = read_layer_tables(question.layer_sizes, question.layer_times)
        self.notes += [f"warning: {note}" for note in tables.notes]
        return profile_from_layers(tables)

    def _default_caps(self) -> list[float | None]:
        if self.sweep:
            default = [] if self.sweep.default() is None else [None]
            return [*self.sweep.measured_s(), *default]
        largest = self.model.profile.total_bytes / 2**20
        caps = (0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400, 800, 1600, 3200)
        return [None, *(cap for cap in caps if cap < 2 * largest)]

    def _table(self, accuracy: Accuracy | None) -> Table:
        table = Table(title="Backward pass of DDP by bucket cap", title_justify="left")
        for name in ("cap (MiB)", "buckets", "predicted (ms)", "exposed (ms)"):
            table.add_column(name, justify="right")
        measured = self._measured_ms(accuracy)
        if accuracy:
            table.add_column("measured (ms)", justify="right")
            table.add_column("error", justify="right")
        for cap in self.caps:
            timeline = self.model.at_cap(cap)
            row = [
                cap_label(cap),
                str(timeline.num_buckets),
                f"{timeline.total_s * 1e3:.1f}",
                f"{timeline.exposed_communication_s * 1e3:.1f}",
            ]
            if cap in measured:
                error = timeline.total_s * 1e3 / measured[cap] - 1
                row += [f"{measured[cap]:.1f}", f"{error:+.1%}"]
            table.add_row(*row)
        return table

    def _measured_ms(self, accuracy: Accuracy | None) -> dict[float | None, float]:
        """Returns what was measured at each cap; None is DDP's default."""
        if accuracy is None:
            return {}
        of_case = accuracy.table.set_index("bucket_cap_mib")["measured_ms"]
        by_cap = {cap: of_case[case] for cap, case in self.sweep.smallest_alike().items()}
        default = self.sweep.default()
        return by_cap if default is None else by_cap | {None: default["median_ms"]}

    def _print_best(self, console: Console, best: BestCap) -> None:
        measured_alpha = float(self.curve.times_s[0])
        print_lines(console, [_best_line("b*", best)])
        alpha = self.question.alpha_us / 1e6 if self.question.alpha_us is not None else None
        if self.without_latency:
            self.notes.append(self.without_latency)
        elif alpha is None and measured_alpha > SUSPICIOUS_ALPHA_S:
            alpha = PLAUSIBLE_ALPHA_S
            self.notes.append(
                f"the smallest message takes {measured_alpha * 1e3:.2f} ms, more than a network's "
                f"latency: mostly the harness. The second answer takes {alpha * 1e6:.0f} µs (one "
                "A100 node measures 32 µs in nccl-tests; NCCL's tuner gives a tree over 2 × 4 "
                "GPUs 20 µs); choose another with --alpha-us"
            )
        if alpha is not None:
            # All-reduces in flight together are slowed alike, by as large a factor.
            crowded = self.model.crowded_network
            other = replace(
                self.model,
                network=with_latency(self.curve, alpha),
                crowded_network=crowded and scaled(crowded, latency=alpha / measured_alpha),
            ).best_cap()
            print_lines(console, [_best_line(f"b* with α = {alpha * 1e6:.0f} µs", other)])

    def _print_accuracy(self, console: Console, accuracy: Accuracy) -> None:
        lines = [
            f"Error of the prediction: median {accuracy.median_error:.1%}, worst "
            f"{accuracy.worst_error:.1%}; noise floor {accuracy.noise_floor:.1%} (two halves of "
            f"the rounds); median error told from noise: {accuracy.error.said}",
            "Caps that gave the same buckets are one case.",
        ]
        if self.sweep.default() is not None:
            lines.append("None is DDP's default, and no case.")
        lines.append(
            f"Measured best: {cap_or_ties(accuracy.best)}. Regret of the predicted best, "
            f"{accuracy.predicted_best_mib:g} MiB: {accuracy.regret.estimate:.1%}; told from "
            f"noise: {accuracy.regret.said}"
        )
        print_lines(console, lines)


def contention_notes(overlap: OverlapSamples | None) -> list[str]:
    """Returns what a prediction lacks where contention was not measured as it is now."""
    if overlap is None:
        return [
            "assumed: DDP's copies are free and communication does not slow computation "
            "(no --overlap table)"
        ]
    if not overlap.beside:
        return [
            "assumed: computation and communication do not slow each other (the overlap table has "
            "no backward pass beside all-reduces)"
        ]
    return []


def _best_line(label: str, best: BestCap) -> str:
    return (
        f"{label} = {best.cap_mib:.3g} MiB: {best.total_s * 1e3:.1f} ms; within 1 %: "
        f"{near_text(best)} ({len(best.candidates)} distinct bucketings searched)"
    )


def lacking_all_reduces(run_dir: str | None) -> str:
    """Says that a run has no table of all-reduces, and why it broke off; empty without a run."""
    if run_dir is None:
        return ""
    reason = why_broken_off(Path(run_dir))
    broke_off = f", which broke off ({reason})," if reason else ""
    return f"{run_dir}{broke_off} has no complete {ALL_REDUCES}; "


def with_tables_of_run(question: TableQuestion) -> tuple[TableQuestion, dict]:
    """Fills in the tables of ``--run-dir`` where none was given; all must be comparable.

    Returns what was asked with its tables, and the settings that their runs share.
    """
    folder = Path(question.run_dir) if question.run_dir else None
    if folder and not folder.is_dir():
        raise UserError(f"{folder}: no such run directory")
    wanted = {
        "allreduce": ALL_REDUCES,
        "overlap": "overlap-times.csv",
        "measured": "ddp-times.csv",
    }
    if not (question.layer_sizes or question.layer_times):
        wanted["ready_times"] = "gradient-ready-times.csv"
    paths = {
        field: str(path)
        for field, name in wanted.items()
        if folder
        and not getattr(question, field)
        and (path := find_table(folder, name, WRITTEN_BY[name]))
    }
    question = replace(question, **paths)
    tables = (question.ready_times, question.allreduce, question.overlap, question.measured)
    return question, check_comparable(Path(table) for table in tables if table)
