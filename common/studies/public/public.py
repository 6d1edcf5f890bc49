"""``ddplab study public``: published multi-GPU rows, predicted from hardware and configuration.

Nothing is measured. Two scores are never mixed: *scaling*, in which each series is anchored at its
smallest number of GPUs, and *throughput*, in which MFU is an assumption. ``rows.csv`` has every
training row with its prediction or the reason for none, ``series.csv`` and ``scores.csv`` what
follows, ``refusals.csv`` the reasons counted, ``collectives.csv`` a row per size of a collective
and ``collective-tables.csv`` one per table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.records.study import say_tables, study_run
from common.runtime.stage_progress import StageProgress
from common.samples import LEAST_ROUNDS
from common.settings import Settings
from common.studies.public import predictor
from common.studies.public.collectives import collective_tables, predict_collectives
from common.studies.public.hardware import regime
from common.studies.public.jobs import (
    Forecast,
    Predictor,
    job_of,
    published_samples_per_s,
    read_published,
    with_defaults,
)
from common.studies.public.scores import (
    absolute_scores,
    collective_scores,
    memory_scores,
    pair_scores,
    scaling_scores,
    summary,
)
from common.studies.public.series import LOSSY, errors_by_series, with_series


@dataclass(frozen=True)
class PublicStudy(Settings):
    """Settings of the study."""

    table: tuple[str, ...] = ()
    """Tables of published rows, or folders with training.csv and collectives.csv."""


SETTINGS = PublicStudy


def run_study(study: PublicStudy, output_dir: str, progress: StageProgress) -> Path:
    """Predicts and scores every row; returns the run directory.

    Raises UserError without a table, and for one that cannot be read.
    """
    if not study.table:
        raise UserError("study public needs --table FILE: published rows, or a folder of them")
    read = [read_published(table) for table in study.table]
    published = pd.concat([table for table, _ in read], ignore_index=True)
    training = published[published["kind"] != "collective"]
    collectives = published[(published["kind"] == "collective") & (published["problem"] == "")]
    environment = describe_environment(None, "cpu", 1, "published tables")
    with study_run("public", study, output_dir, progress, environment) as run:
        for line in [line for _, lines in read for line in lines]:
            progress.say(line)
        for row in published[published["problem"] != ""].itertuples():
            progress.say(f"{row.file} line {row.line}: {row.problem}; not scored")
        with progress.stage(f"{len(training)} training rows") as update:
            rows = score_rows(predict_rows(training, predictor.predict, update))
        series = errors_by_series(rows)
        parts = [scores_of(rows, series)]
        if len(collectives):
            with progress.stage(f"{len(collectives)} rows of collectives"):
                sizes = predict_collectives(collectives)
                tables = collective_tables(sizes)
            run.write_table("collectives.csv", sizes)
            run.write_table("collective-tables.csv", tables)
            parts.append(collective_scores(tables))
        scores = pd.concat(parts, ignore_index=True).astype({"answered": "Int64"})
        refusals = refusals_of(rows)
        for name, table in (("rows", rows), ("series", series), ("scores", scores)):
            run.write_table(f"{name}.csv", table)
        run.write_table("refusals.csv", refusals)
    progress.say(predictor.assumption())
    filled = [table for table in (scores, refusals) if len(table)]
    say_tables(progress, *filled, float_format="%.3f", na_rep="")
    return run.path


def predict_rows(
    training: pd.DataFrame, predict: Predictor, update: Callable[[str], None]
) -> pd.DataFrame:
    """Predicts training rows as ``read_published`` gives them.

    Returns:
        The rows with predicted, low, high (samples per second and GPU), memory_bytes, fits,
        largest_micro_batch, ``reason`` (of a refusal, or what is wrong with the row, else ""),
        regime, model_parallel, and ``published`` (samples per second and GPU; NaN where the unit
        cannot be converted, for the reason in ``unit_reason``).
    """
    answers = []
    for number, (_, row) in enumerate(training.iterrows()):
        update(f"row {number + 1}")
        answers.append(_predicted(row, predict))
    columns = ["predicted", *[field.name for field in fields(Forecast)][1:], "regime"]
    columns += ["model_parallel", "published", "unit_reason"]
    added = pd.DataFrame(answers, index=training.index, columns=columns)
    numbers = ["predicted", "low", "high", "memory_bytes", "largest_micro_batch", "published"]
    types = dict.fromkeys(numbers, float) | {"model_parallel": bool}
    return training.join(added.astype(types))


def _predicted(row: pd.Series, predict: Predictor) -> dict:
    if row["problem"]:
        return {"reason": row["problem"], "model_parallel": False}
    row = with_defaults(row)
    job = job_of(row)
    answer = {"reason": "", "regime": regime(job), "model_parallel": job.is_model_parallel}
    try:
        answer |= {"published": published_samples_per_s(row), "unit_reason": ""}
    except UserError as error:
        answer |= {"published": np.nan, "unit_reason": str(error)}
    try:
        forecast = asdict(predict(job))
    except UserError as error:
        return answer | {"reason": str(error)}
    return answer | {"predicted": forecast.pop("samples_per_s")} | forecast


def score_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Adds errors to predicted rows: ``absolute_error``, and those of ``with_series``.

    A refusal's absolute error is infinite. It is NaN where a row with a problem or a unit that
    cannot be converted leaves nothing to compare with.
    """
    error = rows["predicted"] / rows["published"] - 1
    refused = rows["predicted"].isna()
    usable = rows["problem"] == ""
    return with_series(rows.assign(absolute_error=error.mask(refused & usable, np.inf)))


def scores_of(rows: pd.DataFrame, series: pd.DataFrame) -> pd.DataFrame:
    """Returns all scores of training rows, as ``scores`` describes them."""
    chosen = rows[(rows["problem"] == "") & ~rows["model_parallel"]]
    usable = rows[rows["problem"] == ""]
    parts = [scaling_scores(series), absolute_scores(chosen), memory_scores(usable)]
    parts.append(pair_scores(chosen))
    return pd.concat(parts, ignore_index=True)


def refusals_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Counts the reasons for which rows were refused: reason, rows, the most frequent first."""
    reasons = rows.loc[rows["reason"] != "", "reason"].value_counts()
    return reasons.rename_axis("reason").rename("rows").reset_index()


def closing_line(run_dir: Path) -> str:
    """Returns the study's last line: the scaling of series that lose, and how much was answered.

    The medians are over series without tensor, pipeline and context parallelism whose largest
    number of GPUs loses ``LOSSY`` or more; M are all training rows without them.
    """
    rows, series = (
        pd.read_csv(run_dir / f"{name}.csv", dtype={"model_parallel": bool})
        for name in ("rows", "series")
    )
    rows = rows[~rows["model_parallel"]]
    lossy = series[(series["lost"] >= LOSSY) & ~series["model_parallel"]]
    form = "{value:.1%}"
    if len(lossy) >= LEAST_ROUNDS:
        form += " ({low:.1%} to {high:.1%})"
    scaling, perfect = (
        form.format(**summary(lossy[f"{name}_error"])) for name in ("scaling", "perfect")
    )
    answered = rows["predicted"].notna().sum()
    return (
        f"scaling: median {scaling}, perfect scaling {perfect}, of "
        f"{len(lossy)} series that lose {LOSSY:.0%} or more; "
        f"answered {answered} of {len(rows)}".replace("%", " %")
    )
