"""``ddplab run``: every stage of an assignment's preset, its notebooks, and the report.

A preset (``assignments/<assignment>/configs/<preset>.yaml``) lists the stages, each a script and
a number of ranks (and a name, where a script runs several times), the settings of each script in a
section of its name, and the notebooks. A stage with ``hosts`` and ``rate`` runs on emulated hosts,
one rank on each, with further settings of its own; its results go to a folder of that rate, apart
from those over loopback.

Neighbouring stages on the same ranks or hosts share them, and what one assignment has measured is
not measured again for another.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.cluster.emulated import EmulatedCluster, why_not
from common.cluster.launch import launch, launch_series
from common.errors import UserError, unknown_name, unwritten_task
from common.report.document import Document, render, write_page, write_pdf
from common.report.notebooks import execute_notebooks
from common.report.progress import StageProgress
from common.runtime.device import choose_device
from common.runtime.environment import describe_environment
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import RunDirectory, read_environment, write_atomically
from common.runtime.script import read_yaml

PRESETS = ("smoke", "laptop", "gpu")


@dataclass(frozen=True, eq=False)
class Stage:
    """One script of a preset, to be started on ``ranks`` ranks (``all``: one per GPU).

    ``name`` is that of its run directory, which lies in ``folder`` below the assignment's;
    ``settings`` are flags on top of those in the script's section.
    """

    title: str
    name: str
    script: Path
    ranks: int | str
    hosts: EmulatedCluster | None = None
    folder: str = "."
    settings: Mapping[str, object] = field(default_factory=dict)

    def flags(self) -> list[str]:
        """Returns the stage's own settings as flags."""
        flags = []
        for name, value in self.settings.items():
            if isinstance(value, bool):
                flags.append(f"--{name}" if value else f"--no-{name}")
            else:
                flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return flags


@dataclass(frozen=True)
class Preset:
    """A preset file, read and checked."""

    assignment: str
    path: Path
    stages: tuple[Stage, ...]
    notebooks: tuple[Path, ...]
    content: dict


class Measured:
    """The stages that one ``ddplab run`` has measured, for assignments that need the same again.

    Stages are the same if they run the same script with the same settings on the same ranks or
    hosts. A copy's ``environment.json`` has ``copied_from``, the run directory that was measured.
    """

    def __init__(self) -> None:
        self._runs: dict[str, Path] = {}

    def add(self, stage: Stage, preset: Preset, run_dir: Path) -> None:
        """Notes that a stage has been measured below ``run_dir``."""
        self._runs[self._key(stage, preset)] = run_dir / stage.folder / stage.name

    def copy(self, stage: Stage, preset: Preset, run_dir: Path) -> Path | None:
        """Copies an earlier measurement of the stage below ``run_dir``.

        Returns the run directory that was copied; None where there is none.
        """
        source = self._runs.get(self._key(stage, preset))
        if source is None:
            return None
        target = run_dir / stage.folder / stage.name
        shutil.copytree(source, target)
        environment = read_environment(target) | {"copied_from": _shown(source)}
        write_atomically(target / "environment.json", json.dumps(environment, indent=1))
        return source

    @staticmethod
    def _key(stage: Stage, preset: Preset) -> str:
        settings = preset.content.get(stage.script.stem, {}) | dict(stage.settings)
        where = str(stage.hosts) if stage.hosts else stage.ranks
        return json.dumps([str(stage.script.resolve()), where, settings], sort_keys=True)


def known_assignments() -> list[str]:
    """Returns the assignments that have presets, in order."""
    folders = (project_root() / "assignments").glob("assignment*/configs/smoke.yaml")
    return sorted(path.parents[1].name for path in folders)


def load_preset(assignment: str, name: str) -> Preset:
    """Reads a preset. Raises UserError for one that does not exist or names what does not."""
    root = project_root()
    path = root / "assignments" / assignment / "configs" / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"{assignment} has no preset {name!r}")
    content = read_yaml(path)
    stages = tuple(_stage(entry, path.parents[1]) for entry in content["stages"])
    notebooks = tuple(root / "notebooks" / f"{name}.ipynb" for name in content["notebooks"])
    for needed in (*(stage.script for stage in stages), *notebooks):
        if not needed.is_file():
            raise UserError(f"{relative_to_project(path)} names {needed.name}, which is not there")
    return Preset(assignment, path, stages, notebooks, content)


