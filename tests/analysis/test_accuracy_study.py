"""The accuracy study's analysis on made-up measurements whose truth is known."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from assignment1_support import write_run

from common.analysis.accuracy.study import LONGER, OTHERS, WITNESS, grouped, open_study
from common.analysis.accuracy.tables import (
    CONTENTION,
    JUDGED,
    NOISE,
    OFF_CASES,
    REGIMES,
    SHARED_CORES,
    SINGLE,
    UNKNOWN,
    cause_of_error,
    off_cases,
    regret_facts,
    regret_summary,
)
from common.analysis.show import show
from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.expected_error import ERRORS
from common.perfmodel.model import FULL, LINE, SEVERAL, DdpModel
from common.runtime.paths import project_root

COPY_S_PER_BYTE = 5e-10
CAPS = (0.25, 2.0, 6.0)
COUNT, SIZE, COMPUTE_S = 40, 256 * 1024, 0.1


def truth(
    slowdown: float, all_reduce_s: float
) -> tuple[BackwardProfile, MeasuredAllReduce, DdpCosts]:
    """Makes a machine on which all all-reduces together take ``all_reduce_s``."""
    ready = np.linspace(COMPUTE_S / COUNT, COMPUTE_S, COUNT)
    profile = BackwardProfile(
        tuple(f"g{i}" for i in range(COUNT)),
        np.full(COUNT, SIZE),
        ready,
        COMPUTE_S,
        kinds=("float32",) * COUNT,
        registration=tuple(range(COUNT))[::-1],
    )
    sizes = np.array([4096.0, 2**20, COUNT * SIZE])
    curve = MeasuredAllReduce(sizes, 1e-4 + sizes / (COUNT * SIZE) * all_reduce_s)
    return profile, curve, DdpCosts(COPY_S_PER_BYTE, COPY_S_PER_BYTE, compute_slowdown=slowdown)


def true_s(cap_mib: float, slowdown: float, all_reduce_s: float) -> float:
    """Simulates the backward pass on that machine, two buckets sharing the link as over gloo."""
    profile, curve, costs = truth(slowdown, all_reduce_s)
    return DdpModel(profile, curve, costs, in_flight=2).backward_s(cap_mib)


def write_study(folder: Path, cases: dict[str, tuple[float, float]]) -> None:
    """Writes tables as the study does: case name → (slowdown, seconds of all all-reduces).

    Steps of the model ``odd`` take a tenth longer than anything explains.
    """
    generator = np.random.default_rng(1)
    tables: dict[str, list] = {
        name: [] for name in ("cases", "steps", "gradients", "all_reduces", "overlap")
    }
    for name, (slowdown, all_reduce_s) in cases.items():
        profile, curve, _ = truth(slowdown, all_reduce_s)
        model, hosts, regime = name.split("_")
        facts = {"model": model, "hosts": int(hosts), "regime": regime, "added_latency_ms": 0.0}
        tables["cases"].append({"case": name} | facts)
        for index, ready in enumerate(profile.ready_s):
            row = {"ready_index": index, "registration_index": profile.registration[index]}
            row |= {"dtype": "float32", "size_bytes": SIZE, "ready_time_ms": ready * 1e3}
            tables["gradients"].append({"case": name} | row)
        copies_ms = 2 * COPY_S_PER_BYTE * profile.total_bytes * 1e3
        overlap = [("local", 0, 0, 100.0, 100.0), ("bookkeeping", 0, 0, 100 + copies_ms, 0.0)]
        overlap = [(*arm, 0) for arm in overlap]
        for size in (2**14, 2**17, 2**20):
            # Computation is slowed all along; the all-reduces are not, and outlast it.
            each_ms, beside_ms = float(curve.time_s(size)) * 1e3, COMPUTE_S * 1e3 * slowdown
            count, done = int(2 * beside_ms / each_ms), int(beside_ms / each_ms)
            overlap.append(("continuous", size, count, beside_ms, count * each_ms, done))
            overlap.append(("all_reduce", size, count, 0.0, count * each_ms, count))
        for round_ in range(8):
            around = generator.normal(1, 0.001)
            more = 1.1 if model == "odd" else 1.0
            times = {cap: more * true_s(cap, slowdown, all_reduce_s) for cap in CAPS}
            for cap in (None, *CAPS):
                backward_ms = (times[cap] if cap else COMPUTE_S) * 1e3 * around
                buckets = profile_buckets(profile, DdpOptions(cap)) if cap else [[0]]
                row = {
                    "role": "judged" if cap else "local",
                    "bucket_cap_mib": cap,
                    "num_buckets": len(buckets),
                }
                row |= {"first_bucket_bytes": len(buckets[0]) * SIZE, "round": round_}
                row |= {"last_bucket_bytes": len(buckets[-1]) * SIZE, "iteration": 0}
                forward_ms = 32.0 if cap else 30.0  # DDP's broadcasts buffers
                row |= {"forward_time_ms": forward_ms, "backward_time_ms": backward_ms}
                row |= {"step_time_ms": backward_ms + forward_ms + 5}
                tables["steps"].append({"case": name} | row)
            row = {"case": name, "role": "forward", "round": round_, "iteration": 0}
            tables["steps"].append(row | {"forward_time_ms": 32.0})
            for size, time_s in zip(curve.sizes_bytes, curve.times_s, strict=True):
                row = {"total_bytes": size, "round": round_, "iteration": 0}
                row |= {"case": name, "time_ms": time_s * 1e3}
                modes = ("sequential", "in_flight")
                tables["all_reduces"] += [row | {"mode": mode} for mode in modes]
            for arm, size, messages, backward_ms, all_reduce_ms, done in overlap:
                row = {"arm": arm, "message_bytes": size, "messages": messages, "round": round_}
                row |= {"iteration": 0, "backward_time_ms": backward_ms}
                row |= {"all_reduce_time_ms": all_reduce_ms, "messages_done": done}
                row |= {"gradient_bytes": profile.total_bytes}
                tables["overlap"].append({"case": name} | row)
    write_run(folder, {}, {"cpu": {"model": "a CPU"}}, **tables)


CASES = {
    "a_2_balanced": (1.4, 0.09),
    "b_2_balanced": (1.3051, 0.11),
    "a_2_communication-bound": (1.1147, 0.25),
}
"""A message takes as much computation in all of them: (1 − 1/s)·a(S)."""


UNLIKE = {
    "a_2_balanced": (1.2, 0.09),
    "b_2_balanced": (1.6, 0.09),
    "odd_2_balanced": (1.5, 0.09),
    "a_4_balanced": (1.3, 0.09),
    "replay_4_balanced": (1.0, 0.09),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes the study of ``CASES``, which tests copy to change it."""
    folder = tmp_path_factory.mktemp("accuracy") / "study"
    write_study(folder, CASES)
    return folder


