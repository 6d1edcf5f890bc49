"""``ddplab predict --from-traces FOLDER``: a job's traces replayed, what changes gain, and T(b)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.analysis.buckets.choice import near_text
from common.analysis.replay.job import Job, read_job
from common.analysis.replay.page import page, timelines
from common.analysis.replay.system import (
    TraceSystem,
    at_caps,
    best_cap,
    checked_system,
    default_caps,
    own_error,
)
from common.cli.flags import check_output, write_output
from common.cli.printed import print_lines, print_notes
from common.errors import UserError, naming
from common.perfmodel.buckets import cap_label, parse_cap
from common.perfmodel.perfetto_trace import lanes_json
from common.perfmodel.replay.changes import CHANGES, Predicted, predicted
from common.perfmodel.replay.engine import Replayed, run
from common.perfmodel.replay.gate import LIMIT, Gate, gate_of
from common.perfmodel.replay.pipeline import read_operations, slowdown
from common.perfmodel.replay.waits import CAUSES, waits
from common.planning.answer_parts import AnswerTable
from common.planning.terminal import as_rich
from common.runtime.wording import counted

TABLES = (".parquet", ".csv")
PAGES = (".html", ".htm")


def print_from_traces(
    folder: str, caps: Sequence[str], console: Console, timeline: str | None = None
) -> None:
    """Prints what the traces of a folder show, and what they predict.

    Args:
        folder: the folder, a trace, or a table of operations.
        caps: caps in MiB, as text.
        console: where to print.
        timeline: file that the timelines are written to, if any.

    Raises UserError where there are none, or the replay does not give the measured steps back.
    """
    wanted = [parse_cap(text) for text in caps]
    if timeline is not None:
        if not timeline.endswith((*PAGES, ".json")):
            legal = "a file .json for Perfetto, or .html for a page"
            raise UserError(f"--timeline {timeline!r}: {legal}")
        check_output("--timeline", timeline)
    if Path(folder).is_file() and Path(folder).suffix in TABLES:
        for flag, has_it in (("--bucket-cap-mb", caps), ("--timeline", timeline)):
            if has_it:
                raise UserError(f"{flag} has an effect on traces, not on a table such as {folder}")
        _print_slowdown(Path(folder), console)
        return
    job = read_job(folder)
    replayed = run(job.program)
    gate = gate_of(replayed)
    gate.check()
    lines = (*_read_lines(job), _gate_line(gate))
    print_lines(console, lines)
    console.print(_tabulated_waits(job, replayed, gate))
    answers = [predicted(name, change, replayed) for name, change in CHANGES.items()]
    changes = _changes(answers)
    console.print(as_rich(changes))
    few = [a.step_s for a in answers if a.step_s is not None and not a.step_s.is_told]
    print_notes(console, [f"95 %: {interval.text(unit='step')}" for interval in few[:1]])
    for answer in answers:
        print_notes(console, (f"{answer.name}: assumed: {text}" for text in answer.assumed))
        if answer.not_judged:
            print_notes(console, [f"{answer.name}: not judged: {answer.not_judged}"])
    _print_caps(console, job, gate, wanted)
    if timeline is not None:
        title = f"What a step of {Path(folder).name} takes"
        text = (
            page(title, lines, replayed, answers, changes)
            if timeline.endswith(PAGES)
            else lanes_json(timelines(replayed, answers), facts={"replay": _gate_line(gate)})
        )
        write_output("--timeline", timeline, text)
        where = "" if timeline.endswith(PAGES) else "; open it in https://ui.perfetto.dev"
        print_lines(console, [f"Timelines written to {timeline}{where}."])


def _print_slowdown(path: Path, console: Console) -> None:
    """Prints what differences between the workers of a table of operations cost."""
    operations = read_operations(path)
    with naming(path):
        result = slowdown(operations)
        result.gate.check()
    stage, alike_s = result.slowest_stage, result.gate.replayed_s / result.ratio
    lines = [
        _gate_line(result.gate),
        f"Were all workers and steps alike, a step would take {alike_s * 1e3:.4g} ms: "
        f"differences make it {result.ratio:.3f} times as long.",
    ]
    if len(result.by_stage) > 1:
        lines.append(
            f"Stage {stage} costs most: as it is, beside stages that are alike, it makes the step "
            f"{result.by_stage[stage]:.3f} times as long."
        )
    print_lines(console, lines)


def _read_lines(job: Job) -> list[str]:
    """Returns what was read, and what was not."""
    ranks = f"{len(job.lanes)} of {counted(job.world_size, 'rank')}"
    steps = len(job.program.steps) // len(job.lanes)
    where = "GPUs" if job.on_device else "CPUs"
    calls = len(job.program.calls)
    lines = [
        f"Read: traces of {ranks} on {where}, {counted(steps, 'step')}, "
        f"{counted(calls, 'collective')} in them."
    ]
    if not job.is_whole:
        lines.append(
            "Not judged, as it needs the other ranks: who comes last to a collective, and how much "
            "of its time is waiting for that rank."
        )
    return [*lines, *(f"- {note}" for note in job.notes)]


def _gate_line(gate: Gate) -> str:
    return (
        f"Replay: a step of {gate.measured_s * 1e3:.4g} ms comes out as "
        f"{gate.replayed_s * 1e3:.4g} ms ({gate.error:+.1%}); {gate.within} of {len(gate.steps)} "
        f"steps within {LIMIT:.0%}. Waiting is computed."
    )


def _tabulated_waits(job: Job, replayed: Replayed, gate: Gate) -> Table:
    """Returns what each rank waits for in a step."""
    table = Table(title=f"A step of {gate.measured_s * 1e3:.4g} ms waits for", title_justify="left")
    pauses = waits(replayed).pivot_table(index="rank", columns="cause", values="seconds")
    causes = [cause for cause in CAUSES if cause in pauses.columns]
    for name in ("rank", *(f"{cause} (ms)" for cause in causes)):
        table.add_column(name, justify="right")
    for rank in job.program.ranks:
        row = pauses.reindex([rank]).fillna(0.0).iloc[0]
        table.add_row(str(rank), *(f"{row[cause] * 1e3:.1f}" for cause in causes))
    return table


def _changes(answers: Sequence[Predicted]) -> AnswerTable:
    """Returns the changes that could be predicted."""
    rows = [
        (
            answer.name,
            f"{answer.step_s.estimate * 1e3:.1f}",
            answer.step_s.map(lambda s: s * 1e3).text("{:.1f}", unit=""),
            f"{answer.gain.estimate:.1%}",
            answer.gain.text("{:.1%}", unit=""),
        )
        for answer in answers
        if answer.step_s is not None and answer.gain is not None
    ]
    columns = ("change", "step (ms)", "95 %", "saves", "95 %")
    return AnswerTable("What a step would take", columns, tuple(rows))


def _print_caps(console: Console, job: Job, gate: Gate, caps: Sequence[float | None]) -> None:
    """Prints T(b), or why it is not judged."""
    try:
        system = checked_system(job)
    except UserError as reason:
        print_notes(console, [f"another bucket cap: not judged: {reason}"])
        return
    console.print(_tabulated_caps(system, gate, caps or default_caps(system)))
    best, gain = best_cap(system)
    gain = gain.map(lambda seconds: -seconds * 1e3)
    compared = "cannot be told from DDP's default"
    if gain.is_told and not gain.low <= 0 <= gain.high:
        words = "faster" if gain.low > 0 else "slower"
        compared = f"{abs(gain.estimate):.1f} ms {words} than DDP's default"
    lines = (
        f"b* = {best.cap_mib:.3g} MiB: {compared}; within 1 %: {near_text(best)}.",
        f"The trace's own {counted(len(system.buckets), 'bucket')}: "
        f"{system.measured_s.mean() * 1e3:.1f} ms measured, {own_error(system):+.1%} predicted.",
    )
    print_lines(console, lines)
    print_notes(console, (f"another bucket cap: assumed: {text}" for text in system.assumed))


def _tabulated_caps(system: TraceSystem, gate: Gate, caps: Sequence[float | None]) -> Table:
    table = Table(title="Backward pass of DDP by bucket cap", title_justify="left")
    for name in ("cap (MiB)", "buckets", "T(b) (ms)", "exposed (ms)", "step (ms)", "95 %"):
        table.add_column(name, justify="right")
    predicted_caps = at_caps(system, gate.steps["measured_s"], caps)
    for cap, row in zip(caps, predicted_caps.itertuples(), strict=True):
        table.add_row(
            cap_label(cap),
            str(row.buckets),
            f"{row.backward_s * 1e3:.1f}",
            f"{row.exposed_s * 1e3:.1f}",
            f"{row.step.estimate * 1e3:.1f}",
            row.step.map(lambda s: s * 1e3).text("{:.1f}", unit=""),
        )
    return table
