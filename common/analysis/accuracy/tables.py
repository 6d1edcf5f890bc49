"""The tables of the accuracy study, ready for a notebook."""

from __future__ import annotations

import pandas as pd

from common.analysis.accuracy.study import CHOICES, LONGER, OTHERS, JudgedStudy
from common.analysis.show import Table
from common.perfmodel.model import CURVE, FULL, LINE, SEVERAL
from common.samples import MOST_NOISE

OFF = 0.05
"""Bucketings predicted worse than this are listed one by one."""
NOISE = "noise"
SINGLE = "one bucket after the pass"
SHARED_CORES = "ranks on few cores"
CONTENTION = "contention"
UNKNOWN = "not explained"
"""Possible sources of an error."""
SHARE = "{:.1%}"
REGIMES = {
    "group": "",
    "bucketings": "bucketings",
    "n": ("n", SHARE),
    "median": ("pass: median", SHARE),
    "p90": ("90 %", SHARE),
    "worst": ("worst", SHARE),
    "step median": ("step: median", SHARE),
    LONGER: ("longer calibration", SHARE),
    OTHERS: ("others' contention", SHARE),
    LINE: (LINE, SHARE),
    CURVE: (CURVE, SHARE),
}
"""Titles of ``JudgedStudy.by_regime``: errors of pass and step, also with other inputs."""
JUDGED = {
    "group": "",
    "n": ("n", SHARE),
    ("judged", "bucketings"): (f"with n up to {MOST_NOISE:.1%}", "{} of {}"),
    ("excess", "judged"): ("excess", lambda excess, judged: _where(judged, excess)),
    ("excess p90", "judged"): ("excess, 90 %", lambda excess, judged: _where(judged, excess)),
    ("inside", "n"): ("in band", lambda share, _: _held(share, "no bands")),
    ("expected", "n"): ("in expected interval", lambda share, _: _held(share, "one case")),
}
"""Titles of ``JudgedStudy.by_regime``: the errors without the measurement's own."""
OFF_COLUMNS = (
    "case",
    "off",
    "buckets of the worst",
    "its error",
    "noise of the case",
    "computation (ms)",
    "all-reduces (ms)",
    "contention's share of its pass",
    "what it can come from",
)


def regret_summary(study: JudgedStudy) -> Table:
    """Returns a row per way to choose the cap: what it costs beside the best measured cap."""
    found = study.regrets()
    rows = [
        {
            "choice": name,
            "cases": found[f"regret of {name}"].notna().sum(),
            "regret, median": found[f"regret of {name}"].median(),
            "regret, worst": found[f"regret of {name}"].max(),
        }
        for name in CHOICES
        if found[f"regret of {name}"].notna().any()
    ]
    return Table(pd.DataFrame(rows), {"regret, median": "{:.1%}", "regret, worst": "{:.1%}"})


def regret_facts(study: JudgedStudy) -> dict[str, str]:
    """Returns in how many cases the regret of b* is significant, and what the caps were like."""
    found = study.regrets()
    known, above = found["low"].notna().sum(), (found["low"] > 0.01).sum()
    return {
        "cases": f"{len(found)}",
        "regret of b* significantly above 1 % (95 % of the draws)": f"{above} of {known}",
        "the best cap is neither the smallest nor the largest": f"{found['interior'].sum()}",
        "the largest cap is one bucket, so nothing overlaps": f"{found['one bucket'].sum()}",
        "an explicit cap of 25 MiB is one bucket, too": f"{found['as 25 MiB'].sum()}",
    }


def off_table(study: JudgedStudy, limit: float = OFF) -> Table:
    """Returns a row per case with an error above ``limit``, the worst case first."""
    found = study.over(limit)
    cases = {case.name: case for case in study.cases}
    rows = []
    for name, own in found.groupby("case", sort=False):
        case, worst = cases[name], own.iloc[0]
        total_bytes = float(case.profile.total_bytes)
        rows.append(
            {
                "case": name,
                "off": f"{len(own)} of {(study.errors['case'] == name).sum()}",
                "buckets of the worst": int(worst["num_buckets"]),
                "its error": worst[FULL],
                "noise of the case": worst["noise"],
                "computation (ms)": case.local_s * 1e3,
                "all-reduces (ms)": case.curve.time_s(total_bytes) * 1e3,
                "contention's share of its pass": worst[FULL] - worst[SEVERAL],
                "what it can come from": cause_of_error(worst),
            }
        )
    formats = {
        "its error": "{:+.1%}",
        "noise of the case": "{:.1%}",
        "computation (ms)": "{:.0f}",
        "all-reduces (ms)": "{:.0f}",
        "contention's share of its pass": "{:.0%}",
    }
    return Table(pd.DataFrame(rows, columns=[*OFF_COLUMNS]), formats)


def _where(judged: int, excess: float) -> str:
    return f"{excess:.1%}" if judged else "not judged"


def _held(share: float, without: str) -> str:
    return without if share != share else f"{share:.0%}"


def cause_of_error(row: pd.Series) -> str:
    """Returns what an error of one bucketing can come from; ``row`` is of ``JudgedStudy.errors``.

    In this order: the measurement's own noise (an error up to twice it); with one bucket, beside
    which nothing runs, computation and all-reduce one after the other; of a replay, whose model has
    no contention, ranks that wait for each other on the cores of one machine; contention, where an
    error in it of its own size is enough.
    """
    error = row[FULL]
    if abs(error) <= 2 * row["noise"]:
        return NOISE
    if row["num_buckets"] == 1:
        return SINGLE
    if row["model"] == "replay":
        return SHARED_CORES
    return CONTENTION if abs(error - row[SEVERAL]) > abs(error) else UNKNOWN
