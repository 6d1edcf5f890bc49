"""Steps of DDP and FSDP on emulated hosts, predicted from measurements without either."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from common.analysis import runs
from common.analysis.comparable import require_same
from common.analysis.data_parallel.strategies import StrategyTimes, read_strategies
from common.analysis.data_parallel.training_runs import ASSIGNMENT, COMMAND, STEPS, TIMES
from common.csv_tables import read_table
from common.errors import NotYetWritten, UserError
from common.judged import Judged, Verdict
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import BUCKET_VIEW, StepOptions, StepParts
from common.perfmodel.fsdp.communication import Collective, all_broadcasts
from common.perfmodel.fsdp.schedule import StepPrediction, predict_fsdp_step
from common.perfmodel.one_device.sharding import whole_tensors
from common.perfmodel.tables import AllReduceTable, read_all_reduce, read_costs, read_ready_times
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import find_table
from common.samples import paired_ratio, slowest_rank

ALL_REDUCE, LOCAL, READY = "allreduce-samples.csv", "local-times.csv", "gradient-ready-times.csv"
OVERLAP = "overlap-times.csv"
ALONE, COLLECTIVES = "alone-times.csv", "collective-times.csv"
COLLECTIVE_COLUMNS = ("operation", "size_bytes", "round", "iteration", "rank", "time_ms")
LOCAL_COLUMNS = ("accumulation", "round", "iteration", "rank", "before_time_ms", "update_time_ms")
PREDICTED = ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", "MY_ZERO1")


@dataclass(frozen=True, eq=False)
class EmulatedStrategies:
    """A comparison of strategies over one network, with the inputs of its prediction.

    Attributes:
        measured: steps of the strategies in turn.
        all_reduce: time of an all-reduce by size, over the same network.
        profile: the last backward pass of a step, without communication.
        local: the other parts of a step without communication, raw (local-times.csv).
        alone: steps of FSDP on a mesh of one rank, raw (alone-times.csv).
        collectives: collectives of FSDP's steps, one at a time, raw (collective-times.csv).
        costs: DDP's copies and contention over the same network, where they were measured.
        left_out: why these are recorded measurements and not the reader's own; or None.
    """

    measured: StrategyTimes
    all_reduce: AllReduceTable
    profile: BackwardProfile
    local: pd.DataFrame
    alone: pd.DataFrame
    collectives: pd.DataFrame
    costs: DdpCosts = NO_COSTS
    left_out: str | None = None

    @property
    def network(self) -> str:
        """Returns its name, such as ``2 emulated hosts at 1 Gbit/s``."""
        return self.measured.environment.get("network") or "an unknown network"

    @property
    def origin(self) -> str:
        """Returns whose data these are, and why there are none of the reader's own, as Markdown."""
        left_out = f"{self.left_out}; {runs.DOCTOR}" if self.left_out else ""
        return runs.origin(self.measured.caption, self.measured.recorded, COMMAND, left_out)

    def local_parts(self, accumulation: int) -> StepParts:
        """Returns medians over steps of the slowest rank's times.

        All that precedes the last backward pass is one part. Raises UserError for an accumulation
        that was not measured without communication.
        """
        steps = self.local[self.local["accumulation"] == accumulation]
        if steps.empty:
            raise UserError(f"{LOCAL}: no steps with accumulation {accumulation}")
        parts = slowest_rank(steps, ["before_time_ms", "update_time_ms"], by=["round", "iteration"])
        before_ms, update_ms = parts.median()
        return StepParts(forward_s=0.0, update_s=update_ms / 1e3, before_s=before_ms / 1e3)

    def predict(self, strategy: str, accumulation: int) -> StepPrediction:
        """Predicts a step of DDP, of it with sharded states (MY_ZERO1), or of FSDP2."""
        parts = self.local_parts(accumulation)
        collectives = self.measured.collectives(strategy, accumulation)
        if strategy in ("DDP", "MY_ZERO1"):
            cap_mib = self.measured.settings.get("bucket_cap_mb")
            model = calibrated_model(
                self.profile,
                self.all_reduce.curve,
                self.costs,
                crowded=self.all_reduce.crowded,
                backend=self.measured.backend,
                # Runs from before this was recorded are predicted as they were.
                gradient_as_bucket_view=bool(self.measured.settings.get(BUCKET_VIEW)),
            )
            ddp = StepOptions(DdpOptions(cap_mib))
            if strategy == "DDP":
                step = model.step(parts, ddp)
                return StepPrediction(strategy, step.total_s, step.without_ddp_s)
            # A rank updates its own parameters, and all of them are sent when all are updated.
            shares = whole_tensors(self.measured.config.parameter_sizes(), self.measured.ranks)
            share = max(shares) / sum(shares)
            step = model.step(replace(parts, update_s=share * parts.update_s), ddp)
            sent_s = self.collective_s(all_broadcasts(collectives))
            return StepPrediction(strategy, step.total_s + sent_s, step.without_ddp_s)
        return predict_fsdp_step(
            strategy,
            self.alone_s(strategy, accumulation),
            parts.update_s,
            collectives,
            self.collective_s,
            self.measured.backend,
        )

    def alone_s(self, strategy: str, accumulation: int) -> float:
        """Returns the median step of FSDP on a mesh of one rank, in seconds: its slowest rank's."""
        chosen = (self.alone["strategy"] == strategy) & (self.alone["accumulation"] == accumulation)
        if not chosen.any():
            raise UserError(f"{ALONE}: no steps of {strategy} with accumulation {accumulation}")
        steps = slowest_rank(self.alone[chosen], "step_time_ms", by=["round", "iteration"])
        return steps.median() / 1e3

    def collective_s(self, collective: Collective) -> float:
        """Returns the seconds of a collective by itself, to be added to those of a step's others.

        The mean over a round's calls of the slowest rank's times, and the median over rounds.
        """
        # A step has a dozen or more of them one after another. A few calls take much longer than
        # the rest, which no median of single calls shows, but a sum of many has its share of them.
        # A round in which the machine was slow altogether is left to the median.
        operation, size = self.collectives["operation"], self.collectives["size_bytes"]
        chosen = (operation == collective.operation) & (size == collective.size_bytes)
        if not chosen.any():
            raise UserError(
                f"{COLLECTIVES}: no {collective.operation} of {collective.size_bytes} bytes"
            )
        calls = slowest_rank(self.collectives[chosen], "time_ms", by=["round", "iteration"])
        return calls.groupby("round").mean().median() / 1e3

    def table(self) -> pd.DataFrame:
        """Returns a row per accumulation and strategy: predicted and measured.

        Columns: accumulation, strategy, computation_ms and exposed_ms (of the prediction),
        predicted_ms, measured_ms, q25_ms, q75_ms, error (of predicted against each round's median),
        above_noise (the verdict on the error), judged (the predicted step over the measured one),
        exposed_share (of the predicted step).

        Raises UserError where no strategy that exchanges anything was measured.
        """
        summary = self.measured.summary().rename(columns={"step_ms": "measured_ms"})
        kept = ["accumulation", "strategy", "measured_ms", "q25_ms", "q75_ms"]
        rows = summary.loc[summary["strategy"].isin(PREDICTED), kept]
        if rows.empty:
            raise UserError(f"{self.measured.folder.name}: no steps of {', '.join(PREDICTED)}")
        predictions = {}
        for row in rows.itertuples():
            # In a student's tree DDP's buckets may not be written yet, which FSDP has none of.
            with suppress(NotYetWritten):
                predictions[row.Index] = self.predict(row.strategy, row.accumulation)
        rows = rows.loc[list(predictions)].assign(
            computation_ms=[step.computation_s * 1e3 for step in predictions.values()],
            exposed_ms=[step.exposed_communication_s * 1e3 for step in predictions.values()],
            predicted_ms=[step.total_s * 1e3 for step in predictions.values()],
        )
        errors = [
            self._error(row.strategy, row.accumulation, row.predicted_ms, len(rows))
            for row in rows.itertuples()
        ]
        return rows.assign(
            error=[error.difference.estimate for error in errors],
            above_noise=[error.said for error in errors],
            judged=errors,
            exposed_share=rows["exposed_ms"] / rows["predicted_ms"],
        ).reset_index(drop=True)

    def _error(self, strategy: str, accumulation: int, predicted_ms: float, claims: int) -> Judged:
        """Returns a predicted step over the measured one, of which rounds are repetitions."""
        rounds = self.measured.rounds[accumulation][strategy]
        ratio = paired_ratio([predicted_ms] * len(rounds), rounds, claims=claims)
        return Judged(ratio, **self.measured.conditions)


