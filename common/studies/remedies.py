"""``ddplab study remedies``: a text classifier that two ranks make slower, diagnosed and changed.

The small AG News model with the write-up's 8 texts per rank, on two emulated hosts joined by
1 Gbit/s, with real texts (local files in --dataset_dir, or the hub): a sweep; the changes that its
diagnosis proposes, run on one rank and on both; and, where a change alters the global batch, what
that does to the accuracy after as many epochs. ``changes.csv`` holds predicted and achieved
speedups, ``accuracies.csv`` the trainings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.diagnosis.changes import Changes, open_changes
from common.cluster.emulated import EmulatedCluster, why_not
from common.cluster.launch import launch, launch_series
from common.errors import UserError
from common.report.progress import StageProgress
from common.runtime.flags import as_flags
from common.runtime.paths import project_root
from common.runtime.recorder import require_positive
from common.studies.study import study_run

SCRIPTS = project_root() / "assignments" / "assignment4"
HOSTS = 2


@dataclass(frozen=True)
class RemedyStudy:
    """Settings of the study: the sweep and its changes, and the trainings."""

    dataset_dir: str = "datasets"
    dataset: str = "ag_news"
    experiment: str = "ag_news_ddp_4gpu_20ep"
    rate: str = "1gbit"
    batch_per_rank: int = 8
    rounds: int = 5
    steps_per_visit: int = 2
    train_texts: int = 3_200
    eval_texts: int = 2_000
    epochs: int = 2
    seeds: tuple[int, ...] = (42, 43, 44)

    def __post_init__(self) -> None:
        require_positive(
            self,
            "batch_per_rank",
            "rounds",
            "steps_per_visit",
            "train_texts",
            "epochs",
        )


def run_study(study: RemedyStudy, output_dir: str, progress: StageProgress) -> Path:
    """Sweeps, runs the proposed changes and trains; returns the run directory.

    Raises:
        UserError: this machine cannot emulate hosts.
    """
    if reason := why_not():
        raise UserError(reason)
    with study_run("remedies", study, output_dir, progress, backend="gloo", ranks=HOSTS) as run:
        (run.path / "logs").mkdir()
        cluster = EmulatedCluster.of(HOSTS, [study.rate])
        folder = run.path / f"emulated-{HOSTS}x{study.rate}"
        for name, script, flags in measurements(study):
            where = {"output_dir": folder, "run_id": name, "device": "cpu"}
            with progress.stage(f"{name} on {cluster}") as update:
                launch(
                    script=SCRIPTS / script,
                    arguments=as_flags(flags | where),
                    ranks=HOSTS,
                    log=run.path / "logs" / f"{name}.log",
                    hosts=cluster,
                    on_output=update,
                )
        changes = open_changes(folder / "changes")
        run.write_table("changes.csv", changes.table)
        accuracies = train(study, changes, run.path, progress)
        run.write_table("accuracies.csv", accuracies)
    progress.say(changes.table.to_string(index=False, float_format="%.4g"))
    progress.say(accuracies.to_string(index=False, float_format="%.4f"))
    return run.path


def measurements(study: RemedyStudy) -> list[tuple[str, str, dict]]:
    """Returns name, script and flags of each measurement on the emulated hosts."""
    sweep = {
        "workload": "text",
        "text_experiment": study.experiment,
        "dataset": study.dataset,
        "dataset_dir": Path(study.dataset_dir).absolute(),
        "text_samples": study.train_texts,
        "batch_size": study.batch_per_rank,
        "regimes": "strong",
        "bucket_cap_mb": 25,
        "rounds": study.rounds,
        "steps_per_visit": 4 * study.steps_per_visit,
    }
    changed = {"rounds": study.rounds, "steps_per_visit": study.steps_per_visit}
    return [
        ("sweep", "benchmark.py", {"sweep": True} | sweep),
        ("changes", "verify_changes.py", changed),
    ]


def train(
    study: RemedyStudy, changes: Changes, folder: Path, progress: StageProgress
) -> pd.DataFrame:
    """Trains with each global batch from each seed, in one process each.

    A global batch has the same texts on any number of ranks, so one process stands for all.
    Returns a row per training: global_batch, seed, epochs, train_loss and accuracy in the end.
    """
    batches = sorted({int(batch) for batch in changes.table["global_batch"]})
    runs = [(batch, seed) for batch in batches for seed in study.seeds]
    rows = []
    with launch_series(ranks=1) as series:
        for batch, seed in runs:
            flags = as_flags(training(study, batch, seed, folder))
            series.add(SCRIPTS / "train_text.py", *flags)
            name = f"batch-{batch}-seed-{seed}"
            with progress.stage(name) as update:
                series.wait(folder / "logs" / f"{name}.log", update)
            last = pd.read_csv(folder / name / "metrics.csv").iloc[-1]
            found = {"train_loss": last["train_loss"], "accuracy": last["val_acc"]}
            rows.append({"global_batch": batch, "seed": seed, "epochs": study.epochs} | found)
    return pd.DataFrame(rows)


def training(study: RemedyStudy, batch: int, seed: int, folder: Path) -> dict:
    """Returns the settings of a training with this global batch."""
    return {
        "experiment": study.experiment,
        "dataset": study.dataset,
        "dataset_dir": Path(study.dataset_dir).absolute(),
        "max_train_samples": study.train_texts,
        "eval_samples": study.eval_texts,
        "epochs": study.epochs,
        "batch_size": batch,
        "warmup_steps": 20,
        "seed": seed,
        "workers": 0,
        "threads": 2,
        "probe_repeats": 0,
        "device": "cpu",
        "output_dir": folder,
        "run_id": f"batch-{batch}-seed-{seed}",
    }
