"""A verdict, and what every cause is judged from.

A cause is a function of a ``Case`` that returns a verdict, or None where it was judged and is not
so; it raises NotJudged where the run has not the table it needs. Thresholds stand beside the
causes, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from common.analysis.sweep_speedups import step_times_by_round
from common.diagnose.evidence.evidence import (
    FACTS,
    STACKS,
    STEP,
    Evidence,
    NotJudged,
    standard_error,
)
from common.diagnose.evidence.measured_step import step_model
from common.errors import UserError
from common.perfmodel.scaling.scaled_step import StepModel, StepSettings, predict
from common.samples import paired_ratio

VALIDITY, PERFORMANCE, MINOR = 0, 1, 2
"""Verdicts that make a comparison void come first, then what costs time, then what costs neither.
"""
SURE, LIKELY = 4.0, 1.5
"""Distances from the threshold in standard errors: above 4 a false alarm is negligible; below 1.5
noise alone gives one in ten."""
NORMAL_90 = 1.645
"""Standard deviations to either side of a normal distribution's middle that hold 90 % of it."""
GAIN_ERROR = 0.09
"""Root mean square of ln(achieved over predicted gain) of scripts not met before: in the 23 changes
of the eighth set (``study scripts``) it was 0.076, with a 95 % interval of 0.059 to 0.107;
other scripts may differ more."""
MOST_LOST = 0.99
"""Share of a step that a cause takes at most, in a speedup without it."""
MODULES = "torch.nn.modules.module."
"""Beginning of the calls of a module."""
MANY_STEPS = 10
"""A spread from fewer steps is not known well enough to be sure of anything."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A cause that was found; what a number is worth is ``common.judged.Verdict``.

    Attributes:
        cause: stable name, such as ``batch-too-small``.
        title: cause in words.
        evidence: sentences with the numbers, each with the file that they come from. It is made of
            any iterable, whose empty sentences are left out.
        lost_share: share of a step (or of an epoch) that the cause takes; None where it
            makes the comparison void instead.
        confidence, reason: high, medium or low, and why (``confidence``).
        change: advice on what to do.
        proposed: the settings of the step with the change, where it is one of settings.
        speedup_now: samples per second over those of one rank, where that is known.
        gain: samples per second after the change over those now; None where it is not a matter of
            speed, or nothing to predict it from was measured.
        gain_low, gain_high: interval of 90 %, by the steps' noise and the model's error.
        group: VALIDITY, PERFORMANCE or MINOR.
        sure_share: share of the step that decides its place among others, where that is not
            ``lost_share``: the least that it takes, as the best of several changes that were tried
            looks better than it is; or what it takes between steps, over the median step.
    """

    cause: str
    title: str
    evidence: tuple[str, ...]
    lost_share: float | None = 0.0
    confidence: str
    reason: str
    change: str
    proposed: StepSettings | None = None
    speedup_now: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    group: int = PERFORMANCE
    sure_share: float | None = None

    def __post_init__(self) -> None:
        """Holds what a cause takes between nothing and the whole step, whatever it was made of."""
        object.__setattr__(self, "evidence", tuple(filter(None, self.evidence)))
        for name in ("lost_share", "sure_share"):
            if (share := getattr(self, name)) is not None:
                object.__setattr__(self, name, min(max(float(share), 0.0), 1.0))

    @property
    def predicted_speedup(self) -> float | None:
        """Returns ``speedup_now`` after the change; None where it, or the gain, is unknown."""
        return self._over_one_rank(self.gain)

    @property
    def speedup_low(self) -> float | None:
        """Returns the lower end of the predicted speedup's interval."""
        return self._over_one_rank(self.gain_low)

    @property
    def speedup_high(self) -> float | None:
        """Returns the upper end of the predicted speedup's interval."""
        return self._over_one_rank(self.gain_high)

    def _over_one_rank(self, gain: float | None) -> float | None:
        return None if gain is None or self.speedup_now is None else self.speedup_now * gain

    def as_json(self) -> dict[str, object]:
        """Returns the verdict's fields, and its speedups over one rank."""
        names = ("predicted_speedup", "speedup_low", "speedup_high")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def with_interval(self, noise: float) -> Verdict:
        """Returns the verdict with the interval of its gain.

        Args:
            noise: standard error of the run's median step, as a share of it.
        """
        if self.gain is None or self.gain_low is not None:
            return self
        factor = math.exp(NORMAL_90 * math.hypot(noise, GAIN_ERROR))
        return replace(self, gain_low=self.gain / factor, gain_high=self.gain * factor)

    @property
    def order(self) -> tuple[int, float]:
        """Returns a key that is smallest for the main cause."""
        share = self.lost_share if self.sure_share is None else self.sure_share
        return self.group, -math.inf if share is None else -share


