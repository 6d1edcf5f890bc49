"""Figures of the accuracy study: errors by group and predictor, and what following b* costs."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from common.analysis.accuracy.study import GROUPS, OTHERS, JudgedStudy, grouped
from common.analysis.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, figure
from common.perfmodel.model import CURVE, FULL, LINE

PREDICTORS = {LINE: ORANGE, CURVE: SKY, OTHERS: GREEN, FULL: BLUE}
COLOURS = {"smallest": SKY, "largest": ORANGE, "default": GREEN, "b*": BLUE}
PERCENT = FuncFormatter(lambda value, _: f"{value:g} %")


def errors_by_group(study: JudgedStudy) -> Figure:
    """Draws every judged bucketing's |error| of the backward pass, by group and predictor."""
    errors = study.errors.assign(group=grouped(study.errors))
    groups = [name for name in GROUPS if (errors["group"] == name).any()]
    with figure(study.caption, figsize=(7.2, 0.62 * len(groups) + 1.9)) as (fig, axes):
        for index, group in enumerate(groups):
            rows = errors[errors["group"] == group]
            for offset, (name, colour) in enumerate(PREDICTORS.items()):
                size = rows[name].abs().clip(lower=5e-4) * 100
                y = index + 0.2 * (offset - 1.5)
                axes.plot(size, np.full(len(size), y), "o", ms=3, color=colour, alpha=0.55, mew=0)
                axes.plot(size.median(), y, "|", ms=11, mew=2.2, color=colour)
            noise = rows["standard error"].median() * 100
            label = "n: standard error of the measured median" if not index else None
            axes.plot([noise] * 2, [index - 0.45, index + 0.45], ":", color=BLACK, label=label)
        for name, colour in PREDICTORS.items():
            axes.plot([], [], "o", color=colour, ms=4, label=name)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PERCENT)
        axes.set_xlabel("|predicted / measured − 1| of the backward pass; bar: median")
        axes.set_yticks(range(len(groups)), groups)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.legend(
            fontsize=7.5, loc="upper center", bbox_to_anchor=(0.4, 1.0 + 0.9 / len(groups)), ncols=3
        )
    return fig


def regrets(study: JudgedStudy) -> Figure:
    """Draws the regret of each choice of a cap in each case, beside the best that was measured."""
    table = study.regrets().set_index("case")
    with figure(study.caption, figsize=(7.2, 0.24 * len(table) + 1.3)) as (fig, axes):
        places = np.arange(len(table))
        axes.hlines(places, table["low"] * 100, table["high"] * 100, color=GREY, lw=3, alpha=0.5)
        single = " (one bucket)" if table["one bucket"].all() else ""
        for name, colour in COLOURS.items():
            if table[f"regret of {name}"].isna().all():
                continue  # not measured
            axes.plot(
                table[f"regret of {name}"] * 100,
                places,
                "D" if name == "b*" else "o",
                ms=4.5,
                color=colour,
                label=name + (single if name == "largest" else ""),
                clip_on=False,
            )
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter(PERCENT)
        axes.set_xlim(left=0)
        axes.set_xlabel("slower than the best measured cap; grey: 95 % interval of that of b*")
        axes.set_yticks(places, table.index, fontsize=7.5)
        axes.invert_yaxis()
        axes.legend(fontsize=7.5, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return fig
