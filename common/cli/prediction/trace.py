"""``ddplab predict --trace FILE``: the predicted and the measured step for Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.analysis.buckets.measurements import check_comparable
from common.analysis.buckets.sweep import BucketSweep
from common.analysis.buckets.timelines import (
    TABLE,
    MeasuredTimelines,
    around_passes,
    gaps,
    read_timelines,
)
from common.cli.flags import check_output, write_output
from common.errors import UserError
from common.perfmodel.buckets import cap_label
from common.perfmodel.model import DdpModel
from common.perfmodel.perfetto_trace import Around, trace_json
from common.perfmodel.tables import read_step_parts
from common.runtime.records.run_directory import find_table


@dataclass(frozen=True)
class TraceRequest:
    """The file that a trace goes to, and the pass that it shows.

    ``caps`` are those the user gave; ``watched`` the run's measured passes, and ``local`` its
    table of steps without DDP, if it has them.
    """

    path: Path
    caps: tuple[float | None, ...]
    watched: MeasuredTimelines | None
    local: Path | None = None

    def write(self, model: DdpModel, best_mib: float, sweep: BucketSweep | None) -> str:
        """Writes the trace and returns the line that says so.

        The cap is the one that was asked for, else the watched one that is predicted to be the
        best, else ``best_mib``. Around the measured pass are the medians of the sweep's steps.
        """
        watched = self.watched.caps() if self.watched else []
        cap = self.caps[0] if self.caps else best_mib
        if not self.caps and watched:
            cap = min(watched, key=model.backward_s)
        passes = {"predicted": model.at_cap(cap)}
        if cap in watched:
            passes["measured"] = self.watched.typical(cap)
            gaps(*passes.values())  # refuses passes of different buckets
        around = self._around(cap, sweep)
        what = "step" if "predicted" in around else "backward pass"
        facts = {"bucket_cap_mib": cap_label(cap), "zero": f"the start of the {what}"}
        text = trace_json(passes, parameters=model.profile.names, facts=facts, around=around)
        write_output("--trace", str(self.path), text)
        kinds = "predicted and measured" if len(passes) > 1 else "predicted only: not measured"
        return (
            f"trace of the {what} at {cap_label(cap)} MiB ({kinds}) written to {self.path}; "
            "open it in https://ui.perfetto.dev"
        )

    def _around(self, cap: float | None, sweep: BucketSweep | None) -> dict[str, Around]:
        """Returns forward pass and update of both; none where no steps without DDP were timed."""
        if self.local is None:
            return {}
        parts = read_step_parts(self.local)
        around = {"predicted": Around(parts.forward_s, parts.update_s)}
        measured = around_passes(sweep, cap) if sweep else None
        return around | ({"measured": measured} if measured else {})


def trace_request(
    path: str, caps: tuple[float | None, ...], run_dir: str | None, measured: str | None
) -> TraceRequest:
    """Checks what was asked for, before anything is computed.

    Measured passes come from the run directory, else from beside the ``measured`` table.
    Raises UserError for more than one cap, or a file that cannot be written.
    """
    if len(caps) > 1:
        raise UserError(f"--trace shows one cap, {len(caps)} are given; give one --bucket-cap-mb")
    check_output("--trace", path)
    table = find_table(Path(run_dir), TABLE, "ddp_benchmark") if run_dir else None
    if table is None and measured:
        table = find_table(Path(measured).parent, TABLE)
    local = find_table(Path(run_dir), "local-times.csv", "ddp_benchmark") if run_dir else None
    # A table of --measured may be another run's than those of --run-dir.
    check_comparable(path for path in (table, local, measured and Path(measured)) if path)
    return TraceRequest(Path(path), tuple(caps), read_timelines(table) if table else None, local)
