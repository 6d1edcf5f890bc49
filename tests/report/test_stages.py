"""Stages whose machine was disturbed are measured again, and the better measurement is kept."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from common.errors import RunFailed
from common.report import stages
from common.report.presets import Preset, Stage
from common.report.stages import Measuring
from common.report.timetable import DONE, Timetable
from common.runtime.records.run_directory import RunDirectory
from common.runtime.stage_progress import StageProgress
from common.tables import WITNESS_COLUMNS

BUSY, CALM = 0.5, 0.0
STAGE_S = 30.0


class Watch:
    """Follows stages, each of which takes STAGE_S by its timetable."""

    def __init__(self) -> None:
        self.timetable = Timetable([])
        self.text = io.StringIO()
        self.progress = StageProgress(Console(file=self.text, width=200))

    @contextmanager
    def stage(self, assignment: str, key: str) -> Iterator[Callable[[str], None]]:
        entry = self.timetable.begin(assignment, key)
        yield print
        self.timetable.end(entry, DONE)
        entry.took_s = STAGE_S


def measure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, others: list[float], budget_s: float | None
) -> tuple[dict[str, float], Watch, list[str]]:
    """Measures two stages, on cores of which others have these shares, one time after the other.

    Returns the share of each run directory, the watch and the names of what ran, in order.
    """
    ran, left = [], iter(others)

    def launch(script: Path, arguments: list[str], *_: object, **__: object) -> None:
        name = arguments[arguments.index("--run_id") + 1]
        ran.append(name)
        with RunDirectory.create(folder, name, {}, {"status": "running"}, name) as run:
            row = dict.fromkeys(WITNESS_COLUMNS, 0) | {"stage": "run", "witness_ms": 1.0}
            share = next(left, None)
            if share is None:
                raise RunFailed("rank 1 was killed")
            end = row | {"round": 1, "others_share": share, "steal_share": 0.0}
            run.write_table("witness.csv", pd.DataFrame([row, end]))

    monkeypatch.setattr(stages, "launch", launch)
    content = {} if budget_s is None else {"retry_budget_s": budget_s}
    pair = [Stage(name, name, folder / f"{name}.py", 1) for name in ("first", "second")]
    preset = Preset("assignment0", folder / "smoke.yaml", tuple(pair), (), content)
    watch = Watch()
    Measuring(preset, dict.fromkeys(pair, 1), folder, watch, None).measure(pair)
    shares = {
        path.parent.name: pd.read_csv(path)["others_share"].max()
        for path in folder.glob("*/witness.csv")
    }
    return shares, watch, ran


@pytest.mark.parametrize(
    ("again", "kept", "words"),
    [
        ([0.01], 0.01, "first: measured twice, and the second measurement kept"),
        ([0.6], BUSY, "first: measured twice, and the first measurement kept"),
        ([], BUSY, "not measured again: rank 1 was killed"),
    ],
)
def test_the_quieter_measurement_is_kept_and_it_is_said(
    again: list[float], kept: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, watch, ran = measure(tmp_path, monkeypatch, [BUSY, CALM, *again], 100)
    assert ran == ["first", "second", "first-again"]
    assert shares == {"first": kept, "second": CALM}
    said = watch.text.getvalue()
    assert "the machine was disturbed: other processes took 50 % of the cores" in said
    assert words in said
    assert not (tmp_path / "first-again").exists()


def test_what_another_stage_started_from_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "DEPENDENT", {"second.py"})
    _, _, ran = measure(tmp_path, monkeypatch, [BUSY, BUSY, CALM, CALM], 100)
    assert ran == ["first", "second"]


@pytest.mark.parametrize(
    ("budget_s", "again"),
    [(None, []), (STAGE_S - 1, []), (2 * STAGE_S - 1, ["first-again"])],
)
def test_the_budget_bounds_what_is_measured_again(
    budget_s: float | None, again: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, ran = measure(tmp_path, monkeypatch, [BUSY, BUSY, CALM], budget_s)
    assert ran == ["first", "second", *again]
