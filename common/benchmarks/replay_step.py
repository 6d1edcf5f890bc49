"""The training step of a replay, for the same benchmarks as a GPT-2's; which of them is made."""

from __future__ import annotations

from torch import Tensor, nn

from common.benchmarks.gpt2_step import Gpt2Step, StepSettings
from common.errors import UserError
from common.models.replay import ReplayModel
from common.runtime.process_group import Worker


class ReplayStep:
    """A backward pass that sleeps as a recorded one computed; there is nothing else to a step.

    On rank r every element of a gradient is r + 1, so that their mean over the ranks shows that
    they were reduced.
    """

    def __init__(self, settings: StepSettings, worker: Worker) -> None:
        """Raises UserError on a GPU: a sleep of the CPU would not keep it busy."""
        if worker.device.type != "cpu":
            raise UserError(
                f"replay on {worker.device.type}: it sleeps on the CPU; use --device cpu"
            )
        replayed = settings.replayed_profile()
        self.settings = settings
        self.device = worker.device
        self.model = ReplayModel(replayed.profile, value=worker.rank + 1.0)
        self.forward_model: nn.Module = self.model
        self.note = replayed.label
        # What the flags say of a model does not hold: the record says what does.
        self.recorded_settings = {
            "replay": replayed.source,
            "model": replayed.label,
            "batch_size": "as recorded",
            "max_seq_len": "as recorded",
            "dtype": "float32",
        }

    def forward(self, model: nn.Module | None = None) -> Tensor:
        """A loss of 0 under ``model`` (by default the step's own), ready for backward."""
        return (model or self.forward_model)()

    def optimize(self) -> None:
        """Nothing: a recording has no optimizer step, and parameters that nobody uses stay."""

    def zero_grad(self) -> None:
        """Forget the gradients, as the optimizers do by default (set to None)."""
        self.model.zero_grad(set_to_none=True)

    @property
    def lateness_s(self) -> float:
        """By how much the latest backward pass fell behind the recording, at worst."""
        return self.model.lateness_s


Step = Gpt2Step | ReplayStep


def make_step(settings: StepSettings, worker: Worker) -> Step:
    """The step that the settings ask for: a replay, or a GPT-2."""
    return ReplayStep(settings, worker) if settings.replay else Gpt2Step(settings, worker)
