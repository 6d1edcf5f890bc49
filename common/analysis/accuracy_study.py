"""What ``ddplab study accuracy`` says: predictions of bucketings that no calibration has seen.

A case (a model on a network) is predicted from its own calibration: the backward pass without DDP
and the moments of its gradients, all-reduces one after another and several at once, DDP's copies,
and what all-reduces without pause beside the backward pass take from it. None of that is a
bucketing. In a second judgement contention comes from the *other* models on the same kind of
network. Beside it stand predictors with less in them, or with contention fitted to one bucketing,
which no predictor is judged on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.sweep import BucketSweep
from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AllReduceModel, AlphaBeta, MeasuredAllReduce
from common.perfmodel.contention import ContentionFit, OverlappedRun, fit_contention
from common.perfmodel.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.samples import AllReduceSamples, OverlapSamples
from common.perfmodel.simulator import profile_buckets, simulate_backward
from common.perfmodel.tables import read_table
from common.runtime.paths import project_root
from common.runtime.run_directory import read_environment

MODEL = "full model"
OTHERS = "contention of other models"
FITTED = "contention of one bucketing"
SIMPLER = ("α–β", "recurrence", "with copies", "two in flight", FITTED, "all-reduces slowed too")
REGIMES = ("communication-bound", "balanced", "compute-bound", "loopback")
GROUPS = (*REGIMES[:3], "added latency", "four ranks on two cores", "replay", "loopback")
MODES = ("sequential", "in_flight")
DEFAULT_CAP_MIB = 25.0
DRAWS = 500


@dataclass(frozen=True, eq=False)
class AccuracyCase:
    """One case: what predicts it, and what it is held against.

    Attributes:
        facts: its row of cases.csv.
        profile: gradients, at the speed of the rounds without DDP.
        curve: all-reduces one after another, with the latency added to buckets.
        crowded: several at once, the time of each.
        overlap: DDP's copies and contention, measured apart from DDP.
        copies_s: DDP's copies in and out of all gradients, from all cases of the model on as many
            hosts, as the network has no part in them.
        local_s, around_s: backward pass without DDP; forward pass and update around it.
        calibration, judged: steps of DDP.
    """

    facts: pd.Series
    profile: BackwardProfile
    curve: MeasuredAllReduce
    crowded: MeasuredAllReduce
    overlap: OverlapSamples
    copies_s: float
    local_s: float
    around_s: float
    calibration: BucketSweep
    judged: BucketSweep

    @property
    def name(self) -> str:
        return str(self.facts["case"])

    @cached_property
    def costs(self) -> DdpCosts:
        """Copies, and the computation lost to all-reduces without pause beside it.

        How much longer these take is left out: most of it is that the small ones wait for a core,
        which they do for each other in DDP, too, as ``crowded`` has it.
        """
        per_byte = self.copies_s / 2 / self.profile.total_bytes
        copies = {"copy_in_s_per_byte": per_byte, "copy_out_s_per_byte": per_byte}
        measured = self.overlap.saturated_costs()
        return replace(measured, **copies).without("communication_slowdown")

    @cached_property
    def lost_shares(self) -> tuple[float, ...]:
        """Computation lost per second of all-reduces, for each size measured beside it."""
        sizes, lost_s = self.costs.lost_compute
        return tuple(np.asarray(lost_s) / self.crowded.time_s(np.asarray(sizes)))

    def with_lost_shares(self, shares: NDArray) -> DdpCosts:
        """The case's costs with these ``lost_shares`` in place of its own."""
        sizes, _ = self.costs.lost_compute
        lost_s = shares * self.crowded.time_s(np.asarray(sizes))
        return replace(self.costs, lost_compute=(sizes, tuple(lost_s.tolist())))

    @cached_property
    def fitted(self) -> ContentionFit:
        """Contention as a slowdown that is fitted to the calibration bucketing."""
        steps = self.calibration.steps
        run = OverlappedRun(
            total_s=(steps["backward_time_ms"] / 1e3).tolist(),
            options=DdpOptions(float(steps["bucket_cap_mib"].iloc[0])),
        )
        without = self.costs.without("compute_slowdown")
        return fit_contention(self.profile, self.curve, run, without, **self.queue)

    @property
    def queue(self) -> dict:
        """Gloo takes up two buckets at a time; the hook that adds latency, one."""
        if self.facts["added_latency_ms"] > 0:
            return {}
        return {"in_flight": 2, "crowded_network": self.crowded}

    def predictors(self) -> dict[str, Callable[[float], float]]:
        """Each predictor, from a cap in MiB to the seconds of a backward pass; simplest first."""
        line = AlphaBeta.fit(self.curve.sizes_bytes, self.curve.times_s)
        copies = self.costs.without("compute_slowdown")
        slowed = replace(self.costs, slowdowns=self.overlap.saturated_costs().slowdowns)
        made = (
            self.predictor(line, NO_COSTS),
            self.predictor(self.curve, NO_COSTS),
            self.predictor(self.curve, copies),
            self.model(copies),
            self.model(self.fitted.costs),
            self.model(slowed),
        )
        return dict(zip(SIMPLER, made, strict=True)) | {MODEL: self.model(self.costs)}

    def model(self, costs: DdpCosts) -> Callable[[float], float]:
        """The full model, with these costs."""
        return self.predictor(self.curve, costs, **self.queue)

    def predictor(
        self, network: AllReduceModel, costs: DdpCosts, **queue
    ) -> Callable[[float], float]:
        """A simulation of the case with this network and these costs."""
        return lambda cap_mib: (
            simulate_backward(self.profile, network, cap_mib, costs=costs, **queue).total_s
        )


