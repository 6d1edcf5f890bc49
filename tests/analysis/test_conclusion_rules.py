"""What conclusions say of simulated rounds whose truth is known, with this project's own noise.

Where nothing differs, at most one page in twenty says that a sentence holds or that it does not;
where something was planted, the sentence does what the truth does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from test_judged import NOISE
from test_rules_by_rounds import CAPS, FEW, MOST_FALSE, PAGES, alarms, held_against, pages, sweep

from common.analysis.conclusions import bucket_evaluation, buckets, synthetic_scaling
from common.analysis.conclusions.conclusion import (
    Seen,
    Status,
    every,
    is_behind,
    is_first,
    opposite,
    within,
)
from common.analysis.scaling.sweep_run import SweepRun
from common.errors import UserError
from common.judged import Judged, rival_of
from common.perfmodel.model import COMPUTE, COPIES, CURVE, FULL
from common.samples import Interval, student
from common.tables import STEP_COLUMNS

HOLDS, FAILS, OPEN, ABSENT = Status.HOLDS, Status.FAILS, Status.OPEN, Status.ABSENT


def settled(outcomes: list[Seen]) -> int:
    return alarms([outcome.status in (HOLDS, FAILS) for outcome in outcomes])


def count(outcomes: list[Seen], status: Status) -> int:
    return sum(outcome.status is status for outcome in outcomes)


@pytest.mark.parametrize(
    ("rounds", "arms"),
    [(8, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 2), (6, 8)))],
)
def test_where_arms_do_not_differ_none_is_said_to_be_the_first_or_behind(
    rounds: int, arms: int
) -> None:
    drawn = pages(rounds, arms)
    assert settled([is_first(times, arms - 1) for times in drawn]) <= MOST_FALSE
    assert settled([is_behind(times, 0) for times in drawn]) <= MOST_FALSE
    rivals = [rival_of(times, 0) for times in drawn]
    assert alarms([rival.is_settled and rival.estimate < 1 for rival in rivals]) <= MOST_FALSE


def test_of_a_planted_first_the_sentences_hold_and_fail() -> None:
    drawn = pages(8, 6, 0.2, count=FEW)  # arm 0 takes less
    assert count([is_first(times, 0) for times in drawn], HOLDS) >= 0.85 * FEW
    assert count([is_first(times, 3) for times in drawn], FAILS) >= 0.85 * FEW
    assert count([is_behind(times, 3) for times in drawn], HOLDS) >= 0.85 * FEW
    assert count([is_behind(times, 0) for times in drawn], FAILS) >= 0.85 * FEW
    few = [is_first(times[:3], 0) for times in drawn]
    assert {outcome.status for outcome in few} == {OPEN}


@pytest.mark.parametrize("rounds", [4, 8])
def test_at_its_very_limit_a_number_is_seldom_said_to_keep_it_or_to_break_it(rounds: int) -> None:
    draw, outcomes = np.random.default_rng(rounds), []
    for page in range(PAGES):
        noise = draw.choice(NOISE[page % len(NOISE)], size=(rounds, 5))
        judged = [
            Judged(student(0.05 + noise[:, at] - noise[:, -1], claims=4), null=0.0)
            for at in range(4)
        ]
        outcomes.append(every([within(number, 0.05) for number in judged]))
    assert count(outcomes, FAILS) <= MOST_FALSE
    assert count(outcomes, HOLDS) <= MOST_FALSE


def test_all_sides_hold_or_one_decides() -> None:
    sides = {status: Seen(status, str(status)) for status in Status}
    assert every([sides[HOLDS], sides[HOLDS]]).status is HOLDS
    assert every([sides[HOLDS], sides[OPEN], sides[FAILS]]) is sides[FAILS]
    assert every([sides[ABSENT], sides[OPEN], sides[HOLDS]]) is sides[OPEN]
    assert opposite(sides[FAILS]).status is HOLDS
    assert opposite(sides[OPEN]) is not None
    assert opposite(sides[ABSENT]).status is ABSENT
    far = Judged(Interval(0.2, 0.15, 0.25, rounds=6), null=0.0)
    assert within(far, 0.05).status is FAILS
    assert within(far, 0.3).status is HOLDS
    assert within(far, 0.2).status is OPEN


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes a sweep, held against a prediction, the run that is asked."""

    def make(times: pd.DataFrame, predicted_ms: float = 100.0, chosen: int = 6) -> None:
        accuracy = held_against(times, predicted_ms, chosen)
        models = dict.fromkeys((FULL, COMPUTE, COPIES, CURVE), accuracy)
        for module in (buckets, bucket_evaluation):
            monkeypatch.setattr(module, "models_of", lambda _: models)

    return make


