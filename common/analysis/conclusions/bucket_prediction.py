"""Conclusions of assignment 2, part 2: what the model predicts."""

from __future__ import annotations

import numpy as np

from common.analysis.buckets import choice
from common.analysis.conclusions.bucket_runs import (
    at_end,
    choice_not_worse,
    run_of,
)
from common.analysis.conclusions.conclusion import (
    Seen,
    by_prediction,
    counted,
    numbered,
)
from common.perfmodel import whatif
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.published import UMD_A100, load_recorded


def _lines(run_dir: str) -> tuple[float, float]:
    """Returns the median errors of the course's line and of the fitted one."""
    curve = run_of(run_dir).all_reduce.curve
    sizes, times_s = curve.sizes_bytes, curve.times_s
    lines = AlphaBeta.from_endpoints(sizes, times_s), AlphaBeta.fit(sizes, times_s)
    return tuple(float(np.median(abs(line.time_s(sizes) / times_s - 1))) for line in lines)


def _course_line(run_dir: str) -> Seen:
    course, fitted = _lines(run_dir)
    return counted(course < fitted, f"{course:.0%} against {fitted:.0%}")


def _no_line(run_dir: str) -> Seen:
    better = min(_lines(run_dir))
    return counted(better > 0.05, f"the better one by {better:.0%}")


def _single_chosen(run_dir: str) -> Seen:
    best = run_of(run_dir).model.best_cap()
    last = best.candidates[-1]
    holds = last.num_buckets == 1 and best.near_mib[-1][1] >= last.high_mib
    return counted(holds, f"{choice.near_text(best)}, predicted")


def _published_band(_: str) -> Seen:
    system = load_recorded(UMD_A100)
    low, high = whatif.near_interval(calibrated_model(system.profile, system.all_reduce).best_cap())
    return by_prediction(high / low > 10, f"a factor of {high / low:.0f}")


def _published_default(_: str) -> Seen:
    system = load_recorded(UMD_A100)
    model = calibrated_model(system.profile, system.all_reduce)
    longer = model.backward_s(None) / model.best_cap().total_s - 1
    return by_prediction(longer < 0.01, f"{longer:+.1%}")


CONCLUSIONS = {
    "assignment2_part2_prediction": (
        *numbered(
            [
                (1, "the course's line is closer than the fitted one", _course_line),
                (1, "both lines are off by more than 5 % in the median", _no_line),
                (3, "one bucket is within 1 % of b*", _single_chosen),
                (3, "measured, the smallest cap is slower than the best", at_end(0)),
                (3, "what is chosen is not slower than the best", choice_not_worse),
            ]
        ),
        *numbered(
            [
                (4, "caps within 1 % of b* span a factor of ten", _published_band),
                (4, "DDP's default is within 1 % of b*", _published_default),
            ],
            of_run=False,
        ),
    ),
}
