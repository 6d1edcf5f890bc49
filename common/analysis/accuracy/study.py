"""Evaluates ``ddplab study accuracy``: predictions of bucketings that no calibration has seen.

Each case (``case.py``) is predicted from its own calibration; beside it stand the same model
with a longer calibration, with the contention of the *other* models on the same kind of network,
and on the machine as fast as a witness says it was meanwhile.

An error e and the standard error n of the measured median are told apart: what is left of e is the
excess √max(0, e² − n²). Where n is above ``MOST_NOISE``, or of fewer than ``JUDGED_ROUNDS``, a
bucketing is not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.accuracy.case import JudgedCase, caps_of, case_of, lost_to_messages
from common.analysis.buckets.sweep import regret_of
from common.analysis.runs import Run, age
from common.csv_tables import read_table
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, fastest
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.profile import DdpCosts, SecondsBySize, of_size
from common.perfmodel.expected_error import ERROR_COLUMNS, LATENCY, LOOPBACK, REGIMES, interval_s
from common.perfmodel.model import COPIES, CURVE, FULL, LINE, SEVERAL
from common.runtime.paths import project_root
from common.samples import MOST_NOISE, per_round

LONGER, OTHERS = "longer calibration", "contention of other models"
WITNESS = "at the witness's speed"
BESIDE = (LONGER, OTHERS, WITNESS)
"""The full model with other inputs."""
GROUPS = (*REGIMES, LATENCY, "four ranks on two cores", "replay", LOOPBACK)
JUDGED_ROUNDS = 8
OFF = 0.05
"""|error| of a backward pass above which a bucketing is listed by itself."""
USUAL_CAP_MIB = 25.0
"""DDP's ``bucket_cap_mb``; an explicit one is not its default, whose first bucket has 1 MiB."""
CHOICES = ("b*", "smallest", "largest", "default")
"""Caps to choose: the model's, and three that need no model. Older studies have no default."""


