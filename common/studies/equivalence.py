"""``ddplab study equivalence``: does every strategy compute the numbers of one device?

One device, DDP and FSDP on 2 and 4 ranks, each with and without gradient accumulation, in float64
and float32, from ranks that were seeded differently. The losses of all steps (``losses.csv``) and,
in float64, the final weights are held against those of one device without accumulation
(``differences.csv``). In float32 weights are no measure: where a gradient is zero in theory, Adam
turns the noise of rounding into updates of full size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.cluster.launch import launch
from common.errors import RunFailed
from common.exercises.checkpoint_commit import finished_checkpoints
from common.report.progress import StageProgress
from common.studies.study import study_run, with_verdicts

SCRIPT = Path(__file__).with_name("equivalence_ranks.py")
CASE = ["precision", "strategy", "ranks", "accumulation"]
ALLOWED = {("float64", "loss"): 1e-10, ("float64", "weight"): 1e-8, ("float32", "loss"): 1e-5}
"""Largest absolute difference, by precision and quantity."""


@dataclass(frozen=True)
class EquivalenceStudy:
    """Settings of the study; those of each run are in ``equivalence_ranks.Cases``."""

    ranks: tuple[int, ...] = (1, 2, 4)
    num_steps: int = 20


def run_study(study: EquivalenceStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs all cases and judges them; returns the run directory."""
    with (
        study_run(
            "equivalence", study, output_dir, progress, backend="gloo", ranks=max(study.ranks)
        ) as run,
        TemporaryDirectory(dir=run.path) as scratch,
    ):
        refused = False
        for ranks in study.ranks:
            with progress.stage(f"all strategies on {ranks} rank{'s' * (ranks > 1)}") as update:
                log = Path(scratch) / f"{ranks}.log"
                flags = ["--output_dir", scratch, "--num_steps", str(study.num_steps)]
                launch(SCRIPT, flags, ranks, log, on_output=update)
                refused = refused or "refused: HYBRID_SHARD" in log.read_text()
        losses = read_losses(Path(scratch))
        run.write_table("losses.csv", losses)
        differences = compare(losses, read_weights(Path(scratch)))
        run.write_table("differences.csv", differences)
        verdicts = judge(differences, refused)
        run.write_table("verdicts.csv", verdicts)
    progress.say(differences.to_string(index=False, float_format="%.1e"))
    progress.say(verdicts.to_string(index=False))
    return run.path


def read_losses(folder: Path) -> pd.DataFrame:
    """Reads the losses and gradient norms of all runs: a row per case and step.

    Raises:
        RunFailed: the ranks of a run do not agree on a loss.
    """
    tables = []
    for path in sorted(folder.glob("*/training-steps.csv")):
        table = pd.read_csv(path)
        if table.groupby("step")["loss"].nunique().max() > 1:
            raise RunFailed(f"{path.parent.name}: the ranks do not agree on the loss")
        kept = table[table["rank"] == 0][["step", "loss", "gradient_norm"]]
        tables.append(kept.assign(**_case(path.parent.name)))
    return pd.concat(tables)[[*CASE, "step", "loss", "gradient_norm"]]


def read_weights(folder: Path) -> dict[tuple, dict[str, torch.Tensor]]:
    """Reads the final weights of the float64 runs from their last checkpoints.

    Returns:
        The values of CASE → name → tensor, whole, whatever the strategy had sharded.
    """
    weights = {}
    for path in sorted((folder / "checkpoints").glob("*-float64")):
        [newest, *_] = finished_checkpoints(path)
        whole = path / "whole.pt"
        dcp_to_torch_save(newest, whole)
        weights[tuple(_case(path.name).values())] = torch.load(whole)["model"]
        whole.unlink()
    return weights


def _case(name: str) -> dict[str, str | int]:
    strategy, ranks, accumulation, precision = name.split("-")
    values = (precision, strategy, int(ranks), int(accumulation))
    return dict(zip(CASE, values, strict=True))


def compare(losses: pd.DataFrame, weights: dict[tuple, dict[str, torch.Tensor]]) -> pd.DataFrame:
    """Returns the largest difference of any loss and weight from one device's, a row per case.

    Raises:
        RunFailed: a case has not the same steps as one device.
    """
    rows = []
    for case, table in losses.groupby(CASE, sort=False):
        # One device without accumulation, at the precision of the case.
        reference = (case[0], "single", 1, 1)
        there = losses[(losses[CASE] == pd.Series(reference, CASE)).all(axis=1)]
        both = table.merge(there, on="step", suffixes=("", "_there"), validate="1:1")
        if len(both) != len(there) or len(table) != len(there):
            raise RunFailed(f"{case}: not the same steps as {reference}")
        found = {"loss": (both["loss"] - both["loss_there"]).abs().max(), "weight": None}
        if case in weights:
            own, other = weights[case], weights[reference]
            found["weight"] = max((own[n] - other[n]).abs().max().item() for n in other)
        rows.append(dict(zip(CASE, case, strict=True)) | found)
    return pd.DataFrame(rows)


def judge(differences: pd.DataFrame, refused: bool) -> pd.DataFrame:
    """Compares the largest differences with what is allowed; returns a row per promise.

    Columns: promise, at_most, found and held.
    """
    others = differences[differences["strategy"] != "single"]
    rows = []
    for (precision, quantity), allowed in ALLOWED.items():
        found = others.loc[others["precision"] == precision, quantity].max()
        rows.append(
            (
                f"{quantity} in {precision}, {(others['precision'] == precision).sum()} cases",
                allowed,
                found,
            )
        )
    table = with_verdicts(pd.DataFrame(rows, columns=["promise", "at_most", "found"]))
    refusal = {"promise": "HYBRID_SHARD is refused on 2 ranks", "held": refused}
    return pd.concat([table, pd.DataFrame([refusal])], ignore_index=True)
