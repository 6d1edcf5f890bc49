"""What pages say of bucket caps, sweeps, changes and trials, where the truth is known.

A page is what one rule shows of one table. Where nothing differs, at most one in twenty may say
that something does; where something was planted, it is found, and nothing else is named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sweep_support import bucket_sweep
from test_judged import pages as drawn

from common.analysis.buckets.choice import cap_or_ties, choice_facts, spread_facts
from common.analysis.buckets.sweep import Accuracy, BucketSweep
from common.analysis.sweep_speedups import against_one_rank, sweep_speedups
from common.diagnose.causes.trials import AS_IT_IS, tried_changes
from common.diagnose.changes import Changes, best_or_tied, judged_changes
from common.judged import DISTURBED, Verdict
from common.samples import CONFIDENCE, Interval
from common.tuning.ddp_setting import DEFAULT, DdpSetting
from common.tuning.results.recommendation import Recommendation, Verified
from common.tuning.results.report import verdict

CAPS = (0.25, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
PAGES, FEW = 80, 20
MOST_FALSE, MOST_OF_FEW = (stats.binom.ppf(0.999, count, 1 - CONFIDENCE) for count in (PAGES, FEW))
"""What a share of one in twenty exceeds once in a thousand studies, of all pages and of few."""


def pages(rounds: int, arms: int, faster: float = 0.0, count: int = PAGES) -> list[pd.DataFrame]:
    """Draws tables of times with recorded noise; arm 0 takes less by ``faster``."""
    return drawn(rounds, arms, faster, count)


def sweep(times: pd.DataFrame, machine: str = "quiet") -> BucketSweep:
    """Makes a sweep of the columns, the last of which is DDP's default; a step a round."""
    caps = [*CAPS[: times.shape[1] - 1], None]
    buckets = {cap: 10 - place for place, cap in enumerate(caps)}
    return bucket_sweep(dict(zip(caps, times.to_numpy().T, strict=True)), buckets, machine=machine)


def held_against(times: pd.DataFrame, predicted_ms: float = 100.0, chosen: int = 6) -> Accuracy:
    """Holds a prediction, the same at each cap but for the chosen one, against a sweep."""
    measured = sweep(times)
    caps = measured.distinct().measured_s()
    predicted = dict.fromkeys(caps, predicted_ms / 1000.0)
    predicted[CAPS[chosen]] *= 1 - 1e-6
    return measured.accuracy_of(predicted.get)


def alarms(said: list[bool]) -> int:
    """Returns how many pages say something; there have to be as many as the limit is made for."""
    assert len(said) == PAGES
    return sum(said)


@pytest.mark.slow
def test_where_caps_do_not_differ_few_pages_name_one_or_find_a_loss() -> None:
    judged = [held_against(times) for times in pages(8, 8)]
    assert alarms([one.best.lead.is_settled for one in judged]) <= MOST_FALSE
    assert alarms([one.worst.lead.is_settled for one in judged]) <= MOST_FALSE
    assert alarms([one.worst_over_best.is_settled for one in judged]) <= MOST_FALSE
    assert alarms([one.regret.is_settled for one in judged]) <= MOST_FALSE
    assert alarms([one.error.is_settled for one in judged]) <= MOST_FALSE


