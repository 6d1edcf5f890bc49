"""The tables and sentences of the accuracy study."""

from __future__ import annotations

import pandas as pd

from common.analysis.accuracy_case import JudgedCase
from common.analysis.accuracy_study import CHOICES, LONGER, OTHERS, JudgedStudy
from common.analysis.statistics import MOST_NOISE
from common.analysis.tables import Table
from common.perfmodel.model import CURVE, FULL, LINE, SEVERAL

OFF = 0.05
"""Bucketings predicted worse than this are listed one by one."""


def regime_table(study: JudgedStudy) -> Table:
    """A row per group of cases: errors of pass and step, and of the same with other inputs."""
    found = study.by_regime().reset_index()
    names = {
        "group": "",
        "bucketings": "bucketings",
        "n": "n",
        "median": "pass: median",
        "p90": "90 %",
        "worst": "worst",
        "step median": "step: median",
        LONGER: "longer calibration",
        OTHERS: "others' contention",
        LINE: LINE,
        CURVE: CURVE,
    }
    shares = dict.fromkeys(list(names.values())[2:], "{:.1%}")
    return Table(found[list(names)].rename(columns=names), shares)


def judgement_table(study: JudgedStudy) -> Table:
    """A row per group of cases: what is left of the errors without the measurement's own."""
    found = study.by_regime().reset_index()
    judged = found["judged"] > 0

    def text(column: str) -> pd.Series:
        return found[column].map("{:.1%}".format).where(judged, "not judged")

    return Table(
        pd.DataFrame(
            {
                "": found["group"],
                "n": found["n"],
                f"with n up to {MOST_NOISE:.1%}": [
                    f"{known} of {every}"
                    for known, every in zip(found["judged"], found["bucketings"], strict=True)
                ],
                "excess": text("excess"),
                "excess, 90 %": text("excess p90"),
                "in band": [
                    "no bands" if share != share else f"{share:.0%}" for share in found["inside"]
                ],
            }
        ),
        {"n": "{:.1%}"},
    )


def regret_table(study: JudgedStudy) -> Table:
    """A row per case: the chosen cap, the best measured, and what each choice costs."""
    found = study.regrets()
    found["interval"] = [
        f"{low:.1%} to {high:.1%}" if low == low else "too few rounds"
        for low, high in found[["low", "high"]].values
    ]
    found["inside"] = found["interior"].map({True: "yes", False: "no"})
    choices = [f"regret of {name}" for name in CHOICES if found[f"regret of {name}"].notna().any()]
    shown = found[["case", "b* (MiB)", "best (MiB)", "inside", *choices, "interval"]]
    shown = shown.rename(columns={name: name.removeprefix("regret of ") for name in choices})
    forms = dict.fromkeys(CHOICES, "{:.1%}")
    return Table(shown, forms | {"b* (MiB)": "{:.3g}", "best (MiB)": "{:.3g}"})


def regret_sentence(study: JudgedStudy) -> str:
    """How the predicted b* does beside two choices that need no model."""
    found = study.regrets()
    own = found["regret of b*"]
    told, known = int((found["low"] > 0.01).sum()), int(found["low"].notna().sum())
    smallest, largest, default = (found[f"regret of {name}"].median() for name in CHOICES[1:])
    known_default = (
        f"DDP's default costs {default:.1%}. "
        if default == default
        else "DDP's own default, whose first bucket has 1 MiB, is not among the caps that were "
        "measured. "
    )
    single, usual = int(found["one bucket"].sum()), int(found["as 25 MiB"].sum())
    return (
        f"In {len(found)} cases the predicted b* costs {own.median():.1%} in the median and "
        f"{own.max():.1%} at worst beside the best measured cap. In {told} of the {known} with "
        f"four rounds or more it is more than 1 % for sure (in 95 % of the draws). Choices without "
        f"a model cost in the median: the smallest cap {smallest:.1%}, the largest {largest:.1%}. "
        f"The largest puts all gradients into one bucket in {single} cases, so that nothing "
        f"overlaps; an explicit cap of 25 MiB does the same in {usual}. {known_default}"
        f"The best cap lies between smallest and largest in {int(found['interior'].sum())} cases."
    )


def off_lines(study: JudgedStudy, limit: float = OFF) -> str:
    """A line for every case with a bucketing that is off by more, as Markdown."""
    found = study.over(limit)
    if found.empty:
        return f"No bucketing is off by more than {limit:.0%}."
    cases = {case.name: case for case in study.cases}
    lines = [
        _off_line(cases[name], own, len(study.errors[study.errors["case"] == name]))
        for name, own in found.groupby("case", sort=False)
    ]
    return "\n".join(lines)


def _off_line(case: JudgedCase, own: pd.DataFrame, judged: int) -> str:
    worst = own.iloc[0]
    caps = ", ".join(
        f"{row['bucket_cap_mib']:.3g} MiB ({int(row['num_buckets'])} buckets) {row[FULL]:+.1%}"
        for _, row in own.iterrows()
    )
    return (
        f"- **{case.name}**: {len(own)} of {judged} off, {caps}. Noise of the case "
        f"{worst['noise']:.1%}, computation {case.local_s * 1e3:.0f} ms, all-reduces of everything "
        f"{case.curve.time_s(float(case.profile.total_bytes)) * 1e3:.0f} ms. {why_off(worst)}"
    )


def why_off(row: pd.Series) -> str:
    """What an error of one bucketing can come from; ``row`` is one of ``JudgedStudy.errors``.

    In this order: the measurement's own noise; with one bucket, where nothing runs beside anything,
    what the two take one after the other; contention, where an error of it is enough.
    """
    error = row[FULL]
    if abs(error) <= 2 * row["noise"]:
        return "The worst is within twice the noise: it says nothing of the model."
    if row["num_buckets"] == 1:
        off_ms = row["measured_ms"] - row["predicted_ms"]
        return (
            f"The worst is a single bucket, beside which nothing runs: computation and all-reduce, "
            f"one right after the other, took {abs(off_ms):.0f} ms "
            f"{'more' if off_ms > 0 else 'less'} than the two alone."
        )
    if row["model"] == "replay":
        return (
            f"A replay sleeps, and its model knows no contention; the messages of {row['hosts']} "
            "ranks wait for each other on the cores of one machine."
        )
    contention = row[FULL] - row[SEVERAL]
    if abs(contention) > abs(error):
        return (
            f"Contention makes up {contention:.0%} of the worst's pass: an error of "
            f"{abs(error / contention):.0%} in it suffices."
        )
    return (
        f"Contention as measured makes up only {contention:.0%} of the worst's pass: either it is "
        "larger beside DDP, or a term is missing."
    )
