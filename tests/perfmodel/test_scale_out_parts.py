"""What predictions for clusters are made of: stragglers, ranges, overlap, many caps, FLOPs.

Oracles: published tables of order statistics, closed forms, a simulation in small steps of time,
and the project's own simulator and search, which take one case at a time.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import (
    gpt2_parameters,
    gpt2_ready_order,
    make_profile,
    multiples,
    networks,
    profiles,
    refused,
)

from common.perfmodel.cluster.assumptions import OF_WORK, STRAGGLER_SPREAD, Assumptions, Range
from common.perfmodel.cluster.cap_grid import (
    Circumstances,
    best_rows,
    cap_rows,
    default_row,
    near_interval,
    simulate_grid,
)
from common.perfmodel.cluster.computed_profile import computed_profile
from common.perfmodel.cluster.stragglers import slowest_at, slowest_of
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.ddp.recurrence import many_cases
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.flops import training_flops_per_token

ROOT = Path(__file__).resolve().parents[2]

# E[max of n] of standard normal variables (Harter 1961, table 1).
NORMAL_MAXIMA = {1: 0.0, 2: 0.56419, 3: 0.84628, 5: 1.16296, 10: 1.53875, 100: 2.50759}


@pytest.mark.parametrize(("gpus", "expected"), NORMAL_MAXIMA.items())
def test_the_slowest_of_n_normal_gpus_is_the_published_order_statistic(gpus, expected):
    assert slowest_of(gpus, 0.02, "normal") == pytest.approx(1 + 0.02 * expected, abs=2e-7)


@pytest.mark.parametrize("gpus", [1, 2, 16, 1024])
def test_the_slowest_of_n_delays_is_the_harmonic_number(gpus):
    harmonic = sum(1 / k for k in range(1, gpus + 1))
    assert slowest_of(gpus, 0.1, "exponential") == pytest.approx(0.9 + 0.1 * harmonic)


DISTRIBUTIONS = ["lognormal", "normal", "exponential", "gumbel"]


def drawn_ranks(distribution, rng):
    """Draws [steps, ranks] with mean 1 and a standard deviation of 0.1."""
    return {
        "normal": 1 + 0.1 * rng.standard_normal((4000, 64)),
        "exponential": 0.9 + 0.1 * rng.exponential(size=(4000, 64)),
        "lognormal": np.exp(
            math.sqrt(math.log(1.01)) * rng.standard_normal((4000, 64)) - math.log(1.01) / 2
        ),
        "gumbel": rng.gumbel(
            1 - 0.1 * math.sqrt(6) / math.pi * np.euler_gamma,
            0.1 * math.sqrt(6) / math.pi,
            (4000, 64),
        ),
    }[distribution]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_slowest_gpu_is_that_of_a_simulation(distribution):
    drawn = drawn_ranks(distribution, np.random.default_rng(1))
    # mean 1 and standard deviation 0.1, as stated, and then the mean of the largest of 64
    assert drawn.mean() == pytest.approx(1, abs=0.002)
    assert drawn.std() == pytest.approx(0.1, abs=0.002)
    slowest = drawn.max(axis=1)
    error = 4 * slowest.std() / math.sqrt(len(slowest))
    assert slowest_of(64, 0.1, distribution) == pytest.approx(slowest.mean(), abs=error)
    # and so are its quantiles
    for quantile in (0.05, 0.5, 0.95):
        expected = np.quantile(slowest, quantile)
        assert slowest_at(64, 0.1, quantile, distribution) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("gpus", [2, 512, 16_384])
def test_the_mean_over_quantiles_is_the_expected_slowest(distribution, gpus):
    middles = (np.arange(20_000) + 0.5) / 20_000
    drawn = slowest_at(gpus, 0.1, middles, distribution)
    assert (np.diff(drawn) >= 0).all()
    assert drawn.mean() == pytest.approx(slowest_of(gpus, 0.1, distribution), abs=2e-4)


@pytest.mark.parametrize("gpus", [1, 2, 32, 1024])
def test_the_slowest_of_n_gumbel_gpus_is_ln_n_scales_slower(gpus):
    assert slowest_of(gpus, 0.1, "gumbel") == pytest.approx(
        1 + 0.1 * math.sqrt(6) / math.pi * math.log(gpus)
    )


@pytest.mark.parametrize("spread", [0.10, 0.12, 0.14])
def test_texts_have_the_published_excess_over_a_lognormal_law(spread):
    # 3.5 % for the largest of 32 (traces of production jobs with texts of unequal lengths)
    ratio = slowest_of(32, spread, OF_WORK["texts"][1]) / slowest_of(32, spread)
    assert ratio == pytest.approx(1.035, abs=0.007)


def test_512_gpus_with_equal_work_wait_as_long_as_was_published():
    # 1.8 % of a step
    assert slowest_of(512, STRAGGLER_SPREAD.value) == pytest.approx(1.018, abs=5e-4)


def test_one_gpu_or_no_spread_waits_for_nobody():
    for distribution in DISTRIBUTIONS:
        assert slowest_of(1, 0.3, distribution) == pytest.approx(1)
        assert slowest_of(16384, [0.0, 0.0], distribution) == pytest.approx([1, 1])
        assert slowest_at(1, 0.3, 0.9, distribution) == 1
        assert slowest_at(16384, [0.0, 0.0], 0.9, distribution) == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: slowest_of(0, 0.1), ["0 GPUs"]),
        (lambda: slowest_of(8, 0.1, "cauchy"), ["cauchy", "lognormal"]),
        (lambda: slowest_of(8, -0.1), ["spread", "-0.1"]),
        (lambda: slowest_at(8, 0.1, 1.0), ["quantile"]),
        (lambda: Assumptions(draws=3), ["3 draws", "20"]),
        (lambda: Assumptions(seed=-1), ["seed -1"]),
        (lambda: Assumptions(straggler_distribution="cauchy"), ["cauchy"]),
        (lambda: Assumptions(work="text"), ["work", "equal"]),
    ],
)
def test_stragglers_and_draws_that_cannot_be_are_refused(make, words):
    with refused(*words):
        make()


def test_the_spread_of_equal_work_is_that_of_the_recorded_job():
    path = ROOT.parent / "shared/measured/traces/stragglers-8-gpus-trace-ST.parquet"
    if not path.is_file():
        pytest.skip(f"no {path}: the published file is not part of the project")
    trace = pd.read_parquet(path)
    computing = trace[trace["optype"].isin(["forward-compute", "backward-compute"])]
    times = computing.groupby(["stage", "step", "rank"])["duration"].sum()
    of_stage = times.groupby(["stage", "step"])
    within = (of_stage.std() / of_stage.mean()).pow(2).groupby("stage").mean().pow(0.5)
    assert within.median() == pytest.approx(STRAGGLER_SPREAD.value, abs=5e-4)
    assert STRAGGLER_SPREAD.low <= within.pow(2).mean() ** 0.5 <= STRAGGLER_SPREAD.high


def test_equal_work_draws_a_slowest_rank_for_each_job_and_texts_do_not():
    equal, texts = Assumptions(draws=2000), Assumptions(work="texts", draws=2000)
    assert (equal.straggler_spread, equal.straggler_distribution) == OF_WORK["equal"]
    assert (texts.straggler_spread, texts.straggler_distribution) == OF_WORK["texts"]
    draws = equal.drawn()
    pace = equal.slowest(512, draws)
    expected = slowest_of(512, draws.straggler_spread)
    assert pace[0] == expected[0]
    assert pace[1:].mean() == pytest.approx(expected[1:].mean(), rel=1e-4)
    assert pace[1:].std() > 1.1 * expected[1:].std()
    drawn = texts.drawn()
    of_texts = slowest_of(512, drawn.straggler_spread, "gumbel")
    assert texts.slowest(512, drawn) == pytest.approx(of_texts)
    wider = Assumptions(work="texts", straggler_spread=Range(0.2, 0.2, 0.2))
    assert wider.slowest(2, wider.drawn())[0] == slowest_of(2, 0.2, "gumbel")


def test_draws_follow_the_triangle_and_begin_with_its_peak():
    draws = Assumptions(mfu=Range(0.4, 0.3, 0.6), draws=2000).drawn()
    assert draws.pass_rate[0] == 0.4
    assert draws.pass_rate.min() >= 0.3
    assert draws.pass_rate.max() <= 0.6
    # mean and variance of a triangular distribution
    assert draws.pass_rate[1:].mean() == pytest.approx((0.3 + 0.4 + 0.6) / 3, abs=1e-4)
    a, b, c = 0.3, 0.6, 0.4
    variance = (a * a + b * b + c * c - a * b - a * c - b * c) / 18
    assert draws.pass_rate[1:].var() == pytest.approx(variance, rel=0.01)
    again = Assumptions(mfu=Range(0.4, 0.3, 0.6), draws=2000).drawn()
    assert (again.pass_rate == draws.pass_rate).all()
    other = Assumptions(mfu=Range(0.4, 0.3, 0.6), draws=2000, seed=1).drawn()
    assert (other.pass_rate != draws.pass_rate)[1:].all()


def test_a_single_number_is_certain():
    assert Range.of("--mfu", [0.4], 0, 1) == Range(0.4, 0.4, 0.4)
    assert (Assumptions(mfu=Range(0.4, 0.4, 0.4)).drawn().pass_rate == 0.4).all()


@pytest.mark.parametrize(
    "numbers", [[], [0.4, 0.3], [2.0], [0.4, 0.5, 0.6], [0.4, 0.3, 1.1], [math.nan], [0.4, 0.3, -1]]
)
def test_ranges_that_cannot_be_are_refused(numbers):
    with refused("--mfu"):
        Range.of("--mfu", numbers, 0, 1)


def small_steps(work, ready, limit, alone, slow):
    """Simulates time, a little at a time: (end, seconds of computation beside collectives)."""
    dt, now, done, beside, index, sent = 1 / 256, 0.0, 0.0, 0.0, 0, 0.0
    while done < work or index < len(ready):
        active = index < len(ready) and done >= ready[index]
        stop = min([work, *limit[index:]])
        if done < stop:
            done = min(stop, done + (dt / slow if active else dt))
            beside += dt * active
        now += dt
        if active:
            sent += dt
            if sent >= alone[index] - 1e-9:
                index, sent = index + 1, 0.0
    return now, beside


@given(st.data())
def test_overlap_is_that_of_small_steps_of_time(data):
    count = data.draw(st.integers(0, 5))
    work = data.draw(multiples(1, 6))
    shares = sorted(data.draw(st.lists(st.sampled_from([0, 0.25, 0.5, 1]), min_size=2 * count)))
    levels = [work * share for share in shares[: 2 * count]]
    ready = levels[::2]
    limit = [max(r, x) for r, x in zip(ready, levels[1::2], strict=True)]
    alone = data.draw(st.lists(multiples(0, 2), min_size=count, max_size=count))
    slow = data.draw(st.sampled_from([1.0, 2.0, 4.0]))
    running = np.minimum.accumulate(np.array(limit)[::-1])[::-1]
    found = many_cases(
        np.array([work]),
        np.array(ready)[:, None],
        np.array(alone)[:, None],
        limit_s=running[:, None],
        compute_slowdown=slow,
    )
    end, beside = small_steps(work, ready, limit, alone, slow)
    assert found.total_s[0] == pytest.approx(end, abs=(count + 2) * 4 / 256)
    assert found.slowed_s[0] == pytest.approx(beside * (1 - 1 / slow), abs=(count + 2) * 4 / 256)
    # every second is work, slowed work, or neither
    assert found.total_s[0] == pytest.approx(work + found.slowed_s[0] + found.exposed_s[0])


@given(profiles(), networks(), st.sampled_from([1.0, 1.5, 3.0]), st.data())
def test_a_grid_of_caps_is_one_simulation_after_another(profile, network, slow, data):
    caps = data.draw(st.lists(st.integers(1, 250), min_size=1, max_size=6))
    caps_mib = [cap / 2**20 for cap in caps]
    scales = np.array([1.0, 0.5, 2.0])
    cases = Circumstances(scales, np.array([0, 1, 0]), np.array([1.0, 1.0, 2.0]), np.full(3, slow))
    other = AlphaBeta(0.5, 16)
    rows = (*cap_rows(profile, caps_mib), default_row(profile))
    grid = simulate_grid(profile, [network, other], rows, cases, copy_s_per_byte=0.01)

    class Doubled:
        def time_s(self, size_bytes):
            return 2 * network.time_s(size_bytes)

    alike = DdpCosts(0.01, 0.01, compute_slowdown=slow)
    for number, row in enumerate(rows):
        for case, one in enumerate((network, other, Doubled())):
            scaled = profile.scaled(compute=scales[case])
            expected = DdpModel(scaled, one, costs=alike).at_cap(row.cap_mib)
            assert grid.total_s[number, case] == pytest.approx(expected.total_s)
            exposed_s = expected.exposed_communication_s
            assert grid.exposed_s[number, case] == pytest.approx(exposed_s)
            assert len(row.last) == expected.num_buckets
    searched = grid.total_s[:-1]
    best = best_rows(searched)
    for case, one in enumerate((network, other, Doubled())):
        scaled = profile.scaled(compute=scales[case])
        expected = DdpModel(scaled, one, costs=alike).best_cap(caps_mib)
        assert searched[best[case], case] == pytest.approx(expected.total_s)
        assert expected.predicted_s(rows[best[case]].cap_mib) == pytest.approx(expected.total_s)


def test_the_best_cap_and_its_interval_are_those_of_the_search():
    profile = computed_profile(GPT2Config.named("gpt2").architecture(1024), 8, 2e13)
    caps = np.geomspace(0.25, 500, 40)
    bandwidths = (1e9, 1e10, 1e11)
    lines = [AlphaBeta(1e-4, bandwidth) for bandwidth in bandwidths]
    cases = Circumstances(np.ones(3), np.arange(3), np.ones(3), np.full(3, 1.19))
    rows = cap_rows(profile, caps)
    grid = simulate_grid(profile, lines, rows, cases)
    for case, (line, row) in enumerate(zip(lines, best_rows(grid.total_s), strict=True)):
        expected = DdpModel(profile, line, costs=DdpCosts(compute_slowdown=1.19)).best_cap(caps)
        assert rows[row].cap_mib == pytest.approx(expected.cap_mib)
        around = [(low, high) for low, high in expected.near_mib if low <= expected.cap_mib <= high]
        assert near_interval(rows, grid.total_s[:, case], row) == pytest.approx(around[0])


def test_no_caps_and_several_dtypes_are_refused():
    profile = make_profile([8, 8], [1.0, 2.0], kinds=["float32", "bfloat16"])
    with refused("no caps"):
        cap_rows(profile, [])
    with refused("several dtypes"):
        cap_rows(profile, [1])


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_computed_gradients_are_the_models_in_its_order(name):
    config = GPT2Config.named(name)
    architecture = config.architecture(1024)
    profile = computed_profile(architecture, 4, 1e14)
    parameters = gpt2_parameters(name)
    ordered = [parameters[key] for key in gpt2_ready_order(list(parameters))]
    assert profile.sizes_bytes.tolist() == ordered
    # the whole step is its FLOPs over the rate
    block_s, _, head_s = (4 * layer.forward_flops / 1e14 for layer in architecture.layers[1:])
    forward_s = config.n_layer * block_s + head_s
    expected = 4096 * training_flops_per_token(config, 1024) / 1e14
    assert forward_s + profile.backward_s == pytest.approx(expected)
    assert profile.backward_s == pytest.approx(2 * forward_s)
    # the head comes first, and the last block's last gradient when it and the head are done
    assert profile.ready_s[0] == pytest.approx(2 * head_s)
    assert profile.ready_s[13] == pytest.approx(2 * head_s + 2 * block_s)
