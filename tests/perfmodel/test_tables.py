"""Reading the course's tables as they are, and refusing those that cannot be right.

This project's own raw tables are in test_tables_raw.py.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from perfmodel_support import gpt2_parameters, gpt2_ready_order, refused

from common.csv_tables import read_table
from common.perfmodel.layer_tables import layer_key, profile_from_layers, read_layer_tables
from common.perfmodel.tables import read_all_reduce

COURSE = Path(__file__).parents[3] / "shared" / "measured" / "umd-2x4-a100"
WIDTH = 8  # of the small hand-made GPT-2
BLOCK = 12 * WIDTH**2 + 13 * WIDTH


@pytest.fixture
def course() -> Path:
    """Returns the course's folder of measurements on 2×4 A100."""
    if not COURSE.is_dir():
        pytest.skip("the course's tables are not here: no ../shared/measured/umd-2x4-a100")
    return COURSE


@pytest.fixture
def layers(course):
    """Reads its layer tables of gpt2-large."""
    return read_layer_tables(
        course / "layer-sizes-gpt2_large-bs4.csv", course / "layer-times-gpt2_large-bs4.csv"
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    """Reads a table by Python's own reader."""
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_courses_all_reduce_table_is_read_point_by_point(course):
    table = read_all_reduce(course / "allreduce-times.csv")
    assert table.world_size == 8
    rows = rows_of(course / "allreduce-times.csv")
    for row in rows:
        assert table.curve.time_s(int(row["total_bytes"])) == float(row["average_time"])
    assert len(table.curve.sizes_bytes) == len(rows) == 19


def test_the_notes_tell_of_the_tied_weight_and_of_the_row_that_is_no_backward_time(layers):
    tied, backward = layers.notes
    for word in ("layer-sizes", "tied", "64,328,960", "twice", "counted once"):
        assert word in tied
    for word in ("layer-times", "'backward'", "1.7 µs", "no backward time", "ignored"):
        assert word in backward
    assert all("\n" not in note for note in layers.notes)


def test_the_courses_layers_are_read_in_the_order_of_the_model(course, layers):
    # The table of times sorts block_10 before block_2.
    assert [name for name, _, _ in layers.layers] == [*(f"block {i}" for i in range(36)), "ln_f"]
    medians = {
        row["Name"]: float(row["median"])
        for row in rows_of(course / "layer-times-gpt2_large-bs4.csv")
    }
    for index, (_, parameters, seconds) in enumerate(layers.layers[:36]):
        assert parameters == 19_677_440
        assert seconds == medians[f"block_{index} grad"]
    assert layers.layers[36][1:] == (2560, medians["ln_f grad"])
    assert layers.lm_head_s == medians["lm_head grad"]
    assert layers.forward_s == medians["forward"]
    assert layers.step_s == medians["step"]


def test_the_profile_from_the_courses_tables_has_the_gradients_of_gpt2_large(layers):
    profile = profile_from_layers(layers)
    parameters = gpt2_parameters("gpt2-large")
    order = gpt2_ready_order(list(parameters))
    # The tied weight once: 774,030,080 parameters of 4 bytes, not 838,359,040.
    assert profile.total_bytes == 774_030_080 * 4
    assert list(profile.names) == order
    assert profile.sizes_bytes.tolist() == [parameters[name] for name in order]
    assert list(profile.registration) == [list(parameters).index(name) for name in order]


def test_the_profile_from_the_courses_tables_ends_when_all_its_layers_are_done(layers):
    profile = profile_from_layers(layers)
    total = layers.lm_head_s + sum(seconds for _, _, seconds in layers.layers)
    assert profile.backward_s == pytest.approx(total)
    assert profile.ready_s[-1] == pytest.approx(total)  # the tied embedding
    ready = dict(zip(profile.names, profile.ready_s, strict=True))
    # The first gradient of the table, ln_f, comes after the LM head's; block 35 is done one
    # block's time later, and block 0 last.
    assert ready["ln_f.bias"] == pytest.approx(layers.lm_head_s + layers.layers[36][2])
    block_35 = layers.layers[35][2]
    assert ready["blocks.35.ln_1.bias"] == pytest.approx(ready["ln_f.bias"] + block_35)
    assert ready["blocks.0.ln_1.bias"] == pytest.approx(total)
    # Inside a block time goes with the matrices: 4, 4, 1 and 3 of 12 parts.
    for name, twelfths in [("mlp.c_proj", 4), ("mlp.c_fc", 8), ("attn.c_proj", 9)]:
        expected = ready["ln_f.bias"] + block_35 * twelfths / 12
        assert ready[f"blocks.35.{name}.weight"] == pytest.approx(expected)


def test_the_profile_from_the_courses_tables_says_what_it_assumes(layers):
    assumptions = profile_from_layers(layers).assumptions
    assert any("embedding" in text and "ends" in text for text in assumptions)
    assert any("no row" in text for text in assumptions)
    assert any("inside a block" in text for text in assumptions)


# --- tables made by hand ---------------------------------------------------------------------


def write(path: Path, *lines: str) -> Path:
    """Writes a file of these lines."""
    path.write_text("\n".join(lines) + "\n")
    return path


SIZES = {
    "Token embedding": 80,
    "Position embedding": 24,
    "Block 0": BLOCK,
    "Block 1": BLOCK,
    "LayerNorm final": 2 * WIDTH,
    "LM head": 80,
}
TIMES = {
    "block_0 grad": 3.0,
    "block_1 grad": 2.0,
    "ln_f grad": 0.5,
    "lm_head grad": 1.0,
    "forward": 4.0,
    "backward": 6.5,
    "step": 1.0,
}


def read_layers(folder: Path, sizes: dict = SIZES, times: dict = TIMES):
    """Writes and reads layer tables with these rows."""
    sizes_path = write(
        folder / "sizes.csv",
        ",Name,No. Params",
        *(f"{i},{name},{count}" for i, (name, count) in enumerate(sizes.items())),
    )
    times_path = write(
        folder / "times.csv",
        "Name,min,max,mean,std,median",
        *(f"{name},0,9,0,0,{seconds}" for name, seconds in times.items()),
    )
    return read_layer_tables(sizes_path, times_path)


def without(rows: dict, *names: str) -> dict:
    return {name: value for name, value in rows.items() if name not in names}


def test_a_small_model_is_profiled_as_computed_by_hand(tmp_path):
    profile = profile_from_layers(read_layers(tmp_path))
    ready = dict(zip(profile.names, profile.ready_s, strict=True))
    assert profile.total_bytes == 4 * (80 + 24 + 2 * BLOCK + 2 * WIDTH)
    assert profile.backward_s == pytest.approx(6.5)
    # LM head 1 s, ln_f 0.5 s, block 1 2 s in twelfths by its matrices, block 0 3 s.
    assert ready["ln_f.bias"] == pytest.approx(1.5)
    assert ready["blocks.1.mlp.c_fc.weight"] == pytest.approx(1.5 + 2 * 8 / 12)
    assert ready["blocks.1.ln_1.bias"] == pytest.approx(3.5)
    assert ready["blocks.0.attn.c_attn.weight"] == pytest.approx(6.5)
    assert ready["wte.weight"] == pytest.approx(6.5)


def test_without_a_row_for_the_positions_there_are_none(tmp_path):
    tables = read_layers(tmp_path, sizes=without(SIZES, "Position embedding"))
    assert any("taken as 0 parameters" in note for note in tables.notes)
    profile = profile_from_layers(tables)
    assert profile.total_bytes == 4 * (80 + 2 * BLOCK + 2 * WIDTH)
    assert "wpe.weight" not in profile.names
    with refused("sizes.csv", "ln_f has 1 parameter"):
        profile_from_layers(read_layers(tmp_path, SIZES | {"LayerNorm final": 1}))


def test_a_credible_backward_row_and_a_weight_listed_once_need_no_note(tmp_path):
    assert read_layers(tmp_path, sizes=without(SIZES, "LM head")).notes == ()


def test_the_embeddings_own_time_counts_where_the_table_has_it(tmp_path):
    profile = profile_from_layers(read_layers(tmp_path, times=TIMES | {"embedding grad": 0.25}))
    assert profile.backward_s == pytest.approx(6.75)
    assert profile.ready_s[-1] == pytest.approx(6.75)
    assert not any("no row" in text for text in profile.assumptions)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Block 7", "block_7 grad"),
        ("Transformer Block 7", "h.7"),
        ("LM head", "lm_head grad"),
        ("LayerNorm final", "ln_f grad"),
        ("Token embedding", "wte"),
        ("Position embedding", " WPE "),
    ],
)
def test_one_layer_has_one_key_in_both_tables(one, other):
    assert layer_key(one) == layer_key(other)


