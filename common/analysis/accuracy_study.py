"""What ``ddplab study accuracy`` says: predictions of bucketings that no calibration has seen.

Each case (``accuracy_case``) is predicted from its own calibration, and in a second judgement with
the contention of the *other* models on the same kind of network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.accuracy_case import Contention, JudgedCase, case_of, contention_of
from common.analysis.sweep import BucketSweep
from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.expected_error import ERROR_COLUMNS, LATENCY, LOOPBACK, REGIMES
from common.perfmodel.model import COPIES, FULL, RUNGS, SEVERAL
from common.perfmodel.profile import DdpCosts
from common.perfmodel.simulator import profile_buckets
from common.perfmodel.tables import read_table
from common.runtime.paths import project_root
from common.runtime.run_directory import read_environment

OTHERS = "contention of other models"
GROUPS = (*REGIMES, LATENCY, "four ranks on two cores", "replay", LOOPBACK)
USUAL_CAP_MIB = 25.0
"""DDP's ``bucket_cap_mb``; an explicit one is not its default, whose first bucket has 1 MiB."""
CHOICES = ("b*", "smallest", "largest")
"""Caps to choose: the model's, and two that need no model."""
DRAWS = 500


@dataclass(frozen=True, eq=False)
class JudgedStudy:
    """All cases of one run of the study; ``caption`` names hardware and date."""

    folder: Path
    caption: str
    cases: tuple[JudgedCase, ...]

    @cached_property
    def errors(self) -> pd.DataFrame:
        """One row per judged bucketing.

        Columns: case, model, hosts, regime, added_latency_ms, bucket_cap_mib, num_buckets,
        measured_ms, measured_step_ms, noise (of the case), predicted_ms; error of the backward
        pass under each predictor (its name; NaN for ``OTHERS`` where there are none), and step
        error (of the model).
        """
        return pd.concat([_judge(case, self._of_others(case)) for case in self.cases])

    def _of_others(self, case: JudgedCase) -> DdpCosts | None:
        """The case's own copies with the contention of the other models on such a network.

        None where there is no other, or no contention.
        """
        alike = [
            other
            for other in self.cases
            if other.facts["model"] != case.facts["model"]
            and other.contention is not None
            and not other.facts["added_latency_ms"]
            and all(other.facts[key] == case.facts[key] for key in ("hosts", "regime"))
        ]
        if not alike or case.contention is None:
            return None
        sizes = case.contention.sizes_bytes
        lost_s = np.median([other.costs.lost_to(sizes) for other in alike], axis=0)
        slower = np.median([other.costs.slowdown_of(sizes) for other in alike], axis=0)
        return case.with_contention(Contention(sizes, lost_s, slower))

    def by_regime(self) -> pd.DataFrame:
        """Per group: cases, bucketings, noise floor, then median, 90th percentile and worst |error|
        of backward pass and step, and the medians of the other predictors."""
        rows = []
        errors = self.errors.assign(group=grouped(self.errors))
        for group, own in errors.groupby("group", sort=False):
            row = {"group": group, "cases": own["case"].nunique(), "bucketings": len(own)}
            row["noise"] = own.drop_duplicates("case")["noise"].median()
            for what, column in (("", FULL), ("step ", "step error")):
                size = own[column].abs()
                row |= {f"{what}median": size.median(), f"{what}p90": size.quantile(0.9)}
                row[f"{what}worst"] = size.max()
            for column in (OTHERS, *RUNGS[:-1]):
                row[column] = own[column].abs().median()
            rows.append(row)
        order = {name: place for place, name in enumerate(GROUPS)}
        return (
            pd.DataFrame(rows).sort_values("group", key=lambda g: g.map(order)).set_index("group")
        )

    def errors_by_regime(self) -> pd.DataFrame:
        """What ``expected_error`` tells users of the model: ERROR_COLUMNS."""
        table = self.by_regime().reset_index()
        table = table.rename(columns={"group": "regime", "median": "median_error"})
        table = table.rename(columns={"p90": "p90_error", "worst": "worst_error"})
        hardware, _, date = self.caption.rpartition("; ")
        return table.assign(hardware=hardware, date=date)[list(ERROR_COLUMNS)]

    def regrets(self) -> pd.DataFrame:
        """Per case what b*, of the judged caps the one predicted to be fastest, costs beside the
        one that was; and what choices without a model cost.

        Columns: case, b* (MiB), best (MiB), interior (the best is neither smallest nor largest),
        one bucket (the largest cap gives one: nothing overlaps), as 25 MiB (an explicit cap of 25
        MiB gives the same), ``regret of`` each of ``CHOICES``, low and high (of that of b*).
        """
        return pd.DataFrame([_regrets(case) for case in self.cases])

    def over(self, limit: float = 0.05) -> pd.DataFrame:
        """The judged bucketings whose backward pass is off by more, the worst first."""
        errors = self.errors
        return errors[errors[FULL].abs() > limit].sort_values(FULL, key=np.abs, ascending=False)


def grouped(errors: pd.DataFrame) -> pd.Series:
    """Which of ``GROUPS`` each judged bucketing belongs to."""
    groups = errors["regime"].copy()
    groups[errors["added_latency_ms"] > 0] = LATENCY
    groups[errors["hosts"] > 2] = "four ranks on two cores"
    groups[errors["model"] == "replay"] = "replay"
    return groups


