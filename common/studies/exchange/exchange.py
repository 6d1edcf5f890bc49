"""``ddplab study exchange``: T(b) over an exchange of known duration, on one device.

One rank, whose process group makes an all-reduce of x bytes take a(x) (``emulated_group``). All
else is real: the backward pass, DDP's reducer and its copies, launches from the autograd thread,
on a GPU streams, events, and two kernels that share multiprocessors and memory. So one GPU shows
whether T(b) follows from gradients' ready times, a(x), DDP's costs and contention. What stays out:
other ranks that are late, links, and how NCCL chooses its protocol.

Each exchange is calibrated as ``ddplab predict`` calibrates, its bucketings are predicted, the
predictions written down, and only then are they measured. Two predictors that need no timeline
stand beside: computation and all-reduces one after the other, and the longer of the two. Exchanges
whose ``get_future`` waits, as torch 2.15's does over NCCL, must take as long as the first of these
says. Then a script is diagnosed with such an exchange and without (``script.py``), and every
strategy's gradients are checked where a sum arrives late (``late.py``).

On a GPU, whose commands may be limited in time: ``--only gpt2-medium-0.5 gpt2-medium-1``, and go on
with ``--continues RUN_DIR``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
from ddplab_watch import __file__ as watch_file

from common.analysis.accuracy.study import JudgedStudy, open_study
from common.cluster.launch import launch
from common.diagnose.opened import open_diagnosis
from common.errors import require_known
from common.perfmodel.model import COPIES, FULL, NO_OVERLAP, PERFECT_OVERLAP
from common.runtime.flags import as_flags
from common.runtime.machine.device import choose_device
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import (
    earlier_tables,
    require_same_settings,
    say_tables,
    study_run,
    with_verdicts,
)
from common.runtime.stage_progress import StageProgress
from common.settings import Positive, Settings
from common.studies.accuracy.tables import TABLES, join_case, open_tables
from common.studies.exchange.emulated_group import EMULATED
from common.studies.exchange.ranks import Wanted

FOLDER = project_root() / "common" / "studies" / "exchange"
WATCH = Path(watch_file).parent / "__main__.py"
STALLS, HEALTHY = "stalls", "overlaps"
STALLED = "no-overlap"
FREE = ("only", "rounds", "continues", "minutes_per_case")
"""Settings in which a study may differ from the one that it continues."""


@dataclass(frozen=True)
class Model:
    """A model and the exchanges that it is seen over."""

    name: str
    batch_size: int
    max_seq_len: int
    dtype: str
    exchanges: tuple[str, ...]

    def cases(self) -> dict[str, str]:
        """Maps the name of each case to its exchange."""
        return {f"{self.name}-{exchange}": exchange for exchange in self.exchanges}


@dataclass(frozen=True)
class Bounds:
    """Upper bounds that are promised of the errors of T(b), as fractions; None where none is."""

    median: float
    worst: float | None
    regret: float | None
    stalled: float


CPU_MODELS = (Model("gpt2-nano", 4, 64, "float32", ("0.5", "1", "2+1000us", "1-stalls")),)
GPU_MODELS = (
    Model(
        "gpt2-medium",
        2,
        1024,
        "float32",
        ("0.5", "1", "2", "0.5+300us", "0.5+1000us", "1x0", "1x32", "0.5-stalls", "1-stalls"),
    ),
    Model("gpt2", 16, 1024, "bfloat16", ("0.5",)),
)
BOUNDS = {
    "cpu": Bounds(median=0.05, worst=None, regret=None, stalled=0.05),
    "cuda": Bounds(median=0.03, worst=0.08, regret=0.02, stalled=0.02),
}


@dataclass(frozen=True)
class ExchangeStudy(Settings):
    """Settings of the study, for the CPU."""

    device: str = "cpu"
    """cpu or cuda."""
    models: tuple[Model, ...] = CPU_MODELS
    """Models whose exchange is measured."""
    judged: Annotated[int, Positive] = 5
    """Bucketings of each case, beside DDP's default."""
    calibration_rounds: Annotated[int, Positive] = 4
    """Rounds that the model is calibrated with."""
    rounds: Annotated[int, Positive] = 8
    """Least rounds of the judged measurement."""
    max_rounds: int = 40
    """Most rounds of the judged measurement."""
    minutes_per_case: Annotated[float, Positive] = 3.0
    """Time of a model for each of its exchanges."""
    only: tuple[str, ...] = ()
    """Cases to run, such as gpt2-nano-0.5; by default all."""
    continues: str = ""
    """Run directory of a study that was cut, whose cases are taken over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        cases = sorted(case for model in self.models for case in model.cases())
        for name in self.only:
            require_known("case", name, cases)

    def wanted(self, finished: set[str]) -> Iterator[tuple[Model, dict[str, str]]]:
        """Yields each model with its cases that are asked for and not done."""
        for model in self.models:
            cases = {
                name: exchange
                for name, exchange in model.cases().items()
                if name not in finished and (name in self.only or not self.only)
            }
            if cases:
                yield model, cases


def study_of_device() -> ExchangeStudy:
    """Returns the study of the GPU where there is one, and of the CPU elsewhere."""
    if choose_device(None) == "cpu":
        return ExchangeStudy()
    return ExchangeStudy("cuda", GPU_MODELS, judged=6, rounds=4, max_rounds=4)


SETTINGS = study_of_device


def run_study(study: ExchangeStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures and judges all cases; returns the run directory.

    Raises UserError: the study that it continues is not there, or measured something else.
    """
    require_same_settings("exchange", study, FREE)
    earlier = earlier_tables(study.continues, TABLES, ["case"])
    environment = describe_environment(EMULATED, study.device, 1)
    with study_run("exchange", study, output_dir, progress, environment) as run:
        scratch = (run.path / "runs").absolute()
        scratch.mkdir()
        streams = open_tables(run, earlier)
        for model, cases in study.wanted(set(earlier["cases.csv"]["case"])):
            with progress.stage(f"{model.name}, {len(cases)} exchanges") as update:
                log = scratch / f"{model.name}.log"
                flags = job_flags(study, model, cases, scratch)
                launch(FOLDER / "ranks.py", flags, 1, log, on_output=update)
            for case in cases:
                join_case(streams, scratch / case)
        with progress.stage("sums that arrive late") as update:
            late = late_gradients(study, scratch, update)
        run.write_table("late.csv", late)
        with progress.stage("diagnosed") as update:
            causes = {arm: first_cause(study, arm, scratch, update) for arm in (HEALTHY, STALLS)}
    judged = open_study(run.path)  # its tables have their names once the run is complete
    summary = by_case(judged)
    run.write_table("by-case.csv", summary)
    verdicts = judge(summary, judged, late, causes, BOUNDS[study.device])
    run.write_table("verdicts.csv", verdicts)
    say_tables(progress, summary, verdicts)
    return run.path


