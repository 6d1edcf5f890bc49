"""Settings that are tried of a verified plan: which, predicted how, and what is taken of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t
from test_plan_search import llama, printed

from common.errors import NotYetWritten
from common.judged import DISTURBED, QUIET
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile
from common.perfmodel.scaling.step_model import LinearTime, PassTimes
from common.planning.measured_times import Inputs, MeasuredTimes
from common.planning.search import TimedPlan, search
from common.planning.space import Plan, Question, candidates, sized, variations
from common.planning.tuned import TriedPlan, Tuned
from common.samples import Interval
from common.tuning.candidates import APART, MOST_CANDIDATES
from common.tuning.plans.plan_tuning import settings_to_try, verify

BLOCKS, FORWARD_S, BACKWARD_S, UPDATE_S, OWN_S = 4, 0.4, 0.8, 0.08, 0.05
SHARDED = ("SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
FULL = Plan("FULL_SHARD", 4)


def asked(**settings: object) -> Question:
    defaults = {"ranks": 4, "ranks_per_node": 4, "global_batch": 16, "precisions": ("float32",)}
    return Question(architecture=llama(), memory_bytes=9e9, **(defaults | settings))


def times(question: Question, call_s: float = 1e-4, backend: str = "nccl") -> MeasuredTimes:
    """Makes measurements in which every collective takes the same time, whatever its size."""
    count = 10
    profile = BackwardProfile(
        names=tuple(f"p{i}" for i in range(count)),
        sizes_bytes=np.full(count, 2**20, np.int64),
        ready_s=np.arange(1, count + 1) * 0.01,
        backward_s=count * 0.01,
        registration=tuple(range(count))[::-1],
    )
    lines = PassTimes(LinearTime(0.0, FORWARD_S / 4), LinearTime(0.0, BACKWARD_S / 4))
    groups = itertools.product(("all_gather", "reduce_scatter", "all_reduce"), (2, 4, 8))
    inputs = Inputs(
        passes={("none", casts): lines for casts in ("float32", "half", "autocast")},
        profile=profile,
        curve=AlphaBeta(1e-3, 2**30),
        crowded=None,
        costs=NO_COSTS,
        update_s=UPDATE_S,
        zero1_s=UPDATE_S,
        collectives={group: AlphaBeta(call_s, float("inf")) for group in groups},
        overhead_s=dict.fromkeys(SHARDED, OWN_S),
        backend=backend,
        noise=(0.01, 0.01),
        rounds=4,
    )
    return MeasuredTimes(question, inputs)


def timed(measured: MeasuredTimes, plan: Plan) -> TimedPlan:
    return TimedPlan(sized(measured.question, plan), measured.step(plan))


def test_one_rank_by_itself_takes_as_much_less_time_as_its_passes_did():
    measured = times(asked())
    faster = MeasuredTimes(asked(), replace(measured.inputs, one_rank=0.6))
    for plan, share in ((Plan("single", 4, 2), 0.6), (Plan("DDP", 4), 1.0)):
        seconds = [of.at_least_s(plan) - UPDATE_S for of in (measured, faster)]
        assert seconds[1] == pytest.approx(share * seconds[0])


@pytest.mark.parametrize(
    ("plan", "exposed_calls"),
    [
        # The first gathers of root and first block, the reductions of the last block and the root.
        (FULL, 2 + 2),
        (replace(FULL, prefetch=2), 2 + 2),
        # Each block's second gather, too, and before all but one of these a reduction.
        (replace(FULL, prefetch=0), 2 + BLOCKS + (BLOCKS - 1) + 2),
        (replace(FULL, prefetch=0, blocks_per_unit=2), 2 + 2 + 1 + 2),
        (Plan("SHARD_GRAD_OP", 4), 2 + 2),
        # Two micro-batches: both gather the first block, and the last one reduces.
        (Plan("FULL_SHARD", 2, 2), 2 + 1 + 2),
    ],
)
def test_what_is_exposed_over_nccl_is_what_nothing_can_hide(plan, exposed_calls):
    call_s = 1e-4
    computation_s = FORWARD_S + BACKWARD_S + plan.accumulation * OWN_S + UPDATE_S / 4
    step = times(asked(), call_s).step(plan)
    assert step.step_s == pytest.approx(computation_s + exposed_calls * call_s, rel=1e-9)


def test_slow_collectives_follow_one_another_whatever_is_gathered_ahead():
    calls = 2 * BLOCKS + BLOCKS + 2  # gathers of both passes, reductions, and the root's two
    for ahead in (0, 1, 2):
        step = times(asked(), 100.0).step(replace(FULL, prefetch=ahead))
        assert step.step_s == pytest.approx(calls * 100, rel=0.02)


def test_over_gloo_nothing_is_hidden_and_depth_changes_nothing():
    measured = times(asked(), 1e-3, backend="gloo")
    steps = {measured.step(replace(FULL, prefetch=ahead)).step_s for ahead in (0, 1, 2)}
    calls = 2 * BLOCKS + BLOCKS + 2
    [step_s] = steps
    assert step_s == pytest.approx(
        FORWARD_S + BACKWARD_S + OWN_S + UPDATE_S / 4 + calls * 1e-3, rel=1e-9
    )


@pytest.mark.parametrize("plan", [Plan("DDP", 4), Plan("ZERO1", 2, 2)])
def test_a_students_tree_without_buckets_sends_one_after_the_passes(monkeypatch, plan):
    def not_there(*_: object) -> None:
        raise NotYetWritten("A2.3")

    monkeypatch.setattr("common.perfmodel.ddp.bucketings.walk_bucketings", not_there)
    measured = times(asked())
    gradients = 10 * 2**20
    exchange_s = 1e-3 + gradients / 2**30
    step = measured.step(plan)
    assert step.step_s == pytest.approx(FORWARD_S + BACKWARD_S + UPDATE_S + exchange_s)
    assert step.bucket_cap_mib == 10
    assert settings_to_try(timed(measured, plan), measured) == []
    [line] = [line for line in measured.basis if "A2.3" in line]
    assert "one bucket" in line


def test_variations_are_all_settings_of_the_same_work_and_no_others():
    question = asked(strategies=SHARDED)
    expected = {
        ("FULL_SHARD", 1, 0),
        ("FULL_SHARD", 1, 2),
        *(("FULL_SHARD", 2, ahead) for ahead in (0, 1, 2)),
        ("FULL_SHARD", 4, 1),  # one unit: nothing is left to be gathered ahead
        *(("SHARD_GRAD_OP", unit, ahead) for unit in (1, 2) for ahead in (1, 2)),
        ("SHARD_GRAD_OP", 4, 1),
    }
    found = variations(question, FULL)
    assert {(p.strategy, p.blocks_per_unit, p.prefetch) for p in found} == expected
    assert len(found) == len(expected)
    same = {(p.micro_batch, p.accumulation, p.checkpointing, p.precision) for p in found}
    assert same == {(4, 1, "none", "float32")}
    # Hosts have a mesh to choose, and the precision is chosen only where the question allows it.
    over_hosts = variations(asked(strategies=SHARDED, ranks_per_node=2), FULL)
    assert {plan.strategy for plan in over_hosts} == set(SHARDED)
    both = variations(asked(strategies=SHARDED, precisions=("float32", "bfloat16")), FULL)
    assert len(both) == 2 * (len(expected) + 1) - 1
    # What plan searches gathers one unit ahead, as FSDP does by itself.
    assert {plan.prefetch for plan in candidates(question)} == {1}


def test_settings_of_fsdp_are_tried_from_the_best_predicted_one_on():
    measured = times(asked(strategies=SHARDED), 1e-3)
    settings = settings_to_try(timed(measured, replace(FULL, prefetch=0)), measured)
    assert len(settings) == MOST_CANDIDATES
    assert replace(FULL, prefetch=0) not in [setting.plan for setting in settings]
    steps = [setting.time.step_s for setting in settings]
    assert steps[0] <= min(steps) * 1.01
    every = [measured.step(plan).step_s for plan in variations(measured.question, FULL)]
    assert min(steps) == min(every)


def test_settings_that_do_not_fit_are_not_tried():
    roomy = times(asked(strategies=SHARDED, device="cpu"), backend="gloo")
    sizes = {
        setting.plan.name: setting.peak_bytes
        for setting in settings_to_try(timed(roomy, FULL), roomy)
    }
    middle = sorted(sizes.values())[len(sizes) // 2]
    tight = times(replace(roomy.question, memory_bytes=middle * 1.0301), backend="gloo")
    found = {setting.plan.name for setting in settings_to_try(timed(tight, FULL), tight)}
    assert found
    assert {name for name, size in sizes.items() if size > middle}.isdisjoint(found)


@pytest.mark.parametrize("strategy", ["DDP", "ZERO1"])
def test_settings_of_ddp_are_other_buckets_some_way_apart(strategy):
    measured = times(asked())
    base = timed(measured, Plan(strategy, 4))
    caps = [setting.plan.bucket_cap_mib for setting in settings_to_try(base, measured)]
    assert caps
    assert base.plan.bucket_cap_mib not in caps
    for one, other in itertools.combinations(caps, 2):
        assert max(one / other, other / one) >= APART
    assert settings_to_try(timed(measured, Plan("single", 4, 4)), measured) == []


def tuned(gain: Interval | None, *, fits: bool = True, machine: str = QUIET) -> Tuned:
    measured = times(asked())
    base, other = timed(measured, FULL), timed(measured, replace(FULL, prefetch=2))
    half = timed(measured, replace(FULL, precision="bfloat16"))
    return Tuned(
        base=base,
        tried=(TriedPlan(other, gain, 10**9), TriedPlan(timed(measured, Plan("SHARD_GRAD_OP", 4)))),
        options=(TriedPlan(half, Interval(0.3, 0.28, 0.32, rounds=8)),),
        allowed_s=30,
        took_s=21,
        visit_s=0.2,
        fits=fits,
        machine=machine,
    )


@pytest.mark.parametrize(
    ("result", "is_taken", "said"),
    [
        (tuned(Interval(0.05, 0.03, 0.07, rounds=8)), True, "2 units ahead is taken"),
        (tuned(Interval(0.05, -0.01, 0.11, rounds=8)), False, "within noise over 8 rounds"),
        (tuned(Interval(-0.05, -0.07, -0.03, rounds=8)), False, "none is taken"),
        (tuned(Interval(0.05, 0.03, 0.07, rounds=8), fits=False), False, "more memory than"),
        (tuned(Interval(0.05, 0.03, 0.07, rounds=8), machine=DISTURBED), False, "other work"),
        (tuned(Interval(0.05, 0.03, 0.07, rounds=2)), False, "2 more rounds"),
        (tuned(None), False, "longer than the 30 s allowed"),
        (replace(tuned(None), tried=()), False, "no other settings that fit"),
    ],
)
def test_a_setting_is_taken_where_it_is_settled_to_save_time_and_fits(result, is_taken, said):
    assert result.best == (result.tried[0].timed if is_taken else result.base)
    assert said in result.sentences()[0]
    values = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert values["taken"]["prefetch"] == (2 if is_taken else 1)


def test_an_answer_has_the_lines_of_what_was_taken_and_tells_of_other_precisions_only():
    question = asked(strategies=SHARDED, checkpointing=("none",))
    searched = search(question, times(question))
    result = tuned(Interval(0.05, 0.03, 0.07, rounds=8))
    text = printed(searched, result.best, (), result)
    assert "set_modules_to_backward_prefetch(last[i + 1 : i + 3]" in text
    assert "MixedPrecisionPolicy" not in text
    assert "changes what is computed (--changes-training yes): FULL_SHARD, 1 × 4" in text
    assert "Tried beside the verified plan" in text


class MadeUpVisits:
    """Visits whose seconds are drawn, in place of steps: the median of each plan is given."""

    def __init__(self, median_s: dict[Plan, float]) -> None:
        self.median_s, self.times = median_s, pd.DataFrame()
        single = {"gather": lambda value: [value], "broadcast": lambda value: value}
        self.worker = SimpleNamespace(is_main=True, **single)
        machine = SimpleNamespace(state=QUIET)
        self.recorder = SimpleNamespace(machine=lambda: machine)
        self.died: dict[Plan, str] = {}
        self._noise = np.random.default_rng(0)

    def rounds(
        self, stage: str, plans: Sequence[Plan], rounds: int, first: int = 0
    ) -> pd.DataFrame:
        """Draws the seconds of each plan in each round; returns those of all rounds so far."""
        for round_, plan in itertools.product(range(first, first + rounds), plans):
            noise = self._noise.normal(1, 0.02)
            self.times.loc[round_, plan.name] = self.median_s[plan] * noise
        return self.times

    def peaks(self) -> dict[str, int]:
        """Returns a byte for each plan."""
        return {plan.name: 1 for plan in self.median_s}


@pytest.mark.parametrize(("named_s", "pairs"), [(0.13, 3), (0.11, 1)], ids=["third", "second"])
def test_the_intervals_of_all_finalists_hold_at_once(named_s: float, pairs: int) -> None:
    best, second, third, named = (Plan("DDP", size) for size in (1, 2, 4, 8))
    visits = MadeUpVisits({best: 0.1, second: 0.12, third: 0.15, named: named_s})
    verified = verify(visits, [third, named, second, best], None, named)
    yours = next(plan for plan in verified if plan.is_mine)
    final = np.log(visits.times[[named.name, best.name]].tail(len(visits.times) - 4))
    logs = final[named.name] - final[best.name]
    half = t.ppf(1 - 0.05 / 2 / pairs, len(logs) - 1) * logs.std() / len(logs) ** 0.5
    assert verified[0].plan == best
    assert yours.over_best.interval.low == pytest.approx(np.exp(logs.mean() - half))
    assert yours.over_best.interval.high == pytest.approx(np.exp(logs.mean() + half))
