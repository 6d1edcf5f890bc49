"""What the commands answer for the recorded runs: predictions, diagnoses, plans, flags."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pandas as pd
from plain_text import frame_text

PROJECT = Path(__file__).resolve().parents[2]
CLUSTERED = ("gpt2", "gpt2-large")
GPUS = "8..4096"


def predict_answers() -> dict[str, str]:
    """Returns what ``ddplab predict`` prints for recorded runs, published tables and clusters."""
    answers = {}
    for path in sorted(PROJECT.glob("data/*-2-cores/assignment2/**/gradient-ready-times.csv")):
        folder = path.parents[1].relative_to(PROJECT)
        name = "-".join(folder.parts[1:])
        answers[f"{name}.txt"] = printed("predict", "--run-dir", str(folder))
    for path in sorted(PROJECT.glob("data/clusters/*.yaml")):
        for model in CLUSTERED:
            flags = ("--model", model, "--cluster", path.stem, "--gpus", GPUS)
            answers[f"cluster-{path.stem}-{model}.txt"] = printed("predict", *flags)
    return answers


def diagnosis_answers() -> dict[str, str]:
    """Returns the diagnosis of every recorded scaling run."""
    from common.diagnose.diagnosis import diagnosis_lines
    from common.errors import UserError

    answers = {}
    for path in sorted(PROJECT.glob("data/**/arms.csv")):
        folder = path.parent.relative_to(PROJECT)
        try:
            lines = diagnosis_lines(path.parent)
        except UserError as refused:
            lines = [f"refused: {refused}"]
        answers[f"{'-'.join(folder.parts[1:])}.txt"] = "\n".join(lines)
    return answers


def tune_answers() -> dict[str, str]:
    """Returns what each recorded tuning would try: bucketings, candidates, options, visits."""
    from common.perfmodel.tables import read_all_reduce, read_costs, read_ready_times
    from common.runtime.records.run_directory import read_environment
    from common.tuning.candidates import predict_all
    from common.tuning.measured import WIRE_DTYPES, Measured
    from common.tuning.plan import plan_visits
    from common.tuning.tuner import bucketing_table

    answers = {}
    for path in sorted(PROJECT.glob("data/**/tune/predictions.csv")):
        folder = path.parent
        times = pd.read_csv(folder / "local-step-times.csv")
        measured = Measured(
            forward_s=float(times.groupby("rank")["forward_time_ms"].median().max()) / 1e3,
            profile=read_ready_times(folder / "gradient-ready-times.csv"),
            networks={
                name: read_all_reduce(folder / f"allreduce-samples{suffix}.csv")
                for name, suffix in {"none": "", "fp16": "-fp16", "bf16": "-bf16"}.items()
            },
            costs=read_costs(folder / "overlap-times.csv"),
            backend=read_environment(folder)["backend"],
            cast_s_per_byte=dict.fromkeys(WIRE_DTYPES, 0.0),
        )
        predicted = predict_all(measured)
        tried = [predicted.default, *predicted.candidates, *predicted.options]
        table = pd.DataFrame(
            {
                "setting": each.setting.label,
                "buckets": each.num_buckets,
                "backward_ms": each.backward_s * 1e3,
                "step_ms": each.step_s * 1e3,
            }
            for each in tried
        )
        plans = [str(plan_visits(n, len(predicted.candidates), [1])) for n in (10, 40, 160)]
        name = "-".join(folder.relative_to(PROJECT).parts[1:])
        bucketings = frame_text(bucketing_table(predicted, measured))
        answers[f"{name}.txt"] = "\n".join([frame_text(table), *plans, "", bucketings])
    return answers


def help_answers() -> dict[str, str]:
    """Returns what ``--help`` prints of every subcommand and of every script."""
    from common.cli.help import PAGES, PROGRAM
    from common.cli.main import SUBCOMMANDS

    asked = [(), *((name,) for name in SUBCOMMANDS)]
    for command, page in PAGES.items():
        if command != PROGRAM:
            # All studies have one set of flags.
            names = page.names if page.noun == "subcommand" else page.names[:1]
            asked += [(*command.split()[1:], name) for name in names]
    answers = {"-".join([PROGRAM, *words]) + ".txt": printed(*words, "--help") for words in asked}
    for path in sorted(PROJECT.glob("assignments/*/*.py")):
        name = f"{path.parent.name}-{path.stem}.txt"
        answers[name] = _printed([str(path), "--help"], lambda path=path: _as_script(path))
    return answers


def _as_script(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


def printed(*arguments: str) -> str:
    """Returns what ``ddplab`` prints with these arguments, on a terminal of 120 columns."""
    from common.cli.main import main

    return _printed(["ddplab", *arguments], main)


def _printed(argv: Sequence[str], action: object) -> str:
    """Returns the standard output of ``action`` under a command line, errors at its end."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    plain = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        mock.patch.object(sys, "argv", list(argv)),
        mock.patch.dict(os.environ, plain),
        contextlib.chdir(PROJECT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            action()
        except SystemExit as ended:
            status = ended.code
    text = out.getvalue() + err.getvalue()
    lines = [line.rstrip() for line in text.replace(f"{PROJECT}{os.sep}", "").splitlines()]
    return "\n".join([*lines, f"exit status {status or 0}"])
