"""Real DDP over two gloo processes forms the buckets that ``ddp_buckets`` says, iteration by
iteration. The runs are those of ddp_bucket_worker.py; all are made by one launch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import ddp_bucket_worker
import pytest
from ddp_bucket_worker import ITERATIONS, RUNS, Run
from perfmodel_support import MIB, gpt2_ready_order

from common.perfmodel.buckets import DdpOptions, ddp_buckets

pytestmark = [pytest.mark.two_ranks]

WATCHED = [run for run in RUNS if run.watched]
UNUSED_IN_STATIC_GRAPH = [run for run in WATCHED if run.model == "with_unused" and run.static_graph]


QUICK = (
    *("tied-default", "tied-5MiB", "tied-default-static", "mixed-1MiB-static-unused"),
    *("mixed-default", "mixed-2,0.5,8-static", "ranks_differ-0.5MiB"),
    *("with_unused-default-unused", "with_unused-1MiB-static", "tied-5MiB-unwatched"),
)


def ids(runs: Sequence[Run]) -> dict:
    """Returns arguments of parametrize."""
    slow = pytest.mark.slow
    values = [pytest.param(run, marks=() if run.name in QUICK else slow) for run in runs]
    return {"argnames": "run", "argvalues": values, "ids": [run.name for run in runs]}


@pytest.fixture(scope="module")
def ranks(rank_server, slow_chosen, tmp_path_factory) -> list[dict]:
    """Returns what each rank saw, by the name of the run."""
    folder = tmp_path_factory.mktemp("ddp")
    names = [run.name for run in RUNS] if slow_chosen else QUICK
    worker = Path(ddp_bucket_worker.__file__)
    done = rank_server.run(worker, folder, *names, ranks=2, timeout_s=110)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def options(run: Run) -> DdpOptions:
    """Returns the arguments DDP got."""
    return DdpOptions(run.cap_mib, run.static_graph, run.find_unused_parameters, run.caps_mib)


def predicted(seen: dict, run: Run, iteration: int | None) -> list[list[int]]:
    """Predicts the buckets from sizes, dtypes and the measured gradient-ready order."""
    ready = seen["ready"][-1 if iteration is None else iteration]
    return ddp_buckets(seen["sizes_bytes"], ready, options(run), iteration, seen["kinds"])


@pytest.mark.parametrize(**ids([run for run in WATCHED if run not in UNUSED_IN_STATIC_GRAPH]))
def test_predicted_buckets_are_those_that_ddp_reduces_in_every_iteration(ranks, run):
    seen = ranks[0][run.name]
    for iteration in range(ITERATIONS):
        reduced = seen["reduced"][iteration]
        buckets = predicted(seen, run, iteration)
        assert buckets == [members for _, members in reduced]
        sizes = [sum(seen["sizes_bytes"][i] for i in bucket) for bucket in buckets]
        assert sizes == [size for size, _ in reduced]
    # Without an iteration it is the steady state, which every run has reached.
    assert predicted(seen, run, None) == buckets


@pytest.mark.parametrize(**ids(UNUSED_IN_STATIC_GRAPH))
def test_a_static_graph_reduces_its_unused_parameters_too(ranks, run):
    # Their gradients never become ready, so no measured ready order holds them; DDP all-reduces
    # their zeros all the same, after those of the parameters that are used.
    seen = ranks[0][run.name]
    assert set(range(len(seen["sizes_bytes"]))) - set(seen["ready"][-1]) == {4, 5, 6, 7}
    assert predicted(seen, run, None) == [members for _, members in seen["reduced"][-1]]


@pytest.mark.parametrize(**ids(WATCHED))
def test_rank_0_decides_the_buckets_of_both_ranks(ranks, run):
    # In the run "ranks_differ" the other rank's gradients become ready in another order.
    first, second = (rank[run.name] for rank in ranks)
    assert first["reduced"] == second["reduced"]
    assert (first["ready"] != second["ready"]) == (run.model == "ranks_differ")


@pytest.mark.parametrize(**ids(RUNS))
def test_predicted_buckets_are_those_in_ddps_own_log(ranks, run):
    # The log is DDP's own word, also in runs that no communication hook watches.
    seen = ranks[0][run.name]
    initial = predicted(seen, run, 0)
    log = seen["logged"]
    assert log["bucket_sizes"] == listed(
        [sum(seen["sizes_bytes"][i] for i in bucket) for bucket in initial]
    )
    rebuilt = options(run).rebuild_iteration() is not None
    assert bool(log["rebuilt_bucket_sizes"]) == rebuilt
    if rebuilt and run not in UNUSED_IN_STATIC_GRAPH:
        buckets = predicted(seen, run, None)
        sizes = [sum(seen["sizes_bytes"][i] for i in bucket) for bucket in buckets]
        assert log["rebuilt_bucket_sizes"] == listed(sizes)
        members = [" ".join(map(str, bucket)) for bucket in buckets]
        assert log["rebuilt_per_bucket_param_indices"] == listed(members)


def listed(values: list) -> str:
    """Formats a list as DDP logs it."""
    return ", ".join(map(str, values))


def test_the_tied_embedding_is_ready_last_and_gpt2_in_its_known_order(ranks):
    seen = ranks[0]["tied-5MiB"]
    names = [name.removeprefix("gpt2.") for name in seen["names"]]
    for order in seen["ready"]:
        assert [names[i] for i in order] == gpt2_ready_order(names)


@pytest.mark.slow
def test_the_runs_tell_the_caps_apart(ranks):
    # A comparison of buckets proves something only where another cap would give other buckets.
    for model in ("tied", "mixed"):
        seen = {run.cap_mib: ranks[0][run.name] for run in RUNS if run == Run(model, run.cap_mib)}
        buckets = [str(one["reduced"][-1]) for one in seen.values()]
        assert len(seen) == len(set(buckets)) == 5
        assert all(sum(one["sizes_bytes"]) > 25 * MIB for one in seen.values())
