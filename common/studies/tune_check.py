"""``ddplab study tune``: is the recommended setting the best, and what did finding it cost?

Five models that no other study measures, over loopback and between two emulated hosts. Each is
tuned, as a user would, and then swept: every distinct bucketing, visited as often. What counts is
how much slower the recommendation is than the best of the sweep's few fastest, in rounds of their
own: neither the recommendation nor those few were chosen by them, and a round is compared with the
one of the few that other rounds have as the fastest (``runoff_regret``). They go on until the
interval is no wider than ``HALF_WIDTH`` to either side; a case whose interval holds what is allowed
tells nothing (``judge``).
``cases.csv`` holds what was found, ``verdicts.csv`` what was promised and whether it held. A cut
study is continued: ``ddplab study tune --continues RUN_DIR`` takes over complete cases, whose
regrets are computed anew from their samples.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import pandas as pd

from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.csv_tables import read_table
from common.errors import UserError, require_known
from common.judged import FIRST_PAGE_ROUNDS, Judged, Verdict, fastest
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import earlier_table, say_tables, study_run, with_verdicts
from common.runtime.stage_progress import StageProgress
from common.samples import Interval, per_round
from common.settings import NonEmpty, Positive, Settings
from common.studies.exhaustive_sweep import runoff_regret
from common.tuning.ddp_setting import DEFAULT
from common.tuning.launched import run_job, tune_on_ranks
from common.tuning.results.recommendation import Recommendation
from common.tuning.tune_settings import SWEEP_ROUNDS

CASES = "cases.csv"
NEEDED = ("model", "network", "recommended", "half_width", "regret", "regret_low", "share")
EXHAUSTIVE = project_root() / "common" / "studies" / "exhaustive_sweep.py"
EXAMPLES = "common.tuning.examples"
RANKS = 2
WITHIN, SHARE = 0.01, 0.2
"""Upper bounds that are promised: on the regret, and on the share of a sweep's time."""
HALF_WIDTH = 0.02
"""Half the width of the regret's interval at which a run-off ends."""