@pytest.mark.parametrize("rounds", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_where_the_default_is_as_fast_few_pages_find_a_gain(rounds: int) -> None:
    gains = [sweep(times).gain_over_default(CAPS[0]) for times in pages(rounds, 8)]
    assert alarms([gain.is_settled for gain in gains]) <= MOST_FALSE
    assert rounds >= 6 or not any(gain.is_settled for gain in gains)


def test_a_planted_best_cap_is_named_and_what_was_chosen_instead_is_a_loss() -> None:
    judged = [held_against(times) for times in pages(8, 8, 0.15, count=FEW)]
    named = [one.measured_best_mib for one in judged if one.measured_best_mib is not None]
    assert len(named) >= 0.85 * FEW
    assert sum(cap != CAPS[0] for cap in named) <= MOST_OF_FEW
    lost = [one.regret.estimate for one in judged if one.regret.is_settled]
    assert len(lost) >= 0.7 * FEW  # held against six caps at once
    assert np.median(lost) == pytest.approx(0.15, abs=0.03)
    right = [replace(one, predicted_best_mib=CAPS[0]).regret for one in judged]
    assert sum(one.is_settled for one in right) <= MOST_OF_FEW


@pytest.mark.slow
def test_a_prediction_that_is_off_is_told_to_be() -> None:
    # Rounds are slow by a tenth for all caps alike, which does not cancel against a prediction.
    judged = [held_against(times, predicted_ms=160.0).error for times in pages(8, 8)]
    assert alarms([one.is_settled for one in judged]) >= 0.9 * PAGES
    assert np.median([one.estimate for one in judged]) == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_sweep_of_few_rounds_names_nothing(rounds: int) -> None:
    [times] = pages(rounds, 8, 0.5, count=1)
    accuracy = held_against(times)
    said = f"not settled: {6 - rounds} more rounds"
    assert accuracy.regret.said == accuracy.error.said == said
    assert cap_or_ties(accuracy.best) == said
    assert accuracy.measured_best_mib is None
    best = SimpleNamespace(
        matched_by=lambda caps: True, predicted_s=lambda cap: 0.1, total_s=0.1, cap_mib=1.0
    )
    facts = choice_facts(accuracy, best) | spread_facts(accuracy)
    assert facts["the slowest cap's T(b) over the fastest's"] == said
    assert "nan" not in " ".join(facts.values())


def test_a_sweep_that_was_cut_compares_the_rounds_that_have_both() -> None:
    [times] = pages(6, 8, 0.5, count=1)
    cut = sweep(times)
    last = (cut.steps["round"] == 5) & (cut.steps["bucket_cap_mib"] != CAPS[3])
    accuracy = BucketSweep(cut.steps[~last], 2).accuracy_of(lambda cap: 0.1)
    assert accuracy.best.arm == CAPS[0]
    assert accuracy.best.lead.rounds == 5
    one_cap = cut.steps[cut.steps["bucket_cap_mib"] == 2.0]
    single = BucketSweep(one_cap, 2).accuracy_of(lambda cap: 0.1)
    assert (single.best, single.measured_best_mib) == (None, 2.0)
    assert not single.regret.is_settled
    assert not single.worst_over_best.is_settled


def test_caps_that_gave_the_same_buckets_are_one_arm_whose_steps_are_no_ranks() -> None:
    # The median of both caps' steps, 100 and 120 ms: they are visits, not ranks of one step.
    [times] = pages(4, 3, count=1)
    measured = sweep(times)
    twin = measured.steps[measured.steps["bucket_cap_mib"] == CAPS[1]]
    steps = pd.concat([measured.steps, twin.assign(bucket_cap_mib=1.5)])
    steps.loc[steps["bucket_cap_mib"] == 1.0, "backward_time_ms"] = 100.0
    steps.loc[steps["bucket_cap_mib"] == 1.5, "backward_time_ms"] = 120.0
    assert BucketSweep(steps, 2).rounds()[1.0].tolist() == [110.0] * 4


def test_on_a_disturbed_machine_all_caps_are_tied_and_no_gain_is_said() -> None:
    [times] = pages(8, 8, 0.5, count=1)
    measured = sweep(times, DISTURBED)
    accuracy = measured.accuracy_of(lambda cap: 0.1)
    assert accuracy.best.tied == CAPS
    assert accuracy.regret.verdict == "disturbed"
    assert not measured.gain_over_default(CAPS[0]).is_settled


def scaled(times: pd.DataFrame, change: str | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Makes the arms and steps of a sweep: column 0 is one rank, the others are on several.

    ``change`` names the changes of further pairs of columns, each one rank and two.
    """
    arms, steps = [], []
    for arm, column in enumerate(times):
        pair = change is not None
        ranks = 1 + arm % 2 if pair else 2 ** min(arm, 3)
        name = "none" if not pair or arm < 2 else f"{change}{arm // 2}"
        arms.append(
            {"arm": arm, "regime": "strong", "world_size": ranks, "batch_per_rank": 64 // ranks}
            | {"global_batch": 64, "change": name, "precision": "fp32", "compression": "none"}
        )
        steps += [
            {"rank": 0, "arm": arm, "kind": "plain", "round": round_, "epoch": 0, "step": 0}
            | {"warmup": False, "step_time_ms": time_ms}
            for round_, time_ms in times[column].items()
        ]
    return pd.DataFrame(arms), pd.DataFrame(steps)


def against(times: pd.DataFrame) -> list[str]:
    """Returns what the table of a sweep says of each arm against one rank."""
    table = sweep_speedups(*scaled(times))
    return [against_one_rank(judged) for judged in table["judged"][table["world_size"] > 1]]


@pytest.mark.slow
def test_ranks_as_fast_as_one_are_seldom_called_faster_or_slower() -> None:
    said = [against(times) for times in pages(8, 7)]
    told = [any(words in ("faster", "slower") for words in page) for page in said]
    assert alarms(told) <= MOST_FALSE


def test_a_planted_speedup_is_paired_by_round_and_found() -> None:
    said = [against(times) for times in pages(8, 4, 0.2, count=FEW)]  # one rank is the faster
    assert sum(page == ["slower"] * 3 for page in said) >= 0.8 * FEW
    [times] = pages(8, 4, 0.2, count=1)
    table = sweep_speedups(*scaled(times)).set_index("arm")
    assert table.loc[2, "speedup"] == pytest.approx(np.exp(np.log(times[0] / times[2]).mean()))
    assert table.loc[2, "speedup_low"] < table.loc[2, "speedup"] < table.loc[2, "speedup_high"]
    assert against(times[:2]) == ["not settled: 4 more rounds"] * 3
    assert np.isfinite(sweep_speedups(*scaled(times[:2]))["speedup_low"]).all()
    assert against(times[:1]) == ["not settled: 5 more rounds"] * 3


def changes_of(times: pd.DataFrame) -> Changes:
    """Makes a run of changes: pairs of columns, on one rank and on two, the first unchanged."""
    speedups = {
        "none" if pair == 0 else f"change{pair}": times[2 * pair] / times[2 * pair + 1]
        for pair in range(times.shape[1] // 2)
    }
    table = pd.DataFrame({"change": [*speedups], "world_size": 2})
    return Changes(table, "made up", "a model", pd.DataFrame(speedups))


@pytest.mark.parametrize("rounds", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_changes_that_do_nothing_are_seldom_told_or_called_the_best(rounds: int) -> None:
    made = [changes_of(times) for times in pages(rounds, 10)]
    told = [judged_changes(changes)["told"].eq("settled").any() for changes in made]
    assert alarms(told) <= MOST_FALSE
    named = [best_or_tied(changes) in ("no change", *changes.rounds) for changes in made]
    assert alarms(named) <= MOST_FALSE


def test_a_change_that_helps_is_told_and_named() -> None:
    made = []
    for times in pages(8, 10):
        times[3] /= 1.4  # two ranks under the first change
        made.append(changes_of(times))
    told = [judged_changes(changes)["told"].tolist() for changes in made]
    assert sum(words[1] == "settled" for words in told) >= 0.9 * PAGES
    assert alarms(["settled" in words[2:] for words in told]) <= MOST_FALSE
    named = [best_or_tied(changes) for changes in made if changes.lead.is_settled]
    assert len(named) >= 0.9 * PAGES
    assert set(named) == {"change1"}
    four = changes_of(times[:4])
    assert four.lead.verdict is Verdict.OPEN
    assert best_or_tied(four) == f"not settled, {four.lead.reason}"


def tried(times: pd.DataFrame) -> tuple:
    """Returns what trials of changes say: column 0 is the script as it is."""
    rows = [
        {"rank": 0, "kind": "bucket_cap_mb", "setting": AS_IT_IS if arm == 0 else f"cap {arm}"}
        | {"round": round_, "iteration": 0, "passes": 1, "step_time_ms": time_ms}
        for arm in times
        for round_, time_ms in times[arm].items()
    ]
    run = SimpleNamespace(
        tables={"trials.csv": pd.DataFrame(rows)},
        accumulation=1,
        by_step=lambda column: pd.DataFrame({0: [50.0]}),
        slowest_ms=pd.Series([100.0]),
        opened=SimpleNamespace(machine_state="quiet"),
    )
    return tried_changes(SimpleNamespace(run=run, speedup_now=None))


@pytest.mark.slow
def test_trials_that_change_nothing_seldom_say_that_they_do() -> None:
    said = [[trial.said() for trial in tried(times)] for times in pages(6, 8)]
    told = [any("not told from no change" not in words for words in page) for page in said]
    assert alarms(told) <= MOST_FALSE


def test_a_trial_that_saves_time_says_so_and_one_of_few_rounds_does_not() -> None:
    said = []
    for times in pages(8, 8, count=FEW):
        times[1] /= 1.3
        said.append({trial.change: trial.said() for trial in tried(times)}["cap 1"])
    assert sum("not told from no change" not in words for words in said) >= 0.9 * FEW
    [few] = {trial.change: trial.said() for trial in tried(times[[0, 1]][:2])}.values()
    assert few.endswith("not told from no change: 4 more rounds")
    [one] = {trial.change: trial.said() for trial in tried(times[[0, 1]][:1])}.values()
    assert "nan" not in one
    assert one.endswith("not told from no change: 5 more rounds")


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (Interval(0.1, 0.05, 0.15, rounds=8), "Recommended: 2 MiB"),
        (Interval(0.1, 0.05, 0.15, rounds=3), "(not settled: 1 more round): keep it"),
        (Interval(0.1, -0.05, 0.2, rounds=8), "(hidden by noise: within noise over 8 rounds)"),
        (Interval(-0.1, -0.15, -0.05, rounds=8), "Nothing beats DDP's default: keep it"),
        (None, "Nothing was verified"),
    ],
)
def test_tuning_recommends_only_what_is_settled(
    gain: Interval | None, words: str, tmp_path: Path
) -> None:
    best = Verified(DdpSetting(2.0), 3, 0.1, 0.1, 0.1, gain)
    default = Verified(DEFAULT, 2, 0.11, 0.0, 0.11)
    advice = Recommendation(
        *("a:model", "2 cores", 1, 1, 4, 0.1, 0.1, default, best, (best,), ()),
        *(0.01, 5, 10.0, 50.0, str(tmp_path)),
    )
    assert words in verdict(advice)
    assert advice.worth_it == words.startswith("Recommended")
    assert not replace(advice, machine=DISTURBED).worth_it
