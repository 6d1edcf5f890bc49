"""The search of ``ddplab plan`` against brute force: every plan sized, every plan timed."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from rich.console import Console

from common.analysis.plans.page import page
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.hugging_face import model_of
from common.perfmodel.architectures.published_sizes import sized_architecture
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES
from common.planning.answer import (
    VerifiedPlan,
    as_json,
    compared_with_mine,
    plan_to_take,
    why_not_others,
)
from common.planning.cluster_times import ClusterTimes
from common.planning.search import (
    ALIKE,
    Searched,
    StepTime,
    TimedPlan,
    Times,
    matches,
    named_fields,
    named_plan,
    named_plans,
    search,
    sized_plans,
)
from common.planning.space import (
    SINGLE,
    Plan,
    Question,
    candidates,
    fits,
    least_ranks,
    sized,
)
from common.planning.terminal import print_answer
from common.samples import paired_ratio, student

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


@cache
def llama() -> Architecture:
    return model_of(LLAMA, "a small Llama").architecture(256)


def gpt2() -> Architecture:
    return sized_architecture("gpt2", 512)[0]


def on(memory_gb: float, architecture: Architecture, **settings: object) -> Question:
    defaults = {"ranks": 8, "ranks_per_node": 4, "global_batch": 32, "precisions": ("bfloat16",)}
    memory = memory_gb * 1e9 + LIBRARIES_BYTES
    return Question(architecture=architecture, memory_bytes=memory, **(defaults | settings))


class MadeUpTimes:
    """Draws a step between its bound and three times that, from a seed and the plan."""

    basis = ()

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def at_least_s(self, plan: Plan) -> float:
        """Returns a bound that is the same for many plans, as that of computation is."""
        again = {"none": 3, "selective": 3.5, "block": 4}[plan.checkpointing]
        return again * (plan.accumulation * plan.micro_batch + 0.2 * plan.accumulation)

    def step(self, plan: Plan) -> StepTime:
        """Draws a step."""
        share = random.Random(f"{self.seed} {plan}").choice([1, 1.001, 1.2, 2, 3])
        seconds = share * self.at_least_s(plan)
        return StepTime(seconds, seconds, seconds, seconds)


@cache
def searched_on(memory_gb: float) -> Searched:
    """Returns a search that tests do not change."""
    return search(on(memory_gb, llama()), MadeUpTimes(0))


def printed(searched: Searched, *answer: object) -> str:
    """Prints an answer; returns it as text. ``answer``: best, verified and tuned."""
    best, *ran = answer
    console = Console(file=io.StringIO(), width=250)
    print_answer(searched, best, "here", console, *ran)
    return console.file.getvalue()


def check_against_all(question: Question, times: Times) -> None:
    """Compares best and frontier with those among all plans that fit, each timed once."""
    remembered = {"step": cache(times.step), "at_least_s": times.at_least_s, "basis": times.basis}
    times = SimpleNamespace(**remembered)
    every = [sized(question, plan) for plan in candidates(question)]
    fitting = [plan for plan in every if fits(question, plan)]
    points = [(times.step(plan.plan).step_s, plan.peak_bytes) for plan in fitting]
    searched = search(question, times)
    for plan, (seconds, _) in zip(fitting, points, strict=True):
        assert times.at_least_s(plan.plan) <= seconds * (1 + 1e-9), plan.plan
    fastest_s = min(seconds for seconds, _ in points)
    assert searched.best.time.step_s <= (1 + ALIKE) * fastest_s
    undominated = {
        (seconds, size)
        for seconds, size in points
        if not any((s <= seconds and m < size) or (s < seconds and m <= size) for s, m in points)
    }
    assert {(plan.time.step_s, plan.peak_bytes) for plan in searched.frontier} == undominated
    by_strategy = {}
    for plan, (seconds, _) in zip(fitting, points, strict=True):
        name = plan.plan.strategy
        by_strategy[name] = min(seconds, by_strategy.get(name, seconds))
    for name, seconds in by_strategy.items():
        assert searched.fastest(strategy=name).time.step_s == seconds
    assert len(searched.timed) <= len(fitting) <= searched.considered


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_search_finds_what_brute_force_finds_with_any_times(seed):
    check_against_all(on(0.4, llama()), MadeUpTimes(seed))


@pytest.mark.parametrize(
    ("make", "memory_gb"), [pytest.param(llama, 0.2, marks=pytest.mark.slow), (gpt2, 2.5)]
)
def test_search_finds_what_brute_force_finds_on_a_cluster(make, memory_gb):
    question = on(memory_gb, make(), ranks=16, ranks_per_node=8)
    job = Job(question.architecture, precision="float32")
    check_against_all(question, ClusterTimes(question, load_cluster("h100-ib"), Assumptions(), job))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plans_that_are_not_sized_would_not_fit(device):
    asked = on(4, llama(), device=device, precisions=("float32", "bfloat16"))
    plans = list(candidates(asked))
    sizes = [sized(asked, plan) for plan in plans]  # whatever the memory is
    for memory_gb in (0.03, 0.1, 0.4):
        question = replace(asked, memory_bytes=memory_gb * 1e9 + LIBRARIES_BYTES)
        fitting, refused = sized_plans(question, plans)
        each = {plan.plan: fits(question, plan) for plan in sizes}
        assert {plan.plan for plan in fitting} == {plan for plan, does in each.items() if does}
        assert all(not each[plan.plan] for plan in refused)
        assert {p.strategy for p in each} == {p.plan.strategy for p in (*fitting, *refused)}


def test_one_rank_takes_what_ddp_takes_without_buckets():
    question = on(10, llama())
    size = 4 * question.architecture.num_parameters
    alone = sized(question, Plan(SINGLE, 2)).memory
    ddp = sized(question, Plan("DDP", 2)).memory
    assert alone.peak_bytes == ddp.peak_bytes - size  # all gradients once more, in buckets
    assert alone.peak.components["parameters"] == size
    assert alone.peak.components["optimizer states"] == 2 * size


def test_where_nothing_fits_the_least_ranks_are_those_of_a_hand_count():
    architecture = llama()
    question = on(0.035, architecture, ranks=1, ranks_per_node=1, global_batch=1)
    searched = search(question, MadeUpTimes(0))
    assert searched.best is None
    assert not searched.frontier
    assert not searched.timed
    more = least_ranks(question)
    assert more > 1
    assert more & (more - 1) == 0
    # 16 bytes a parameter in each of n shards are held at any time: half of these ranks lack even
    # the room for their states, or the plan that checkpoints everything does not fit there.
    half = replace(question, ranks=more // 2, global_batch=more // 2)
    plans = [p for p in candidates(half) if p.strategy == "FULL_SHARD" and p.blocks_per_unit == 1]
    assert plans
    assert not any(fits(half, sized(half, plan)) for plan in plans)
    assert 16 * architecture.num_parameters / more < question.usable_bytes
    full = replace(question, ranks=more, global_batch=more)
    assert search(full, MadeUpTimes(0)).best.plan.strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    tiny = replace(question, memory_bytes=LIBRARIES_BYTES + 100_000)
    assert least_ranks(tiny, most=64) is None


def test_what_a_model_cannot_take_is_left_out_and_named():
    question = on(0.4, llama()).without({1: "it takes pairs", 4: "no fours"})
    plans = list(candidates(question))
    assert {plan.micro_batch for plan in plans if plan.strategy == "DDP"} == {2}
    assert {plan.micro_batch for plan in plans if plan.strategy == SINGLE} == {2, 8, 16, 32}
    answer = as_json(search(question, MadeUpTimes(0)))
    assert answer["left_out"] == ["micro-batches of size 1, 4 were left out: it takes pairs"]
    tiny = replace(question, memory_bytes=LIBRARIES_BYTES + 100_000)
    assert answer["left_out"][0] in as_json(search(tiny, MadeUpTimes(0)))["nothing_fits"]
    alone = on(0.4, llama(), global_batch=8)  # a sample a rank, which one rank alone can double
    plans = list(candidates(alone.without({1: "it takes pairs"})))
    assert {(plan.strategy, plan.micro_batch) for plan in plans} == {(SINGLE, n) for n in (2, 4, 8)}
    shared = on(0.4, llama(), global_batch=8, strategies=("DDP",))
    with pytest.raises(UserError, match=r"takes no micro-batch that makes it \(size 1\); it takes"):
        shared.without({1: "it takes pairs"})


def test_a_plan_that_ran_once_has_no_interval_in_any_answer():
    searched = searched_on(0.4)
    ran = student([2.0])
    verified = (
        VerifiedPlan(searched.best.plan, student([2.0, 2.1] * 2), 10**8),
        VerifiedPlan(searched.timed[1].plan, ran, 10**8, was_refused=True),
        VerifiedPlan(searched.timed[2].plan, None, None, "ran out of memory"),
    )
    answer = json.loads(json.dumps(as_json(searched, verified, searched.best), allow_nan=False))
    best, once, died = answer["verified"]
    assert best["step_low_s"] < 2.05 < best["step_high_s"]
    assert (once["step_s"], once["step_low_s"], once["step_high_s"]) == (2, None, None)
    assert died["step_s"] is None
    text = printed(searched, searched.best, verified)
    assert "nan" not in text
    assert "ran out of memory" in text


def test_a_named_plan_is_predicted_where_others_dominate_it_and_sized_where_it_does_not_fit():
    question = on(0.4, llama())
    fields = named_fields(["FULL_SHARD", "micro_batch=1", "checkpointing=block"])
    every = [plan for plan in candidates(question) if matches(plan, fields)]
    assert every
    assert {(p.strategy, p.micro_batch, p.checkpointing) for p in every} == {
        ("FULL_SHARD", 1, "block")
    }
    times = MadeUpTimes(0)
    fastest_s = min(times.step(plan).step_s for plan in every)
    found = named_plan(search(question, times, fields), fields)
    assert found.time.step_s == fastest_s
    large = named_fields(["DDP", "micro_batch=4"])
    tight = search(on(0.05, llama()), times, large)
    assert tight.best is not None
    smallest = named_plan(tight, large)
    assert smallest.peak_bytes == min(
        sized(question, plan).peak_bytes for plan in candidates(question) if matches(plan, large)
    )
    assert not fits(tight.question, smallest)
    assert named_plan(tight, {}) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["DPP"], "unknown strategy 'DPP'; did you mean 'DDP'"),
        (["DDP", "micro_batch=many"], "micro_batch=many': expected a strategy, then any of"),
        (["DDP", "colour=red"], "colour=red': expected a strategy, then any of"),
        (["DDP", "checkpointing=all"], "unknown checkpointing 'all'"),
        (["DDP", "micro_batch=3"], "no plan has strategy DDP, micro_batch 3"),
        (["DDP", "precision=float32"], "no plan has strategy DDP, precision float32"),
    ],
)
def test_a_named_plan_that_cannot_be_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        named_plans(on(1, llama()), named_fields(words))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("ratios", "machine", "verdict"),
    [
        ([1.10, 1.12, 1.11, 1.10, 1.09, 1.11], "quiet", "settled"),
        ([1.10, 0.95, 1.05, 0.99, 1.20, 0.90], "quiet", "hidden by noise"),
        ([1.10, 1.12, 1.11], "quiet", "not settled"),
        ([1.10, 1.12, 1.11, 1.10, 1.09, 1.11], "disturbed", "disturbed"),
    ],
)
def test_what_is_not_told_from_the_second_best_gives_way_to_the_simpler_plan(
    ratios, machine, verdict, swapped
):
    question = searched_on(1).question
    plans = [Plan("DDP", 4), Plan("FULL_SHARD", 4, checkpointing="block")]
    simple, other = (TimedPlan(sized(question, p), MadeUpTimes(0).step(p)) for p in plans)
    searched = replace(searched_on(1), timed=(simple, other))
    first, second = (other, simple) if swapped else (simple, other)
    judged = Judged(paired_ratio(ratios, [1.0] * len(ratios)), machine=machine)
    size = round(question.usable_bytes)
    ran = [
        VerifiedPlan(first.plan, student(ratios), size),
        VerifiedPlan(second.plan, student(ratios), size, over_best=judged),
    ]
    best = plan_to_take(searched, ran)
    assert best == (first if verdict == "settled" else simple)
    answer = as_json(searched, ran, best)
    assert answer["verdict"] == verdict
    assert ("is not told" in answer["choice"]) == (verdict != "settled")
    assert answer["choice"] in printed(searched, best, ran)
    assert answer["choice"] in page(searched, best, "here", ran)
    mine = [ran[0], replace(ran[1], is_mine=True)]
    told = "Yours, " + (
        f"{second.plan.label}, is the plan to take" if best == second else second.plan.label
    )
    assert told in compared_with_mine(best, mine)
    assert (verdict in compared_with_mine(best, mine)) == (best != second)
    other = second if best == first else first
    against = next(line for line in why_not_others(searched, best, ran) if other.plan.label in line)
    assert (best == first) == ("in the same rounds" in against)  # else what is left is predicted
    too_large = replace(ran[0], peak_bytes=size + 1)
    assert plan_to_take(searched, (too_large, ran[1])) == second
    assert "more memory than there is" in as_json(searched, (too_large, ran[1]), second)["choice"]
    assert as_json(searched, ran[:1], first)["verdict"] == "not measured"
    died = tuple(replace(each, step=None, peak_bytes=None, died="it died") for each in ran)
    answer = as_json(searched, died, plan_to_take(searched, died))
    assert answer["choice"].startswith("no plan that was run")


def test_the_simplest_of_all_that_are_tied_is_taken_and_one_round_gives_no_number():
    question = searched_on(1).question
    plans = [Plan("FULL_SHARD", 4, checkpointing="block"), Plan("FULL_SHARD", 4), Plan("DDP", 4)]
    timed = tuple(TimedPlan(sized(question, p), MadeUpTimes(0).step(p)) for p in plans)
    searched = replace(searched_on(1), timed=timed)
    for ratios in ([1.1, 0.95, 1.05, 0.9], [1.1]):
        over = Judged(paired_ratio(ratios, [1.0] * len(ratios)))
        best, *others = [VerifiedPlan(p, student([1.0] * 4), 1) for p in plans]
        ran = [best, *(replace(other, over_best=over) for other in others)]
        assert plan_to_take(searched, ran).plan == plans[2]
        answer = as_json(searched, ran, timed[2])
        assert "the simplest of the 3 that are tied is taken" in answer["choice"]
        assert "nan" not in answer["choice"]
        mine = compared_with_mine(timed[2], [*ran[:1], replace(ran[1], is_mine=True)])
        assert "nan" not in mine
        assert str(over.verdict) in mine


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"global_batch": 33}, "8 ranks cannot split it evenly; 32 is the nearest"),
        ({"global_batch": 3}, "8 ranks cannot split it evenly; 8 is the nearest"),
        ({"global_batch": 0}, "global_batch is 0; at least 1"),
        ({"micro_batches": (3,)}, "no number of micro-batches of 3 samples makes it"),
        ({"strategies": ("DPP",)}, "'DPP'"),
        ({"precisions": ("float99",)}, "'float99'"),
        ({"ranks": 0}, "ranks is 0; at least 1"),
    ],
)
def test_questions_without_an_answer_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        on(1, llama(), **settings)