@dataclass(frozen=True)
class TuneStudy(Settings):
    """Settings of the study: models, network, and how carefully recommendations are checked."""

    models: Annotated[tuple[str, ...], NonEmpty] = (
        "encoder_decoder",
        "convolutions",
        "vision_transformer",
        "masked_language_model",
        "depthwise_convolutions",
    )
    """Functions of common.tuning.examples."""
    rate: str = "1gbit"
    """Rate of the links of two emulated hosts; empty leaves them out."""
    rounds: Annotated[int, Positive] = SWEEP_ROUNDS
    """Visits to each bucketing in the sweep."""
    runoff_rounds: Annotated[int, Positive] = 12
    """Rounds that a run-off adds at a time, until a regret is known to ``HALF_WIDTH``."""
    most_runoff_rounds: Annotated[int, Positive] = 60
    """Most rounds of the run-off between the best settings."""
    only: tuple[str, ...] = ()
    """Cases to run, such as convolutions-loopback; by default all."""
    continues: str = ""
    """Run directory of a study that was cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        cases = {f"{model}-{network}" for model in self.models for network in self.networks}
        for name in self.only:
            require_known("case", name, sorted(cases))

    @property
    def networks(self) -> dict[str, EmulatedCluster | None]:
        """Returns the networks by name: emulated hosts, or None for loopback."""
        networks: dict[str, EmulatedCluster | None] = {"loopback": None}
        if self.rate:
            networks[f"{RANKS}x{self.rate}"] = EmulatedCluster.of(RANKS, [self.rate])
        return networks

    def cases(self) -> Iterator[tuple[str, str, EmulatedCluster | None]]:
        """Yields model, network and hosts of each case asked for."""
        for (network, hosts), model in product(self.networks.items(), self.models):
            if not self.only or f"{model}-{network}" in self.only:
                yield model, network, hosts


SETTINGS = TuneStudy


def run_study(study: TuneStudy, output_dir: str, progress: StageProgress) -> Path:
    """Tunes and sweeps each case; returns the run directory.

    Raises:
        UserError: this machine cannot emulate hosts, or the study to continue lacks the folder of
            a case.
    """
    cases = list(study.cases())
    if any(hosts for *_, hosts in cases) and (reason := why_no_hosts()):
        raise UserError(reason)
    earlier = earlier_table(study.continues, CASES, NEEDED)
    earlier_rows = {(row["model"], row["network"]): row for row in earlier.to_dict("records")}
    for model, network in earlier_rows:
        if not (Path(study.continues) / f"{model}-{network}" / "sweep").is_dir():
            raise UserError(f"--continues {study.continues}: no {model}-{network}/sweep in it")
    environment = describe_environment("gloo", "cpu", RANKS)
    with study_run("tune", study, output_dir, progress, environment) as run:
        rows = []
        for model, network, hosts in cases:
            name = f"{model}-{network}"
            case = run.path.absolute() / name  # ranks start in another folder
            if row := earlier_rows.get((model, network)):
                shutil.copytree(Path(study.continues) / name, case)
                row |= regrets(row["recommended"], case / "sweep")
            else:
                result = check(study, model, hosts, case, progress)
                row = {"model": model, "network": network} | result
            rows.append(row)
            table = pd.DataFrame(rows)
            run.write_table(CASES, table)  # whole after each
        verdicts = judge(table)
        run.write_table("verdicts.csv", verdicts)
    say_tables(progress, table, float_format="%.4g")
    say_tables(progress, verdicts)
    return run.path


def check(
    study: TuneStudy,
    model: str,
    hosts: EmulatedCluster | None,
    folder: Path,
    progress: StageProgress,
) -> dict:
    """Tunes a model, sweeps its bucketings and runs the best off; returns columns of cases.csv."""
    folder.mkdir()
    function = f"{EXAMPLES}:{model}"
    with progress.stage(f"tune {folder.name}") as update:
        advice = tune_on_ranks(
            function=function,
            ranks=RANKS,
            hosts=hosts,
            output_dir=folder,
            run_id="tune",
            flags={"device": "cpu"},
            on_output=update,
        )
    settings = {
        "function": function,
        "tune_run": folder / "tune",
        "rounds": study.rounds,
        "runoff_rounds": study.runoff_rounds,
        "most_runoff_rounds": study.most_runoff_rounds,
        "within": HALF_WIDTH,
        "device": "cpu",
        "output_dir": folder,
        "run_id": "sweep",
    }
    with progress.stage(f"sweep {folder.name}") as update:
        run_job(EXHAUSTIVE, settings, RANKS, hosts=hosts, on_output=update)
    return compare(advice, folder / "sweep")


def compare(advice: Recommendation, sweep: Path) -> dict:
    """Compares the recommendation with the sweep; returns columns of ``cases.csv``."""
    sweep_s = float(pd.read_csv(sweep / "sweep.csv")["sweep_s"].iloc[0])
    return {
        "bucketings": advice.bucketings,
        "recommended": advice.setting.label,
        **regrets(advice.setting.label, sweep),
        "expected_gain": advice.best.predicted_gain,
        "verified_gain": advice.best.gain.estimate if advice.best.gain else float("nan"),
        "worth_it": advice.worth_it,
        "noise": advice.noise,
        "tuning_s": advice.tuning_s,
        "sweep_s": sweep_s,
        "share": advice.tuning_s / sweep_s,
    }


def regrets(label: str, sweep: Path) -> dict:
    """Computes the regret of a setting, and DDP's default's; returns columns of ``cases.csv``.

    ``best_of_sweep`` is named where the sweep tells it from all others. ``regret_sweep`` is of the
    sweep's own medians, whose best looks better than it is; ``regret`` of the rounds of the
    run-off, with its interval, against the fastest there of the settings that the sweep chose.
    """
    visits = read_table(sweep / "sweep-visits.csv", ())
    rounds = per_round(visits, "step_time_ms", "setting")
    swept, best = rounds.median(), fastest(rounds)
    runoff = read_table(sweep / "runoff-visits.csv", ())
    against = runoff_regret(runoff, visits, label)
    verdict = best.lead.said if best else str(Verdict.NOT_MEASURED)
    return {
        "best_of_sweep": best.arm if best and best.lead.is_settled else verdict,
        "regret": against.estimate,
        "regret_low": against.interval.low,
        "regret_high": against.interval.high,
        "half_width": against.interval.half_width,
        "rounds": against.rounds,
        "regret_sweep": swept[label] / swept.min() - 1 if label in swept else float("nan"),
        "default_regret": runoff_regret(runoff, visits, DEFAULT.label).estimate,
    }


def judge(cases: pd.DataFrame) -> pd.DataFrame:
    """Compares the cases with what was promised; returns a row per promise.

    A case keeps or breaks the promise on regrets where its interval tells: one that reaches to
    both sides of ``WITHIN`` does neither.

    Columns: promise, at_most, found and held. If no case tells, the promise on regrets is not held.
    """
    regrets = [
        Judged(
            Interval(row.regret, row.regret_low, row.regret_high, rounds=int(row.rounds)),
            null=WITHIN,
            least_rounds=FIRST_PAGE_ROUNDS,
        )
        for row in cases.itertuples()
    ]
    clear = [regret for regret in regrets if regret.is_settled]
    broken = sum(regret.estimate > WITHIN for regret in clear) / len(clear) if clear else math.nan
    values = [
        (f"share of cases, of those that tell, with a regret above {WITHIN:.0%}", 0.0, broken),
        ("share of the cases whose regret does not tell", 0.0, 1 - len(clear) / len(cases)),
        ("tuning takes this share of the sweep", SHARE, cases["share"].max()),
    ]
    return with_verdicts(values, ["promise", "at_most", "found"])
