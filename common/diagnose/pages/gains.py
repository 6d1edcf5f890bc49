"""Speedups now and after each change, predicted or tried, as a diagnosis' web page draws them."""

from __future__ import annotations

import math

from common.diagnose.causes.trials import WORKERS, Tried
from common.diagnose.diagnosis import Diagnosis
from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.pages.bars import Axis, Bar, BarFigure, Row, number, upright, whiskers

SPARE = 1.08
"""An axis ends a little after the longest bar, so that the line of the ideal is seen with its
number below it."""
HEIGHT, TOP, THICK, THIN = 30, 3, 15, 7
"""Heights in pixels: of a row, above its bars, of what is predicted, and of what is."""
TALL = 44
"""Height in pixels of a row whose label has two lines."""


def bounds(verdict: Verdict) -> tuple[float, float] | None:
    """Returns the interval of the predicted speedup; None where there is none."""
    low, high = verdict.speedup_low, verdict.speedup_high
    return None if low is None or high is None else (low, high)


def interval(verdict: Verdict) -> str:
    """Returns the interval in brackets, with a space before it; nothing where there is none."""
    ends = bounds(verdict)
    return "" if ends is None else f" ({number(ends[0])} to {number(ends[1])})"


def counted_in(verdict: Verdict, case: Case) -> bool:
    """Returns True if a verdict's speedup now is not that of steps alone.

    What lies between steps, repeated samples and a warm-up are not in the time of a step.
    """
    now, counted = case.speedup_now, verdict.speedup_now
    return now is not None and counted is not None and not math.isclose(now, counted, rel_tol=1e-3)


def gains_section(diagnosis: Diagnosis, case: Case) -> dict[str, object]:
    """Returns the speedup now and those predicted after each change, against the ideal.

    Keys: said, and figure, None where no speedup is known.
    """
    now, ranks = case.speedup_now, case.ranks
    predicted = [verdict for verdict in diagnosis.verdicts if verdict.predicted_speedup is not None]
    if ranks == 1 or (now is None and not predicted):
        why = "there is one rank" if ranks == 1 else "there is nothing to compare with"
        return {"said": f"No speedup is known: {why}.", "figure": None}
    values = [ranks, now or 0.0]
    for verdict in predicted:
        values += [verdict.predicted_speedup, verdict.speedup_now or 0.0, *(bounds(verdict) or ())]
    alone = any(counted_in(verdict, case) for verdict in predicted)
    name = "As it is, by steps alone" if alone else "As it is"
    rows = [] if now is None else [_as_it_is(name, now, ranks)]
    rows += [
        _after(index, verdict, ranks)
        for index, verdict in enumerate(diagnosis.verdicts, 1)
        if verdict.predicted_speedup is not None
    ]
    kinds = [("now", "now")]
    if predicted:
        kinds.append(("predicted", "predicted after the change"))
    if any(bounds(verdict) for verdict in predicted):
        kinds.append(("interval", "its interval"))
    kinds.append(("mark", f"the ideal: {ranks:,}"))
    sentence = "Each change is taken alone: gains do not add up."
    if alone:
        sentence += " A cause that lies outside of steps is counted in where its change is drawn."
    if not predicted:
        sentence = "No change is predicted to gain."
    elif any(verdict.predicted_speedup > ranks for verdict in predicted):
        sentence += (
            " One above the ideal would make one rank faster as well; it is compared with one rank "
            "as it is."
        )
    unit = "speedup over one rank, in samples/s"
    return {"said": sentence, "figure": BarFigure(Axis(max(values) * SPARE), unit, rows, kinds)}


def _as_it_is(name: str, now: float, ranks: int) -> Row:
    sentence = f"Speedup now {number(now)}; the ideal is {ranks:,}."
    shapes = [Bar("now", 0.0, now, TOP, THICK), upright("mark", ranks, 0, HEIGHT)]
    return Row(f"{name}: {number(now)}", sentence, shapes, HEIGHT)


def _after(index: int, verdict: Verdict, ranks: int) -> Row:
    after, now = verdict.predicted_speedup, verdict.speedup_now
    shapes = [Bar("predicted", 0.0, after, TOP, THICK)]
    label = f"{index}. {verdict.cause}: {number(after)}{interval(verdict)}"
    sentence = f"Speedup predicted after the change for {verdict.title}: {number(after)}"
    if now is not None:
        shapes.append(Bar("now", 0.0, now, TOP + THICK, THIN))
        sentence += f", now {number(now)}"
    if ends := bounds(verdict):
        shapes += whiskers(*ends, TOP + THICK / 2, THICK / 4)
    shapes.append(upright("mark", ranks, 0, HEIGHT))
    return Row(label, f"{sentence}; the ideal is {ranks:,}.", shapes, HEIGHT)


def tried_section(diagnosis: Diagnosis) -> dict[str, object]:
    """Returns how long a pass takes with each change that was tried: said, and figure."""
    axis = Axis(max(1.0, *(1 - tried.gain.low for tried in diagnosis.tried)) * 100 * SPARE)
    kinds = [("tried", "with the change"), ("interval", "its interval"), ("mark", "as it is")]
    unit = "time of a forward and backward pass with its exchange, in % of the script's as it is"
    loads = any(tried.kind == WORKERS for tried in diagnosis.tried)
    sentence = (
        "Each was run on a copy of the model, alone, in rounds with the script as it is. Gains do "
        f"not add up.{' With num_workers each pass loads a batch first.' * loads}"
    )
    return {
        "said": sentence,
        "figure": BarFigure(axis, unit, [*map(_tried, diagnosis.tried)], kinds),
    }


def _tried(tried: Tried) -> Row:
    took = tried.gain.map(lambda saved: (1 - saved) * 100)
    shapes = [
        Bar("tried", 0.0, took.estimate, (TALL - THICK) / 2, THICK),
        *whiskers(took.low, took.high, TALL / 2, THICK / 4),
        upright("mark", 100.0, 0, TALL),
    ]
    label = f"{tried.change}: {number(took.estimate)}\u00a0%"
    if tried.speedup is not None:
        label += f", speedup {number(tried.speedup.estimate)}"
    return Row(label, tried.said(), shapes, TALL)
