"""The tables of the accuracy study, ready for a notebook."""

from __future__ import annotations

import pandas as pd

from common.analysis.accuracy.study import CHOICES, LONGER, OTHERS, JudgedStudy
from common.analysis.show import Table
from common.judged import FIRST_PAGE_ROUNDS, Judged, Verdict
from common.perfmodel.model import CURVE, FULL, LINE, SEVERAL
from common.samples import MOST_NOISE, median

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
OFF_CASES = {
    "case": "case",
    ("off", "bucketings"): ("off", "{} of {}"),
    "num_buckets": "buckets of the worst",
    "error": ("its error", "{:+.1%}"),
    "noise": ("noise of the case", SHARE),
    "compute_ms": ("computation (ms)", "{:.0f}"),
    "all_reduce_ms": ("all-reduces (ms)", "{:.0f}"),
    "contention": ("contention's share of its pass", "{:.0%}"),
    "cause": "what it can come from",
}
"""Titles of ``off_cases``."""


def regret_summary(study: JudgedStudy) -> Table:
    """Returns a row per way to choose the cap: what it costs beside the best measured cap."""
    regrets, rows = study.regrets(), []
    for name in CHOICES:
        if len(measured := regrets[f"regret of {name}"].dropna()):
            middle = median_regret(study, name).interval
            text = middle.text(SHARE, "case")
            rows.append((name, len(measured), middle.estimate, text, measured.max()))
    columns = ["choice", "cases", "regret, median", "95 % over cases", "regret, worst"]
    return Table(pd.DataFrame(rows, columns=columns), dict.fromkeys(columns[2::2], SHARE))


def median_regret(study: JudgedStudy, name: str) -> Judged:
    """Judges the median over cases of what a choice of cap costs (one of ``CHOICES``)."""
    middle = median(study.regrets()[f"regret of {name}"].dropna())
    return Judged(middle, null=0.0, least_rounds=FIRST_PAGE_ROUNDS)


def regret_facts(study: JudgedStudy) -> dict[str, str]:
    """Returns in how many cases the regret of b* is settled, and what the caps were like."""
    regrets = study.regrets()
    is_settled = regrets["verdict"] == Verdict.SETTLED
    above = (is_settled & (regrets["low"] > 0.01)).sum()
    return {
        "cases": f"{len(regrets)}",
        "regret of b* surely above 1 % (95 %, against all other caps)": f"{above}",
        "one cap is told from all others": f"{regrets['is clear'].sum()}",
        "and is neither the smallest nor the largest": f"{regrets['interior'].sum()}",
        "the largest cap is one bucket, so nothing overlaps": f"{regrets['one bucket'].sum()}",
        "an explicit cap of 25 MiB is one bucket, too": f"{regrets['as 25 MiB'].sum()}",
    }


def off_cases(study: JudgedStudy) -> pd.DataFrame:
    """Tabulates the cases with bucketings that are off (``JudgedStudy.off``), the worst first.

    Columns: case, off (number of these), bucketings, then of the worst one num_buckets,
    error and contention (its part of the error), and noise, compute_ms and all_reduce_ms (of all
    gradients in one), cause.
    """
    cases = {case.name: case for case in study.cases}
    counts = study.errors["case"].value_counts()
    rows = []
    for name, bucketings in study.off().groupby("case", sort=False):
        case, worst = cases[name], bucketings.iloc[0]
        rows.append(
            {
                "case": name,
                "off": len(bucketings),
                "bucketings": counts[name],
                "num_buckets": int(worst["num_buckets"]),
                "error": worst[FULL],
                "noise": worst["noise"],
                "compute_ms": case.local_s * 1e3,
                "all_reduce_ms": case.curve.time_s(float(case.profile.total_bytes)) * 1e3,
                "contention": worst[FULL] - worst[SEVERAL],
                "cause": cause_of_error(worst),
            }
        )
    columns = ["case", "off", "bucketings", *list(OFF_CASES)[2:]]
    return pd.DataFrame(rows, columns=columns)


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