def gain_without(lost_share: float) -> float:
    """Returns how many times as fast a step is without a share of it."""
    return 1 / (1 - min(max(0.0, lost_share), MOST_LOST))


def most_costly(*verdicts: Verdict | None) -> Verdict | None:
    """Returns the verdict that comes first; None where there is none."""
    return min(filter(None, verdicts), key=lambda verdict: verdict.order, default=None)


def confidence(
    value: float,
    threshold: float,
    error: float,
    steps: int = MANY_STEPS,
    of: str = "share of the step",
) -> tuple[str, str]:
    """Returns how sure it is that a value is beyond its threshold, and why.

    Args:
        value, threshold: measured value and its threshold, in one unit.
        error: standard error of the value.
        steps: number of steps that the value was taken from.
        of: name of the value.
    """
    if math.isnan(value) or math.isnan(error):
        return "low", f"{of}: how much it is by chance is not known"
    distance = abs(value - threshold)
    errors = distance / error if error > 0 else math.inf
    reason = f"{of}: {value:.3g} against a threshold of {threshold:.3g}"
    if math.isfinite(errors):
        reason += f", {'within its' if errors < 1 else 'with a'} standard error of {error:.2g}"
    if steps < MANY_STEPS:
        reason += f"; from {steps} steps only"
    if errors >= SURE and steps >= MANY_STEPS:
        return "high", reason
    return ("medium" if errors >= LIKELY else "low"), reason


@dataclass(frozen=True, eq=False)
class Case:
    """A run on several ranks, and one on one rank to compare it with, if there is one."""

    run: Evidence
    baseline: Evidence | None = None

    @property
    def ranks(self) -> int:
        return self.run.world_size

    def need_ranks(self, lacks: str) -> None:
        """Raises NotJudged for a run on one rank, which has nothing to judge a cause by."""
        if self.ranks < 2:
            raise NotJudged(f"one rank {lacks}")

    def verdict(
        self,
        *,
        lost: float,
        sure: tuple[str, str],
        whole_ms: float | None = None,
        **fields: object,
    ) -> Verdict:
        """Returns a verdict on what takes a share of each step, with the speedup without it.

        Args:
            lost: share of the step.
            sure: level of confidence and its reason, as ``confidence`` returns them.
            whole_ms: mean of the steps with what lies between them, where the share is of that.
            fields: further fields of the verdict, or others in place of these.
        """
        level, reason = sure
        lost = min(max(0.0, lost), MOST_LOST)
        now = self.speedup_now
        if now is not None and whole_ms is not None:  # it is that of the median step alone
            now *= self.run.step_ms / whole_ms
        usual = {
            "lost_share": lost,
            "confidence": level,
            "reason": reason,
            "sure_share": None if whole_ms is None else lost * whole_ms / self.run.step_ms,
            "speedup_now": now,
            "gain": gain_without(lost),
        }
        return Verdict(**usual | fields)

    def of_round(self, round_: int) -> Case:
        """Returns the case of one round's steps."""
        return Case(self.run.of_round(round_), self.baseline and self.baseline.of_round(round_))

    @cached_property
    def model(self) -> StepModel:
        """Returns the run's step model; raises NotJudged where the run lacks what it needs."""
        try:
            return step_model(self.run)
        except UserError as error:
            raise NotJudged(str(error)) from None

    def model_or_none(self) -> StepModel | None:
        """Returns the model where there is one."""
        try:
            return self.model
        except NotJudged:
            return None

    @property
    def is_measured(self) -> bool:
        """Returns True if one rank was measured: a baseline of the same model and data."""
        return self.baseline is not None and not differing_facts(self.run, self.baseline)

    @cached_property
    def one_rank_throughput(self) -> float | None:
        """Returns the samples per second on one rank: of the baseline, or else by the model."""
        if self.is_measured:
            return self.baseline.throughput
        model = self.model_or_none()
        if model is None:
            return None
        samples = self.run.samples_per_step / self.ranks if self.run.mixed else None
        return (samples or model.settings.samples) / predict(model).step_1_s

    @cached_property
    def speedup_now(self) -> float | None:
        """Returns the samples per second over those of one rank; None where that is not known.

        Paired by round where one rank was measured in the same rounds, as in a sweep.
        """
        one_rank = self.one_rank_throughput
        if not one_rank:
            return None
        run, base = self.run, self.baseline
        if base is None or base.folder != run.folder or one_rank != base.throughput:
            return run.throughput / one_rank
        times = [step_times_by_round(side.measured)[side.arm["arm"]] for side in (base, run)]
        ratio = paired_ratio(*times[0].align(times[1]))
        return ratio.estimate * run.samples_per_step / base.samples_per_step

    def gain_with(self, settings: StepSettings) -> float | None:
        """Returns the gain of other settings as the model predicts it; None without a model."""
        model = self.model_or_none()
        return model and predict(model, settings).speedup / predict(model).speedup

    def share(self, column: str) -> tuple[float, float]:
        """Returns a part's share of the step, the median over steps, and its standard error."""
        steps_ms = self.run.slowest_ms
        shares = self.run.by_step(column).mean(axis=1) / steps_ms
        return float(shares.median()), standard_error(shares)

    @property
    def steps(self) -> int:
        """Returns the number of steps measured in parts."""
        return self.run.timed.groupby(STEP).ngroups

    def change(self, flags: str, python: str) -> str:
        """Returns a change as flags of this project's programs, or as Python for other scripts."""
        return python if self.run.watched else flags


