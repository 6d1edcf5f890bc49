"""The systems to start from, and the command that asks the same."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import ROOT, answered
from explore_support import small_system

from common.errors import UserError
from common.explore.buckets import explore, first_settings, predict_line
from common.explore.chosen_model import DEFAULT_MODEL, named_model
from common.explore.known_systems import known_systems, on_cluster
from common.explore.systems import System

RECORDED = ROOT / "data" / "epyc-2-cores" / "assignment2"


@pytest.fixture(scope="module")
def systems() -> dict[str, System]:
    return {name: opens() for name, opens in known_systems(RECORDED).items()}


def test_every_system_opens_and_says_whose_it_is(systems: dict[str, System]) -> None:
    kinds = [name.split(":")[0] for name in systems]
    assert kinds == ["recorded"] * 3 + ["published"] + ["computed"] * 6
    for name, system in systems.items():
        assert system.name == name
        assert re.search("recorded|computed, not measured", system.caption), name
        view = explore(system, first_settings(system, 5.0))
        assert view.at_cap[0] == 1.0
        assert not view.unwritten
        assert min(view.at_cap[1:]) > 0


def asked(line: str) -> str:
    """Runs a command as it was copied; returns what it prints."""
    words = shlex.split(line)
    assert words[:3] == ["uv", "run", "ddplab"]
    return answered(*words[3:])


@pytest.mark.parametrize("place", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_command_finds_the_same_best_cap_for_a_run(
    systems: dict[str, System], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    system = list(systems.values())[place]
    now = first_settings(system, 2.0)
    view = explore(system, now)
    line = predict_line(system, now, now)
    printed = asked(line.line)
    assert f"b* = {view.best.cap_mib:.3g} MiB" in printed
    [row] = re.findall(r"│\s+2 │\s+(\d+) │\s+([\d.]+) │", printed)
    assert int(row[0]) == view.timeline.num_buckets
    if not line.missing:
        assert float(row[1]) == pytest.approx(view.timeline.total_s * 1e3, abs=0.06)
    # What predict cannot be told is said, and the command is still one.
    moved = replace(now, alpha_us=now.alpha_us * 10, ranks=8)
    other = predict_line(system, moved, now)
    assert {"α", "the number of ranks"} <= set(other.missing)
    assert other.line == line.line


def test_the_command_takes_a_latency_where_one_curve_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The recorded run without the all-reduces that were measured several at a time.
    run = tmp_path / "run"
    shutil.copytree(RECORDED, run, ignore=shutil.ignore_patterns("emulated-*"))
    samples = run / "allreduce_benchmark" / "allreduce-samples.csv"
    kept = [row for row in samples.read_text().splitlines() if "in_flight," not in row]
    header = "mode,total_elements,total_bytes,in_flight,round,iteration,rank,time_ms"
    samples.write_text("\n".join([header, *kept]) + "\n")
    [name, *_] = known_systems(run)
    assert name.startswith("your run run: ")
    system = known_systems(run)[name]()
    first = first_settings(system, 5.0)
    now = replace(first, alpha_us=4000.0)
    line = predict_line(system, now, first)
    assert line.line.endswith("--alpha-us 4000")
    assert line.note == ""
    best = explore(system, now).best
    assert best.total_s > explore(system, first).best.total_s
    assert f"b* with α = 4000 µs = {best.cap_mib:.3g} MiB: {best.total_s * 1e3:.1f} ms" in asked(
        line.line
    )


@pytest.mark.parametrize(
    "moved",
    [
        *({"ranks": 512, "compute": 0.8}, {"contention": 2.0}),
        *(pytest.param({"compute": much}, marks=pytest.mark.slow) for much in (1.0, 5.0)),
    ],
    ids=str,
)
def test_the_command_finds_the_same_for_a_cluster(moved: dict, tmp_path: Path) -> None:
    system = on_cluster("h100-a3mega", named_model(DEFAULT_MODEL))
    first = first_settings(system, 25.0)
    now = replace(first, **moved)
    line = predict_line(system, now, first)
    assert line.missing == ("the bucket cap",)
    asked(f"{line.line} --csv {tmp_path / 'all.csv'}")
    header, *rows = ((tmp_path / "all.csv").read_text()).splitlines()
    weak = dict(zip(header.split(","), rows[0].split(","), strict=True))
    assert (weak["scaling"], weak["strategy"], int(weak["gpus"])) == ("weak", "DDP", now.ranks)
    view = explore(system, now)
    # Of caps that give the same buckets either may be named.
    assert view.best.candidate(float(weak["bucket_cap_mib"])).contains(view.best.cap_mib)
    place = view.ranks.index(now.ranks)
    if "contention" not in moved:  # the same number, as nothing but the ranges was left out
        assert view.at_best[place] == pytest.approx(float(weak["efficiency"]), rel=1e-6)


def test_a_run_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps({"status": "complete"}))
    with pytest.raises(UserError, match="no complete run with"):
        known_systems(tmp_path)


def test_a_network_without_a_bandwidth_is_refused() -> None:
    flat = small_system()
    network = flat.start.model.network
    network.times_s[:] = 1e-3
    with pytest.raises(UserError, match="not slower than the fastest"):
        _ = flat.line
