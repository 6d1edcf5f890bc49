"""Compares planned micro-batches (assignment 3) with equal numbers of texts."""

from __future__ import annotations

from pathlib import Path

from common.analysis.findings.finding import MEASURED, Found, Question, span
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import STATIC
from common.errors import UserError

DYNAMIC = "dynamic"


def dynamic_over_static(folder: Path) -> Found:
    """Finds the mean step of dynamic micro-batches over static's, on the same global batches."""
    comparison = open_assignment3(folder).comparison
    if DYNAMIC not in comparison.summary.index:
        raise UserError(f"mode {DYNAMIC} was not compared with {STATIC}")
    row = comparison.summary.loc[DYNAMIC]
    return Found(
        value=f"{row['ratio']:.2f} of static's step",
        spread=(
            f"95 % interval {span(row['ratio_low'], row['ratio_high'])}; the plan promises "
            f"{row['padded_ratio']:.2f}; {comparison.dataset}, {comparison.ranks} ranks"
        ),
        kind=MEASURED,
        runs=(comparison.opened,),
        hidden="" if row["differs"] else "whether it differs from static's step",
    )


QUESTIONS = (
    Question(
        title="Dynamic over static batches",
        meaning=(
            "Below 1, the same texts in the same global batches take less time when ranks share "
            "them by work and not by number."
        ),
        anchor="assignment3_dynamic_batches-modes-on-the-same-global-batches",
        find=dynamic_over_static,
    ),
)
"""Questions of the first page to assignment 3."""