@pytest.mark.parametrize(
    ("sizes", "times", "words"),
    [
        (without(SIZES, "Block 1"), TIMES, ["block 1", "not match", "sizes.csv", "times.csv"]),
        (SIZES, TIMES | {"Block 1": 20.0}, ["times.csv", "block 1"]),  # twice: which is meant?
        (SIZES, without(TIMES, "block_1 grad"), ["block 1", "not match", "sizes.csv", "times.csv"]),
        (SIZES | {"Block 5": BLOCK}, TIMES, ["block 5", "sizes.csv", "times.csv"]),
        (
            without(SIZES, "Block 0", "Block 1"),
            without(TIMES, "block_0 grad", "block_1 grad"),
            ["no block", "sizes.csv"],
        ),
        (without(SIZES, "Token embedding"), TIMES, ["sizes.csv", "token embedding"]),
        (without(SIZES, "LayerNorm final"), TIMES, ["sizes.csv", "ln_f"]),
        (SIZES, without(TIMES, "lm_head grad"), ["times.csv", "lm_head grad"]),
        (SIZES, without(TIMES, "ln_f grad"), ["times.csv", "ln_f grad"]),
        (SIZES | {"LM head": 88}, TIMES, ["sizes.csv", "88", "80", "untied"]),
        (SIZES | {"Block 0": -1}, TIMES, ["sizes.csv", "line 4", "No. Params", "-1"]),
        (SIZES | {"Block 0": "many"}, TIMES, ["sizes.csv", "line 4", "No. Params", "many"]),
        (SIZES, TIMES | {"block_1 grad": -0.1}, ["times.csv", "line 3", "median", "-0.1"]),
        (SIZES, TIMES | {"block_1 grad": "slow"}, ["times.csv", "line 3", "median", "slow"]),
        (SIZES, TIMES | {"block_1 grad": ""}, ["times.csv", "line 3", "median"]),
    ],
)
def test_layer_tables_that_do_not_fit_are_refused(tmp_path, sizes, times, words):
    with refused(*words):
        read_layers(tmp_path, sizes, times)


