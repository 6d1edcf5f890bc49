"""The memory analysis as a student runs it: what it prints and writes, and how it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from rank_support import torchrun_variables
from refusal_support import refused_line

from common.benchmarks.one_device.memory import MemoryAnalysis, largest_batches
from common.runtime.records.run_directory import read_environment

SCRIPT = Path(__file__).parents[2] / "assignments" / "assignment0" / "memory_analysis.py"
TINY = ("--model", "gpt2-nano", "--batch_size", 2, "--seq_len", 32)


@pytest.fixture(scope="module")
def run(rank_server, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("memory")
    flags = ("--device", "cpu", "--run_step", "--sharding", "FULL_SHARD", "--ranks", 8)
    done = rank_server.run(SCRIPT, *TINY, *flags, "--output_dir", folder, "--run_id", "run")
    assert done.exit_codes == [0], done.stderr
    return folder / "run", done.stdout[0]


def test_the_courses_block_is_printed_in_its_order(run):
    printed = run[1]
    expected = [
        *("Model: GPT-2 Nano", "Batch size: 2", "Sequence length: 32", "Device: CPU"),
        *("Model parameters: 6,901,760", "--- Memory Breakdown ---", "Estimated Memory:"),
        *("Parameters: 26.33 MiB", "Gradients: 26.33 MiB", "Optimizer States: 52.66 MiB"),
        *("Total Estimated: 105.31 MiB", "Actual Memory:", "Peak Allocated: ", "Reserved: "),
        *("Difference:", "Allocated vs Estimated: "),
    ]
    places = [printed.index(text) for text in expected]
    assert places == sorted(places)


def test_peak_is_of_the_step_and_not_of_what_is_left_after_it(run):
    # After a step only parameters and states are there; the original read that as the peak.
    peaks = pd.read_csv(run[0] / "memory-peak.csv").set_index("source")["peak_bytes"]
    states = 12 * 6_901_760
    assert peaks["allocator"] > 1.2 * states
    assert peaks["predicted"] == pytest.approx(peaks["allocator"], rel=0.02)
    assert peaks["tracked"] == pytest.approx(peaks["allocator"], rel=0.02)
    printed = float(re.search(r"Peak Allocated: ([\d.]+) MiB", run[1])[1])
    assert printed == pytest.approx(peaks["allocator"] / 2**20, abs=0.01)


def test_the_tables_add_up(run):
    components = pd.read_csv(run[0] / "memory-components.csv").set_index("component")
    assert components.drop("total").sum().to_dict() == components.loc["total"].to_dict()
    moments = pd.read_csv(run[0] / "memory-moments.csv")
    peak = moments.groupby("moment")["predicted_bytes"].sum().max()
    assert peak == components.loc["total", "predicted_bytes"]
    sharded = pd.read_csv(run[0] / "memory-sharded.csv")
    assert sharded.groupby("moment")["predicted_bytes"].sum().max() < peak
    layers = pd.read_csv(run[0] / "memory-layers.csv")
    assert len(layers) == 6 + 2
    assert layers["predicted_bytes"].tolist() == layers["measured_bytes"].tolist()
    assert read_environment(run[0])["status"] == "complete"


def test_the_largest_batches_of_a_step_of_few_tokens_have_fewer_pieces_of_the_loss():
    settings = MemoryAnalysis(model="gpt2-nano", batch_size=1, seq_len=4, capacity_gb=(24,))
    [row] = largest_batches(settings).to_dict("records")
    assert row["as_asked"] <= row["chunked_loss"] <= row["both"]


def test_a_step_that_this_machine_cannot_hold_is_refused_before_it_starts(tmp_path):
    flags = ("--model", "gpt2-xl", "--batch_size", 4096, "--run_step", "--device", "cpu")
    line = refused_line(SCRIPT, *flags, "--output_dir", tmp_path)
    assert re.match(r"error: batch_size 4096: the step needs .* GB and .* are free", line)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.py")), ids=lambda path: path.stem)
def test_all_of_assignment_0_is_for_one_device(script, tmp_path):
    flags = ("--device", "cpu", "--output_dir", tmp_path)
    line = refused_line(script, *flags, variables=torchrun_variables(0, 2, 0))
    assert "for one device, and was started on 2 ranks" in line
    assert not list(tmp_path.iterdir())
