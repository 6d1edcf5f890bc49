"""Settings that a benchmark cannot run with: one line, before anything is written."""

from __future__ import annotations

import re

import pytest
from rank_support import ASSIGNMENT2
from refusal_support import refused_line

from common.benchmarks.buckets.ddp import DdpBenchmark
from common.benchmarks.micro_batches.simulated_modes import ModeSimulation
from common.benchmarks.one_device.memory import MemoryAnalysis
from common.benchmarks.one_device.options import OptionsBenchmark
from common.benchmarks.one_device.profiling import ProfileTraining
from common.benchmarks.one_device.throughput import ThroughputBenchmark
from common.benchmarks.scaling.scaling import ScalingBenchmark
from common.benchmarks.scaling.verify_changes import VerifyChanges
from common.benchmarks.strategies import StrategyBenchmark
from common.errors import UserError

STEP = ("--model", "nano", "--batch_size", 1, "--max_seq_len", 16)
TINY = {
    "allreduce_benchmark": ("--numel", 1, "--rounds", 1, "--iterations", 1),
    "ddp_benchmark": (*STEP, "--rounds", 1, "--num_steps", 1),
    "overlap_benchmark": (*STEP, "--rounds", 1, "--num_steps", 1, "--message_mib", 0.001),
    "train_benchmark": (*STEP, "--num_steps", 1),
    "profile_training": ("--model", "gpt2-pico", "--batch_size", 2, "--seq_len", 32),
    "compare_modes": ("--dataset", "synthetic"),
}
"""Flags of scripts with which they would not run for long."""
SYSTEM = "umd-2x4-a100"
REPLAY = [
    (("--replay", "umd-2x4"), "did you mean 'umd-2x4-a100'"),
    (("--replay", "common"), "no complete run with gradient-ready-times.csv"),
    (("--replay", "data/umd-2x4-a100/layers.csv"), "no column"),
    (("--replay", SYSTEM, "--replay_factor", 0.5), "replay_factor is 0.5"),
    (("--replay", SYSTEM, "--replay_factor", 0), "replay_factor is 0"),
    (("--replay", SYSTEM, "--replay_factor", "nan"), "replay_factor is nan"),
    (("--replay", SYSTEM, "--replay_factor", "inf"), "replay_factor is inf"),
    (("--replay", SYSTEM, "--replay_factor", "fast"), "fast"),
    (("--replay", SYSTEM, "--replay_time_factor", 0), "replay_time_factor is 0"),
    (("--replay_factor", 64), "without --replay"),
    (("--replay_time_factor", 2), "without --replay"),
    (("--replay", SYSTEM, "--compile"), "--compile with --replay"),
]
REFUSED = {
    "allreduce_benchmark": [
        (("--numel",), "numel is empty"),
        (("--warmup_steps", -1), "warmup_steps"),
        (("--rounds", 0), "rounds is 0"),
        (("--iterations", 0), "iterations is 0"),
        (("--in_flight_mib", 0), "in_flight_mib is 0"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--backend", "mpi"), "legal are nccl and gloo"),
        (("--backend", "nccl"), "gloo"),
        (("--device", "tpu"), "legal are cpu and cuda"),
    ],
    "ddp_benchmark": [
        *((("--bucket_cap_mb", cap), "bucket cap") for cap in (0, -1, "abc", "nan", "inf")),
        (("--bucket_cap_mb", "1e999"), "bucket cap"),
        (("--bucket_cap_mb", 25, 0), "bucket cap 0"),
        (("--bucket_cap_mb",), "bucket_cap_mb"),
        (("--model", "gpt2-hugh"), "did you mean 'gpt2-large'"),
        (("--model", "gpt2-nan"), "did you mean 'gpt2-nano'"),
        (("--warmup_steps", 2), "at least 3"),
        (("--rounds", 0), "rounds is 0"),
        (("--num_steps", -1), "num_steps is -1"),
        (("--bucket_cap", 1), "--bucket_cap"),
        *((("--added_latency_ms", value), value) for value in ("-1", "nan", "inf", "much")),
        *REPLAY,
    ],
    "overlap_benchmark": [
        (("--message_mib", 0), "message_mib 0"),
        (("--message_mib", 1, -1), "message_mib -1"),
        (("--message_mib", "nan"), "message_mib"),
        (("--message_mib", "inf"), "message_mib"),
        (("--message_mib", "big"), "big"),
        (("--num_steps", 0), "num_steps is 0"),
        (("--warmup_steps", -1), "warmup_steps"),
        (("--model", "nanno"), "did you mean"),
        *REPLAY[:2],
    ],
    "train_benchmark": [
        (("--model", "gpt3"), "unknown model 'gpt3'; did you mean"),
        (("--num_steps", 0), "num_steps is 0"),
        (("--warmup_steps", -1), "warmup_steps"),
        (("--batch_size", 0), "batch_size is 0"),
        (("--max_seq_len", 257, "--model", "nano"), "has 256 positions"),
        (("--dtype", "float8"), "unknown dtype 'float8'"),
        (("--optimizer", "adam"), "did you mean 'adamw'"),
        (("--gradient-accumulation", 0), "gradient_accumulation is 0"),
        (("--replay", SYSTEM, "--layer_size_output", "sizes.csv"), "a replay has no layers"),
        *(REPLAY[index] for index in (0, 3, -1)),
    ],
    "profile_training": [
        (("--active_steps", 0), "active_steps is 0; it must be above 0"),
        (("--warmup_steps", -1), "warmup_steps is -1; it must be at least 0"),
        (("--model", "gpt2-nanp"), "did you mean 'gpt2-nano'?"),
        (("--seq_len", 257), "gpt2-pico has 256 positions; use --seq_len 256 or less"),
    ],
    "compare_modes": [(("--lr", 0.1), "unknown: --lr")],  # its modes have the same weights
}
OF_VARIABLES = {
    ("allreduce_benchmark", "NUMEL"): [
        ("0 10", "at least 1 element"),
        ("-5 10", "at least 1 element"),
        ("1000 10", "ascending"),
        ("10 10", "ascending"),
        ("1 many", "many"),
        ("1.5", "1.5"),
    ],
    ("allreduce_chunk_benchmark", "NUMEL"): [
        ("0", "numel is 0"),
        ("-1", "numel is -1"),
        ("ten", "ten"),
        ("1 2", "2"),
    ],
    ("ddp_benchmark", "BUCKET_SIZE"): [
        (text, "error: bucket cap") for text in ("0", "1 x", "1,,-2")
    ],
}


@pytest.mark.parametrize(
    ("script", "flags", "variables", "said"),
    [
        *((script, case[0], {}, case[1]) for script, cases in REFUSED.items() for case in cases),
        *(
            (script, (), {name: text}, said)
            for (script, name), cases in OF_VARIABLES.items()
            for text, said in cases
        ),
    ],
)
def test_an_unusable_setting_is_refused_in_one_line_before_anything_is_written(
    tmp_path, script, flags, variables, said
):
    [path] = ASSIGNMENT2.parent.glob(f"assignment*/{script}.py")
    tiny = () if variables else TINY[script]
    where = ("--output_dir", tmp_path / "out", "--device", "cpu")
    assert said in refused_line(path, *tiny, *where, *flags, variables=variables)
    assert not (tmp_path / "out").exists()


TINY_SETTINGS = {
    OptionsBenchmark: {"model": "gpt2-pico", "seq_len": 32},
    ThroughputBenchmark: {"model": "gpt2-nano", "seq_len": 32, "batch_sizes": (1,)},
    ModeSimulation: {"planning_world_sizes": (3, 8)},
}
REFUSED_VALUES = {
    MemoryAnalysis: [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"seq_len": 1025}, "1024 positions; use --seq_len 1024 or less"),
        ({"model": "gpt3"}, "model 'gpt3'"),
        ({"precision": "float8"}, "precision 'float8'"),
        ({"compile": True}, "leave out --compile"),
        ({"capacity_gb": (24, 0)}, "capacity_gb: 0"),
        ({"sharding": "ZeRO"}, "sharding 'ZeRO'"),
    ],
    OptionsBenchmark: [
        ({"rounds": 0}, "rounds is 0"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"seq_len": 1000}, "gpt2-pico has 256 positions"),
    ],
    ThroughputBenchmark: [
        ({"num_steps": 0}, "num_steps is 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
        ({"batch_sizes": (4, 0)}, "batch_sizes: 0; each is at least 1"),
        ({"seq_len": 2000}, "gpt2-nano has 256 positions"),
        ({"model": "gpt3"}, "did you mean 'gpt2'"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"memory_limit_gib": -1}, "memory_limit_gib is -1"),
        ({"memory_limit_gib": float("nan")}, "memory_limit_gib is nan"),
        ({"memory_limit_gib": float("inf")}, "memory_limit_gib is inf"),
        ({"batch_size": 1, "loss_chunks": 40}, "loss_chunks 40: more than the 32 tokens"),
    ],
    ModeSimulation: [
        ({"world_sizes": ()}, "world_sizes is empty"),
        ({"world_sizes": (8, 0)}, "world_sizes: 0; each is at least 1"),
        ({"draws": 0}, "draws is 0"),
        ({"max_length": 0}, "max_length is 0"),
        ({"c1_s": -1.0}, "c1_s is -1.0"),
        ({"planning_batches": (20,)}, "1 values and planning_world_sizes 2"),
        ({"planning_batches": (20, 7)}, "7 samples for 8 ranks"),
    ],
    VerifyChanges: [
        ({"kinds": ("bucket_cap",)}, "did you mean 'bucket_cap_mb'"),
        ({"kinds": ()}, "kinds is empty"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [(kind, *case) for kind, cases in REFUSED_VALUES.items() for case in cases],
)
def test_settings_that_cannot_be_are_refused_in_one_line(kind, values, said):
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        kind(**TINY_SETTINGS.get(kind, {}) | values)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "kind",
    [
        *(DdpBenchmark, OptionsBenchmark, ProfileTraining, ThroughputBenchmark),
        *(ScalingBenchmark, StrategyBenchmark),
    ],
)
def test_a_seed_that_pytorch_does_not_take_is_refused(kind: type) -> None:
    assert kind(seed=20_000_000_000).seed == 20_000_000_000
    for seed in (-1, 2**63):
        with pytest.raises(UserError, match=f"seed is {seed}; it must be from 0 to"):
            kind(seed=seed)