@pytest.mark.parametrize("layer", ["Block 1", "LayerNorm final"])
def test_a_layer_whose_size_is_not_that_of_a_gpt2_is_refused_with_its_file(tmp_path, layer):
    with refused("sizes.csv", "GPT-2 of width"):
        profile_from_layers(read_layers(tmp_path, SIZES | {layer: SIZES[layer] + 1}))


HEADER = "backend,world_size,total_elements,total_bytes,average_time,stdev_time"
ROW_4, ROW_8 = "nccl,8,1,4,0.003,0.0001", "nccl,8,2,8,0.004,0.0001"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["empty"]),
        ([HEADER], ["no rows"]),
        ([HEADER, ROW_4], ["at least 2"]),
        ([HEADER, ROW_8, ROW_4], ["ascend", "4 bytes follows 8"]),
        ([HEADER, ROW_4, ROW_4], ["ascend"]),
        ([HEADER.replace("average_time", "time"), ROW_4, ROW_8], ["no column 'average_time'"]),
        ([HEADER.replace("total_bytes", "bytes"), ROW_4, ROW_8], ["'total_bytes'", "has backend"]),
        ([HEADER, ROW_4, "nccl,8,2,8,-0.004,0"], ["line 3", "average_time", "-0.004"]),
        ([HEADER, ROW_4, "nccl,8,2,8,0,0"], ["line 3", "average_time"]),
        ([HEADER, ROW_4, "nccl,8,2,8,fast,0"], ["line 3", "average_time", "fast"]),
        ([HEADER, ROW_4, "nccl,8,2,8,,0"], ["line 3", "average_time"]),
        ([HEADER, ROW_4, "nccl,8,2,inf,0.1,0"], ["line 3", "total_bytes"]),
        ([HEADER, ROW_4, "nccl,8,2,large,0.1,0"], ["line 3", "total_bytes", "large"]),
        ([HEADER, ROW_4, ROW_8.replace("8,2", "4,2")], ["several world sizes", "[4, 8]"]),
        ([HEADER, ROW_4, ROW_8.replace("8,2", "all,2")], ["line 3", "world_size", "all"]),
        ([HEADER, "1,2", "1,2,3,4,5,6,7,8,9"], ["not a CSV table"]),
    ],
)
def test_an_unusable_all_reduce_table_is_refused_by_its_name(tmp_path, lines, words):
    path = tmp_path / "allreduce-times.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    with refused("allreduce-times.csv", *words):
        read_all_reduce(path)


def test_a_table_that_is_not_there_or_not_text_is_refused_by_its_name(tmp_path):
    with refused("missing.csv", "no such file"):
        read_all_reduce(tmp_path / "missing.csv")
    with refused("missing.csv", "no such file"):
        read_layer_tables(tmp_path / "missing.csv", tmp_path / "times.csv")
    with refused(tmp_path.name):
        read_table(tmp_path, ["Name"])
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 4)
    with refused("binary.csv"):
        read_table(tmp_path / "binary.csv", ["Name"])


def test_blanks_around_column_names_do_not_matter(tmp_path):
    path = write(tmp_path / "a.csv", HEADER.replace(",", " , "), ROW_4, ROW_8)
    assert read_all_reduce(path).curve.time_s([4, 8]) == pytest.approx([0.003, 0.004])
