"""A preset: the stages that an assignment measures, their ranks or hosts, and its notebooks.

A preset (``assignments/<assignment>/configs/<preset>.yaml``) lists the stages, each a script and
a number of ranks (and a name, where a script runs several times), the settings of each script in a
section of its name, and the notebooks. A stage with ``hosts`` and ``rate`` runs on emulated hosts,
one rank on each, with further settings of its own; its results go to a folder of that rate, apart
from those over loopback.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.cluster.emulated import EmulatedCluster
from common.errors import UserError
from common.runtime.flags import as_flags, read_yaml
from common.runtime.machine.device import choose_device
from common.runtime.paths import project_root, relative_to_project
from common.runtime.records.run_directory import read_environment
from common.settings import dividing_batch

PRESETS = ("smoke", "laptop", "gpu")
GLOBAL_BATCH = "global_batch_size"
"""Setting of the scripts whose ranks must divide it."""


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

    @property
    def key(self) -> str:
        """Returns its folder below the assignment's run directory."""
        return self.name if self.folder == "." else f"{self.folder}/{self.name}"

    def flags(self) -> list[str]:
        """Returns the stage's own settings as flags."""
        return as_flags(self.settings)


@dataclass(frozen=True)
class Preset:
    """A preset file, read and checked."""

    assignment: str
    path: Path
    stages: tuple[Stage, ...]
    notebooks: tuple[Path, ...]
    content: dict

    def identity(self, stage: Stage) -> str:
        """Returns a text that is the same for stages that measure the same, in any preset.

        They run the same script with the same settings on the same ranks or hosts.
        """
        settings = self.content.get(stage.script.stem, {}) | dict(stage.settings)
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


def with_dividing_batches(preset: Preset, say: Callable[[str], None]) -> Preset:
    """Returns the preset with global batches that the largest number of ranks of a stage divides.

    Stages on fewer ranks, such as one device, are compared with those and take the same. A change
    is said before anything is measured.
    """
    most = max(count_ranks(stage.ranks) for stage in preset.stages)
    stages, changes = [], []
    for stage in preset.stages:
        settings = preset.content.get(stage.script.stem, {}) | dict(stage.settings)
        wanted, micro = settings.get(GLOBAL_BATCH, 0), settings.get("micro_batch_size", 1)
        batch = wanted and dividing_batch(wanted, most * micro)
        if batch != wanted:
            stage = dataclasses.replace(stage, settings={**stage.settings, GLOBAL_BATCH: batch})
            changes.append(
                f"{preset.assignment}: global batch of {batch} sequences, a multiple of {most} "
                f"ranks × {micro}; the preset's {wanted} is none"
            )
        stages.append(stage)
    for change in dict.fromkeys(changes):
        say(change)
    return dataclasses.replace(preset, stages=tuple(stages))


def preset_of(folder: Path, assignment: str) -> Preset:
    """Returns the preset that ``ddplab run`` made a run with; for cluster jobs, that of GPUs."""
    record = folder / "environment.json"
    label = read_environment(folder).get("label") if record.is_file() else None
    return load_preset(assignment, label if label in PRESETS else "gpu")


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

    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise UserError(
            f"the preset wants a rank per GPU and at least 2; torch can use {gpus} here. "
            "Without them: --preset laptop"
        )
    return gpus


def stages_that_run(presets: Sequence[Preset], with_hosts: bool) -> set[tuple[str, str]]:
    """Returns assignment and key of the stages that one run of these presets measures.

    What an earlier assignment has measured is copied. Without emulated hosts theirs are left out.
    """
    running, measured = set(), set()
    for preset in presets:
        stages = [stage for stage in preset.stages if with_hosts or not stage.hosts]
        new = [stage for stage in stages if preset.identity(stage) not in measured]
        running |= {(preset.assignment, stage.key) for stage in new}
        measured |= {preset.identity(stage) for stage in new}
    return running
