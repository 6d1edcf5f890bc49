"""Holds one GPU's figures in the notebooks against the raw rows, and what is published.

Nothing of the library is in the arithmetic; ``data/RESULTS.md`` has the published figures.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import median

import pytest

from common.analysis.buckets import one_gpu
from common.analysis.buckets.measurements import open_run
from common.analysis.data_parallel.tables import full_shard_beside_gpu, losses_beside_gpu
from common.analysis.data_parallel.training_runs import open_training
from common.analysis.one_device import memory, profile_text, throughput
from common.analysis.one_device.profile import open_profile
from common.runtime.paths import project_root

GPU = project_root() / "data" / "h100-1" / "one-gpu"
CPU = project_root() / "data" / "epyc-2-cores"
RESULTS = (project_root() / "data" / "RESULTS.md").read_text()
H100 = "NVIDIA H100 80GB HBM3"
H100_FLOPS = 1979e12 / 2
"""bfloat16 by NVIDIA's data sheet, which prints it with sparsity."""
GPT2_FLOPS = 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
"""Operations a token: matrices of 12 blocks and of the logits, and attention over 1,024 tokens."""


def rows(below: str, folder: Path = GPU) -> list[dict[str, str]]:
    with (folder / below).open() as file:
        return list(csv.DictReader(file))


def published(pattern: str) -> list[float]:
    """Returns the numbers of a row of a table in RESULTS.md."""
    [found] = re.findall(pattern, RESULTS)
    return [float(number.replace(",", "").replace("−", "-")) for number in found]


@pytest.mark.parametrize(
    ("step", "folder", "batch", "name"),
    [
        ("bfloat16, adamw (fused)", "throughput-eager", 8, "batch 8, not compiled"),
        ("bfloat16, adamw (fused), compiled", "throughput", 8, "batch 8, compiled"),
        ("bfloat16, adamw (fused), compiled", "throughput", 32, "batch 32, compiled"),
    ],
)
def test_rates_and_mfu_are_those_of_the_median_step_and_those_that_are_published(
    step, folder, batch, name
):
    table = throughput.beside_gpu(throughput.open_throughput(CPU / "assignment0"))
    [row] = table[table["step"] == f"gpt2, batch {batch}, sequence 1024, {step}"].to_dict("records")
    times = rows(f"assignment0/{folder}/throughput-times.csv")
    step_ms = median(float(r["step_time_ms"]) for r in times if r["batch_size"] == str(batch))
    rate = batch * 1024 / step_ms * 1e3
    mfu = rate * GPT2_FLOPS / H100_FLOPS
    assert (row["device"], row["tokens/s"]) == (H100, pytest.approx(rate))
    assert row["MFU"] == pytest.approx(mfu)
    stated, percent = published(rf"\| {name} \| ([\d,]+) \| (\d+) % \|")
    assert round(rate, -3) == stated
    assert round(100 * mfu) == percent


def test_the_runs_own_row_stands_first_and_is_what_the_notebook_says_of_it():
    run = throughput.open_throughput(CPU / "assignment0")
    first = throughput.beside_gpu(run).iloc[0]
    assert first["tokens/s"] == run.tokens_per_s
    assert first["device"] == "AMD EPYC"
    assert len(throughput.on_gpu()) == 3


def test_peaks_are_the_allocators_and_those_that_are_published():
    table = memory.beside_gpu(memory.open_memory_run(CPU / "assignment0")).iloc[1:]
    assert set(table["device"]) == {H100}
    stated = re.findall(r"\| ([\d.]+) GB \| ([\d.]+) GB \| −([\d.]+) % \|", RESULTS)
    shown = zip(
        table["predicted (MiB)"] * 2**20 / 1e9,
        table["seen (MiB)"] * 2**20 / 1e9,
        -100 * table["error"],
        strict=True,
    )
    assert sorted((f"{p:.2f}", f"{s:.2f}", f"{e:.1f}") for p, s, e in shown) == sorted(stated)