def prediction_accuracy(run: EmulatedStrategies) -> dict[str, object]:
    """Returns how well the steps of a run were predicted; errors are of predicted over measured.

    Keys: network, median_error (of the sizes), worst_error and worst_strategy, clear (strategies
    whose error is told from noise), predicted_fastest (what the model would choose, with the fewest
    micro-batches), measured_fastest (with as many; several that are tied).
    """
    table = run.table()
    sizes = table["error"].abs()
    worst = table.loc[sizes.idxmax()]
    few = table[table["accumulation"] == table["accumulation"].min()].set_index("strategy")
    best = run.measured.fastest(few["accumulation"].iloc[0])
    return {
        "network": run.network,
        "median_error": float(sizes.median()),
        "worst_error": float(worst["error"]),
        "worst_strategy": worst["strategy"],
        "clear": tuple(table.loc[table["above_noise"] == Verdict.SETTLED, "strategy"]),
        "predicted_fastest": few["predicted_ms"].idxmin(),
        "measured_fastest": " or ".join(best.tied if best else few.index),
    }


def open_emulated(run_dir: str | Path | None = None) -> EmulatedStrategies:
    """Opens the strategies on the emulated hosts of a run, or recorded ones where it has none.

    Of several networks the slowest is taken.

    Raises:
        UserError: no such directory, tables that do not go together, or no recorded ones either.
    """
    folder = runs.choose_folder(run_dir, ASSIGNMENT, (STEPS, TIMES))
    paths = [path for path in folder.glob("emulated-*") if _complete(path)]
    if paths:
        return min((read_emulated(path, folder) for path in paths), key=_rate)
    recorded = runs.recorded_assignment(ASSIGNMENT)
    if folder.resolve() == recorded.resolve():
        raise UserError(f"{relative_to_project(folder)}: no runs on emulated hosts")
    reason = runs.Run(folder, folder).environment.get("emulated_hosts_left_out")
    return replace(
        open_emulated(recorded), left_out=reason or "the run that is shown measured none"
    )