def job_flags(
    study: ExchangeStudy, model: Model, cases: dict[str, str], scratch: Path
) -> list[str]:
    """Returns the flags of a model's job."""
    return as_flags(
        {
            "model": model.name,
            "batch_size": model.batch_size,
            "max_seq_len": model.max_seq_len,
            "dtype": model.dtype,
            "exchanges": tuple(cases.values()),
            "device": study.device,
            "judged": study.judged,
            "calibration_rounds": study.calibration_rounds,
            "rounds": study.rounds,
            "max_rounds": max(study.rounds, study.max_rounds),
            "budget_s": 60 * study.minutes_per_case * len(cases),
            "output_dir": scratch,
            "run_id": model.name,
        }
    )


def late_gradients(study: ExchangeStudy, scratch: Path, update) -> pd.DataFrame:
    """Returns a row per strategy, and whether its gradients are exact (``late.py``)."""
    table = scratch / "late.csv"
    flags = as_flags({"table": table, "device": study.device})
    launch(FOLDER / "late.py", flags, 1, scratch / "late.log", on_output=update)
    return pd.read_csv(table)


def first_cause(study: ExchangeStudy, arm: str, scratch: Path, update) -> str:
    """Returns the first cause that the diagnosis of ``script.py`` names, or nothing."""
    folder = scratch / f"script-{arm}"
    words = [f"folder={folder}", "probe=1", str(FOLDER / "script.py"), arm, study.device]
    launch(WATCH, words, 1, scratch / f"{folder.name}.log", on_output=update)
    opened = open_diagnosis(folder)
    (scratch / f"{folder.name}.txt").write_text("\n".join(opened.lines()) + "\n")
    return opened.diagnosis.verdicts[0].cause if opened.diagnosis.verdicts else ""


def by_case(study: JudgedStudy) -> pd.DataFrame:
    """Tabulates each case: its |errors| of T(b) under the model and under simpler predictors.

    Columns: case, stalls, caps, rounds, n (largest standard error of a measured median), median
    and worst |error|; the medians without contention, without overlap and with perfect overlap;
    regret of the cap that was predicted to be the fastest.
    """
    regrets = study.regrets().set_index("case")["regret of b*"]
    rows = []
    for case, errors in study.errors.groupby("case", sort=False):
        size = errors[[FULL, COPIES, NO_OVERLAP, PERFECT_OVERLAP]].abs()
        row = {"case": case, "stalls": Wanted.named(errors["regime"].iloc[0]).stalls}
        row |= {"caps": len(errors), "rounds": errors["rounds"].iloc[0]}
        row |= {"n": errors["standard error"].max(), "median": size[FULL].median()}
        row |= {"worst": size[FULL].max(), "no contention": size[COPIES].median()}
        row |= {name: size[name].median() for name in (NO_OVERLAP, PERFECT_OVERLAP)}
        rows.append(row | {"regret": regrets[case]})
    return pd.DataFrame(rows)


def judge(
    summary: pd.DataFrame,
    study: JudgedStudy,
    late: pd.DataFrame,
    causes: dict[str, str],
    bounds: Bounds,
) -> pd.DataFrame:
    """Compares what was found with what is promised; returns a row per promise."""
    stalls = study.errors["case"].isin(summary.loc[summary["stalls"], "case"])
    errors, stalled = study.errors[~stalls], study.errors[stalls]
    overlapping = summary[~summary["stalls"]]
    waited = stalled[NO_OVERLAP].abs().median()
    size = errors[[FULL, NO_OVERLAP, PERFECT_OVERLAP]].abs()
    written = [
        (case.predictions["written_s"] < case.facts["judged_from_s"]).all() for case in study.cases
    ]
    ours = size[FULL].median()
    values = [
        ("cases not predicted before they were measured", None, 0.0, written.count(False)),
        ("median |error| of T(b)", None, bounds.median, ours),
        ("worst |error| of T(b)", None, bounds.worst, size[FULL].max()),
        ("median |error| of compute + Σa over it", 1.0, None, size[NO_OVERLAP].median() / ours),
        ("that of max(compute, Σa)", 1.0, None, size[PERFECT_OVERLAP].median() / ours),
        ("largest regret of the predicted cap", None, bounds.regret, overlapping["regret"].max()),
        ("median |error| of compute + Σa where get_future waits", None, bounds.stalled, waited),
        ("share of strategies whose gradients are exact", 1.0, None, late["exact"].mean()),
        ("the wait is the diagnosis' first cause", 1.0, None, float(causes[STALLS] == STALLED)),
        ("the same without a wait", None, 0.0, float(causes[HEALTHY] == STALLED)),
    ]
    return with_verdicts(values)
