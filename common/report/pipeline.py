"""``ddplab run``: every stage of an assignment's preset, its notebooks, and the report."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from common.cluster.emulated import why_no_hosts
from common.cluster.kept_ranks import KeptRanks, Place
from common.errors import RunFailed, UserError, require_known, unwritten_task
from common.report.document import Document
from common.report.first_page import COMPLETE, print_page
from common.report.notebooks import execute_notebooks
from common.report.presets import (
    Preset,
    count_ranks,
    known_assignments,
    load_preset,
    preset_of,
    with_dividing_batches,
)
from common.report.run_page import RunPage, RunWatch
from common.report.stages import Measured, Measuring
from common.report.timetable import (
    FIRST_PAGE,
    NOTEBOOKS,
    REPORT,
    REPORT_OF_ALL,
    STAGES,
    plan,
)
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root, relative_to_project
from common.runtime.records.run_directory import RunDirectory
from common.runtime.stage_progress import StageProgress
from common.runtime.wording import counted

SUMMARY = project_root() / "notebooks" / "summary.ipynb"


def run_assignments(
    what: str,
    label: str,
    output_dir: str,
    progress: StageProgress,
    *,
    full: bool = False,
    with_answers: bool = False,
) -> Path:
    """Runs one assignment or ``all``; returns the folder with report.pdf and index.html.

    index.html is there from the beginning and grows. Each run directory keeps its own report.

    Args:
        what: Name of an assignment, or ``all``.
        label: Name of the presets: smoke, laptop or gpu.
        output_dir: Folder of all runs.
        progress: Display of the terminal.
        full: Whether report.pdf has the notebooks whole.
        with_answers: Whether the notebooks show the staff's answers.
    """
    assignments = known_assignments()
    require_known("assignment", what, ["all", *assignments])
    output = Path(output_dir).absolute()
    named = [load_preset(name, label) for name in (assignments if what == "all" else [what])]
    presets = [with_dividing_batches(preset, progress.say) for preset in named]
    titles = entry_titles(presets)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if output.is_file() else error.strerror
        raise UserError(f"output folder {output}: {reason}") from None
    timetable = plan(presets, label, output, titles, with_hosts=why_no_hosts() is None)
    watch = RunWatch(output, timetable, progress, full=full)
    measured = Measured()
    folders = []
    last = timetable.entries[-1]
    with watch.until_the_end():
        with KeptRanks() as kept:
            watch.announce()
            for number, preset in enumerate(presets, start=1):
                folders.append(
                    _run_assignment(
                        preset, label, output, watch, measured, kept, with_answers=with_answers
                    )
                )
                kept.end_all_but(_places(presets[number:]))
        with watch.stage(last.assignment, last.key) as update:
            if len(folders) > 1:
                _summarise(dict(zip(assignments, folders, strict=True)), output, watch, update)
            watch.page.state = COMPLETE
            watch.page.write_report(output)
    progress.say(
        f"Done in {progress.elapsed_s:.0f} s. Report: {relative_to_project(output / 'report.pdf')}"
    )
    progress.say(f"and {relative_to_project(output / 'index.html')}")
    for folder in folders:
        progress.say(f"Measurements: {relative_to_project(folder)}")
    print_page(watch.page.first(), progress.console)
    return output


def entry_titles(presets: Sequence[Preset]) -> dict[str, dict[str, str]]:
    """Returns the title of all that a run of presets does, by assignment and key, in order."""
    titles = {}
    for preset in presets:
        stages = {
            stage.key: f"{stage.title} ({stage.hosts or counted(count_ranks(stage.ranks), 'rank')})"
            for stage in preset.stages
        }
        after = {NOTEBOOKS: counted(len(preset.notebooks), "notebook"), REPORT: "report"}
        titles[preset.assignment] = stages | after
    closing = REPORT_OF_ALL if len(presets) > 1 else FIRST_PAGE
    titles[presets[-1].assignment][closing] = closing
    return titles


def _places(presets: Iterable[Preset]) -> set[Place]:
    """Returns where the stages of presets run."""
    stages = itertools.chain.from_iterable(preset.stages for preset in presets)
    return {Place(count_ranks(stage.ranks), stage.hosts) for stage in stages}


def _run_assignment(
    preset: Preset,
    label: str,
    output: Path,
    watch: RunWatch,
    measured: Measured,
    kept: KeptRanks,
    *,
    with_answers: bool,
) -> Path:
    """Measures, executes the notebooks, writes one assignment's report; returns its folder."""
    device = None if label == "gpu" else "cpu"
    ranks = {stage: count_ranks(stage.ranks) for stage in preset.stages}
    backend = "gloo" if device == "cpu" else "nccl"
    environment = describe_environment(backend, device, max(ranks.values()))
    no_hosts = why_no_hosts() if any(stage.hosts for stage in preset.stages) else None
    environment["emulated_hosts_left_out"] = no_hosts
    run = RunDirectory.create(output / preset.assignment, label, preset.content, environment)
    watch.progress.say(f"{preset.assignment}, preset {label}: {relative_to_project(run.path)}")
    watch.page.open(preset.assignment, run.path)
    (run.path / "logs").mkdir()
    measuring = Measuring(preset, ranks, run.path, watch, kept if label != "gpu" else None)
    with run:
        new = []
        for stage in preset.stages:
            if stage.hosts and no_hosts:
                watch.leave_out(preset.assignment, stage.key, no_hosts)
            elif source := measured.copy(stage, preset, run.path):
                origin = relative_to_project(source)
                watch.leave_out(preset.assignment, stage.key, origin, copied=True)
            else:
                new.append(stage)
        measuring.measure(new)
        complete = [stage for stage in new if measuring.is_complete(stage)]
        for stage in complete:
            measured.add(stage, preset, run.path)
        is_partial = len(complete) < len(new)
        _write_up(preset, run.path, watch, is_partial=is_partial, with_answers=with_answers)
    return run.path


