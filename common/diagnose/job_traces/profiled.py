"""Causes that a short profile tells of a model that hooks cannot see into.

Under FSDP there are no buckets, and a model that was compiled in place calls no hook. The watch
then records a few steps with torch.profiler; they are judged as a job's own traces are
(``causes_left_behind``), where the steps as they were do not suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.evidence.evidence import TRACE_OPERATIONS, TRACE_STEPS, NotJudged
from common.diagnose.evidence.left_behind import LeftBehind
from common.diagnose.job_traces.causes import (
    idle_device,
)
from common.tables import TRACE_OPERATION_COLUMNS


def profiled(case: Case) -> LeftBehind | None:
    """Returns the steps that were profiled; None where none were."""
    steps = case.run.tables.get(TRACE_STEPS)
    if steps is None or steps.empty:
        return None
    none = pd.DataFrame(columns=list(TRACE_OPERATION_COLUMNS))
    return LeftBehind(case.run.folder, steps, case.run.tables.get(TRACE_OPERATIONS, none))


def by_profile(
    case: Case,
    not_judged: Sequence[tuple[str, str]],
    instead: Mapping[str, Callable[[LeftBehind], Verdict | None]],
) -> tuple[list[Verdict], list[tuple[str, str]]]:
    """Judges by the profile what could not be judged by the steps as they were.

    Args:
        case: the run.
        not_judged: (cause, why) for the steps as they were.
        instead: cause → function that judges it by a profile.

    Returns:
        verdicts, and what is still not judged.
    """
    profile = profiled(case)
    if profile is None:
        return [], list(not_judged)
    verdicts, still = [], []
    for cause, why in not_judged:
        if cause not in instead:
            still.append((cause, why))
            continue
        try:
            verdicts.append(instead[cause](profile))
        except NotJudged:
            still.append((cause, why))
    if profile.on_device:
        verdicts.append(idle_device(profile))
    file = case.file(TRACE_STEPS)
    return [_with_file(verdict, file) for verdict in verdicts if verdict], still


def _with_file(verdict: Verdict, file: str) -> Verdict:
    """Returns a verdict on traces that names the table of theirs in a bundle's run directory."""
    first, *further = verdict.evidence
    return replace(verdict, evidence=(f"{first.removesuffix('.')} {file}.", *further))
