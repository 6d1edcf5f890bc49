"""Tables of each rank's trace, so that nobody has to open a viewer."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.runtime.records.recorder import Recorder
from common.traces import step_overlap

COLLECTIVE_COLUMNS = ("rank", "step", "operation", "size_bytes", "count")


def write_trace_tables(recorder: Recorder, trace: Path, steps: range) -> bool:
    """Writes step-overlap.csv and step-collectives.csv from the traces of all ranks.

    All ranks call it. The tables are empty if there are no traces.

    Args:
        recorder: the run's writer.
        trace: this rank's trace, which does not exist if the run ended before it was traced.
        steps: the training steps since the profiler began to count; what came after the last
            one is no step.

    Returns:
        True if there were traces.
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
    """Returns the table's rows, with the trace's step numbers replaced by those of training."""
    numbered = table.assign(step=table["step"] + steps.start)
    return numbered[numbered["step"] < steps.stop].to_dict("records")