def read_emulated(path: Path, folder: Path) -> EmulatedStrategies:
    """Reads the measurements in ``path``, a part of the run in ``folder``.

    Raises UserError where they were made on different devices, networks or numbers of ranks.
    """
    measured = read_strategies(runs.Run(find_table(path, TIMES).parent, folder))
    samples = find_table(path, ALL_REDUCE)
    for name in (LOCAL, READY, ALONE, COLLECTIVES):
        if not (measured.folder / name).is_file():
            raise UserError(f"{relative_to_project(measured.folder)}: has {TIMES} but no {name}")
    all_reduce = read_all_reduce(samples)
    if all_reduce.world_size != measured.ranks:
        raise UserError(
            f"{relative_to_project(path)}: ranks differs between {ALL_REDUCE} "
            f"({all_reduce.world_size}) and {TIMES} ({measured.ranks}): they cannot be compared"
        )
    overlap = find_table(path, OVERLAP)  # not in older runs
    where = [
        (ALL_REDUCE, runs.Run(samples.parent, folder).environment),
        (TIMES, measured.environment),
    ]
    if overlap:
        where.append((OVERLAP, runs.Run(overlap.parent, folder).environment))
    require_same(where, f"they cannot be compared ({relative_to_project(path)})")
    return EmulatedStrategies(
        measured=measured,
        costs=read_costs(overlap, measured.backend) if overlap else NO_COSTS,
        all_reduce=all_reduce,
        profile=read_ready_times(measured.folder / READY),
        local=read_table(measured.folder / LOCAL, LOCAL_COLUMNS),
        alone=read_table(measured.folder / ALONE, ("strategy", "accumulation", "step_time_ms")),
        collectives=read_table(measured.folder / COLLECTIVES, COLLECTIVE_COLUMNS),
    )


def _complete(path: Path) -> bool:
    """Returns True if the steps and the all-reduces of a network are there."""
    return all(find_table(path, name) for name in (TIMES, ALL_REDUCE))


def _rate(run: EmulatedStrategies) -> float:
    """Returns the rate of the slowest link, in bit/s."""
    emulated = run.measured.environment.get("interconnect", {}).get("emulated") or {}
    return min(emulated.get("rates_bit_per_s", [float("inf")]))
