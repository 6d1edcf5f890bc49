"""The roofline, by hand: a device of 100 operations and 10 bytes per second has its ridge at 10."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from common.perfmodel.one_device.peaks import DevicePeak
from common.perfmodel.one_device.roofline import Roof, placed, roofline_table

ROOF = Roof(flops_per_s=100, memory_bytes_per_s=10)


def test_below_the_ridge_memory_limits_and_above_it_arithmetic():
    assert ROOF.ridge == 10
    assert [ROOF.attainable_flops_per_s(x) for x in (0.5, 5, 10, 20)] == [5, 50, 100, 100]


@pytest.mark.parametrize(
    ("flops", "moved_bytes", "time_s", "share", "bound"),
    [
        # 50 operations on 100 bytes take 10 s for the bytes.
        (50, 100, 10, 1.0, "memory"),
        (50, 100, 25, 0.4, "memory"),
        # 2000 operations on 100 bytes take 20 s for the arithmetic.
        (2000, 100, 40, 0.5, "compute"),
        # On the ridge both take as long.
        (1000, 100, 10, 1.0, "compute"),
        # Far below either limit neither explains the time.
        (2000, 100, 400, 0.05, "neither (overhead)"),
        (0, 100, 1000, 0.01, "neither (overhead)"),
        # A copy does no arithmetic; a cache may serve it faster than memory could.
        (0, 100, 5, 2.0, "memory"),
    ],
)
def test_a_placement_is_the_least_time_over_the_time_taken(
    flops, moved_bytes, time_s, share, bound
):
    assert placed(flops, moved_bytes, time_s, ROOF) == {
        "achieved_flops_per_s": flops / time_s,
        "achieved_bytes_per_s": moved_bytes / time_s,
        "intensity": flops / moved_bytes,
        "ridge": 10,
        "share_of_roof": pytest.approx(share),
        "bound": bound,
    }


@pytest.mark.parametrize("work", [(0, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_nonsense_is_refused(work):
    with pytest.raises(ValueError, match="operations and"):
        placed(*work, ROOF)


def test_a_roof_takes_the_peak_of_its_precision_and_is_none_where_there_is_no_peak():
    peak = DevicePeak("a", {"float32": 100, "tf32": 800, "bfloat16": 1600}, 10, "a sheet")
    assert Roof.of(peak, "float32").ridge == 10
    assert Roof.of(peak, "float32", tf32=True).ridge == 80
    assert Roof.of(peak, "bfloat16", tf32=True).ridge == 160
    assert Roof.of(peak, "float16") is None
    assert Roof.of(None, "float32") is None


def operators(*rows: tuple) -> pd.DataFrame:
    """Makes rows of a profile: (step, phase, operator, shapes, calls, milliseconds)."""
    table = pd.DataFrame(rows, columns=["step", "phase", "operator", "shapes", "calls", "ms"])
    return table.assign(time_us=table["ms"] * 1e3)


def costs(*rows: tuple) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["operator", "shapes", "calls", "flops", "bytes"])


def test_costs_join_times_by_operator_and_shapes_and_the_median_step_counts():
    profile = operators(
        *[(step, "forward", "aten::mm", "2x3 3x4", 2, ms) for step, ms in enumerate((4, 90, 5))],
        *[(step, "forward", "aten::mm", "9x9 9x9", 1, 7) for step in range(3)],
        (0, "forward", "aten::view", "2x3", 50, 1),
    )
    known = costs(("aten::mm", "2x3 3x4", 4, 400, 80), ("aten::mm", "9x9 9x9", 1, 1000, 10))
    table = roofline_table(profile, known, ROOF)
    # Two calls a step at 100 operations and 20 bytes each; a view costs nothing and is left out.
    assert table["shapes"].tolist() == ["9x9 9x9", "2x3 3x4"]
    small = table.iloc[1]
    assert (small["calls"], small["flops"], small["bytes"], small["time_ms"]) == (2, 200, 40, 5)
    assert (small["intensity"], small["ridge"]) == (5, 10)
    # 200 operations in 5 ms are 40,000 per second.
    assert small["achieved_flops_per_s"] == pytest.approx(40_000)


def test_the_same_operator_in_two_phases_has_two_rows():
    profile = operators(
        (0, "forward", "aten::add", "4", 1, 1), (0, "backward", "aten::add", "4", 3, 1)
    )
    table = roofline_table(profile, costs(("aten::add", "4", 4, 16, 192)), ROOF)
    assert dict(zip(table["phase"], table["bytes"], strict=True)) == {
        "forward": 48,
        "backward": 144,
    }


def test_a_compiled_models_calls_which_also_take_the_result_are_found():
    profile = operators((0, "forward", "aten::mm", "2x3 3x4 2x4", 1, 1))
    known = costs(("aten::mm", "2x3 3x4", 1, 48, 104), ("aten::mm", "5x5 5x5", 1, 250, 300))
    assert roofline_table(profile, known, ROOF)["flops"].tolist() == [48]


def test_shapes_that_the_profiler_does_not_know_matter_only_where_they_decide():
    profile = operators(
        (0, "optimizer", "aten::_fused_adamw_", "", 1, 1), (0, "backward", "aten::mm", "", 1, 1)
    )
    known = costs(
        *[("aten::_fused_adamw_", "304 tensors", 1, 14, 28)],
        *[("aten::mm", "2x3 3x4", 1, 48, 104), ("aten::mm", "5x5 5x5", 1, 250, 300)],
    )
    assert roofline_table(profile, known, ROOF)["operator"].tolist() == ["aten::_fused_adamw_"]


def test_without_a_known_peak_rates_are_given_and_bounds_are_not():
    profile = operators((0, "forward", "aten::mm", "2x3 3x4", 1, 1))
    row = roofline_table(profile, costs(("aten::mm", "2x3 3x4", 1, 48, 96)), None).iloc[0]
    assert (row["bound"], row["intensity"]) == ("unknown", 0.5)
    assert math.isnan(row["ridge"])
    assert math.isnan(row["share_of_roof"])