@dataclass(frozen=True, eq=False)
class JudgedStudy:
    """All cases of one run of the study; ``caption`` names hardware and date."""

    caption: str
    cases: tuple[JudgedCase, ...]

    @cached_property
    def errors(self) -> pd.DataFrame:
        """Tabulates the errors, one row per judged bucketing.

        Columns: case, model, hosts, regime, added_latency_ms, bucket_cap_mib (NaN is DDP's
        default), num_buckets, measured_ms, noise (floor of the case), standard error (of
        measured_ms, relative), rounds, predicted_ms; error of the backward pass under each rung,
        each extreme of overlap and each of ``BESIDE`` (NaN for ``OTHERS`` where there are none),
        excess (of the model's error), inside (whether the 90 % band holds the measurement; NaN
        without bands), chance (half its width; 0 without), expected (whether the interval of
        ``expected_error`` does, from the group's other cases alone; NaN without any), and step
        error (of the model).
        """
        errors = pd.concat([_judge(case, self._of_others(case)) for case in self.cases])
        return errors.assign(expected=_expected(errors))

    def _of_others(self, case: JudgedCase) -> DdpCosts | None:
        """Combines the case's own copies with the contention of the other models on such a network.

        None where there is no other, or no contention.
        """
        fellows = [
            other
            for other in self.cases
            if other.facts["model"] != case.facts["model"]
            and other.longer.lost_compute is not None
            and not other.facts["added_latency_ms"]
            and all(other.facts[key] == case.facts[key] for key in ("hosts", "regime"))
        ]
        if not fellows or case.longer.lost_compute is None:
            return None
        sizes = case.longer.lost_compute[0]

        def middle(curves: list[SecondsBySize]) -> SecondsBySize:
            seconds = np.median([of_size(curve, np.array(sizes)) for curve in curves], axis=0)
            return sizes, tuple(seconds.tolist())

        return replace(
            case.longer,
            lost_compute=middle([other.longer.lost_compute for other in fellows]),
            delays=middle([other.longer.delays for other in fellows]),
        )

    def by_regime(self) -> pd.DataFrame:
        """Tabulates per group: bucketings, noise floor, then median, 90th percentile and worst
        |error| of the backward pass, and the medians of the step's and of the other predictors'.

        Besides: n (median standard error), judged (bucketings whose own is no more than
        ``MOST_NOISE``, of ``JUDGED_ROUNDS`` or more; none where n is above that), excess and excess
        p90 (of these; NaN of none), inside and expected (shares of bands and of intervals that hold
        the measurement).
        """
        rows = {}
        errors = self.errors.assign(group=grouped(self.errors))
        for group, members in errors.groupby("group"):
            size, n = members[FULL].abs(), members["standard error"].median()
            is_quiet = members["standard error"] <= MOST_NOISE
            quiet = members[is_quiet & (members["rounds"] >= JUDGED_ROUNDS)]
            judged = quiet if n <= MOST_NOISE else members[:0]
            rows[group] = {
                "bucketings": len(members),
                "noise": members.drop_duplicates("case")["noise"].median(),
                "n": n,
                "judged": len(judged),
                "excess": judged["excess"].median(),
                "excess p90": judged["excess"].quantile(0.9),
                "inside": members["inside"].astype(float).mean(),
                "expected": members["expected"].mean(),
                "median": size.median(),
                "p90": size.quantile(0.9),
                "worst": size.max(),
                "step median": members["step error"].abs().median(),
                **members[[LONGER, OTHERS, LINE, CURVE]].abs().median(),
            }
        ordered = {group: rows[group] for group in (*GROUPS, *rows) if group in rows}
        return pd.DataFrame.from_dict(ordered, orient="index").rename_axis("group")

    def errors_by_regime(self) -> pd.DataFrame:
        """Tabulates what ``expected_error`` tells users of the model: ERROR_COLUMNS."""
        errors = {name: f"{name}_error" for name in ("median", "p90", "worst")}
        table = self.by_regime().rename_axis("regime").reset_index().rename(columns=errors)
        hardware, _, date = self.caption.rpartition("; ")
        return table.assign(hardware=hardware, date=date)[list(ERROR_COLUMNS)]

    def regrets(self) -> pd.DataFrame:
        """Tabulates the regret of b*, of the judged caps the one predicted to be fastest, by case,
        against the one that was; and the regret of choices without a model.

        Columns: case, b* (MiB), is clear (whether a cap is told from all others), best (MiB; NaN if
        none is, or DDP's default), interior (the best is told, and neither smallest nor largest),
        one bucket (the largest cap gives one: nothing overlaps), as 25 MiB (an explicit cap of 25
        MiB gives the same), ``regret of`` each of ``CHOICES`` (by medians, against the least; NaN
        where it was not measured); low, high and verdict (of that of b*, held against all other
        caps at once).
        """
        return pd.DataFrame([_regrets(case) for case in self.cases])

    def off(self) -> pd.DataFrame:
        """Selects the judged bucketings that are ``OFF``, the worst first."""
        errors = self.errors
        return errors[errors[FULL].abs() > OFF].sort_values(FULL, key=np.abs, ascending=False)


def grouped(errors: pd.DataFrame) -> pd.Series:
    """Assigns each judged bucketing to one of ``GROUPS``."""
    groups = errors["regime"].copy()
    groups[errors["added_latency_ms"] > 0] = LATENCY
    groups[errors["hosts"] > 2] = "four ranks on two cores"
    groups[errors["model"] == "replay"] = "replay"
    return groups