def run_assignments(what: str, preset: str, output_dir: str, progress: StageProgress) -> Path:
    """Runs one assignment or ``all``; returns the folder with report.pdf and index.html.

    Each run directory keeps its own report; a copy of the latest is in ``output_dir``.
    """
    known = known_assignments()
    if what != "all" and what not in known:
        raise UserError(unknown_name("assignment", what, ["all", *known]))
    output = Path(output_dir).absolute()
    presets = [load_preset(name, preset) for name in (known if what == "all" else [what])]
    measured = Measured()
    documents = [run_assignment(chosen, preset, output, progress, measured) for chosen in presets]
    if len(documents) == 1:
        folder = documents[0].notebooks[0].parents[1]
        for name in ("report.pdf", "index.html"):
            shutil.copyfile(folder / name, output / name)
    else:
        with progress.stage("report of all assignments"):
            write_page(output, [render(document) for document in documents])
            write_pdf(output, documents)
    progress.say(f"Done in {progress.elapsed_s:.0f} s. Report: {_shown(output / 'report.pdf')}")
    progress.say(f"and {_shown(output / 'index.html')}")
    for document in documents:
        progress.say(f"Measurements: {_shown(document.notebooks[0].parents[1])}")
    return output


def run_assignment(
    preset: Preset, name: str, output: Path, progress: StageProgress, measured: Measured
) -> Document:
    """Measures, executes the notebooks and writes the report of one assignment."""
    device = None if name == "gpu" else "cpu"
    ranks = {stage: count_ranks(stage.ranks) for stage in preset.stages}
    backend = "gloo" if device == "cpu" else "nccl"
    environment = describe_environment(backend, device, max(ranks.values()))
    left_out = why_not() if any(stage.hosts for stage in preset.stages) else None
    environment["emulated_hosts_left_out"] = left_out
    run = RunDirectory.create(output / preset.assignment, name, preset.content, environment)
    progress.say(f"{preset.assignment}, preset {name}: {_shown(run.path)}")
    if left_out:
        progress.say(f"Emulated hosts are left out: {left_out}")
    (run.path / "logs").mkdir()
    with run:
        stages = [stage for stage in preset.stages if not (stage.hosts and left_out)]
        new = []
        for stage in stages:
            if source := measured.copy(stage, preset, run.path):
                progress.say(f"= {_where(stage, ranks)}: as in {_shown(source)}")
            else:
                new.append(stage)
        # Neighbouring stages on the same ranks share them, one after another; on GPUs, whose state
        # does not outlive a fork, each stage has ranks of its own.
        alone = itertools.count()
        for _, group in itertools.groupby(
            new, lambda s: next(alone) if name == "gpu" else (str(s.hosts), ranks[s])
        ):
            _measure_what_is_written(list(group), ranks, preset, run.path, progress)
        unwritten = [stage for stage in new if not _is_complete(stage, run.path)]
        for stage in new:
            if stage not in unwritten:
                measured.add(stage, preset, run.path)
        return _write_up(preset, run.path, progress, is_partial=bool(unwritten))


def report_measured(assignment: str, run_dir: str, progress: StageProgress) -> Path:
    """Writes notebooks and report from measurements that are there, such as those of cluster jobs.

    They go into ``run_dir``, which holds the runs of the benchmarks; returns its path.

    Raises:
        UserError: there is no such assignment or folder, or nothing was measured there.
    """
    if assignment == "all":
        raise UserError("--run-dir holds one assignment: say which, like assignment2")
    if assignment not in known_assignments():
        raise UserError(unknown_name("assignment", assignment, known_assignments()))
    folder = Path(run_dir).absolute()
    if not folder.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    if not any(folder.rglob("*.csv")):
        raise UserError(f"{run_dir}: no complete run with tables of {assignment} in it")
    new = not (folder / "notebooks").exists()
    try:
        _write_up(_preset_of(folder, assignment), folder, progress)
    except UserError:
        if new:  # nothing half-written where there was nothing to report
            shutil.rmtree(folder / "notebooks", ignore_errors=True)
        raise
    progress.say(f"Report: {_shown(folder / 'report.pdf')}")
    progress.say(f"and {_shown(folder / 'index.html')}")
    return folder


def _preset_of(folder: Path, assignment: str) -> Preset:
    """Returns the preset that ``ddplab run`` made a run with; for cluster jobs, that of GPUs."""
    record = folder / "environment.json"
    label = read_environment(folder).get("label") if record.is_file() else None
    return load_preset(assignment, label if label in PRESETS else "gpu")


