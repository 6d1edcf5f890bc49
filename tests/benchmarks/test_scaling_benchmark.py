"""The synthetic benchmark, its sweep and the changes it leads to, on two real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from refusal_support import refused_line

from common.benchmarks.scaling.scaling import ScalingBenchmark
from common.benchmarks.scaling.workloads import MlpSizes, global_batch, mlp_workload, text_workload
from common.diagnose.changes import open_changes
from common.errors import UserError
from common.models.mlp import MLP
from common.tables import ARM_COLUMNS, SAMPLE_COLUMNS, STEP_COLUMNS

ASSIGNMENT4 = Path(__file__).resolve().parents[2] / "assignments" / "assignment4"
TINY = (
    *("--device", "cpu", "--input-dim", 64, "--hidden-dim", 64, "--output-dim", 16),
    *("--bucket-cap-mb", 0.01, "--batch-size", 8),
)


@pytest.fixture(scope="module")
def run(rank_server, tmp_path_factory):
    """Returns ``run(script, *flags)``: how it ended on two ranks, and its run directory."""

    def start(script: str, *flags: object):
        folder = tmp_path_factory.mktemp("scaling")
        flags = (*flags, "--output_dir", folder, "--run_id", script)
        return rank_server.run(ASSIGNMENT4 / f"{script}.py", *flags, ranks=2), folder / script

    return start


@pytest.fixture(scope="module")
def sweep(run) -> Path:
    """Runs a sweep: one and two ranks, strong and weak, one round of two steps."""
    how = ("--sweep", "--rounds", 2, "--steps-per-visit", 2)
    done, folder = run("benchmark", *TINY, *how)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return folder


@pytest.mark.two_ranks
def test_it_prints_what_the_original_printed_and_keeps_raw_steps(run):
    flags = ("--epochs", 2, "--steps-per-epoch", 5, "--warmup-steps", 3, "--timed-steps", 4)
    done, folder = run("benchmark", *TINY, *flags)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    first, second = done.stdout
    assert second.startswith("[Rank 1] CUDA_VISIBLE_DEVICES=unset, LOCAL_RANK=1, device=cpu")
    assert "=== DDP Scaling Benchmark ===" in first
    for line in (
        *(r"World size +: 2", r"Device +: cpu", r"Config +: \{.*'batch_size': 8"),
        *(r"Warmup steps +: 3", r"Measured steps +: 7 / 10", r"Avg step time +: [\d.]+ ms"),
        *(r"Throughput +: [\d,]+ samples/s", r"Measured samples +: 112"),
    ):
        assert re.search(line, first), line
    steps = pd.read_csv(folder / "steps.csv")
    assert list(steps) == list(STEP_COLUMNS)
    plain = steps[steps["kind"] == "plain"]
    # 10 steps on each rank, of which the first 3 are marked and not counted.
    assert plain.groupby("rank")["warmup"].agg(["size", "sum"]).to_numpy().tolist() == [[10, 3]] * 2
    assert (folder / "allreduce-samples.csv").is_file()
    samples = pd.read_csv(folder / "samples.csv")
    assert list(samples) == list(SAMPLE_COLUMNS)
    # Ranks draw different numbers: 2 ranks × 5 steps × 8 samples, none twice.
    assert (samples["distinct_all_ranks"] == 80).all()
    assert (samples["shared"] == 0).all()


@pytest.mark.slow
@pytest.mark.two_ranks
def test_a_sweep_has_every_rank_count_in_both_regimes(sweep):
    arms = pd.read_csv(sweep / "arms.csv")
    assert list(arms) == list(ARM_COLUMNS)
    found = arms.set_index(["regime", "world_size"])[["batch_per_rank", "global_batch"]]
    # Weak keeps the batch per rank, strong the global batch of the most ranks.
    assert found.to_dict("index") == {
        ("weak", 1): {"batch_per_rank": 8, "global_batch": 8},
        ("weak", 2): {"batch_per_rank": 8, "global_batch": 16},
        ("strong", 1): {"batch_per_rank": 16, "global_batch": 16},
        ("strong", 2): {"batch_per_rank": 8, "global_batch": 16},
    }
    steps = pd.read_csv(sweep / "steps.csv").merge(arms, on="arm")
    # A rank beyond an arm's world size takes no part in it.
    assert (steps["rank"] < steps["world_size"]).all()
    assert (steps["samples"] == steps["batch_per_rank"]).all()
    measured = steps[~steps["warmup"]]
    counts = measured.groupby(["global_batch", "kind", "round", "rank", "arm"]).size()
    # A step of half the samples is made twice as often; one on one rank is not made twice.
    assert (counts.loc[16] == 2).all()
    assert (counts.loc[8] == 4).all()


@pytest.mark.slow
@pytest.mark.two_ranks
def test_proposed_changes_are_run_beside_what_they_change(run, sweep):
    how = ("--rounds", 2, "--steps_per_visit", 1, "--kinds", "accumulation", "--device", "cpu")
    done, folder = run("verify_changes", *how, "--run_dir", sweep)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    changes = open_changes(folder)
    assert changes.table["change"].iloc[0] == "none"
    arms = pd.read_csv(folder / "arms.csv")
    # Every change on one rank and on two, with the same global batch.
    assert (arms.groupby("change")["world_size"].apply(sorted).map(tuple) == (1, 2)).all()
    assert (arms.groupby("change")["global_batch"].nunique() == 1).all()
    accumulated = arms[arms["change"].str.startswith("accumulation=")]
    assert (accumulated["accumulation"] > 1).all()


def test_changes_without_a_sweep_are_refused(tmp_path):
    flags = ("--device", "cpu", "--output_dir", tmp_path)
    line = refused_line(ASSIGNMENT4 / "verify_changes.py", *flags)
    assert "no complete sweep below" in line


def test_a_sweep_with_accumulation_begins_with_an_exchange(run):
    # DDP's static graph fails where its first backward pass exchanges nothing.
    visits = ("--rounds", 1, "--steps-per-visit", 1, "--regimes", "weak", "--no-plain")
    done, folder = run("benchmark", *TINY, "--sweep", "--accumulation", 2, *visits)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    arms = pd.read_csv(folder / "arms.csv")
    assert (arms["global_batch"] == arms["world_size"] * 2 * arms["batch_per_rank"]).all()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sweep",), "no speedup can be computed"),
        (("--sweep", "--world-sizes", 1, 4), "the job has 1 ranks"),
        (("--warmup-steps", 20, "--epochs", 1, "--steps-per-epoch", 20), "none would be left"),
        (("--workload", "text"), "is for --sweep"),
        (("--workload", "mpl"), "mlp"),
        (("--sweep", "--regimes", "week"), "weak"),
        (("--sweep", "--regimes"), "regimes is empty; give one or more of strong, weak"),
        (("--sweep", "--profile"), "--profile traces watched steps: not with --sweep"),
        (("--profile", "--timed-steps", 0), "--profile traces watched steps"),
        (("--device", "cuda"), "torch can use no GPU"),
        (("--backend", "nccl"), "nccl needs GPUs"),
        (("--batch-size", 0), "above 0"),
        (("--seed", 2**64), "seed is 18446744073709551616; it must be from 0 to"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(tmp_path, flags, said):
    if "--device" in flags and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    flags = (*TINY[2:], *flags) if "--device" in flags else (*TINY, *flags)
    where = ("--output_dir", tmp_path, "--run_id", "run")
    assert said in refused_line(ASSIGNMENT4 / "benchmark.py", *flags, *where)
    assert not (tmp_path / "run" / "steps.csv").exists()


def test_the_defaults_model_has_the_published_number_of_parameters():
    sizes = MlpSizes()
    with torch.device("meta"):
        model = MLP(sizes.input_dim, sizes.hidden_dim, sizes.num_layers, sizes.output_dim)
    assert sum(p.numel() for p in model.parameters()) == 58_734_592
    assert ScalingBenchmark().bucket_cap_mb == 50


def test_samples_are_told_apart_by_their_values():
    workload = mlp_workload(MlpSizes(8, 8, 1, 4), torch.device("cpu"), seed=1)
    one, same = workload.make_batch(64, 0, 0, 2), workload.make_batch(64, 0, 0, 2)
    other = workload.make_batch(64, 0, 1, 2)
    assert (one.identities == same.identities).all()
    assert not set(one.identities) & set(other.identities)
    assert len(set(one.identities)) == 64


def test_every_seed_step_and_rank_draws_samples_of_its_own():
    drawn = [
        mlp_workload(MlpSizes(8, 8, 1, 4), torch.device("cpu"), seed).make_batch(4, step, rank, 1)
        for seed, step, rank in [(1, 0, 1009), (1, 1, 0), (20_000_000_000, 1, 0), (2**62, 9, 5)]
    ]
    identities = np.concatenate([batch.identities for batch in drawn])
    assert len(set(identities)) == 16


def test_the_seed_of_a_text_workload_decides_its_texts():
    texts = [
        text_workload("ag_news_ddp_4gpu_20ep", "synthetic", "", 16, torch.device("cpu"), seed)
        .make_batch(16, 0, 0, 1)
        .inputs[0]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1])
    assert set(map(tuple, texts[0].tolist())).isdisjoint(map(tuple, texts[2].tolist()))


def test_a_global_batch_of_texts_is_the_same_on_any_number_of_ranks():
    whole = global_batch(10, 6, 3, seed=0)
    shares = [global_batch(10, 6, 3, seed=0)[rank::3] for rank in range(3)]
    assert sorted(whole) == sorted(text for share in shares for text in share)
    # Every text once before any comes again: steps 0 to 4 are three passes over ten texts.
    passes = [text for step in range(5) for text in global_batch(10, 6, step, seed=0)]
    assert all(sorted(passes[first : first + 10]) == list(range(10)) for first in (0, 10, 20))


def test_a_sweep_goes_up_to_all_ranks_of_the_job_as_its_probes_are_of_them():
    with pytest.raises(UserError) as refused:
        ScalingBenchmark(sweep=True, world_sizes=(1, 2)).sweep_plan(4)
    assert str(refused.value).startswith("world_sizes 2 at most: the job has 4 ranks")
    assert "\n" not in str(refused.value)
    assert ScalingBenchmark(sweep=True, world_sizes=(1, 4)).sweep_plan(4).world_sizes == (1, 4)
    # What a sweep does not use refuses none.
    sweep = ScalingBenchmark(sweep=True, epochs=1, steps_per_epoch=2, warmup_steps=2)
    assert sweep.sweep_plan(6).world_sizes == (1, 2, 4, 6)
