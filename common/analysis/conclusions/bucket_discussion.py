"""Conclusions of assignment 2: what simpler models and other systems say."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from common.analysis.buckets import ablation, choice
from common.analysis.conclusions.bucket_runs import (
    GOOD,
    models_of,
    run_of,
)
from common.analysis.conclusions.conclusion import (
    Seen,
    above,
    by_prediction,
    counted,
    numbered,
)
from common.perfmodel import whatif
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import PLAUSIBLE_ALPHA_S, with_latency
from common.perfmodel.model import CURVE
from common.perfmodel.published import UMD_A100, load_recorded

FACTORS = (1, 16)


def _simpler_worse(run_dir: str) -> Seen:
    return above(ablation.error_without(models_of(run_dir), CURVE), "{:+.1%}")


def _moves(run_dir: str) -> pd.DataFrame:
    run = run_of(run_dir)
    cases = whatif.cases(run.model, run.all_reduce.world_size, FACTORS)
    return choice.moves(whatif.best_caps(cases), *FACTORS).set_index("quantity")


def _latency_moves(run_dir: str) -> Seen:
    before, after, *simulated = _moves(run_dir).loc["latency α"]
    stays = np.isclose(*simulated)
    number = f"equation {before:.2f} → {after:.2f} MiB, simulation "
    number += " → ".join(f"{cap:.3g}" for cap in simulated)
    return counted(stays and after > before, number)


@cache
def _there() -> pd.DataFrame:
    system = load_recorded(UMD_A100)
    model = calibrated_model(system.profile, with_latency(system.all_reduce, PLAUSIBLE_ALPHA_S))
    cases = whatif.cases(model, system.world_size, FACTORS)
    return choice.moves(whatif.best_caps(cases), *FACTORS).set_index("quantity")


def _directions(_: str) -> Seen:
    before, after = (_there()[column] for column in choice.MOVED[:2])
    up = after > before
    grows = up.drop(["bandwidth β", "compute time g"]).all()
    falls = not up[["bandwidth β", "compute time g"]].any()
    return by_prediction(bool(grows and falls), ", ".join(up.index[up]) + " raise it")


CONCLUSIONS = {
    "assignment2_discussion": (
        *numbered(
            [
                GOOD,
                (1, "without copies and contention the error is larger", _simpler_worse),
                (2, "more latency raises b* by hand, not the simulated one", _latency_moves),
            ]
        ),
        *numbered(
            [(3, "bandwidth and computation lower b*, all else raises it", _directions)],
            of_run=False,
        ),
    ),
}