@dataclass(frozen=True, eq=False)
class AccuracyStudy:
    """All cases of one run of the study; ``caption`` names hardware and date."""

    folder: Path
    caption: str
    cases: tuple[AccuracyCase, ...]

    @cached_property
    def errors(self) -> pd.DataFrame:
        """One row per judged bucketing.

        Columns: case, model, hosts, regime, bucket_cap_mib, num_buckets, measured_ms,
        measured_step_ms, noise (of the case), predicted_ms; error of the backward pass under each
        predictor (its name), and step error (of the model).
        """
        return pd.concat([_judge(case, self._of_others(case)) for case in self.cases])

    def _of_others(self, case: AccuracyCase) -> DdpCosts:
        """The case's own copies with the contention of the other models on such a network."""
        alike = [
            other.lost_shares
            for other in self.cases
            if other.facts["model"] != case.facts["model"]
            and (other.facts["model"] == "replay") == (case.facts["model"] == "replay")
            and all(other.facts[key] == case.facts[key] for key in ("hosts", "regime"))
        ]
        if not alike:
            return case.costs.without("compute_slowdown")
        return case.with_lost_shares(np.median(alike, axis=0))

    def by_regime(self) -> pd.DataFrame:
        """Per group: cases, bucketings, noise floor, then median, 90th percentile and worst |error|
        of backward pass and step, and the medians of the other predictors."""
        rows = []
        errors = self.errors.assign(group=grouped(self.errors))
        for group, own in errors.groupby("group", sort=False):
            row = {"group": group, "cases": own["case"].nunique(), "bucketings": len(own)}
            row["noise"] = own.drop_duplicates("case")["noise"].median()
            for what, column in (("", MODEL), ("step ", "step error")):
                size = own[column].abs()
                row |= {f"{what}median": size.median(), f"{what}p90": size.quantile(0.9)}
                row[f"{what}worst"] = size.max()
            for column in (OTHERS, *SIMPLER):
                row[column] = own[column].abs().median()
            rows.append(row)
        order = {name: place for place, name in enumerate(GROUPS)}
        return (
            pd.DataFrame(rows).sort_values("group", key=lambda g: g.map(order)).set_index("group")
        )

    def regrets(self) -> pd.DataFrame:
        """Per case what the predicted b* costs beside the best judged cap, and what others do."""
        return pd.DataFrame([_regrets(case) for case in self.cases])

    def over(self, limit: float = 0.05) -> pd.DataFrame:
        """The judged bucketings whose backward pass is off by more, the worst first."""
        errors = self.errors
        return errors[errors[MODEL].abs() > limit].sort_values(MODEL, key=np.abs, ascending=False)