@pytest.mark.slow
def test_a_cap_that_is_as_good_as_all_is_seldom_called_better_or_worse(swept) -> None:
    choices, ends = [], []
    for times in pages(8, 8):
        swept(times)
        choices.append(buckets.choice_not_worse(""))
        ends.append(buckets.at_end(0)(""))
    assert settled(choices) <= MOST_FALSE
    assert settled(ends) <= MOST_FALSE
    for times in pages(8, 8, 0.3, count=3):  # the smallest cap is the best
        swept(times)
        assert buckets.choice_not_worse("").status is FAILS
        assert buckets.at_end(0)("").status is FAILS
        assert buckets.at_end(-1)("").status is HOLDS
        swept(times, chosen=0)
        assert buckets.choice_not_worse("").status is HOLDS


@pytest.mark.slow
def test_errors_are_held_against_their_limit_by_intervals(swept) -> None:
    outcomes = []
    for times in pages(8, 8):
        base = np.exp(np.log(times).mean(axis=None))
        swept(times / base * 100, predicted_ms=105.0)
        outcomes.append(bucket_evaluation._small_errors(""))
    assert count(outcomes, HOLDS) <= MOST_FALSE
    [times] = pages(8, 8, count=1)
    swept(times, predicted_ms=200.0)
    assert bucket_evaluation._small_errors("").status is FAILS
    still = times * 0 + 100.0 + 0.1 * np.random.default_rng(0).standard_normal(times.shape)
    swept(still)
    assert bucket_evaluation._small_errors("").status is HOLDS


def test_the_term_that_removes_most_is_told_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("line", "copies", COMPUTE, FULL)
    run = SimpleNamespace(model=SimpleNamespace(ladder=lambda: dict.fromkeys(names)))
    monkeypatch.setattr(bucket_evaluation, "run_of", lambda _: run)
    draw = np.random.default_rng(1)

    def outcome(errors: list[float], noise: float) -> Seen:
        rounds = np.array(errors) + noise * draw.standard_normal((8, 4))
        models = {
            name: SimpleNamespace(errors_by_round=pd.Series(rounds[:, at]), median_error=errors[at])
            for at, name in enumerate(names)
        }
        monkeypatch.setattr(bucket_evaluation, "models_of", lambda _: models)
        return bucket_evaluation._contention_most("")

    alike = [outcome([0.3, 0.2, 0.1, 0.0], 0.03) for _ in range(PAGES)]
    assert settled(alike) <= MOST_FALSE
    assert outcome([0.3, 0.28, 0.02, 0.0], 0.01).status is HOLDS
    assert outcome([0.5, 0.1, 0.08, 0.0], 0.01).status is FAILS


ARMS = ((1, 8), (2, 8), (1, 64), (2, 64))
"""Ranks and batch per rank."""
PARTS = ("data", "forward", "backward", "waiting", "communication", "optimizer")