SAME_FACTS = ("parameters", "gradient_dtype", "compute_dtype", "input_shape", "model", "data")
"""Facts in which a run and its baseline must agree for a speedup to be one."""


def differing_facts(run: Evidence, baseline: Evidence) -> dict[str, tuple[str, str]]:
    """Returns the facts (and data set sizes) that differ, by name: (baseline's, run's)."""
    if FACTS not in run.tables or FACTS not in baseline.tables:
        return {}
    mine, other = (
        e.tables[FACTS].astype(object).fillna("").astype(str).iloc[0] for e in (run, baseline)
    )
    columns = (*SAME_FACTS, "data_samples")
    return {name: (other[name], mine[name]) for name in columns if other[name] != mine[name]}


def percent(share: float) -> str:
    """Returns a share as text: ``12.3 %``."""
    return f"{share * 100:.3g} %"


def looks(case: Case, phases: Sequence[str], rank: int | None = None) -> pd.DataFrame:
    """Returns the looks at lines of the script in some phases, of one rank or of all.

    Calls are text, empty where a line called nothing. Looks between the model's call and backward()
    are of the forward pass, and ``in_loss``. No rows where nobody looked (``stacks.csv`` is of
    watched scripts).
    """
    stacks = case.run.rows(STACKS)
    stacks = stacks.assign(
        in_loss=stacks["phase"].eq("loss"), phase=stacks["phase"].replace("loss", "forward")
    )
    rows = stacks[stacks["phase"].isin(phases) & stacks["place"].notna()]
    rows = rows.assign(call=rows["call"].astype(object).fillna("").astype(str))
    return rows if rank is None else rows[rows["rank"] == rank]


def in_modules(rows: pd.DataFrame) -> pd.Series:
    """Returns which looks found the pass of a module, such as a teacher or a loss."""
    return rows["call"].str.startswith(MODULES) | rows["place"].astype(str).str.endswith(" forward")


def share_at(rows: pd.DataFrame, calls: tuple[str, ...]) -> float:
    """Returns the share of looks that found a call with one of these beginnings; 0 of no looks."""
    at_calls = rows.loc[rows["call"].str.startswith(calls), "samples"]
    return float(at_calls.sum() / max(1, rows["samples"].sum()))


def line_of(rows: pd.DataFrame) -> str:
    """Returns the line that most looks found, to follow a title: `` (train.py:31)``, or nothing."""
    if rows.empty:
        return ""
    most = str(rows.groupby("place")["samples"].sum().idxmax())
    line, _, _ = most.rpartition(" ")
    return f" ({Path(line).name})"


def places(case: Case, phases: Sequence[str], rank: int | None = None) -> list[str]:
    """Returns a sentence with the line of the script that phases were most often found at."""
    rows = looks(case, phases, rank)
    if rows.empty:
        return []
    counts = rows.groupby(["place", "call"])["samples"].sum()
    (line, call), share = counts.idxmax(), counts.max() / counts.sum()
    within = f", in {call}" if call else ""
    whose = "the" if rank is None else f"rank {rank}'s"
    return [f"{percent(share)} of {whose} stack samples then are at {line}{within} [{STACKS}]."]
