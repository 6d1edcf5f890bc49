"""Sentences and tables that read their own numbers: the reader's own text runs."""

from __future__ import annotations

import pandas as pd

from common.analysis.comprehensive import Compared, verdict
from common.analysis.comprehensive_report import diagnosis_of, samples_text, speedup_text
from common.analysis.scaling_columns import STEP_COLUMNS
from common.analysis.step_parts import decompose
from common.analysis.text_scaling_narrative import mean_epoch_s, percent
from common.analysis.text_study import TextStudy
from common.errors import UserError
from common.perfmodel.tables import read_table

NO_RUNS = "There are no text runs in this run directory."


def own_shown(study: TextStudy) -> pd.DataFrame:
    """The reader's runs: samples as counted, and the speedup or why there is none."""
    return pd.DataFrame(
        {
            "data": one.configuration.dataset,
            "run": one.configuration.name,
            "epoch (s)": mean_epoch_s(one.configuration),
            "computed": one.configuration.identity.processed_per_epoch,
            "different": one.configuration.identity.distinct_per_epoch,
            "global batch": one.configuration.identity.global_batch,
            "speedup": "base" if one.is_base else _own_speedup(one),
            "accuracy": one.configuration.final_accuracy,
        }
        for compared in study.own.values()
        for one in compared
    )


def _own_speedup(one: Compared) -> str:
    return f"{one.speedup.value:.2f}x" if one.speedup else "n/a"


def own_sentence(study: TextStudy) -> str:
    """The speedup of the reader's runs, or the reason why there is none."""
    if study.left_out:
        return NO_RUNS
    parts = []
    for compared in study.own.values():
        for one in compared:
            if one.is_base:
                continue
            name = f"{one.configuration.dataset}, {one.configuration.name}"
            if one.speedup:
                parts.append(f"{name}: **{speedup_text(one.speedup)}**. *{verdict(one.speedup)}*.")
                continue
            parts.append(f"{name}: no speedup; {one.reason}.")
            if one.per_sample:
                samples = samples_text(one.configuration.runs[0])
                parts.append(f"Per sample {speedup_text(one.per_sample)}; {samples}.")
    if not parts:
        parts = ["All runs are on one rank: one world size only, so no speedup can be computed."]
    if study.warmup == 0:
        parts.append("With a single epoch there is no warm-up to leave out.")
    return " ".join(parts)


def problems_text(study: TextStudy) -> str:
    """What could not be used as it was, as a list; or that all could."""
    if study.left_out and not study.problems:
        return NO_RUNS
    return "\n".join(f"- {line}" for line in study.problems) or "All runs could be used."


def parts_shown(study: TextStudy) -> pd.DataFrame:
    """What the reader's steps consist of, in ms: a row per configuration, from its first run."""
    rows = []
    for one in _all(study):
        run = one.configuration.runs[0]
        try:
            parts = decompose(read_table(run.folder / "steps.csv", STEP_COLUMNS))
        except UserError:
            continue
        row = {"data set": one.configuration.dataset, "run": one.configuration.name}
        rows.append(row | {"step (ms)": parts.step_ms} | dict(parts.parts_ms))
    return pd.DataFrame(rows)


def parts_sentence(study: TextStudy) -> str:
    """Which part of the step grew most from one rank to several."""
    table = parts_shown(study)
    if table.empty:
        return "No run here has steps that were measured in parts."
    parts, sentences = list(table.columns[3:]), []
    for compared in study.own.values():
        base = next((one.configuration.name for one in compared if one.is_base), None)
        own = table[table["data set"] == compared[0].configuration.dataset].set_index("run")
        for name in own.index.difference([base]) if base in own.index else []:
            grown = own.loc[name, parts].astype(float) - own.loc[base, parts].astype(float)
            step = own.loc[name, "step (ms)"] - own.loc[base, "step (ms)"]
            sentences.append(
                f"From {base} to {name} the step changes by {step:+.1f} ms; what grows most is "
                f"**{grown.idxmax()}**, by {grown.max():.1f} ms, "
                f"{percent(grown.max() / own.loc[name, 'step (ms)'])} of the step."
            )
    return " ".join(sentences) or "Only one world size has steps that were measured in parts."


def diagnosis_text(study: TextStudy) -> str:
    """What the diagnosis says of the reader's runs on several ranks, as preformatted text."""
    lines = []
    for one in _all(study):
        if not one.is_base:
            lines += [*diagnosis_of(one.configuration.runs[0], one.base), ""]
    return "\n".join(["```text", *lines[:-1], "```"]) if lines else NO_RUNS


def _all(study: TextStudy) -> list[Compared]:
    return [one for compared in study.own.values() for one in compared]