def _judge(case: JudgedCase, of_others: DdpCosts | None) -> pd.DataFrame:
    measured = case.judged.summary()
    steps = case.judged.summary("step_time_ms")["median_ms"]
    caps = caps_of(case.judged)
    predicted_s = case.predicted_s()
    table = pd.DataFrame(
        {
            **{key: case.facts[key] for key in ("case", "model", "hosts", "regime")},
            "added_latency_ms": case.facts["added_latency_ms"],
            "bucket_cap_mib": measured["bucket_cap_mib"],
            "num_buckets": measured["num_buckets"],
            "measured_ms": measured["median_ms"],
            "noise": case.judged.noise_floor(),
            "standard error": case.judged.standard_errors().to_numpy(),
            "rounds": case.judged.steps["round"].nunique(),
            "predicted_ms": [predicted_s[cap] * 1e3 for cap in caps],
        }
    )
    predictors = (
        case.model.ladder()
        | case.model.extremes()
        | {
            LONGER: replace(case.model, costs=case.longer).backward_s,
            WITNESS: case.model_of_witness.backward_s,
        }
    )
    predictors.setdefault(SEVERAL, predictors[COPIES])  # with one in flight that is the same
    table[OTHERS] = np.nan
    if of_others is not None:
        predictors[OTHERS] = replace(case.model, costs=of_others).backward_s
    for name, predict in predictors.items():
        table[name] = np.array([predict(cap) for cap in caps]) * 1e3 / table["measured_ms"] - 1
    table[FULL] = table["predicted_ms"] / table["measured_ms"] - 1
    table["excess"] = np.sqrt(np.maximum(0, table[FULL] ** 2 - table["standard error"] ** 2))
    table["step error"] = (table["predicted_ms"] + case.around_s * 1e3) / steps - 1
    if case.predictions is None:
        return table.assign(inside=np.nan, chance=0.0)
    bands = {
        None if pd.isna(row.bucket_cap_mib) else row.bucket_cap_mib: (row.low_ms, row.high_ms)
        for row in case.predictions.itertuples()
    }
    low, high = np.array([bands[cap] for cap in caps]).T
    measured_ms, predicted_ms = table["measured_ms"], table["predicted_ms"]
    return table.assign(
        inside=(low <= measured_ms) & (measured_ms <= high), chance=(high - low) / 2 / predicted_ms
    )


def _expected(errors: pd.DataFrame) -> list[float]:
    """Checks if each judged bucketing is within the interval that the group's other cases give.

    1 or 0, and NaN in a group of one case.
    """
    groups = grouped(errors)
    inside = []
    for (_, row), group in zip(errors.iterrows(), groups, strict=True):
        is_fellow = ((groups == group) & (errors["case"] != row["case"])).to_numpy()
        fellows = errors.loc[is_fellow, FULL]
        if fellows.empty:
            inside.append(np.nan)
            continue
        error = math.hypot(fellows.abs().quantile(0.9), row["chance"])
        low, high = interval_s(row["predicted_ms"], error)
        inside.append(float(low <= row["measured_ms"] <= high))
    return inside


def _regrets(case: JudgedCase) -> dict:
    caps = caps_of(case.judged)
    explicit = [cap for cap in caps if cap is not None]
    predicted_s = case.predicted_s()
    medians_s = case.judged.summary()["median_ms"] / 1e3
    measured = dict(zip(caps, medians_s, strict=True))
    best = min(explicit, key=predicted_s.__getitem__)
    chosen = dict(zip(CHOICES, (best, explicit[0], explicit[-1], None), strict=True))
    rounds = per_round(case.judged.steps, "backward_time_ms", "bucket_cap_mib")
    conditions = {"machine": case.judged.machine, "least_rounds": FIRST_PAGE_ROUNDS}
    judged, first = regret_of(rounds, best, **conditions), fastest(rounds, **conditions)
    is_clear = first is not None and first.lead.is_settled
    row = {"case": case.name, "b* (MiB)": best, "is clear": is_clear}
    row["best (MiB)"] = first.arm if is_clear else np.nan
    row["interior"] = is_clear and first.arm not in (explicit[0], explicit[-1])
    largest, usual = (
        profile_buckets(case.profile, DdpOptions(cap)) for cap in (explicit[-1], USUAL_CAP_MIB)
    )
    row |= {"one bucket": len(largest) == 1, "as 25 MiB": largest == usual}
    shortest_s = min(measured.values())
    for name, cap in chosen.items():
        row[f"regret of {name}"] = measured.get(cap, np.nan) / shortest_s - 1
    row |= {"low": judged.interval.low, "high": judged.interval.high}
    return row | {"verdict": str(judged.verdict)}