def measured(
    seed: int,
    noise: float = 0.05,
    rounds: int = 6,
    arms: Sequence[int] = range(4),
    **parts: tuple,
) -> SweepRun:
    """Makes a sweep of some arms; ``parts`` are the ms of all four, by default alike."""
    draw, rows = np.random.default_rng(seed), []
    default = {"data": 1, "forward": 20, "backward": 40, "waiting": 10, "communication": 20}
    for round_ in range(rounds):
        for arm in arms:
            ranks, batch = ARMS[arm]
            slow = np.exp(noise * draw.standard_normal(len(PARTS)))
            for step in range(4):
                times = {
                    f"{name}_time_ms": parts.get(name, (default.get(name, 2),) * 4)[arm] * factor
                    for name, factor in zip(PARTS, slow, strict=True)
                }
                keys = {"arm": arm, "kind": "timed", "round": round_, "epoch": 0, "step": step}
                row = dict.fromkeys(STEP_COLUMNS) | keys | times | {"warmup": False}
                row |= {"step_time_ms": sum(times.values()), "samples": batch}
                rows += [row | {"rank": rank} for rank in range(ranks)]
    table = pd.DataFrame(
        {"arm": arm, "regime": "weak", "world_size": ranks, "batch_per_rank": batch}
        | {"global_batch": ranks * batch, "accumulation": 1, "compression": "none"}
        | {"bucket_cap_mb": None, "precision": "float32", "change": "none"}
        for arm, (ranks, batch) in enumerate(ARMS)
        if arm in arms
    )
    opened = SimpleNamespace(machine_state="quiet")
    return SweepRun(opened, {"arms.csv": table, "steps.csv": pd.DataFrame(rows)})


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that asks a sweep."""

    def ask(run: SweepRun, look: str) -> Seen:
        lab = SimpleNamespace(sweep=run, replay=run, left_out="")
        monkeypatch.setattr(synthetic_scaling, "_lab", lambda _: lab)
        return getattr(synthetic_scaling, look)("")

    return ask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("looks", "arms", "alike"),
    [
        (("_contention", "_share_of_communication"), (1, 2, 3), {}),
        # Half of the step: 40 and 23 ms of waiting and sending beside 1, 20, 40 and 2 of the rest.
        (("_half_waits",), (3,), {"waiting": (40,) * 4, "communication": (23,) * 4}),
    ],
)
def test_of_parts_that_do_not_differ_little_is_said(looks, arms, alike, asks) -> None:
    runs = [measured(seed, arms=arms, **alike) for seed in range(30)]
    for look in looks:
        outcomes = [asks(run, look).status for run in runs]
        assert 30 - outcomes.count(OPEN) <= stats.binom.ppf(0.999, 30, 0.05)


def test_that_passes_take_longer_is_judged_by_rounds(asks) -> None:
    slower = measured(0, forward=(20, 30, 20, 30), backward=(40, 60, 40, 60))
    assert asks(slower, "_contention").status is HOLDS
    assert asks(measured(0, rounds=3), "_contention").status is OPEN


@pytest.mark.slow
def test_of_parts_that_differ_the_sentences_are_judged_by_rounds(asks) -> None:
    slower = measured(0, forward=(20, 30, 20, 30), backward=(40, 60, 40, 60))
    assert asks(measured(0, forward=(20, 20, 20, 9)), "_contention").status is FAILS
    sent = measured(0, communication=(0, 90, 0, 10))
    assert asks(sent, "_share_of_communication").status is HOLDS
    assert asks(sent, "_half_waits").status is FAILS
    assert asks(measured(0, waiting=(0, 0, 0, 200)), "_half_waits").status is HOLDS
    # Two ranks do twice the samples in a step that is as long: 2 of 2.
    assert asks(measured(0), "_none_good").status is FAILS
    assert asks(slower, "_none_good").status is HOLDS
    assert asks(measured(0, rounds=5), "_none_good").status is OPEN


@pytest.mark.slow
def test_an_efficiency_of_eight_tenths_is_neither_good_nor_none(asks) -> None:
    step = 1 + 20 + 40 + 10 + 20 + 2
    longer = step / 0.8 - step + 20
    outcomes = [
        asks(measured(seed, communication=(20, longer, 20, longer)), "_none_good")
        for seed in range(PAGES)
    ]
    assert settled(outcomes) <= MOST_FALSE


@pytest.mark.parametrize("look", ["_more_hidden", "_falls_less"])
def test_what_was_not_watched_was_not_measured(look: str, asks) -> None:
    with pytest.raises(UserError, match="not watched"):
        asks(measured(0), look)


def test_a_sweep_of_few_rounds_says_nothing_of_its_caps(swept) -> None:
    for times in pages(3, 8, 0.5, count=2):
        swept(times)
        for look in (buckets.choice_not_worse, buckets.at_end(-1)):
            assert look("").status is OPEN
        assert bucket_evaluation._small_errors("").status is OPEN


def test_a_disturbed_sweep_settles_nothing() -> None:
    [times] = pages(8, 8, 0.5, count=1)
    accuracy = sweep(times, "disturbed").accuracy_of(lambda cap: 0.2)
    assert not any(error.is_settled for error in accuracy.errors.values())
    outcome = is_first(accuracy.rounds, CAPS[0], **accuracy.conditions)
    assert (outcome.status, outcome.number.rpartition(", ")[2]) == (
        OPEN,
        "the machine had other work meanwhile",
    )
    assert replace(accuracy, machine="quiet").errors[CAPS[0]].is_settled
