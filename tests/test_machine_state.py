"""What is said of a machine by the witness of a measurement."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from common.judged import DISTURBED, DRIFTING, QUIET
from common.machine_state import OFTEN, SLOW, MachineState, judge_machine

QUIET_SHARES = {"others_share": 0.01, "steal_share": 0.002, "idle_share": 0.2}
ROUNDS = 6


def table(ranks: int = 2, **values: list) -> pd.DataFrame:
    """Returns the witness of a loop of six rounds on a quiet machine.

    ``values`` are of the rows after each of its rounds, for all ranks; None where not known.
    """
    moments = [("run", 0), *(("arms", number) for number in range(ROUNDS + 1)), ("run", 1)]
    rows = []
    for index, (stage, number) in enumerate(moments):
        row = {"stage": stage, "round": number, "host": "h", "witness_ms": 2.0, "load_1min": 1.0}
        row |= QUIET_SHARES if index > 0 else dict.fromkeys(QUIET_SHARES)
        if stage == "arms" and number:
            row |= {name: column[number - 1] for name, column in values.items()}
        rows += [row | {"rank": rank} for rank in range(ranks)]
    return pd.DataFrame(rows).astype(dict.fromkeys(QUIET_SHARES, float))


def test_a_machine_with_nothing_else_to_do_is_quiet() -> None:
    assert judge_machine(table()) == MachineState(QUIET)
    assert str(judge_machine(table())) == "quiet"


@pytest.mark.parametrize(("rounds", "state"), [(1, DRIFTING), (2, DRIFTING), (3, DISTURBED)])
def test_other_processes_in_a_few_rounds_are_a_drift_and_in_many_disturb(
    rounds: int, state: str
) -> None:
    crowd = {
        "others_share": [0.38] * rounds + [0.0] * (ROUNDS - rounds),
        "idle_share": [0.02] * ROUNDS,
    }
    judged = judge_machine(table(**crowd))
    told = ROUNDS + 1  # the run's end is looked at, too
    assert (rounds / told >= OFTEN) == (state == DISTURBED)
    assert judged.state == state
    assert judged.reason == f"other processes took 38 % of the cores in {rounds} of {told} spans"


def test_others_on_cores_that_nobody_else_wants_disturb_nobody() -> None:
    aside = {"others_share": [0.3] * ROUNDS, "idle_share": [0.6] * ROUNDS}
    assert judge_machine(table(**aside)).state == QUIET


def test_cores_that_the_hypervisor_gave_away_disturb() -> None:
    judged = judge_machine(table(steal_share=[0.2] * ROUNDS))
    assert judged.state == DISTURBED
    assert judged.reason == "the hypervisor gave 20 % of the cores away in 6 of 7 spans"


def test_a_slow_fixed_computation_is_a_drift_and_the_round_is_named() -> None:
    slow = [2.0, 2.0, 2.0, 2.8, 2.0, 2.0]
    judged = judge_machine(table(witness_ms=slow))
    # The row after the fourth round is that at the beginning of the fifth.
    reason = "the fixed computation took 1.4 times its median after round 4"
    assert judged == MachineState(DRIFTING, reason)
    assert judge_machine(table(witness_ms=[2.0, 2.0 * SLOW * 0.99] * 3)).state == QUIET


def test_one_crowded_host_of_several_disturbs_all() -> None:
    rows = table()
    crowded = (rows["rank"] == 1) & (rows["stage"] == "arms")
    rows.loc[crowded, ["others_share", "idle_share"]] = [0.5, 0.0]
    assert judge_machine(rows).state == DISTURBED


def test_what_came_before_the_first_round_is_not_judged() -> None:
    rows = table()
    first = (rows["stage"] == "arms") & (rows["round"] == 0)
    rows.loc[first, ["others_share", "idle_share"]] = [0.9, 0.0]
    assert judge_machine(rows).state == QUIET


def test_without_shares_the_fixed_computation_alone_is_judged() -> None:
    unknown = {name: [None] * ROUNDS for name in QUIET_SHARES}
    rows = table(**unknown).assign(**dict.fromkeys(QUIET_SHARES, np.nan))
    assert judge_machine(rows).state == QUIET


def test_a_run_without_rounds_is_judged_as_a_whole() -> None:
    rows = table().iloc[[0, 1, -2, -1]].copy()
    assert judge_machine(rows).state == QUIET
    rows.iloc[-2:, [rows.columns.get_loc("others_share")]] = 0.4
    judged = judge_machine(rows)
    assert judged == MachineState(DISTURBED, "other processes took 40 % of the cores")
