"""A step in parts: made-up steps whose parts are known, and tables that cannot be right."""

import numpy as np
import pandas as pd
import pytest

from common.analysis.step_parts import (
    PARTS,
    decompose,
    decompose_all,
    flags,
    hidden_communication_ms,
    middle_half,
)
from common.errors import UserError
from common.tables import ARM_COLUMNS, BUCKET_COLUMNS, STEP_COLUMNS

TIMES = {"data": 1.0, "forward": 10.0, "backward": 20.0, "optimizer": 2.0}


def made_up(steps=8, computed=((30.0,) * 2), communication=5.0, gap=0.0, **more) -> pd.DataFrame:
    """Makes steps that all ranks start and end together; ``computed`` are their backward passes."""
    slowest = max(computed)
    rows = []
    for step in range(steps):
        for rank, own in enumerate(computed):
            row = dict.fromkeys(STEP_COLUMNS, np.nan) | {
                "rank": rank,
                "arm": 0,
                "kind": "timed",
                "round": 0,
                "epoch": 0,
                "step": step,
                "warmup": step < 2,
                "samples": 4,
                "tokens": 40,
                "padded_tokens": 50,
                **{f"{name}_time_ms": time for name, time in TIMES.items()},
                "backward_time_ms": own,
                "waiting_time_ms": slowest - own,
                "communication_time_ms": communication,
            }
            row["step_time_ms"] = sum(row[column] for column in PARTS.values()) + gap
            rows.append(row | more)
    return pd.DataFrame(rows)


def test_parts_are_means_over_ranks_and_add_up_to_the_step() -> None:
    parts = decompose(made_up(computed=(30.0, 40.0)))
    assert parts.parts_ms == pytest.approx(
        {"data": 1, "forward": 10, "backward": 35, "waiting": 5, "communication": 5, "optimizer": 2}
    )
    assert list(parts.parts_ms) == list(PARTS)
    assert parts.step_ms == pytest.approx(58)
    assert parts.unaccounted_share == pytest.approx(0)
    assert parts.adds_up
    assert (parts.world_size, parts.steps) == (2, 6)
    assert parts.exposed_ratio == pytest.approx(5 / 45)
    assert parts.by_rank["waiting_ms"].tolist() == [10, 0]


def test_what_no_rank_has_noted_is_left_over_and_not_spread() -> None:
    parts = decompose(made_up(gap=10.0))
    assert parts.unaccounted_share == pytest.approx(10 / 58)
    assert not parts.adds_up


def test_a_rank_whose_step_is_shorter_was_not_with_the_others() -> None:
    # Rank 1 begins 6 ms after rank 0, which waits for it: that is lost on both.
    table = made_up()
    late = table["rank"] == 0
    table.loc[late, ["waiting_time_ms", "step_time_ms"]] += 6
    parts = decompose(table)
    assert parts.parts_ms["waiting"] == pytest.approx(6)
    assert parts.unaccounted_share == pytest.approx(0)


def test_parts_add_up_where_medians_of_them_would_not() -> None:
    # In each step another part is long, so every part's median is its short value.
    table = made_up(steps=8, computed=(20.0,))
    for step, name in zip(range(2, 8), [*PARTS], strict=True):
        table.loc[table["step"] == step, [PARTS[name], "step_time_ms"]] += 30
    medians = table[~table["warmup"]][list(PARTS.values())].median().sum()
    parts = decompose(table)
    assert medians < 0.6 * parts.step_ms
    assert parts.sum_ms == pytest.approx(parts.step_ms)


def test_warm_up_and_a_hiccup_do_not_count() -> None:
    table = made_up(steps=10)
    table.loc[table["warmup"], "step_time_ms"] = 1e6
    table.loc[table["step"] == 9, ["waiting_time_ms", "step_time_ms"]] += 1000
    assert decompose(table).step_ms == pytest.approx(48)


def test_the_sum_is_held_against_steps_that_nobody_watched() -> None:
    plain = made_up(kind="plain").assign(step_time_ms=40.0)
    plain[list(PARTS.values())] = np.nan
    parts = decompose(pd.concat([made_up(), plain]))
    assert parts.plain_step_ms == pytest.approx(40)
    assert parts.unaccounted_share == pytest.approx(0)  # of the steps they were noted in
    assert parts.watching_share == pytest.approx(48 / 40 - 1)
    assert parts.error == pytest.approx(48 / 40 - 1)
    assert not parts.adds_up


def test_one_rank_has_no_exchange() -> None:
    parts = decompose(made_up(computed=(30.0,), communication=0.0))
    assert parts.parts_ms["communication"] == parts.parts_ms["waiting"] == 0
    assert parts.plain_step_ms is None


def watched(*rows: tuple[int, int, float, float]) -> pd.DataFrame:
    """Makes rows of buckets.csv: rank, bucket, when it was ready, and when it was done."""
    table = [(rank, 0, 0, 5, bucket, 4, ready, done) for rank, bucket, ready, done in rows]
    return pd.DataFrame(table, columns=[*BUCKET_COLUMNS])


def test_hidden_communication_is_what_ran_beside_computation() -> None:
    # Two buckets: ready at 10 and 30 (the end of computation), done at 25 and 40. The first is
    # hidden for 15 ms; the second is exposed. Rank 1 is ready earlier and waits inside.
    rows = [(0, 0, 10.0, 25.0), (0, 1, 30.0, 40.0), (1, 0, 5.0, 25.0), (1, 1, 30.0, 40.0)]
    buckets = watched(*rows)
    assert hidden_communication_ms(buckets) == pytest.approx(15)
    parts = decompose(made_up(), buckets=buckets)
    assert parts.total_communication_ms == pytest.approx(20)
    assert parts.total_ratio == pytest.approx(20 / 40)
    assert hidden_communication_ms(buckets, arm=3) is None


def test_buckets_queue_behind_each_other() -> None:
    # Both ready at once: the second runs when the first is done, not twice the time.
    buckets = watched((0, 0, 10.0, 20.0), (0, 1, 10.0, 30.0), (0, 2, 50.0, 60.0))
    assert hidden_communication_ms(buckets) == pytest.approx(20)


def test_every_arm_has_a_row_and_arms_without_timed_steps_have_none() -> None:
    steps = pd.concat([made_up(), made_up(arm=1, kind="plain"), made_up(arm=2, gap=9.0)])
    arms = pd.DataFrame(0, index=range(3), columns=[*ARM_COLUMNS]).assign(arm=range(3))
    table = decompose_all(arms, steps)
    assert table["arm"].tolist() == [0, 2]
    assert table["adds_up"].tolist() == [True, False]
    assert table["waiting_ms"].tolist() == [0, 0]


def test_the_middle_half_leaves_out_a_quarter_at_each_end() -> None:
    assert sorted(middle_half(pd.Series([9, 1, 5, 7, 3, 2, 8, 6]))) == [2, 3, 4, 7]
    assert len(middle_half(pd.Series([1, 2, 3]))) == 3


def test_flags_are_read_however_they_were_written() -> None:
    assert flags(pd.Series(["True", "False", 1, 0, True])).tolist() == [True, False] * 2 + [True]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (made_up().drop(columns="waiting_time_ms"), "no column 'waiting_time_ms'"),
        (made_up(steps=2), "no step of kind 'timed' after its warm-up"),
        (made_up(arm=4), "arm 0 has no step"),
        (made_up().iloc[:-1], "step 7 has 1 rows for 2 ranks"),
        (made_up(forward_time_ms=np.nan), "step 2, rank 0: forward_time_ms is nan"),
    ],
)
def test_tables_that_cannot_be_right_are_refused(table: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decompose(table)
