"""HYBRID_SHARD between emulated hosts: its mesh, what it sends between them, and its memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from common.cluster.emulated import RANK_PREFIX, EmulatedCluster, why_no_hosts
from common.cluster.launch import launch_series
from common.planning.space import Plan
from common.runtime.flags import as_flags
from common.tuning.plans import JOB

REASON = why_no_hosts()
HERE = Path(__file__).parent
HOSTS = EmulatedCluster.of(2, ["1gbit"], ranks_per_host=2)
STRATEGIES = ("HYBRID_SHARD", "FULL_SHARD")
WIDTH, BLOCKS, LAYERS = 128, 4, 50
"""Sizes of ``hybrid_worker``; the last one are rows of embedding and head."""
FEW_ROUNDS = HERE / "few_rounds_worker.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("emulated"),
    pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts here: {REASON}"),
]


def lines_of(log: Path) -> dict[str, dict]:
    """Returns the JSON lines of rank 0 by strategy."""
    texts = (re.sub(RANK_PREFIX, "", line).strip() for line in log.read_text().splitlines())
    found = [json.loads(text) for text in texts if text.startswith('{"strategy"')]
    return {line["strategy"]: line for line in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the worker, and plans, on the same ranks; returns the folder of ``log`` and ``run``."""
    folder = tmp_path_factory.mktemp("hosts")
    settings = {
        "function": "plan_models:large",
        "folder": HERE,
        "device": "cpu",
        "memory_bytes": 1e9,
        "strategies": STRATEGIES,
        "checkpointing": ("none",),
        "keeps_batch": True,
        "tune_seconds": 0.0,
        "output_dir": folder,
        "run_id": "run",
    }
    with launch_series(HOSTS.ranks, hosts=HOSTS) as series:
        series.add(HERE / "hybrid_worker.py", *STRATEGIES)
        series.add(FEW_ROUNDS, JOB, *as_flags(settings))
        series.wait(folder / "log")
        series.wait(folder / "log-of-planning")
    return folder


def test_hosts_share_inside_and_reduce_between_them_and_hold_what_is_predicted(folder):
    seen = lines_of(folder / "log")
    hybrid, full = (seen[strategy]["ranks"] for strategy in STRATEGIES)
    for rank, view in enumerate(hybrid):
        inside, between = view["groups"]["shard"], view["groups"]["replicate"]
        assert {hybrid[other]["host"] for other in inside} == {view["host"]}
        assert len({hybrid[other]["host"] for other in between}) == HOSTS.hosts
        assert set(inside) & set(between) == {rank}
    # Each rank sends its half of the float32 gradients once: over both, a host sends all of them.
    block = 2 * WIDTH * 4 * WIDTH + 4 * WIDTH + WIDTH + 2 * WIDTH
    parameters = BLOCKS * block + 2 * LAYERS * WIDTH
    assert seen["HYBRID_SHARD"]["parameters"] == parameters
    for view in hybrid:
        assert 4 * parameters < view["sent"] < 1.15 * 4 * parameters  # with headers of packets
    # In a ring over all ranks the host sends three quarters of what goes around: two gathers, and
    # gradients, which gloo sends twice.
    for view in full:
        assert view["sent"] > 2 * hybrid[0]["sent"]
    for strategy in STRATEGIES:
        for view in seen[strategy]["ranks"]:
            slack = 4 * block  # up to a unit more is predicted than is taken
            assert 0.97 * view["peak"] <= view["predicted"] <= 1.03 * view["peak"] + slack


def test_hosts_are_planned_with_their_mesh_among_the_settings(folder):
    answer = json.loads((folder / "run" / "plan.json").read_text())
    ran = {plan["strategy"]: plan for plan in answer["verified"] if not plan["was_refused"]}
    assert set(ran) == set(STRATEGIES)
    peaks = pd.read_csv(folder / "run" / "plan-peaks.csv").groupby("plan")["peak_bytes"].max()
    predicted = {
        tuple(plan[key] for key in Plan.__dataclass_fields__): plan["peak_bytes"]
        for plan in (answer, *answer["rejected"])
    }
    for plan in ran.values():
        peak = predicted[tuple(plan[key] for key in Plan.__dataclass_fields__)]
        assert plan["peak_bytes"] in set(peaks)
        assert peak >= 0.97 * plan["peak_bytes"]
    # Two ranks share a copy in place of four: twice the parameters, gradients and moments.
    assert ran["HYBRID_SHARD"]["peak_bytes"] > ran["FULL_SHARD"]["peak_bytes"]
