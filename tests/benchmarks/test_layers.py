"""train_benchmark.py: layer sizes and times in the course's columns, and when gradients are ready.

The oracle for sizes and order is GPT-2's architecture, written out here for gpt2-pico (width 128,
2 blocks, vocabulary 256, 256 positions); that for times is a second computation from raw samples.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from rank_support import ASSIGNMENT2
from refusal_support import refused_line

from common.benchmarks.one_device.layers import layer_durations
from common.perfmodel.layer_tables import profile_from_layers, read_layer_tables
from common.perfmodel.tables import read_ready_times

WIDTH, BLOCKS, VOCABULARY, POSITIONS = 128, 2, 256, 256
RANKS, STEPS = 2, 3
# A block's parameters in the order in which their gradients become ready, with their sizes.
BLOCK_ORDER = {
    **{"mlp.c_proj.bias": WIDTH, "mlp.c_proj.weight": 4 * WIDTH**2},
    **{"mlp.c_fc.bias": 4 * WIDTH, "mlp.c_fc.weight": 4 * WIDTH**2},
    **{"ln_2.weight": WIDTH, "ln_2.bias": WIDTH},
    **{"attn.c_proj.bias": WIDTH, "attn.c_proj.weight": WIDTH**2},
    **{"attn.c_attn.bias": 3 * WIDTH, "attn.c_attn.weight": 3 * WIDTH**2},
    **{"ln_1.weight": WIDTH, "ln_1.bias": WIDTH},
}
PARAMETERS = {
    **{"ln_f.weight": WIDTH, "ln_f.bias": WIDTH},
    **{
        f"blocks.{block}.{name}": size
        for block in reversed(range(BLOCKS))
        for name, size in BLOCK_ORDER.items()
    },
    **{"wpe.weight": POSITIONS * WIDTH, "wte.weight": VOCABULARY * WIDTH},
}


@pytest.fixture(scope="module")
def ready(train_run):
    return pd.read_csv(train_run / "gradient-ready-times.csv")


@pytest.fixture(scope="module")
def steps(train_run):
    return pd.read_csv(train_run / "local-step-times.csv")


@pytest.fixture(scope="module")
def times(train_run):
    return pd.read_csv(train_run / "layer-times.csv").set_index("Name")


def test_layer_sizes_have_the_courses_columns_and_rows(train_run):
    lines = (train_run / "layer-sizes.csv").read_text().splitlines()
    block = sum(BLOCK_ORDER.values())
    # The tied weight is counted once.
    assert 2 * 32768 + BLOCKS * block + 2 * WIDTH == sum(PARAMETERS.values()) == 462_336
    assert lines == [
        ",Name,No. Params",
        "0,Token embedding,32768",
        "1,Position embedding,32768",
        *(f"{index + 2},Block {index},{block}" for index in range(BLOCKS)),
        f"{BLOCKS + 2},LayerNorm final,{2 * WIDTH}",
    ]


def test_layer_times_have_the_courses_columns_and_rows(train_run, times):
    header = (train_run / "layer-times.csv").read_text().splitlines()[0]
    assert header == "Name,min,max,mean,std,median"
    layers = {f"block_{index} grad" for index in range(BLOCKS)} | {"lm_head grad", "ln_f grad"}
    course = layers | {"forward", "backward", "step"}
    assert set(times.index) - course == {"embedding grad"}
    assert course <= set(times.index)
    assert np.isfinite(times).all().all()


def test_statistics_of_a_layer_are_in_order_and_in_seconds(times, steps):
    assert (times["min"] <= times["median"]).all()
    assert (times["median"] <= times["max"]).all()
    # Raw samples are in ms; the slowest rank of each step counts.
    slowest = steps.groupby("iteration").max() / 1e3
    columns = {"forward": "forward", "backward": "backward", "step": "optimizer"}
    for name, column in columns.items():
        samples = slowest[f"{column}_time_ms"].to_numpy()
        expected = [samples.min(), samples.max(), samples.mean(), samples.std(ddof=1)]
        assert times.loc[name, ["min", "max", "mean", "std"]].to_list() == pytest.approx(expected)
        assert times.loc[name, "median"] == pytest.approx(np.median(samples))


def test_a_blocks_time_is_from_the_last_gradient_of_the_block_after_it_to_its_own_last(
    ready, times
):
    block = ready["parameter"].str.extract(r"blocks\.(\d+)\.")[0]
    inside = ready.assign(block=block).dropna(subset="block")
    # A gradient is ready when its slowest rank's is: the maximum over ranks comes first.
    ends = inside.groupby(["iteration", "block"])["ready_time_ms"].max().unstack()
    for index in range(BLOCKS - 1):
        own = (ends[str(index)] - ends[str(index + 1)]) / 1e3
        assert times.loc[f"block_{index} grad", "mean"] == pytest.approx(own.mean(), rel=1e-6)
        assert times.loc[f"block_{index} grad", "max"] == pytest.approx(own.max(), rel=1e-6)


def test_the_layers_times_add_up_to_the_backward_pass_within_what_the_slowest_rank_adds(
    times, steps
):
    """A layer's time is that of the rank slowest in it: the sum is at least the slower backward
    pass, and at most that of both ranks together."""
    layers = times[times.index.str.endswith(" grad")]
    both = steps.groupby("iteration")["backward_time_ms"].sum().mean() / 1e3
    assert times.loc["backward", "mean"] <= layers["mean"].sum() * (1 + 1e-9)
    assert layers["mean"].sum() <= both * (1 + 1e-9)


def test_on_one_rank_the_layers_times_add_up_to_the_backward_pass_exactly(rank_server, tmp_path):
    flags = ["--model", "nano", "--batch_size", 1, "--max_seq_len", 16, "--device", "cpu"]
    where = ["--output_dir", tmp_path, "--run-id", "one", "--warmup_steps", 0, "--num_steps", 2]
    copy = ["--layer-size-output", tmp_path / "copy.csv"]
    done = rank_server.run(ASSIGNMENT2 / "train_benchmark.py", *flags, *where, *copy)
    assert done.exit_codes == [0], done.stderr
    mean = pd.read_csv(tmp_path / "one" / "layer-times.csv").set_index("Name")["mean"]
    assert mean[mean.index.str.endswith(" grad")].sum() == pytest.approx(mean["backward"], rel=1e-9)
    copied = (tmp_path / "copy.csv").read_text()
    assert copied == (tmp_path / "one" / "layer-sizes.csv").read_text()


def test_layers_share_a_backward_pass_by_the_moments_they_end():
    ready_s = {
        **{"hidden": 2.0, "ln_f.weight": 2.25, "ln_f.bias": 2.5},
        **{"blocks.1.mlp.c_fc.weight": 3.0, "blocks.1.ln_1.bias": 4.0},
        **{"blocks.0.ln_1.bias": 7.0, "wpe.weight": 7.5, "wte.weight": 8.5},
    }
    assert layer_durations(ready_s, backward_s=9.0) == {
        **{"lm_head grad": 2.0, "ln_f grad": 0.5, "block_1 grad": 1.5, "block_0 grad": 3.0},
        "embedding grad": 2.0,  # until the tied weight is final and the pass ends
    }


def test_every_parameter_is_ready_once_per_rank_and_iteration(ready):
    assert sorted(ready["iteration"].unique()) == list(range(STEPS))  # no warm-up step
    groups = ready.groupby(["rank", "iteration"])["parameter"]
    assert len(groups) == RANKS * STEPS
    assert all(sorted(names) == sorted(PARAMETERS) for _, names in groups)


def test_gradients_become_ready_in_gpt2s_order_the_tied_embedding_last(ready):
    for _, group in ready.groupby(["rank", "iteration"]):
        order = group.sort_values("ready_time_ms", kind="stable")["parameter"]
        assert list(order) == list(PARAMETERS)


def test_no_gradient_is_ready_before_the_pass_or_after_it(ready, steps):
    assert (ready["ready_time_ms"] > 0).all()
    last = ready.groupby(["rank", "iteration"])["ready_time_ms"].max()
    backward = steps.set_index(["rank", "iteration"])["backward_time_ms"]
    assert (last <= backward.loc[last.index]).all()


def test_sizes_and_places_are_the_models(ready):
    bytes_each = dict(zip(ready["parameter"], ready["size_bytes"], strict=True))
    assert bytes_each == {name: 4 * size for name, size in PARAMETERS.items()}
    places = dict(zip(ready["registration_index"], ready["parameter"], strict=True))
    # Registered: wte, wpe, the blocks from the first on, ln_f; in a block ln_1 comes first.
    assert [places[index] for index in (0, 1, 2)] == ["wte.weight", "wpe.weight", _block(0, "ln_1")]
    assert sorted(places) == list(range(len(PARAMETERS)))
    assert places[len(places) - 1] == "ln_f.bias"
    assert set(ready["dtype"]) == {"float32"}


def test_the_performance_model_reads_both_tables_and_they_agree(train_run, times):
    tables = read_layer_tables(train_run / "layer-sizes.csv", train_run / "layer-times.csv")
    assert tables.embedding_parameters == VOCABULARY * WIDTH
    assert tables.forward_s == pytest.approx(times.loc["forward", "median"])
    assert not tables.notes  # nothing about these tables is doubtful
    from_layers = profile_from_layers(tables)
    measured = read_ready_times(train_run / "gradient-ready-times.csv")
    assert measured.names == from_layers.names == tuple(PARAMETERS)
    assert list(measured.sizes_bytes) == list(from_layers.sizes_bytes)
    assert measured.registration == from_layers.registration


def test_a_copy_of_the_sizes_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    tiny = ["--model", "nano", "--batch_size", 1, "--max_seq_len", 16, "--num_steps", 1]
    where = ["--output_dir", tmp_path / "out", "--device", "cpu", "--warmup_steps", 0]
    copy = ["--layer-size-output", tmp_path / "file" / "sizes.csv"]
    line = refused_line(ASSIGNMENT2 / "train_benchmark.py", *tiny, *where, *copy)
    assert "Not a directory" in line


def _block(index: int, module: str) -> str:
    return f"blocks.{index}.{module}.weight"