def _measure_what_is_written(
    stages: list[Stage],
    ranks: Mapping[Stage, int],
    preset: Preset,
    run_dir: Path,
    progress: StageProgress,
) -> None:
    """Runs stages; leaves out those that need a task of the course which is not written yet."""
    waiting = stages
    while waiting:
        try:
            _measure(waiting, ranks, preset, run_dir, progress)
            return
        except UserError as error:
            task = unwritten_task(str(error))
            if not task:
                raise
            done = sum(_is_complete(stage, run_dir) for stage in waiting)
            left_out = _where(waiting[done], ranks)
            progress.say(f"- {left_out}: left out, because task {task} is not written yet")
            waiting = waiting[done + 1 :]


def _is_complete(stage: Stage, run_dir: Path) -> bool:
    folder = run_dir / stage.folder / stage.name
    is_there = (folder / "environment.json").is_file()
    return is_there and read_environment(folder)["status"] == "complete"


def _measure(
    stages: list[Stage],
    ranks: Mapping[Stage, int],
    preset: Preset,
    run_dir: Path,
    progress: StageProgress,
) -> None:
    """Runs a stage, or several that share the ranks they run on."""

    def arguments(stage: Stage) -> list[str]:
        where = ("--output_dir", str(run_dir / stage.folder), "--run_id", stage.name)
        return ["--config", str(preset.path), *where, *stage.flags()]

    def log(stage: Stage) -> Path:
        name = stage.name if stage.folder == "." else f"{stage.folder}-{stage.name}"
        return run_dir / "logs" / f"{name}.log"

    first = stages[0]
    if len(stages) == 1:
        with progress.stage(_where(first, ranks)) as update:
            launch(
                first.script,
                arguments(first),
                ranks[first],
                log(first),
                hosts=first.hosts,
                on_output=update,
            )
        return
    scripts = [[str(stage.script), *arguments(stage)] for stage in stages]
    error_file = run_dir / "logs" / "error"
    with launch_series(scripts, ranks[first], error_file, hosts=first.hosts) as wait:
        for stage in stages:
            with progress.stage(_where(stage, ranks)) as update:
                wait(log(stage), update)


def _write_up(
    preset: Preset, folder: Path, progress: StageProgress, *, is_partial: bool = False
) -> Document:
    """Executes the notebooks on the measurements in ``folder`` and writes the report there.

    Notebooks that need a task which is not written yet are left out; of measurements that are
    ``is_partial``, those, too, that miss one.
    """
    with progress.stage(_count(len(preset.notebooks), "notebook")) as update:
        executed, errors = execute_notebooks(
            preset.notebooks, folder / "notebooks", {"run_dir": str(folder)}, update
        )
    for error in errors:
        if not (unwritten_task(str(error)) or is_partial):
            raise error
        progress.say(f"- left out: {error}")
    if not executed:
        raise errors[0]
    with progress.stage("report"):
        document = Document(preset.assignment, tuple(executed))
        write_page(folder, [render(document)])
        write_pdf(folder, [document])
    return document


def _stage(entry: Mapping, folder: Path) -> Stage:
    """Makes a stage from its entry in a preset; ``folder`` holds the scripts."""
    script = folder / entry["script"]
    settings = entry.get("settings", {})
    name = entry.get("name", script.stem)
    if "hosts" not in entry:
        return Stage(entry["title"], name, script, _check_ranks(entry["ranks"]), settings=settings)
    rate = str(entry["rate"])
    cluster = EmulatedCluster.of(entry["hosts"], [rate])
    return Stage(
        title=entry["title"],
        name=name,
        script=script,
        ranks=cluster.ranks,
        hosts=cluster,
        folder=f"emulated-{cluster.hosts}x{rate}",
        settings=settings,
    )


def _check_ranks(text: object) -> int | str:
    if text != "all" and (not isinstance(text, int) or text < 1):
        raise UserError(f"ranks {text!r}: a number above 0, or all")
    return text


def count_ranks(ranks: int | str) -> int:
    """Returns a stage's number of ranks; ``all`` is one per GPU.

    Raises UserError for ``all`` where there are not two GPUs that torch can use.
    """
    if isinstance(ranks, int):
        return ranks
    choose_device("cuda", instead="--preset laptop")
    import torch

    found = torch.cuda.device_count()
    if found < 2:
        raise UserError(
            f"the preset wants a rank per GPU and at least 2; torch can use {found} here. "
            "Without them: --preset laptop"
        )
    return found


def _where(stage: Stage, ranks: Mapping[Stage, int]) -> str:
    """Returns a stage's title with the hosts or the number of ranks that it runs on."""
    where = str(stage.hosts) if stage.hosts else _count(ranks[stage], "rank")
    return f"{stage.title} ({where})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _shown(path: Path) -> str:
    return relative_to_project(path)
