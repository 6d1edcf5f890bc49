"""Numbers sent to whichever experiment tracker is installed: wandb, mlflow or TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from common.errors import UserError

TRACKERS = ("wandb", "mlflow", "tensorboard")


def installed() -> str:
    """Returns the first tracker that is installed; raises UserError for none."""
    tracker = next(filter(find_spec, TRACKERS), None)
    if tracker is None:
        raise UserError(f"--track: none of {', '.join(TRACKERS)} is installed")
    return tracker


def track(tracker: str, name: str, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
    """Records numbers and texts as a run of an installed tracker."""
    numbers, texts = _named(numbers), _named(texts)
    if tracker == "wandb":
        with import_module("wandb").init(name=name) as run:
            run.log(numbers)
            run.summary.update(texts)
    elif tracker == "mlflow":
        mlflow = import_module("mlflow")
        with mlflow.start_run(run_name=name):
            mlflow.log_metrics(numbers)
            mlflow.set_tags(texts)
    else:
        with import_module("torch.utils.tensorboard").SummaryWriter(comment=name) as writer:
            for key, value in numbers.items():
                writer.add_scalar(key, value)
            for key, text in texts.items():
                writer.add_text(key, text)


def _named(values: Mapping[str, float | str]) -> dict[str, float | str]:
    """Returns values by names without commas, which mlflow refuses."""
    return {name.replace(",", ""): value for name, value in values.items()}