def _judge(case: JudgedCase, of_others: DdpCosts | None) -> pd.DataFrame:
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
    predictors = case.model.ladder()
    predictors.setdefault(SEVERAL, predictors[COPIES])  # with one in flight that is the same
    table[OTHERS] = np.nan
    if of_others is not None:
        predictors[OTHERS] = replace(case.model, costs=of_others).backward_s
    for name, predict in predictors.items():
        predicted_ms = np.array([predict(cap) for cap in caps]) * 1e3
        table[name] = predicted_ms / table["measured_ms"] - 1
        if name == FULL:
            table["predicted_ms"] = predicted_ms
            table["step error"] = (predicted_ms + case.around_s * 1e3) / steps - 1
    return table


def _regrets(case: JudgedCase) -> dict:
    caps = sorted(case.judged.measured_s())
    best = min(caps, key=case.model.backward_s)
    chosen = dict(zip(CHOICES, (best, caps[0], caps[-1]), strict=True))
    low, high = _regret_interval(case.judged, best)
    measured = case.judged.measured_s()
    fastest = min(measured, key=measured.__getitem__)
    row = {"case": case.name, "b* (MiB)": best, "best (MiB)": fastest}
    row["interior"] = fastest not in (caps[0], caps[-1])
    largest, usual = (
        profile_buckets(case.profile, DdpOptions(cap)) for cap in (caps[-1], USUAL_CAP_MIB)
    )
    row |= {"one bucket": len(largest) == 1, "as 25 MiB": largest == usual}
    for name, cap in chosen.items():
        row[f"regret of {name}"] = measured[cap] / measured[fastest] - 1
    return row | {"low": low, "high": high}


def _regret_interval(sweep: BucketSweep, chosen: float) -> tuple[float, float]:
    """5 to 95 % of the regret over rounds drawn with replacement; NaN of fewer than four."""
    if sweep.steps["round"].nunique() < 4:
        return float("nan"), float("nan")
    keys = ["round", "bucket_cap_mib"]
    by_round = sweep.steps.groupby(keys)["backward_time_ms"].median().unstack()
    generator = np.random.default_rng(0)
    place = by_round.columns.get_loc(chosen)
    values = by_round.to_numpy()
    drawn = values[generator.integers(len(values), size=(DRAWS, len(values)))]
    medians = np.median(drawn, axis=1)
    regrets = medians[:, place] / medians.min(axis=1) - 1
    return tuple(map(float, np.quantile(regrets, [0.05, 0.95])))


def recorded_study() -> JudgedStudy:
    """The study that is recorded under data/, the newest. Raises UserError where there is none."""
    found = [path.parent for path in (project_root() / "data").glob("*/study-accuracy/cases.csv")]
    if not found:
        raise UserError("no accuracy study is recorded below data/")
    return open_study(max(found, key=lambda path: read_environment(path)["start_time"]))


def open_study(folder: str | Path) -> JudgedStudy:
    """The study's tables in ``folder``. Raises UserError where they are not there or broken."""
    folder = Path(folder)
    cases = read_table(folder / "cases.csv", ["case", "model", "regime", "hosts"])
    names = ("steps.csv", "gradients.csv", "all-reduces.csv", "overlap.csv")
    tables = {name: read_table(folder / name, ["case"]) for name in names}
    for name, table in tables.items():
        if missing := [case for case in cases["case"] if case not in set(table["case"])]:
            raise UserError(f"{folder / name}: no rows of case {missing[0]}")
    steps, overlap = tables["steps.csv"], tables.pop("overlap.csv")
    jobs = _jobs(cases)
    copies, contention = _copies_s(cases, overlap), _contention(cases, overlap, jobs)
    opened = []
    for _, facts in cases.iterrows():
        name = facts["case"]
        own = {file: table[table["case"] == name] for file, table in tables.items()}
        others = [case for case in jobs[name] if case != name]
        alike = (steps["role"] == "local") & steps["case"].isin(others)
        own["steps.csv"] = pd.concat([own["steps.csv"], steps[alike]])
        opened.append(case_of(facts, *own.values(), contention.get(name), copies[name]))
    environment = read_environment(folder)
    if "cpu" not in environment:
        raise UserError(f"{folder}: no environment.json that says where and when it was measured")
    caption = f"{environment['cpu']['model']}; {environment['start_time'][:10]}"
    return JudgedStudy(folder, caption, tuple(opened))


def _jobs(cases: pd.DataFrame) -> dict[str, list[str]]:
    """Case → the cases that the same ranks measured in the same rotation, itself included: its
    model's on other networks, which steps without DDP know nothing of."""
    key = ["model", "hosts", cases["regime"] == "loopback"]
    return {name: list(together) for _, together in cases.groupby(key)["case"] for name in together}


def _contention(
    cases: pd.DataFrame, overlap: pd.DataFrame, jobs: dict[str, list[str]]
) -> dict[str, Contention]:
    """Case → its contention; replays, which sleep, have none."""
    computes = cases.loc[cases["model"] != "replay", "case"]
    found = {}
    for job in {tuple(jobs[name]) for name in computes}:
        rows = [overlap[overlap["case"] == name] for name in job]
        found |= dict(zip(job, contention_of(rows), strict=True))
    return found


def _copies_s(cases: pd.DataFrame, overlap: pd.DataFrame) -> dict[str, float]:
    """Case → seconds that DDP over one rank adds to the backward pass.

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
        one.case: max(0.0, float(medians[one.hosts, one.sleeps] * sizes[one.case])) / 1e3
        for one in kinds.itertuples()
    }