def grouped(errors: pd.DataFrame) -> pd.Series:
    """Which of ``GROUPS`` each judged bucketing belongs to."""
    groups = errors["regime"].copy()
    groups[errors["added_latency_ms"] > 0] = "added latency"
    groups[errors["hosts"] > 2] = "four ranks on two cores"
    groups[errors["model"] == "replay"] = "replay"
    return groups


def _judge(case: AccuracyCase, of_others: DdpCosts) -> pd.DataFrame:
    measured = case.judged.summary()
    steps = case.judged.summary("step_time_ms")["median_ms"]
    caps = measured["bucket_cap_mib"]
    table = pd.DataFrame(
        {
            **{key: case.facts[key] for key in ("case", "model", "hosts", "regime")},
            "added_latency_ms": case.facts["added_latency_ms"],
            "bucket_cap_mib": caps,
            "num_buckets": measured["num_buckets"],
            "measured_ms": measured["median_ms"],
            "measured_step_ms": steps,
            "noise": case.judged.noise_floor(),
        }
    )
    for name, predict in (case.predictors() | {OTHERS: case.model(of_others)}).items():
        predicted_ms = np.array([predict(cap) for cap in caps]) * 1e3
        table[name] = predicted_ms / table["measured_ms"] - 1
        if name == MODEL:
            table["predicted_ms"] = predicted_ms
            table["step error"] = (predicted_ms + case.around_s * 1e3) / steps - 1
    return table


def _regrets(case: AccuracyCase) -> dict:
    caps = sorted(case.judged.measured_s())
    best = min(caps, key=case.model(case.costs))
    default = _bucketing_of(case, DEFAULT_CAP_MIB, caps)
    chosen = {"b*": best, "25 MiB": default, "smallest": caps[0], "largest": caps[-1]}
    low, high = _regret_interval(case.judged, best)
    measured = case.judged.measured_s()
    fastest = min(measured, key=measured.__getitem__)
    row = {"case": case.name, "b* (MiB)": best, "best (MiB)": fastest}
    row["interior"] = fastest not in (caps[0], caps[-1])
    for name, cap in chosen.items():
        row[f"regret of {name}"] = measured[cap] / measured[fastest] - 1 if cap else np.nan
    return row | {"low": low, "high": high}


def _bucketing_of(case: AccuracyCase, cap_mib: float, caps: list[float]) -> float | None:
    """The judged cap with the same buckets as this one."""
    wanted = profile_buckets(case.profile, DdpOptions(cap_mib))
    alike = (cap for cap in caps if profile_buckets(case.profile, DdpOptions(cap)) == wanted)
    return next(alike, None)


def _regret_interval(sweep: BucketSweep, chosen: float) -> tuple[float, float]:
    """5 to 95 % of the regret over rounds drawn with replacement."""
    keys = ["round", "bucket_cap_mib"]
    by_round = sweep.steps.groupby(keys)["backward_time_ms"].median().unstack()
    generator = np.random.default_rng(0)
    place = by_round.columns.get_loc(chosen)
    values = by_round.to_numpy()
    drawn = values[generator.integers(len(values), size=(DRAWS, len(values)))]
    medians = np.median(drawn, axis=1)
    regrets = medians[:, place] / medians.min(axis=1) - 1
    return tuple(map(float, np.quantile(regrets, [0.05, 0.95])))


