"""What each job file of sbatch/ asks of Slurm, runs and reads, as its README says."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Expected:
    """What a job file asks of Slurm and what it runs.

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
REDUCED = {
    "DTYPE": ("bfloat16", "dtype", "bfloat16"),
    "BACKEND": ("gloo", "backend", "gloo"),
}
TEXTS = {
    "DATASET": ("imdb", "dataset", "imdb"),
    "DATASET_DIR": ("my texts", "dataset_dir", "my texts"),
    "MODEL_NAME": ("small", "model_name", "small"),
}
TEXT_FILES = {"DATASET_DIR": ("my texts", "dataset_dir", "my texts")}
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
        3, "train_ddp", 4, TEXTS | {"MODE": ("dynamic", "mode", "dynamic")}, mode="static"
    ),
    "launch-compare-modes": texts(3, "compare_modes", 4, TEXTS),
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
        "common/tuning/job.py",
        "outputs/tune",
        nodes=2,
        gpus=4,
        reads={
            "FUNCTION": ("tuned_models:make", "function", "tuned_models:make"),
            "FOLDER": ("my models", "folder", "my models"),
        },
    ),
    "selftest": Expected(
        "-m common.benchmarks.selftest", "outputs/assignment2/cluster", nodes=2, gpus=4
    ),
}
