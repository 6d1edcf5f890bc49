"""The result of tuning: the best setting, its gain, the noise, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.judged import NOT_WITNESSED, Judged
from common.runtime.records.run_directory import write_atomically
from common.samples import Interval
from common.tuning.ddp_setting import DEFAULT, DdpSetting

FILE = "recommendation.json"


@dataclass(frozen=True)
class Verified:
    """A setting that was predicted and, if there was time for it, run.

    Attributes:
        num_buckets: buckets that DDP makes.
        predicted_step_s: forward and backward pass, per micro-batch.
        predicted_gain: the share of the default's step that it saves.
        measured_step_s: median over instances, in the default's rounds: of other settings the
            default's median less their gain. None where it was not run.
        gain: share of the default's step that it saved in the same rounds; None where it was not
            run.
    """

    setting: DdpSetting
    num_buckets: int
    predicted_step_s: float
    predicted_gain: float
    measured_step_s: float | None = None
    gain: Interval | None = None


@dataclass(frozen=True)
class Recommendation:
    """The answer of ``ddplab tune``.

    Attributes:
        model: MODULE:FUNCTION, or the module's name.
        hardware: ranks, device, backend and network.
        parameters, tensors, gradient_bytes: numbers and bytes of the module's trained tensors.
        forward_s, backward_s: times of the passes without DDP.
        default: DDP as it comes.
        best: the fastest setting that computes the same numbers; it was chosen in rounds before
            those of its gain.
        candidates: the most promising settings, the default not among them, the best first. Those
            that the choice left out follow, the last first, with their gain in the rounds they
            were in; those that there was no time to visit have none.
        options: settings that change the numbers; never part of the recommendation.
        noise: spread of the default's instances: the standard deviation over their median.
        bucketings: number of distinct bucketings.
        tuning_s: seconds of tuning, from the first pass on.
        sweep_s: seconds that visits to every bucketing would take, estimated from the visits made.
        run_dir: folder of the tables.
        on_gpu: True if the model was on a GPU.
        expected_error: the error to expect of predictions, and by how much chance moves them; two
            lines. Recommendations from before 2026-11-23 have none.
        machine: state of the machine while the settings took turns (``Judged``).
    """

    model: str
    hardware: str
    parameters: int
    tensors: int
    gradient_bytes: int
    forward_s: float
    backward_s: float
    default: Verified
    best: Verified
    candidates: tuple[Verified, ...]
    options: tuple[Verified, ...]
    noise: float
    bucketings: int
    tuning_s: float
    sweep_s: float
    run_dir: str
    on_gpu: bool = False
    expected_error: str = ""
    machine: str = NOT_WITNESSED

    @property
    def worth_it(self) -> bool:
        """Returns True if it is settled that the best setting saves time."""
        return self.judged.is_settled and self.judged.estimate > 0

    @property
    def judged(self) -> Judged:
        """Returns the best setting's gain over DDP's default as it may be said."""
        gain = self.best.gain or Interval(math.nan, math.nan, math.nan)
        scope = f"{self.model}, {self.hardware}"
        return Judged(gain, null=0.0, scope=scope, machine=self.machine)

    @property
    def setting(self) -> DdpSetting:
        """Returns the recommended setting: the best, or DDP's default where that gains nothing."""
        return self.best.setting if self.worth_it else DEFAULT

    @property
    def python(self) -> str:
        """Returns the lines of Python to paste."""
        return self.setting.python(self.on_gpu)


def write_recommendation(recommendation: Recommendation, folder: Path) -> None:
    """Writes the recommendation to the run directory, as recommendation.json."""
    write_atomically(folder / FILE, json.dumps(dataclasses.asdict(recommendation), indent=1))


def read_recommendation(folder: Path | str) -> Recommendation:
    """Reads the recommendation of a run. Raises UserError where there is none."""
    path = Path(folder) / FILE
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"{path}: no recommendation there; make one with ddplab tune") from None
    verified = {name: _verified(values[name]) for name in ("default", "best")}
    lists = {
        name: tuple(_verified(entry) for entry in values[name])
        for name in ("candidates", "options")
    }
    return Recommendation(**values | verified | lists)


def _verified(values: dict) -> Verified:
    gain = Interval(**values["gain"]) if values["gain"] else None
    return Verified(**values | {"setting": DdpSetting(**values["setting"]), "gain": gain})
