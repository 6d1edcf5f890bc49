"""Sweeps every distinct bucketing by real steps: what tuning saves, and how good its answer was.

Reads a tuning run's bucketings and recommendation, sweeps all of them in rotated rounds, and then
runs the recommended setting off against the sweep's best, in rounds of their own: the fastest of
many noisy medians looks faster than it is. They go on until the difference is known.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd

from common.csv_tables import read_table
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, Judged
from common.runtime.group.process_group import process_group
from common.runtime.progress import Progress
from common.runtime.records.recorder import record_run
from common.runtime.script import run_script
from common.runtime.seeding import seed_everything
from common.samples import paired_ratio, per_round
from common.settings import Positive, RankOptions
from common.tuning.ddp_setting import DEFAULT, DdpSetting
from common.tuning.results.recommendation import read_recommendation
from common.tuning.same_graph import check_same_graph, on_main, together
from common.tuning.tune_settings import SWEEP_ROUNDS
from common.tuning.user_model import load_user_model, user_step
from common.tuning.visits import Visits, check_under_ddp, left_as_it_was


@dataclass(frozen=True)
class Exhaustive(RankOptions):
    """Sweep every bucketing of a tuning run, then run its recommendation off against the best.

    Recipe: uv run torchrun --nproc_per_node=2 common/studies/exhaustive_sweep.py
    --function my_model:make --tune_run outputs/tune/RUN.
    Writes sweep-visits.csv, runoff-visits.csv and sweep.csv (seconds).
    """

    function: str = ""
    """MODULE:FUNCTION that was tuned."""
    tune_run: str = ""
    """The run directory of ddplab tune."""
    folder: str = "."
    """Folder that the function's module is imported from."""
    rounds: Annotated[int, Positive] = SWEEP_ROUNDS
    """Visits to each bucketing."""
    runoff_rounds: Annotated[int, Positive] = 12
    """Rounds that the run-off adds at a time, while the interval of the regret is wider than
    ``within`` to either side."""
    most_runoff_rounds: Annotated[int, Positive] = 60
    """Most rounds of the run-off between the best settings."""
    within: Annotated[float, Positive] = 0.02
    """Relative half-width at which the run-off ends."""
    runoff_best: Annotated[int, Positive] = 3
    """Number of the sweep's fastest that run off against the recommendation."""
    seed: int = 42
    """Seed of the initial weights and of the random inputs."""
    output_dir: str = "outputs/tune"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.function and self.tune_run):
            raise UserError("give --function MODULE:FUNCTION and --tune_run DIR")


def main(settings: Exhaustive) -> None:
    """Sweeps all bucketings, and runs the recommendation off against the fastest."""
    tuned = Path(settings.tune_run)
    with process_group(settings.device, settings.backend) as worker:
        table = on_main(worker, lambda: read_table(tuned / "predictions.csv", ["bucket_cap_mib"]))
        recommended = on_main(worker, lambda: read_recommendation(tuned))
        seed_everything(settings.seed)
        folder = Path(settings.folder).absolute()
        user = together(worker, lambda: load_user_model(settings.function, folder, worker.device))
        step = user_step(user, worker)
        with left_as_it_was(user.module):
            check_same_graph(user, worker)
            check_under_ddp(user, step)
            with record_run(settings, "tune-sweep", worker) as recorder:
                caps = [DdpSetting(cap) for cap in table["bucket_cap_mib"]]
                progress = Progress(len(caps) * settings.rounds, worker.is_main)
                began = time.perf_counter()
                visits = Visits(step, recorder, "sweep-visits.csv", progress)
                swept = visits.rounds("sweep", caps, settings.rounds)
                sweep_s = time.perf_counter() - began
                finalists = _finalists(caps, swept, recommended.setting, settings.runoff_best)
                runoff = Visits(step, recorder, "runoff-visits.csv")
                most = settings.most_runoff_rounds
                for first in range(0, most, settings.runoff_rounds):
                    rounds = min(settings.runoff_rounds, most - first)
                    runoff.rounds("runoff", finalists, rounds, first)
                    # Every rank has all samples, and decides alike.
                    regret = runoff_regret(runoff.samples, swept, recommended.setting.label)
                    if regret.interval.half_width <= settings.within:
                        break
                if recorder.run:
                    facts = {"bucketings": [len(caps)], "sweep_s": [sweep_s]}
                    recorder.run.write_table("sweep.csv", pd.DataFrame(facts))


def runoff_regret(runoff: pd.DataFrame, swept: pd.DataFrame, label: str) -> Judged:
    """Judges the regret of a setting against its fastest rival in the run-off.

    Rivals are the settings in the run-off that the sweep visited, too. Which one is the fastest is
    chosen for rounds of even numbers by those of odd ones, and the other way round: the one that
    looks fastest in its own rounds looks faster than it is.

    Args:
        runoff: samples of the run-off, VISIT_COLUMNS.
        swept: samples of the sweep, VISIT_COLUMNS.
        label: label of the setting.
    """
    times = per_round(runoff, "step_time_ms", "setting")
    chosen = [name for name in times if name in set(swept["setting"]) and name != label]
    is_even = times.index % 2 == 0
    rival = pd.Series(index=times.index, dtype=float)
    for half in (is_even, ~is_even):
        choosing = times[~half] if (~half).any() else times  # of a single round
        fastest = choosing[chosen].median().idxmin()
        rival[half] = times.loc[half, fastest]
    regret = paired_ratio(times[label], rival).map(lambda ratio: ratio - 1)
    return Judged(regret, null=0.0, least_rounds=FIRST_PAGE_ROUNDS)


def _finalists(
    caps: list[DdpSetting], swept: pd.DataFrame, recommended: DdpSetting, best: int
) -> list[DdpSetting]:
    """Returns the recommendation, the sweep's fastest and DDP's default, each once."""
    medians = per_round(swept, "step_time_ms", "setting").median().sort_values()
    by_label = {setting.label: setting for setting in caps}
    fastest = [by_label[label] for label in medians.index[:best]]
    return list(dict.fromkeys([recommended, *fastest, DEFAULT]))


if __name__ == "__main__":
    run_script(main, Exhaustive)
