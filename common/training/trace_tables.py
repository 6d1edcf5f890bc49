"""What each rank's trace says, as tables: so that nobody has to open a viewer."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.analysis import step_overlap
from common.runtime.recorder import Recorder

COLLECTIVE_COLUMNS = ("rank", "step", "operation", "size_bytes", "count")


def write_trace_tables(recorder: Recorder, trace: Path, steps: range) -> bool:
    """Write step-overlap.csv and step-collectives.csv from the traces of all ranks, if there are.

    Args:
        recorder: of the run; all ranks call this.
        trace: this rank's trace, which does not exist if the run ended before it was traced.
        steps: the training steps since the profiler began to count; what came after the last
            one is no step.

    Returns:
        whether there were traces.
    """
    overlap = recorder.stream("step-overlap.csv", ("rank", *step_overlap.COLUMNS))
    collectives = recorder.stream("step-collectives.csv", COLLECTIVE_COLUMNS)
    if not trace.is_file():
        overlap.write([])
        collectives.write([])
        return False
    overlap.write(_of_training(step_overlap.read_step_overlap(trace), steps))
    collectives.write(_of_training(step_overlap.collectives_of(trace), steps))
    return True


def _of_training(table: pd.DataFrame, steps: range) -> list[dict]:
    """Rows with the training's numbers of steps for the trace's."""
    numbered = table.assign(step=table["step"] + steps.start)
    return numbered[numbered["step"] < steps.stop].to_dict("records")