@pytest.fixture(scope="module")
def study(written):
    return open_study(written)


def test_contention_of_messages_without_pause_holds_for_every_bucketing(study):
    errors = study.errors
    assert len(errors) == len(CAPS) * len(CASES)
    assert errors[FULL].abs().max() < 0.006
    assert errors["step error"].abs().max() < 0.006
    # An all-reduce of a seconds costs a·(1 − 1/s) of computation.
    case = study.cases[0]
    sizes, lost_s = case.costs.lost_compute
    alone_s = case.curve.time_s(np.array(sizes))
    assert lost_s == pytest.approx((1 - 1 / 1.4) * alone_s, rel=0.05, abs=1e-5)
    assert case.costs.delays[1] / alone_s == pytest.approx(
        [0.0] * 3, abs=0.03
    )  # they take no longer


def test_without_contention_a_balanced_step_is_predicted_too_short(study):
    balanced = study.errors[study.errors["regime"] == "balanced"]
    assert (balanced["with copies"] < -0.05).any()
    assert balanced[LINE].abs().median() > 3 * balanced[FULL].abs().median()


def test_another_models_contention_serves_where_it_is_the_same(study):
    balanced = study.errors[study.errors["regime"] == "balanced"]
    assert balanced[OTHERS].abs().max() < 0.01


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Writes a study whose models differ, and opens it."""
    folder = tmp_path_factory.mktemp("accuracy") / "unlike"
    write_study(folder, UNLIKE)
    return open_study(folder)


def test_another_models_contention_is_the_one_that_is_used(unlike):
    own = unlike.errors[unlike.errors["case"] == "a_2_balanced"]
    for row in own.itertuples():
        cap = row.bucket_cap_mib
        # Of b (1.6) and odd (1.5), lost shares of 0.375 and 0.333: a slowdown of 1.55 between.
        as_others = true_s(cap, 1.548, 0.09) / true_s(cap, 1.2, 0.09) - 1
        found = unlike.errors.loc[unlike.errors["bucket_cap_mib"] == cap].set_index("case")
        assert found.loc["a_2_balanced", OTHERS] == pytest.approx(as_others, abs=0.01)
    assert (own[OTHERS] - own[FULL]).max() > 0.03


def test_cases_without_a_fellow_are_not_judged_by_others(unlike):
    alone = unlike.errors[unlike.errors["case"].isin(["a_4_balanced", "replay_4_balanced"])]
    assert alone[OTHERS].isna().all()
    assert alone[FULL].abs().max() < 0.006


def test_cases_that_are_off_are_listed_and_only_those(unlike, study):
    table = show(off_cases(unlike), OFF_CASES)
    assert [row[:2] for row in table.cells] == [["odd_2_balanced", "3 of 3"]]
    assert show(off_cases(study), OFF_CASES).cells == []


@pytest.mark.parametrize(
    ("noise", "buckets", "model", "two_in_flight", "cause"),
    [
        (0.04, 5, "bert", -0.30, NOISE),
        (0.01, 1, "bert", -0.06, SINGLE),
        (0.01, 5, "replay", -0.06, SHARED_CORES),
        (0.01, 5, "bert", -0.30, CONTENTION),
        (0.01, 5, "bert", -0.08, UNKNOWN),
    ],
)
def test_an_error_is_put_down_to_what_is_large_enough_for_it(
    noise, buckets, model, two_in_flight, cause
):
    row = {FULL: -0.06, SEVERAL: two_in_flight, "noise": noise, "num_buckets": buckets}
    assert cause_of_error(pd.Series(row | {"model": model})) == cause


def test_choices_are_compared_over_all_cases(unlike):
    table = regret_summary(unlike)
    assert [row[0] for row in table.cells][:3] == ["b*", "smallest", "largest"]
    assert {row[1] for row in table.cells[:3]} == {str(len(UNLIKE))}
    assert regret_facts(unlike)["cases"] == str(len(UNLIKE))


def test_the_shown_table_has_a_row_for_each_group_of_hosts_and_replay(unlike):
    groups = show(unlike.by_regime(), REGIMES)
    names = [row[0] for row in groups.cells]
    assert names == ["balanced", "four ranks on two cores", "replay"]
    assert {len(row) for row in groups.cells} == {len(groups.columns)}
    assert groups.cells[-1][groups.columns.index("others' contention")] == "–"


def test_the_table_has_a_row_for_each_group(study):
    table = study.by_regime()
    assert list(table.index) == ["communication-bound", "balanced"]
    assert list(table["bucketings"]) == [3, 6]
    assert (table["noise"] < 0.003).all()


def test_regret_is_that_of_the_measured_times(study):
    table = study.regrets().set_index("case")
    for case in study.cases:
        true = {cap: true_s(cap, *CASES[case.name]) for cap in CAPS}
        row = table.loc[case.name]
        assert row["best (MiB)"] == min(true, key=true.get)
        largest = true[max(CAPS)] / min(true.values()) - 1
        assert row["regret of largest"] == pytest.approx(largest, abs=1e-6)
        assert row["regret of b*"] <= 0.01
        single = int(case.profile.total_bytes) <= max(CAPS) * 2**20
        assert bool(row["one bucket"]) == single
        # Six rounds that differ by a thousandth leave no doubt.
        assert row["high"] - row["low"] < 0.005
        assert row["low"] - 1e-9 <= row["regret of b*"] <= row["high"] + 1e-9


def test_steps_without_ddp_are_those_of_all_networks_of_a_job(tmp_path):
    """The same ranks took them in the same minutes; loopback is a job of its own."""
    cases = dict.fromkeys(("a_2_balanced", "a_2_compute-bound", "a_2_loopback"), (1.4, 0.09))
    write_study(tmp_path / "jobs", cases | {"b_2_balanced": (1.4, 0.09)})
    table = tmp_path / "jobs" / "steps.csv"
    steps = pd.read_csv(table)
    slower = (steps["role"] == "local") & (steps["case"] == "a_2_compute-bound")
    steps.loc[slower, "backward_time_ms"] *= 1.2
    steps.to_csv(table, index=False)
    local_s = {case.name: case.local_s for case in open_study(tmp_path / "jobs").cases}
    # Half of the samples are a fifth longer: the median is the middle between the halves.
    for name in ("a_2_balanced", "a_2_compute-bound"):
        assert local_s[name] == pytest.approx(1.1 * COMPUTE_S, rel=0.005)
    for name in ("a_2_loopback", "b_2_balanced"):
        assert local_s[name] == pytest.approx(COMPUTE_S, rel=0.005)


def test_what_a_message_takes_from_computation_is_the_median_of_a_jobs_networks(tmp_path):
    names = ("a_2_balanced", "a_2_compute-bound", "a_2_communication-bound")
    write_study(tmp_path / "job", dict.fromkeys(names, (1.4, 0.09)))
    table = tmp_path / "job" / "overlap.csv"
    overlap = pd.read_csv(table)
    disturbed = (overlap["arm"] == "continuous") & (overlap["case"] == "a_2_compute-bound")
    overlap.loc[disturbed, "backward_time_ms"] *= 1.3
    overlap.to_csv(table, index=False)
    studied = open_study(tmp_path / "job")
    disturbed = studied.errors["case"] == "a_2_compute-bound"
    assert studied.errors.loc[~disturbed, [FULL, LONGER]].abs().max().max() < 0.006
    # Its own calibration is disturbed; in the longer one the other networks outvote it.
    by_own, by_all = studied.errors.loc[disturbed, [FULL, LONGER]].abs().max()
    assert by_own > 2 * by_all
    cases = {case.name: case for case in studied.cases}
    lost = {name: case.longer.lost_compute for name, case in cases.items()}
    assert lost["a_2_compute-bound"] == lost["a_2_balanced"]
    slower = {
        name: case.longer.delays[1] / case.curve.time_s(np.array(case.longer.delays[0]))
        for name, case in cases.items()
    }
    assert min(slower["a_2_compute-bound"]) > 0.15  # that is the network's own
    assert max(slower["a_2_balanced"]) < 0.1


def test_intervals_are_judged_by_the_errors_of_other_cases(study):
    errors = study.errors
    rows = list(errors.itertuples())
    for row, error, expected in zip(rows, errors[FULL], errors["expected"], strict=True):
        others = [
            abs(other_error)
            for other, other_error in zip(rows, errors[FULL], strict=True)
            if other.case != row.case
            and (other.regime, other.hosts > 2) == (row.regime, row.hosts > 2)
            and (other.model == "replay") == (row.model == "replay")
            and (other.added_latency_ms > 0) == (row.added_latency_ms > 0)
        ]
        if others:
            wide = np.hypot(np.quantile(others, 0.9), row.chance)
            assert expected == (abs(error) <= wide)
        else:
            assert np.isnan(expected)
    by_regime = study.by_regime()
    assert by_regime["expected"].dropna().between(0, 1).all()


def test_predictions_that_were_written_first_are_the_ones_that_are_judged(study, written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "new")
    steps = pd.read_csv(folder / "steps.csv")
    witness = steps[steps["role"] == "local"].assign(role="witness")
    judged = steps["role"] == "judged"
    times = ["backward_time_ms", "step_time_ms"]
    witness[times] *= 1.25  # the machine had become slower by a quarter meanwhile
    steps.loc[judged, times] *= 1.25
    pd.concat([steps, witness]).to_csv(folder / "steps.csv", index=False)
    table = pd.DataFrame(
        # More digits than the steps' caps have, as the study writes them.
        {
            "case": case.name,
            "bucket_cap_mib": cap and cap * (1 + 1e-13),
            "predicted_ms": 1e3 * seconds,
        }
        for case in study.cases
        for cap, seconds in case.predicted_s().items()
    )
    widths = np.tile([1.3, 1.1, 1.3], len(CASES))  # one band in three does not hold it
    bands = {"low_ms": table["predicted_ms"] * 0.9, "high_ms": table["predicted_ms"] * widths}
    table.assign(**bands, written_s=1.0).to_csv(folder / "predictions.csv", index=False)
    found = open_study(folder)
    assert found.errors[FULL].to_numpy() == pytest.approx(1 / 1.25 - 1, abs=0.01)
    assert found.errors["inside"].tolist() == [True, False, True] * len(CASES)
    # The witness knows of the slower computation; all-reduces took no longer in what predicts.
    bound = found.errors["case"] == "b_2_balanced"
    assert found.errors.loc[bound, WITNESS].abs().max() < found.errors.loc[bound, FULL].abs().min()


def test_error_and_noise_are_told_apart(study):
    errors = study.errors
    expected = np.sqrt(np.maximum(0, errors[FULL] ** 2 - errors["standard error"] ** 2))
    assert errors["excess"].tolist() == pytest.approx(expected.tolist())
    table = study.by_regime()
    assert (table["n"] < 0.001).all()  # rounds differ by a thousandth
    assert (table["judged"] == table["bucketings"]).all()
    assert (table["excess"] <= table["median"]).all()


def test_what_noise_hides_is_not_judged(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "noisy")
    steps = pd.read_csv(folder / "steps.csv")
    steps["backward_time_ms"] *= 1 + 0.2 * (steps["round"] % 2)
    steps.to_csv(folder / "steps.csv", index=False)
    table = open_study(folder).by_regime()
    assert (table["n"] > 0.015).all()
    assert (table["judged"] == 0).all()
    assert table[["excess", "excess p90"]].isna().all(axis=None)
    assert "not judged" in show(table, JUDGED)._repr_markdown_()


def test_a_case_without_measurements_is_named(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "cut")
    steps = pd.read_csv(folder / "steps.csv")
    steps[steps["case"] != "b_2_balanced"].to_csv(folder / "steps.csv", index=False)
    with pytest.raises(UserError, match=r"steps\.csv: no rows of case b_2_balanced"):
        open_study(folder)


@pytest.mark.parametrize(
    "name",
    [
        "xeon-2-cores/study-accuracy",
        pytest.param("xeon-2-cores/study-accuracy-again", marks=pytest.mark.slow),
        pytest.param("epyc-2-cores/study-accuracy", marks=pytest.mark.slow),
    ],
)
def test_what_users_are_told_to_expect_is_what_the_recorded_study_found(name):
    folder = project_root() / "data" / name
    recorded = pd.read_csv(folder / ERRORS).set_index("regime")
    errors = open_study(folder).errors
    size = errors[FULL].abs().groupby(grouped(errors))
    assert recorded["median_error"].to_dict() == pytest.approx(size.median().to_dict(), abs=1e-4)
    assert recorded["p90_error"].to_dict() == pytest.approx(size.quantile(0.9).to_dict(), abs=1e-4)
    assert recorded["bucketings"].to_dict() == size.size().to_dict()