def recorded_study() -> JudgedStudy:
    """Opens the newest study that is recorded under data/. Raises UserError where there is none."""
    tables = [*(project_root() / "data").glob("*/study-accuracy/cases.csv")]
    if not tables:
        raise UserError("no accuracy study is recorded below data/")
    return open_study(max((Run(path.parent, path.parent) for path in tables), key=age).folder)


def open_study(folder: str | Path) -> JudgedStudy:
    """Reads the study's tables in ``folder``. Raises UserError where one is not there or broken."""
    folder = Path(folder)
    cases = read_table(folder / "cases.csv", ["case", "model", "regime", "hosts"])
    cases = cases.astype({"regime": str})  # exchanges have names such as 0.5
    names = ["steps.csv", "gradients.csv", "all-reduces.csv", "overlap.csv"]
    if (folder / "predictions.csv").exists():  # not in older studies
        names.append("predictions.csv")
    tables = {name: read_table(folder / name, ["case"]) for name in names}
    for name, table in tables.items():
        if missing := [case for case in cases["case"] if case not in set(table["case"])]:
            raise UserError(f"{folder / name}: no rows of case {missing[0]}")
    steps, overlap = tables["steps.csv"], tables["overlap.csv"]
    jobs = _jobs(cases)
    copies, lost = _copies_s(cases, overlap), _lost(cases, overlap, jobs)
    opened = []
    for _, facts in cases.iterrows():
        name = facts["case"]
        rows = {file: table[table["case"] == name] for file, table in tables.items()}
        fellows = [case for case in jobs[name] if case != name]
        shared = steps["role"].isin(["local", "witness"]) & steps["case"].isin(fellows)
        rows["steps.csv"] = pd.concat([rows["steps.csv"], steps[shared]])
        opened.append(case_of(facts, rows, lost.get(name), copies[name]))
    environment = Run(folder, folder).environment
    if "cpu" not in environment:
        raise UserError(f"{folder}: no environment.json that says where and when it was measured")
    device = environment.get("device_name") or environment["cpu"]["model"]
    caption = f"{device}; {environment['start_time'][:10]}"
    return JudgedStudy(caption, tuple(opened))


def _jobs(cases: pd.DataFrame) -> dict[str, list[str]]:
    """Maps each case to those that the same ranks measured in the same rotation, itself included:
    its model's on other networks, which steps without DDP know nothing of."""
    key = ["model", "hosts", cases["regime"] == "loopback"]
    return {name: list(together) for _, together in cases.groupby(key)["case"] for name in together}


def _lost(
    cases: pd.DataFrame, overlap: pd.DataFrame, jobs: dict[str, list[str]]
) -> dict[str, SecondsBySize | None]:
    """Maps each case to the computation lost to messages in its job's networks; not for replays."""
    computes = cases.loc[cases["model"] != "replay", "case"]
    return {
        name: lost_to_messages([overlap[overlap["case"] == other] for other in jobs[name]])
        for name in computes
    }


def _copies_s(cases: pd.DataFrame, overlap: pd.DataFrame) -> dict[str, float]:
    """Maps each case to the seconds that DDP over one rank adds to the backward pass.

    A byte takes as long to copy in any model: the median of the differences within a round, by the
    byte, over all that compute (a replay sleeps meanwhile) with as many ranks on the machine.
    """
    times = overlap[overlap["arm"].isin(["local", "bookkeeping"])]
    by_round = times.groupby(["case", "round", "arm"])["backward_time_ms"].median().unstack()
    added = (by_round["bookkeeping"] - by_round["local"]).rename("added").reset_index()
    sizes = times.groupby("case")["gradient_bytes"].first()
    added["per_byte"] = added["added"] / added["case"].map(sizes)
    kinds = cases.assign(sleeps=cases["model"] == "replay")[["case", "hosts", "sleeps"]]
    medians = added.merge(kinds, on="case").groupby(["hosts", "sleeps"])["per_byte"].median()
    return {
        row.case: max(0.0, float(medians[row.hosts, row.sleeps] * sizes[row.case])) / 1e3
        for row in kinds.itertuples()
    }
