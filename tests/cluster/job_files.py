"""The job files of sbatch/ as the tests submit them, and the tables they must write."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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
class Case:
    """How a job file is tried, and the tables it writes, each with its number of rows."""

    variables: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    tables: dict[str, int] = field(default_factory=dict)
    world_size: int = 2
    backend: str | None = "gloo"
    says: str = ""
    """A part of its output."""


# Two ranks each, on one node or on two; those of assignment 2 on one, as the report compares only
# what was measured over the same network. (As many ranks as GPUs has the job that is signalled,
# whose ranks are cheap.)
ONE_NODE = ("--nodes=1",)
ONE_DEVICE = {"world_size": 1, "backend": None}
NANO = {"MODEL": "gpt2-nano"}
PER_NODE = {1: {"RANKS_PER_NODE": "2"}, 2: {"RANKS_PER_NODE": "1"}}
CASES = {
    "launch-train-benchmark": Case(
        PER_NODE[1]
        | {"MODEL": "gpt2-nano", "FLAGS": f"{STEP} {SGD} --warmup_steps 1 --num_steps 2"},
        ONE_NODE,
        # Two embeddings, 6 blocks and the last LayerNorm; in times the embeddings are one, and
        # there are the head, the forward pass, the backward pass and the step besides.
        tables={"layer-sizes.csv": 9, "layer-times.csv": 12},
    ),
    "launch-allreduce-benchmark": Case(
        PER_NODE[1] | {"NUMEL": "1 20000 300000", "FLAGS": "--rounds 2"},
        ONE_NODE,
        tables={"allreduce-times.csv": 3},
    ),
    "launch-allreduce-chunk-benchmark": Case(
        PER_NODE[1] | {"NUMEL": "12000", "FLAGS": "--rounds 2"},
        ONE_NODE,
        tables={"allreduce-chunk-times.csv": 3},  # chunks of 1,000, 10,000 and 12,000
    ),
    "launch-overlap-benchmark": Case(
        PER_NODE[1]
        | {"MODEL": "gpt2-nano", "FLAGS": f"{STEP} --message_mib 0.1 1 --rounds 2 --num_steps 1"},
        ONE_NODE,
        tables={"overlap-times.csv": 6 * 2 * 1 * 2},  # arms × rounds × steps × ranks
    ),
    "launch-ddp-benchmark": Case(
        PER_NODE[1]
        | {"MODEL": "gpt2-nano", "BUCKET_SIZE": "1 5 25"}
        | {"FLAGS": f"{STEP} {SGD} --rounds 2 --num_steps 2 --initial_steps 1"},
        ONE_NODE,
        tables={"ddp-times.csv": 3 * 2 * 2 * 2},  # caps × rounds × steps × ranks
    ),
    "launch-memory-analysis": Case(
        NANO | {"FLAGS": f"{SMALL} --optimizer_implementation fused"},
        tables={"memory-peak.csv": 2},  # predicted and tracked
        **ONE_DEVICE,
    ),
    "launch-throughput": Case(
        NANO | {"BATCH_SIZES": "1 2", "FLAGS": f"{SMALL} {SGD} --num_steps 2 --warmup_steps 1"},
        tables={"throughput-batches.csv": 2},
        **ONE_DEVICE,
    ),
    "launch-options": Case(
        NANO | {"FLAGS": f"{SMALL} {SGD} --arms sdpa --rounds 2 --num_steps 1"},
        tables={"options-times.csv": 3 * 2},  # the baseline twice
        **ONE_DEVICE,
    ),
    "launch-profile-training": Case(
        NANO
        | {"FLAGS": f"{SMALL} {SGD} --wait_steps 0 --warmup_steps 1 --active_steps 1 --no-trace"},
        tables={"profile-steps.csv": 2},
        **ONE_DEVICE,
    ),
    "launch-train-baseline": Case(
        {"MODEL": "gpt2-pico", "FLAGS": TRAIN},
        tables={"training-steps.csv": 3},
        says="Baseline training completed!",
        world_size=1,
    ),
    "launch-train-ddp": Case(
        PER_NODE[2] | {"MODEL": "gpt2-pico", "FLAGS": TRAIN},
        ("--nodes=2",),
        tables={"training-steps.csv": 3 * 2},  # steps × ranks
        says="DDP training completed!",
    ),
    "launch-train-fsdp": Case(
        PER_NODE[1] | {"MODEL": "gpt2-pico", "STRATEGY": "SHARD_GRAD_OP", "FLAGS": TRAIN},
        tables={"training-steps.csv": 3 * 2},
        says="FSDP training with SHARD_GRAD_OP completed!",
    ),
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
        tables={"mode-times.csv": 8 * 2 * 2},  # seven modes and the control × steps × ranks
    ),
    "launch-agnews-single-gpu-optimized": Case(
        {"FLAGS": CLASSIFIER},
        tables={"metrics.csv": 2, "steps.csv": 2 * 20},  # epochs; epochs × steps
        says="epoch 2/2 | train_loss=",
        world_size=1,
    ),
    "launch-agnews-ddp-optimized": Case(
        PER_NODE[1] | {"FLAGS": CLASSIFIER},
        ONE_NODE,
        # 40 texts, in steps of 2 ranks × accumulation 4 × 2
        tables={"metrics.csv": 2, "epochs.csv": 2 * 2, "steps.csv": 2 * 2 * 2},
        says="epoch 2/2 | train_loss=",
    ),
    "launch-scaling-benchmark": Case(
        PER_NODE[2]
        | {"BATCH_SIZE": "4"}
        | {
            "FLAGS": "--epochs 1 --steps_per_epoch 3 --warmup_steps 1 --timed_steps 1 "
            "--input_dim 16 --hidden_dim 16 --num_layers 1 --output_dim 8"
        },
        ("--nodes=2",),
        tables={"arms.csv": 1, "facts.csv": 2},
        says="=== DDP Scaling Benchmark ===",
    ),
    "launch-tune": Case(
        PER_NODE[2] | {"FUNCTION": "tuned_models:make", "FOLDER": str(ROOT / "tests" / "tuning")},
        ("--nodes=2",),
        tables={"gradient-ready-times.csv": 12 * 8 * 2},  # gradients × passes × ranks
        says="Written to ",
    ),
    "selftest": Case(PER_NODE[2], says="2 ranks on 2 hosts"),
    "launch-report": Case(says="report.pdf"),
}


def job_files() -> list[Path]:
    """All of them: one without a case fails."""
    return sorted(SBATCH.glob("*.sbatch"))


def submit_job_file(slurm: PrivateSlurm, name: str, output: Path, *flags: str) -> int:
    """Submits the job file of that name as its case says; its id."""
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