def _write_up(
    preset: Preset, folder: Path, watch: RunWatch, *, is_partial: bool, with_answers: bool
) -> None:
    """Executes the notebooks on the measurements in ``folder`` and writes the report there."""
    with watch.stage(preset.assignment, NOTEBOOKS) as update:
        executed, errors = execute_notebooks(
            preset.notebooks,
            folder / "notebooks",
            {"run_dir": str(folder)},
            update,
            with_answers=with_answers,
        )
    _say_left_out(executed, errors, watch.progress, is_partial=is_partial)
    with watch.stage(preset.assignment, REPORT):
        watch.page.add(Document(preset.assignment, tuple(executed)))
        watch.page.write_assignment(folder, preset.assignment)


def _summarise(
    folders: Mapping[str, Path], output: Path, watch: RunWatch, update: Callable[[str], None]
) -> None:
    """Executes the notebook of a whole run, whose pages come first in its report."""
    runs = {name: str(folder) for name, folder in folders.items()}
    try:
        executed, errors = execute_notebooks(
            [SUMMARY], output / "notebooks", {"run_dirs": runs}, update
        )
    except RunFailed as error:  # the reports of the assignments are there
        executed, errors = [], [error]
    for error in errors:  # of a task that is not written yet, or of a stage that was left out
        watch.progress.say(f"- left out: {error}")
    if executed:
        watch.page.add_summary(executed[0])


def _say_left_out(
    executed: list[Path], errors: list[UserError], progress: StageProgress, *, is_partial: bool
) -> None:
    """Says which notebooks were left out, where that is no mistake.

    Notebooks that need a task which is not written yet are left out; of measurements that are
    ``is_partial``, those, too, that miss one. Raises what is another error, or where none is left
    though every task is written.
    """
    for error in errors:
        if not (unwritten_task(str(error)) or is_partial):
            raise error
        progress.say(f"- left out: {error}")
    if not executed and not all(unwritten_task(str(error)) for error in errors):
        raise errors[0]


def report_measured(
    assignment: str,
    run_dir: str,
    progress: StageProgress,
    *,
    full: bool = False,
    with_answers: bool = False,
) -> Path:
    """Writes notebooks and report from measurements that are there, such as those of cluster jobs.

    They show the staff's answers only ``with_answers``. They go into ``run_dir``, which holds the
    runs of the benchmarks; returns its path.

    Raises:
        UserError: there is no such assignment or folder, or nothing was measured there.
    """
    if assignment == "all":
        raise UserError("--run-dir holds one assignment: say which, like assignment2")
    require_known("assignment", assignment, known_assignments())
    folder = Path(run_dir).absolute()
    if not run_dir or not folder.is_dir():
        raise UserError(f"{run_dir or repr(run_dir)}: no such run directory")
    if not any(path.name != STAGES for path in folder.rglob("*.csv")):
        raise UserError(f"{run_dir}: no complete run with tables of {assignment} in it")
    new = not (folder / "notebooks").exists()
    preset = preset_of(folder, assignment)
    page = RunPage(full=full)
    page.open(assignment, folder)
    try:
        with progress.stage(counted(len(preset.notebooks), "notebook")) as update:
            executed, errors = execute_notebooks(
                preset.notebooks,
                folder / "notebooks",
                {"run_dir": str(folder)},
                update,
                with_answers=with_answers,
            )
        _say_left_out(executed, errors, progress, is_partial=False)
        with progress.stage("report"):
            page.add(Document(assignment, tuple(executed)))
            page.write_assignment(folder, assignment)
    except (UserError, KeyboardInterrupt):
        if new:  # nothing half-written where there was nothing to report
            shutil.rmtree(folder / "notebooks", ignore_errors=True)
        raise
    progress.say(f"Report: {relative_to_project(folder / 'report.pdf')}")
    progress.say(f"and {relative_to_project(folder / 'index.html')}")
    print_page(page.first(only=assignment), progress.console)
    return folder
