"""The job files of sbatch/: what each asks of Slurm, runs and reads, and how the tests submit it.

A new job file has an entry in ``EXPECTED``, as its README says, and one in ``CASES``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "sbatch"
STEP = "--batch_size 1 --max_seq_len 16"
SMALL = "--batch_size 1 --seq_len 16"
SGD = "--optimizer sgd"  # torch needs seconds to import the machinery of AdamW
TRAIN = f"--global_batch_size 2 --micro_batch_size 1 --seq_len 16 --num_steps 3 --no-profile {SGD}"
TEXTS = (
    "--vocab_size 64 --max_train_samples 64 --max_length 16 --global_batch 4 "
    "--max_local_batch_cap 4"
)
CLASSIFIER = (
    "--dataset synthetic --max_train_samples 40 --eval_samples 8 --batch_size 2 "
    "--epochs 2 --warmup_steps 1 --d_model 16 --n_head 2 --n_layer 1 --d_ff 16 --vocab_size 64 "
    "--max_length 16 --workers 0 --no-persistent_workers --no-cudnn_benchmark --precision fp32 "
    "--probe_repeats 1"
)


@dataclass(frozen=True)
class Expected:
    """What a job file asks of Slurm and what it runs.

    ``gpus`` are those that it uses of a node of four; all ask for nodes with one or more.
    ``reads`` has the variables that become settings: each with a value, the setting's name and
    what that value becomes. ``by_default`` are settings that it gives without any variable.
    """

    script: str
    output_dir: str
    nodes: int
    gpus: int
    reads: dict[str, tuple[str, str, object]] = field(default_factory=dict)
    by_default: dict[str, object] = field(default_factory=dict)


MODEL = {"MODEL": ("gpt2-medium", "model", "gpt2-medium")}
REDUCED = {"DTYPE": ("bfloat16", "dtype", "bfloat16"), "BACKEND": ("gloo", "backend", "gloo")}
TEXT_VARIABLES = {
    "DATASET": ("imdb", "dataset", "imdb"),
    "DATASET_DIR": ("my texts", "dataset_dir", "my texts"),
    "MODEL_NAME": ("small", "model_name", "small"),
}
TEXT_FILES = {"DATASET_DIR": ("my texts", "dataset_dir", "my texts")}
FUNCTIONS = {
    "FUNCTION": ("tuned_models:make", "function", "tuned_models:make"),
    "FOLDER": ("my models", "folder", "my models"),
}
TRAINING = MODEL | {
    "DATA": ("my tokens", "data", "my tokens"),
    "SAVE_EVERY": ("7", "save_every", 7),
    "CHECKPOINT_DIR": ("my checkpoints", "checkpoint_dir", "my checkpoints"),
}


def one_device(script: str, **variables: tuple[str, str, object]) -> Expected:
    return Expected(
        f"assignments/assignment0/{script}.py",
        "outputs/assignment0/cluster",
        nodes=1,
        gpus=1,
        reads=MODEL | variables,
        by_default={"model": "gpt2"},
    )


def training(strategy: str, name: str, gpus: int, **variables: tuple[str, str, object]) -> Expected:
    return Expected(
        f"assignments/assignment1/{name}.py",
        "outputs/assignment1/cluster",
        nodes=1,
        gpus=gpus,
        reads=TRAINING | variables,
        by_default={
            "model": "gpt2-large",
            "save_every": 50,
            "checkpoint_dir": f"outputs/assignment1/cluster/checkpoints/{strategy}",
        },
    )


def all_reduce(script: str, numel: tuple[str, str, object]) -> Expected:
    return Expected(
        f"assignments/assignment2/{script}.py",
        "outputs/assignment2/cluster",
        nodes=2,
        gpus=4,
        reads=REDUCED | {"NUMEL": numel},
    )


def gradients(script: str, **variables: tuple[str, str, object]) -> Expected:
    return Expected(
        f"assignments/assignment2/{script}.py",
        "outputs/assignment2/cluster",
        nodes=2,
        gpus=4,
        reads=MODEL | variables,
        by_default={"model": "gpt2-large"},
    )


def texts(number: int, script: str, gpus: int, reads: dict, **by_default: object) -> Expected:
    return Expected(
        f"assignments/assignment{number}/{script}.py",
        f"outputs/assignment{number}/cluster",
        nodes=1,
        gpus=gpus,
        reads=reads,
        by_default=by_default,
    )


EXPECTED = {
    "launch-memory-analysis": one_device("memory_analysis"),
    "launch-options": one_device("options"),
    "launch-profile-training": one_device("profile_training"),
    "launch-throughput": one_device("throughput", BATCH_SIZES=("1 2", "batch_sizes", (1, 2))),
    "launch-train-baseline": training("baseline", "train_baseline", gpus=1),
    "launch-train-ddp": training("ddp", "train_ddp", gpus=4),
    "launch-train-fsdp": training(
        "fsdp_full_shard",
        "train_fsdp",
        gpus=4,
        STRATEGY=("SHARD_GRAD_OP", "strategy", "SHARD_GRAD_OP"),
    ),
    "launch-allreduce-benchmark": all_reduce(
        "allreduce_benchmark", numel=("1 20000", "numel", (1, 20_000))
    ),
    "launch-allreduce-chunk-benchmark": all_reduce(
        "allreduce_chunk_benchmark", numel=("12000", "numel", 12_000)
    ),
    "launch-ddp-benchmark": gradients(
        "ddp_benchmark", BUCKET_SIZE=("0.5 25", "bucket_cap_mb", ("0.5", "25"))
    ),
    "launch-overlap-benchmark": gradients("overlap_benchmark"),
    "launch-train-benchmark": gradients("train_benchmark"),
    "launch-micro-batches": texts(
        3, "train_ddp", 4, TEXT_VARIABLES | {"MODE": ("dynamic", "mode", "dynamic")}, mode="static"
    ),
    "launch-compare-modes": texts(3, "compare_modes", 4, TEXT_VARIABLES),
    "launch-scaling-benchmark": texts(
        4, "benchmark", 4, {"BATCH_SIZE": ("48", "batch_size", 48)}, sweep=False
    ),
    "launch-agnews-single-gpu-optimized": texts(
        4, "train_text", 1, TEXT_FILES, experiment="ag_news_single_gpu_optimized", epochs=20
    ),
    "launch-agnews-ddp-optimized": texts(
        4, "train_text", 4, TEXT_FILES, experiment="ag_news_ddp_4gpu_20ep_optimized", epochs=20
    ),
    "launch-tune": Expected(
        "common/tuning/job.py", "outputs/tune", nodes=2, gpus=4, reads=FUNCTIONS
    ),
    "launch-plan": Expected(
        "common/tuning/plans/job.py",
        "outputs/plan",
        nodes=2,
        gpus=4,
        reads=FUNCTIONS | {"STEPS": ("7", "train_steps", 7)},
        by_default={"train_steps": 100},
    ),
    "selftest": Expected(
        "-m common.benchmarks.selftest", "outputs/assignment2/cluster", nodes=2, gpus=4
    ),
}


@dataclass(frozen=True)
class Case:
    """How a job file is tried, and the tables it writes, each with its number of rows.

    One that is not submitted differs from a submitted one in its script and settings alone, which
    test_job_files.py holds; its script runs in tests of its own.
    """

    variables: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    tables: dict[str, int] = field(default_factory=dict)
    world_size: int = 2
    backend: str | None = "gloo"
    says: str = ""
    """A part of its output."""

    @property
    def is_submitted(self) -> bool:
        """Returns True where something of its end is told."""
        return bool(self.tables or self.says)


# Two ranks each, on one node or on two. (As many ranks as GPUs has the job that is signalled, whose
# ranks are cheap.)
ONE_NODE = ("--nodes=1",)
ONE_DEVICE = {"world_size": 1, "backend": None}
NANO = {"MODEL": "gpt2-nano"}
PER_NODE = {1: {"RANKS_PER_NODE": "2"}, 2: {"RANKS_PER_NODE": "1"}}
CASES = {
    "launch-train-benchmark": Case(
        {"MODEL": "gpt2-nano", "FLAGS": f"{STEP} {SGD} --warmup_steps 1 --num_steps 2"}
    ),
    "launch-allreduce-benchmark": Case({"NUMEL": "1 20000 300000", "FLAGS": "--rounds 2"}),
    "launch-allreduce-chunk-benchmark": Case({"NUMEL": "12000", "FLAGS": "--rounds 2"}),
    "launch-overlap-benchmark": Case(
        {"MODEL": "gpt2-nano", "FLAGS": f"{STEP} --message_mib 0.1 1 --rounds 2 --num_steps 1"}
    ),
    "launch-ddp-benchmark": Case(
        {"MODEL": "gpt2-nano", "BUCKET_SIZE": "1 5 25"}
        | {"FLAGS": f"{STEP} {SGD} --rounds 2 --num_steps 2 --initial_steps 1"}
    ),
    "launch-memory-analysis": Case(
        NANO | {"FLAGS": f"{SMALL} --optimizer_implementation fused"},
        tables={"memory-peak.csv": 2},  # predicted and tracked
        **ONE_DEVICE,
    ),
    "launch-throughput": Case(
        NANO | {"BATCH_SIZES": "1 2", "FLAGS": f"{SMALL} {SGD} --num_steps 2 --warmup_steps 1"}
    ),
    "launch-options": Case(NANO | {"FLAGS": f"{SMALL} {SGD} --arms sdpa --rounds 2 --num_steps 1"}),
    "launch-profile-training": Case(
        NANO
        | {"FLAGS": f"{SMALL} {SGD} --wait_steps 0 --warmup_steps 1 --active_steps 1 --no-trace"}
    ),
    "launch-train-baseline": Case({"MODEL": "gpt2-pico", "FLAGS": TRAIN}),
    "launch-train-ddp": Case({"MODEL": "gpt2-pico", "FLAGS": TRAIN}),  # in test_requeue.py
    "launch-train-fsdp": Case({"MODEL": "gpt2-pico", "STRATEGY": "SHARD_GRAD_OP", "FLAGS": TRAIN}),
    "launch-micro-batches": Case(
        PER_NODE[2]
        | {"MODE": "dynamic", "DATASET": "synthetic", "MODEL_NAME": "small"}
        | {"FLAGS": f"{TEXTS} --steps 3 --eval_samples 4 --warmup_steps 1 --discard_steps 1"},
        ("--nodes=2",),
        tables={"losses.csv": 3, "evaluations.csv": 1},
        says="after 3 steps: accuracy",
    ),
    "launch-compare-modes": Case(
        PER_NODE[1]
        | {"DATASET": "synthetic", "MODEL_NAME": "small"}
        | {"FLAGS": f"{TEXTS} --steps 2 --warmup 1 --slow_steps 0"},
        ONE_NODE,
        tables={"mode-times.csv": 8 * 2 * 2},  # modes and control × steps × ranks
    ),
    "launch-agnews-single-gpu-optimized": Case({"FLAGS": CLASSIFIER}),
    "launch-agnews-ddp-optimized": Case({"FLAGS": CLASSIFIER}),
    "launch-scaling-benchmark": Case(
        PER_NODE[2]
        | {"BATCH_SIZE": "4"}
        | {
            "FLAGS": "--epochs 1 --steps_per_epoch 3 --warmup_steps 1 --timed_steps 1 "
            "--input_dim 16 --hidden_dim 16 --num_layers 1 --output_dim 8"
        }
    ),
    "launch-tune": Case({"FUNCTION": "tuned_models:make"}),
    "launch-plan": Case(
        PER_NODE[2]
        | {"FUNCTION": "plan_models:make", "FOLDER": str(ROOT / "tests" / "planning"), "STEPS": "5"}
        | {"FLAGS": "--memory_bytes 1e9 --strategies FULL_SHARD --checkpointing none --no-verify"},
        ("--nodes=2",),
    ),
    "selftest": Case(),
    "launch-report": Case({"ASSIGNMENT": "assignment3"}, says="report.pdf"),
}

REPORT = SBATCH / "launch-report.sbatch"
RUNS_RANKS = [SBATCH / f"{name}.sbatch" for name in EXPECTED]
each_that_runs_ranks = pytest.mark.parametrize("path", RUNS_RANKS, ids=lambda path: path.stem)
only_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="job files need the bash and find of Linux"
)


def job_files() -> list[Path]:
    """Lists all of them: one without a case fails."""
    return sorted(SBATCH.glob("*.sbatch"))


def submit_job_file(slurm: PrivateSlurm, name: str, output: Path, *flags: str) -> int:
    """Submits the job file of that name as its case says; returns its id."""
    case = CASES[name]
    # The GPUs are only pretended.
    common = {"PROJECT_ROOT": str(ROOT), "OUTPUT_DIR": str(output), "DEVICE": "cpu"}
    return slurm.submit(
        SBATCH / f"{name}.sbatch",
        *case.flags,
        *flags,
        f"--output={output}/%x-%j.out",
        variables=common | {"OMP_NUM_THREADS": "1"} | case.variables,
    )