def test_shares_of_kinds_of_work_are_those_of_the_step_of_median_length():
    table = profile_text.beside_gpu(open_profile(CPU / "assignment0")).set_index("kind of work")
    operators = rows("assignment0/profile_training/profile-operators.csv")
    of_step: dict[str, float] = {}
    for row in operators:
        of_step[row["step"]] = of_step.get(row["step"], 0) + float(row["time_us"])
    chosen = sorted(of_step, key=of_step.__getitem__)[(len(of_step) - 1) // 2]
    for kind, name in (("matrix products", "matrix products"), ("idle", "idle")):
        own = sum(
            float(row["time_us"])
            for row in operators
            if row["step"] == chosen and row["category"] == kind
        )
        assert table[H100][name] == pytest.approx(own / of_step[chosen])
    assert table[H100].sum() == pytest.approx(1)
    assert table["this run"].sum() == pytest.approx(1)


def test_two_ranks_on_one_gpu_have_the_losses_of_one_as_it_is_published():
    table = losses_beside_gpu(open_training(CPU / "assignment1"))
    [row] = table[table["device"] == H100].to_dict("records")
    one, two = (
        {r["step"]: float(r["loss"]) for r in rows(f"assignment1/{name}/training-steps.csv")}
        for name in ("one-rank", "two-ranks-one-gpu")
    )
    apart = {step: abs(loss - two[step]) for step, loss in one.items()}
    assert row["largest difference (nats)"] == max(apart.values())
    assert (row["steps"], row["ranks"]) == (10, 2)
    assert max(gap / one[step] for step, gap in apart.items()) < 6e-8  # RESULTS.md says so


def test_full_shard_by_itself_is_its_untraced_step_and_its_kernels():
    table = full_shard_beside_gpu(open_training(CPU / "assignment1"))
    assert table["ranks"].tolist() == [2, 1]
    row = table.iloc[1]
    steps = rows("assignment1/train_fsdp/training-steps.csv")
    plain = [float(r["step_time_ms"]) for r in steps if r["profiled"] == "False"]
    assert row["step_ms"] == pytest.approx(median(plain))
    traced = rows("assignment1/train_fsdp/step-overlap.csv")
    of_three = sorted(float(r["computation_ms"]) for r in traced)
    assert of_three[0] <= row["computation_ms"] <= of_three[-1]


def test_passes_on_a_gpu_end_with_the_last_gradient():
    table = one_gpu.passes(open_run(CPU / "assignment2"))
    assert table["device"].tolist() == ["AMD EPYC", H100, H100]
    for row, below in zip(table.iloc[1:].to_dict("records"), one_gpu.PASSES, strict=True):
        ready = rows(f"{below}/gradient-ready-times.csv")
        by_pass: dict[str, float] = {}
        for r in ready:
            last = max(by_pass.get(r["iteration"], 0), float(r["ready_time_ms"]))
            by_pass[r["iteration"]] = last
        sizes = {r["parameter"]: int(r["size_bytes"]) for r in ready}
        assert row["pass (ms)"] == pytest.approx(median(by_pass.values()), rel=1e-3)
        assert row["B (MiB)"] == pytest.approx(sum(sizes.values()) / 2**20)
        assert row["gradients"] == len(sizes)


def test_an_all_reduce_of_one_rank_takes_what_is_published_with_and_without_its_launch():
    table = one_gpu.launches(open_run(CPU / "assignment2")).set_index("launch")["time (µs)"]
    for launch, below in one_gpu.LAUNCHES.items():
        own = [
            float(r["time_ms"]) * 1e3
            for r in rows(f"{below}/allreduce-samples.csv")
            if r["mode"] == "sequential" and r["total_bytes"] == "4"
        ]
        assert table[launch] == pytest.approx(median(own))
    assert published(r"It takes ([\d.]+) µs, .*\nlaunches hidden, and (\d+) to (\d+) µs") == [
        round(table["hidden"], 1),
        22,
        round(table["included"]),
    ]


def test_bookkeeping_is_the_pass_with_ddp_over_the_one_without_as_published():
    table = one_gpu.bookkeeping(open_run(CPU / "assignment2"))
    local = [float(r["backward_time_ms"]) for r in rows(f"{one_gpu.BOOKKEEPING}/local-times.csv")]
    # The run's own is the lab's, which has a cap of 1 TiB.
    assert table.loc[table["device"] != H100, "cap (MiB)"].tolist() == ["one bucket"]
    shown = table[table["device"] == H100]
    assert shown["cap (MiB)"].tolist() == ["1", "25", "400"]
    for row in shown.to_dict("records"):
        own = [
            float(r["backward_time_ms"])
            for r in rows(f"{one_gpu.BOOKKEEPING}/ddp-times.csv")
            if float(r["bucket_cap_mib"]) == float(row["cap (MiB)"])
        ]
        assert row["with DDP (ms)"] == pytest.approx(median(own))
        assert row["added"] == pytest.approx(median(own) / median(local) - 1)
    stated = published(r"0\.1 %: ([\d.]+), ([\d.]+) and ([\d.]+) ms at 1, 25 and 400 MiB")
    assert stated == [round(value, 1) for value in shown["with DDP (ms)"]]
