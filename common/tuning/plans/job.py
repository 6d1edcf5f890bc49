"""Plans the training of a model on the ranks of this job, prints the answer, and trains by it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from common.errors import UserError
from common.planning.asked import named_fields
from common.planning.report import WIDTH, print_answer
from common.runtime.group.process_group import process_group
from common.runtime.records.recorder import record_run
from common.runtime.records.run_directory import write_atomically
from common.runtime.script import run_script
from common.tuning.plans import ANSWER, PRINTED
from common.tuning.plans.plan_settings import PlanSettings
from common.tuning.plans.planner import Planned, plan_model, question_of
from common.tuning.plans.sized_model import SizedModel, of_configuration
from common.tuning.plans.training import train_as_planned
from common.tuning.same_graph import together


def main(settings: PlanSettings) -> None:
    """Loads the model on every rank, plans, prints the answer, and trains if asked to."""
    with process_group(settings.device, settings.backend) as worker:
        if worker.device.type == "cpu" and not settings.memory_bytes:
            raise UserError("a CPU has no memory of its own: say how much a rank may take")
        model = together(worker, lambda: _model(settings))
        question = question_of(model, worker, settings)
        with record_run(settings, "plan", worker) as recorder:
            steps = settings.verify, settings.tune_seconds, settings.options
            mine = named_fields(settings.mine)
            planned = plan_model(model, question, recorder, *steps, mine)
            if planned and recorder.run:
                write_answer(planned, recorder.run.path, settings)
            if settings.train_steps:
                train_as_planned(model, question, planned, settings.train_steps, recorder)


def write_answer(planned: Planned, folder: Path, settings: PlanSettings) -> None:
    """Writes the answer to the run's folder and to the files that settings name, and prints it."""
    text = json.dumps(planned.as_json(), indent=1)
    for path in (folder / ANSWER, *([Path(settings.json)] if settings.json else [])):
        write_atomically(path, f"{text}\n")
    if settings.page:
        from common.analysis.plans.page import page

        answer = (planned.searched, planned.best, planned.where, planned.verified)
        write_atomically(Path(settings.page), page(*answer, planned.tuned))
    printed = printed_answer(planned)
    write_atomically(folder / PRINTED, printed)
    print(printed, end="")


def printed_answer(planned: Planned) -> str:
    """Returns the answer as it is printed."""
    text = io.StringIO()
    console = Console(width=WIDTH, file=text)
    answer = planned.searched, planned.best, planned.where
    print_answer(*answer, console, planned.verified, planned.tuned)
    return text.getvalue()


def _model(settings: PlanSettings) -> SizedModel:
    if settings.model:
        return of_configuration(settings.model, settings.seq_len or None, settings.seed)
    return SizedModel.load(settings.function, Path(settings.folder).absolute(), settings.seed)


if __name__ == "__main__":
    run_script(main, PlanSettings)
