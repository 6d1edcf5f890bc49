"""Tunes a user's model on the ranks of this job; rank 0 prints the recommendation."""

from __future__ import annotations

from pathlib import Path

from common.runtime.group.process_group import process_group
from common.runtime.script import run_script
from common.runtime.seeding import seed_everything
from common.tuning.results.report import print_recommendation
from common.tuning.same_graph import together
from common.tuning.tune_settings import TuneSettings, parse_target
from common.tuning.tuner import check_ranks, tune_model
from common.tuning.user_model import load_user_model


def main(settings: TuneSettings) -> None:
    """Loads the model on every rank, tunes it and prints the recommendation."""
    parse_target(settings.function)
    with process_group(settings.device, settings.backend) as worker:
        check_ranks(worker)
        seed_everything(settings.seed)
        folder = Path(settings.folder).absolute()
        user = together(worker, lambda: load_user_model(settings.function, folder, worker.device))
        recommendation = tune_model(user, worker, settings)
        if worker.is_main:
            print_recommendation(recommendation)


if __name__ == "__main__":
    run_script(main, TuneSettings)
