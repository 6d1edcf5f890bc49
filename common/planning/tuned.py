"""What trying other settings of a verified plan has found: in sentences, cells and plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from common.judged import NOT_WITNESSED, Judged
from common.planning.answer import interval_fields
from common.planning.search import TimedPlan
from common.runtime.wording import counted, digits
from common.samples import Interval


@dataclass(frozen=True)
class TriedPlan:
    """A plan with other settings that was run beside the verified one.

    Attributes:
        timed: the plan, with its predicted memory and time.
        gain: share of the verified plan's step that it saved in the same rounds; None where it was
            not visited or did not end.
        peak_bytes: the largest peak of a rank; None where it was not measured.
    """

    timed: TimedPlan
    gain: Interval | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Tuned:
    """The last step of a plan: its other settings, predicted and tried.

    Attributes:
        base: the verified plan.
        tried: plans that do the same work, the best first, in rounds that had no part in the
            choice; then those that the choice left out.
        options: plans that compute other numbers; they are never chosen.
        allowed_s, took_s: seconds that trying might take, and took.
        visit_s: seconds of a visit to the verified plan.
        fits: whether the best one's measured peak is within the memory.
        machine: state of the machine meanwhile (``Judged``).
    """

    base: TimedPlan
    tried: tuple[TriedPlan, ...]
    options: tuple[TriedPlan, ...]
    allowed_s: float
    took_s: float
    visit_s: float
    fits: bool = False
    machine: str = NOT_WITNESSED

    @property
    def gain(self) -> Judged | None:
        """Returns what the best setting saves as it may be said; None where none was run."""
        if not self.tried or self.tried[0].gain is None:
            return None
        scope = f"{self.base.plan.name} and {self.tried[0].timed.plan.name}"
        return Judged(self.tried[0].gain, null=0.0, scope=scope, machine=self.machine)

    @property
    def best(self) -> TimedPlan:
        """Returns the plan to take: another one where that is settled to save time, and fits."""
        gain = self.gain
        better = gain is not None and self.fits and gain.is_settled and gain.estimate > 0
        return self.tried[0].timed if better else self.base

    def sentences(self) -> list[str]:
        """Returns what was found, in a line, and a line for each option."""
        if self.gain is None:
            return [self._why_nothing()]
        judged, best = self.gain, self.tried[0]
        number = sum(tried.gain is not None for tried in self.tried)
        saved = f"{judged.estimate:+.1%} of a step ({best.gain.text('{:+.1%}')}, "
        saved += f"{counted(judged.rounds, 'round')} that had no part in the choice)"
        spent = f"{counted(number, 'setting')} tried beside it in {self.took_s:.0f} s "
        spent += f"({self.allowed_s:.0f} s allowed)"
        if self.best is best.timed:
            lines = [f"Tuned: of {spent} {best.timed.plan.name} is taken, which saves {saved}"]
        else:
            why = f": {judged.reason}" if judged.reason else ""
            why = why if self.fits else ": it takes more memory than there is"
            lines = [
                f"Tuned: of {spent} none is taken; the best, {best.timed.plan.name}, saves "
                f"{saved}{why}"
            ]
        for option in self.options:
            if option.gain:
                lines.append(
                    f"Not taken, as it changes what is computed (--changes-training yes): "
                    f"{option.timed.plan.name}, {option.gain.estimate:+.1%} of a step "
                    f"({option.gain.text('{:+.1%}')})"
                )
        return lines

    def _why_nothing(self) -> str:
        if not self.tried:
            return "Tuned: this plan has no other settings that fit"
        return (
            f"Tuned: nothing, as the fewest visits that tell two settings apart take longer than "
            f"the {self.allowed_s:.0f} s allowed, at {digits(self.visit_s)} s each"
        )

    def as_json(self) -> dict:
        """Returns it as plain values."""
        return {
            "base": asdict(self.base.plan),
            "taken": asdict(self.best.plan),
            "tried": [_plain(tried) for tried in self.tried],
            "options": [_plain(option) for option in self.options],
            "allowed_s": self.allowed_s,
            "took_s": self.took_s,
        }


def _plain(tried: TriedPlan) -> dict:
    gain = tried.gain
    return {
        **asdict(tried.timed.plan),
        "predicted_s": tried.timed.time.step_s,
        **interval_fields(gain, "gain"),
        "rounds": gain.rounds if gain else 0,
        "peak_bytes": tried.peak_bytes,
    }
