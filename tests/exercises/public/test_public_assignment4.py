"""Assignment 4: steps, laws and pairs of runs that can be judged by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from common.errors import UserError
from common.exercises import step_apart
from common.exercises.comparable_runs import Conditions, differing_conditions, differing_setting
from common.exercises.main_cause import HEALTHY, main_cause
from common.exercises.scaling_fit import AMDAHL, check_points, fit_parameters
from common.runtime.paths import project_root

FAULTS = project_root() / "data" / "fault-runs"


def test_a4_1_what_differs_is_named() -> None:
    run = Conditions("A100", "NVLink", world_size=4, backend="nccl")
    assert differing_conditions(run, run) is None
    assert differing_conditions(run, replace(run, device="H100")) == "device"
    assert differing_conditions(run, replace(run, network="TCP")) == "network"
    assert differing_setting({"batch": 4}, {"batch": 8}, ["batch"]) == "batch"
    assert differing_setting({"batch": 4}, {}, ["batch"], unknown_agrees=True) is None


def test_a4_2_a_step_of_ten() -> None:
    apart = step_apart.take_apart((0, 10), [(0, 4), (3, 5)], [(4, 8)])
    parts = (apart.computation, apart.overlap, apart.exposed, apart.idle)
    assert parts == (5, 1, 3, 2)


def test_a4_2_intervals_are_joined_and_taken_away() -> None:
    joined = step_apart.union([(3, 4), (0, 1), (1, 2), (5, 5)])
    assert joined.tolist() == [[0, 2], [3, 4]]
    inside = np.array([[1.0, 3.5]])
    assert step_apart.intersection(joined, inside).tolist() == [[1, 2], [3, 3.5]]
    assert step_apart.difference(joined, inside).tolist() == [[0, 1], [3.5, 4]]
    assert step_apart.length(joined) == 3


def test_a4_3_a_tenth_that_is_serial() -> None:
    ranks = np.array([2.0, 4, 8])
    [serial], _, _ = fit_parameters(AMDAHL, ranks, 1 / (0.1 + 0.9 / ranks))
    assert serial == pytest.approx(0.1)
    with pytest.raises(UserError):
        check_points(AMDAHL, ranks[:2], ranks[:2])


def test_a4_4_causes_of_a_step_that_waits_and_of_one_that_does_not() -> None:
    assert main_cause(made_up(data_ms=0.1)) == HEALTHY
    assert main_cause(made_up(data_ms=40.0)) == "data-loading"
    assert main_cause(made_up(samples_shared=True)) == "wrong-sampler"


@pytest.mark.skipif(not FAULTS.is_dir(), reason="students have them")
def test_a4_4_causes_of_recorded_runs() -> None:
    listed = pd.read_csv(FAULTS / "causes.csv", keep_default_na=False)

    def tables_of(name: str) -> dict[str, pd.DataFrame] | None:
        paths = (FAULTS / name).glob("*.csv")
        return {path.stem: pd.read_csv(path) for path in paths} if name else None

    named = {
        case.run: main_cause(tables_of(case.run), tables_of(case.baseline))
        for case in listed.itertuples()
    }
    wrong = {c.run: (named[c.run], c.cause) for c in listed.itertuples() if named[c.run] != c.cause}
    assert not wrong, "run: (named, planted)"


def made_up(*, data_ms: float = 0.1, samples_shared: bool = False) -> dict[str, pd.DataFrame]:
    """Makes the tables of twenty steps on two ranks that compute for 60 ms and exchange 1 MB."""
    ranks, steps = range(2), range(20)
    rows = [
        {
            **{"rank": rank, "kind": kind, "round": 0, "epoch": 1, "step": step, "warmup": False},
            **{"samples": 8, "padded_tokens": 800, "micro_batches": 1},
            **{"exchanged_bytes": 10**6, "step_time_ms": 66.0 + data_ms, "data_time_ms": data_ms},
            **{"forward_time_ms": 20.0 + 0.01 * ((rank + step) % 2), "backward_time_ms": 40.0},
            **{"waiting_time_ms": 0.0, "communication_time_ms": 1.0, "optimizer_time_ms": 5.0},
            **{"between_time_ms": 0.1, "cpu_time_ms": 60.0},
        }
        for kind in ("timed", "plain")
        for step in steps
        for rank in ranks
    ]
    different = 160 if samples_shared else 320
    samples = [
        {"epoch": 1, "rank": rank, "processed": 160, "distinct": 160, "data_samples": different}
        | {"distinct_all_ranks": different}
        for rank in ranks
    ]
    fact = {"parameters": 250_000, "gradient_bytes": 10**6, "gradient_dtype": "float32"}
    fact |= {"compute_dtype": "float32", "input_shape": "4", "model": "m", "data": "d"}
    probes = [
        {"rank": rank, "batch_per_rank": 8, "together": together, "repeat": repeat}
        | {"forward_time_ms": 20.0, "backward_time_ms": 40.0, "optimizer_time_ms": 5.0}
        for rank in ranks
        for together in (True, False)
        for repeat in range(5)
    ]
    all_reduces = [
        {"mode": "sequential", "total_bytes": size, "round": 0, "iteration": iteration}
        | {"rank": rank, "time_ms": 0.1 + size / 10**6}
        for size in (4, 10**5, 10**6)
        for iteration in range(5)
        for rank in ranks
    ]
    gradients = [
        {"rank": rank, "ready_index": index, "size_bytes": 250_000, "ready_time_ms": 10.0 * index}
        for rank in ranks
        for index in range(1, 5)
    ]
    buckets = [{"rank": rank, "step": 3, "bucket": 0, "size_bytes": 10**6} for rank in ranks]
    places = [{"rank": rank, "core_list": "0 1", "threads": 1} for rank in ranks]
    tables = {
        "steps": rows,
        "samples": samples,
        "facts": [fact | {"rank": rank} for rank in ranks],
        "probes": probes,
        "allreduce-samples": all_reduces,
        "gradient-ready-times": gradients,
        "buckets": buckets,
        "placement": places,
    }
    return {name: pd.DataFrame(content) for name, content in tables.items()}