def recorded_study() -> AccuracyStudy:
    """The study that is recorded under data/, the newest. Raises UserError where there is none."""
    found = [path.parent for path in (project_root() / "data").glob("*/study-accuracy/cases.csv")]
    if not found:
        raise UserError("no accuracy study is recorded below data/")
    return open_study(max(found, key=lambda path: read_environment(path)["start_time"]))


def open_study(folder: str | Path) -> AccuracyStudy:
    """The study's tables in ``folder``. Raises UserError where they are not there or broken."""
    folder = Path(folder)
    cases = read_table(folder / "cases.csv", ["case", "model", "regime", "hosts"])
    names = ("steps.csv", "gradients.csv", "all-reduces.csv", "overlap.csv")
    tables = {name: read_table(folder / name, ["case"]) for name in names}
    copies = _copies_s(cases, tables["overlap.csv"])
    opened = []
    for _, facts in cases.iterrows():
        own = {name: table[table["case"] == facts["case"]] for name, table in tables.items()}
        if missing := [name for name, table in own.items() if table.empty]:
            raise UserError(f"{folder / missing[0]}: no rows of case {facts['case']}")
        opened.append(_case(facts, *own.values(), copies[facts["case"]]))
    environment = read_environment(folder)
    caption = f"{environment['cpu']['model']}; {environment['start_time'][:10]}"
    return AccuracyStudy(folder, caption, tuple(opened))


def _case(
    facts: pd.Series,
    steps: pd.DataFrame,
    gradients: pd.DataFrame,
    all_reduces: pd.DataFrame,
    overlap: pd.DataFrame,
    copies_s: float,
) -> AccuracyCase:
    local = steps[steps["role"] == "local"]
    local_s = float(local["backward_time_ms"].median()) / 1e3
    around_s = float((local["step_time_ms"] - local["backward_time_ms"]).median()) / 1e3
    ranks = int(facts["hosts"])
    curve, crowded = (
        AllReduceSamples.of(own.assign(rank=ranks - 1)).curve()
        for own in (all_reduces[all_reduces["mode"] == mode] for mode in MODES)
    )
    latency_s = float(facts["added_latency_ms"]) / 1e3
    return AccuracyCase(
        facts=facts,
        profile=_profile(gradients, local_s),
        curve=MeasuredAllReduce(curve.sizes_bytes, curve.times_s + latency_s),
        crowded=crowded,
        overlap=OverlapSamples.of(overlap.assign(rank=0)),
        copies_s=copies_s,
        local_s=local_s,
        around_s=around_s,
        calibration=BucketSweep(steps[steps["role"] == "calibration"], ranks),
        judged=BucketSweep(steps[steps["role"] == "judged"], ranks),
    )


def _copies_s(cases: pd.DataFrame, overlap: pd.DataFrame) -> dict[str, float]:
    """Case → seconds that DDP over one rank adds to the backward pass, over all cases alike.

    The median of the differences within a round.
    """
    times = overlap[overlap["arm"].isin(["local", "bookkeeping"])]
    by_round = times.groupby(["case", "round", "arm"])["backward_time_ms"].median().unstack()
    added = (by_round["bookkeeping"] - by_round["local"]).rename("added").reset_index()
    added = added.merge(cases[["case", "model", "hosts"]], on="case")
    medians = added.groupby(["model", "hosts"])["added"].median()
    return {
        row.case: max(0.0, float(medians[row.model, row.hosts])) / 1e3 for row in cases.itertuples()
    }


def _profile(gradients: pd.DataFrame, local_s: float) -> BackwardProfile:
    ordered = gradients.sort_values("ready_index")
    ready_s = ordered["ready_time_ms"].to_numpy() / 1e3
    profile = BackwardProfile(
        names=tuple(f"gradient {index}" for index in ordered["ready_index"]),
        sizes_bytes=ordered["size_bytes"].to_numpy(np.int64),
        ready_s=ready_s,
        backward_s=float(ready_s[-1]),
        kinds=tuple(ordered["dtype"]),
        registration=tuple(ordered["registration_index"]),
    )
    return profile.scaled(compute=local_s / profile.backward_s)
