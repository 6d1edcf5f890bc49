"""A model that hooks cannot see into is judged by a few profiled steps, others by their own."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from bundle_support import with_values, write_bundle
from scaling_evidence import MadeUp, as_watched, change_table
from test_postmortem import span, trace, write_trace

from common.diagnose.diagnosis import diagnose_folder
from common.diagnose.opened import Opened, open_diagnosis, open_postmortem
from common.traces.profiler_trace import events_of
from common.traces.step_overlap import activity, step_operations, step_windows


def opened(folder: Path, *passes: tuple[int, int], steps: int = 3, gpu: bool = True) -> Opened:
    """Diagnoses a bundle of a model under FSDP whose ranks compute and exchange for so many µs."""
    folder.mkdir(exist_ok=True)
    bundle = write_bundle(folder / "b")
    with_values(bundle, "steps", kind="plain", exchange_time_ms=None)
    for rank, (compute_us, exchange_us) in enumerate(passes):
        made = trace(bundle, rank, compute_us, exchange_us, steps=steps - 1, gpu=gpu)
        made.rename(bundle / f"rank{rank}-trace.json.gz")
    return open_diagnosis(bundle)


def test_the_rank_that_computes_longer_is_found_in_profiled_steps(tmp_path: Path) -> None:
    found = opened(tmp_path, (40_000, 60_000), (90_000, 10_000)).diagnosis
    verdict = next(each for each in found.verdicts if each.cause == "slow-rank")
    assert verdict.title == "rank 1 keeps the others waiting"
    assert verdict.lost_share == pytest.approx(0.5)
    assert verdict.confidence != "high"  # of three steps
    assert "[trace-steps.csv]." in verdict.evidence[0]
    assert "A step of 100 ms under the profiler" in found.summary


@pytest.mark.parametrize("gpu", [True, False])
def test_communication_that_nothing_hides_is_found_in_profiled_steps(tmp_path, gpu) -> None:
    found = opened(tmp_path, (50_000, 50_000), (60_000, 40_000), gpu=gpu).diagnosis
    verdict = next(each for each in found.verdicts if each.cause == "exposed-communication")
    assert verdict.lost_share == pytest.approx(0.4, rel=0.05)
    assert "1 all_reduce 40 ms (40 exposed)" in verdict.evidence[1]


def test_a_gpu_that_waits_for_its_host_is_found_and_a_cpu_not_judged(tmp_path: Path) -> None:
    for gpu in (True, False):
        found = opened(tmp_path / str(gpu), (50_000, 5_000), (50_000, 5_000), gpu=gpu).diagnosis
        assert ("idle-device" in [verdict.cause for verdict in found.verdicts]) == gpu


def test_without_a_trace_nothing_is_said_of_one(tmp_path: Path) -> None:
    found = opened(tmp_path).diagnosis
    assert "slow-rank" in dict(found.not_judged)
    assert "profiler" not in found.summary


def test_a_trace_that_was_cut_off_is_noted(tmp_path: Path) -> None:
    bundle = opened(tmp_path, (40_000, 60_000), (90_000, 10_000)).folder
    path = bundle / "rank1-trace.json.gz"
    path.write_bytes(path.read_bytes()[:-40])
    found = open_diagnosis(bundle)
    assert any("rank1-trace.json.gz: not a trace" in note for note in found.notes)
    assert "slow-rank" in dict(found.diagnosis.not_judged)  # of one rank


def test_steps_as_they_were_are_believed_before_profiled_ones(tmp_path: Path) -> None:
    folder = as_watched(MadeUp().write(tmp_path / "run"))
    rows = [
        {"rank": rank, "step": step, "step_ms": 100.0, "computation_ms": 40.0 + 50 * rank}
        | {"communication_ms": 60.0 - 50 * rank, "overlap_ms": 0.0, "idle_ms": 0.0, "copy_ms": 0.0}
        | {"exposed_communication_ms": 60.0 - 50 * rank, "on_device": False}
        for rank in (0, 1)
        for step in range(3)
    ]
    pd.DataFrame(rows).to_csv(folder / "trace-steps.csv", index=False)
    found = diagnose_folder(folder)
    assert found.healthy
    assert "profiler" not in found.summary


@pytest.mark.parametrize(("modules", "exchanges"), [(2, 4.0), (8, None), (0, None)])
def test_scatters_after_each_micro_batch_are_needless(tmp_path: Path, modules, exchanges) -> None:
    folder = as_watched(MadeUp().write(tmp_path / "run"))
    change_table(folder, kind="plain", micro_batches=4)
    change_table(folder, "facts.csv", wrapper="FSDP", sharded_modules=modules)
    keys = [{"rank": rank, "step": step} for rank in (0, 1) for step in range(3)]
    rows = [
        {"step_ms": 100.0, "computation_ms": 60.0, "communication_ms": 40.0, "overlap_ms": 0.0}
        | {"idle_ms": 0.0, "copy_ms": 0.0, "exposed_communication_ms": 40.0, "on_device": False}
        | each
        for each in keys
    ]
    pd.DataFrame(rows).to_csv(folder / "trace-steps.csv", index=False)
    taken = {"calls": 8, "communication_ms": 40.0, "exposed_ms": 40.0}
    rows = [{"operation": "reduce_scatter"} | taken | each for each in keys]
    pd.DataFrame(rows).to_csv(folder / "trace-operations.csv", index=False)
    diagnosis = diagnose_folder(folder)
    verdicts = diagnosis.verdicts
    # Without modules that are known to be under FSDP nothing was counted: that is no good news.
    assert ("needless-synchronisation" in dict(diagnosis.not_judged)) == (modules == 0)
    if exchanges is None:
        assert "needless-synchronisation" not in [verdict.cause for verdict in verdicts]
        return
    assert verdicts[0].cause == "needless-synchronisation"  # before what all of them take
    assert verdicts[0].lost_share == pytest.approx(0.4 * (1 - 1 / exchanges))
    assert f"{exchanges} exchanges where one is enough" in verdicts[0].evidence[0]


# Gathers and scatters.


def sharded_trace(folder: Path, *, gpu: bool, gather_us: int, scatter_us: int) -> None:
    """Writes traces whose steps gather, compute beside half of a second gather, and scatter."""
    middle = 2 * gather_us - gather_us // 2
    parts = [
        ("gather", 0, gather_us),
        ("gather", gather_us, gather_us),
        ("compute", middle, 30_000),
        ("scatter", middle + 30_000, scatter_us),
    ]
    for rank in (0, 1):
        write_trace(folder / f"{rank}.json.gz", rank, parts, steps=12, gpu=gpu)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(
    ("gather_us", "scatter_us", "do"), [(20_000, 10_000, "Gather"), (8_000, 30_000, "Scatter")]
)
def test_gathers_and_scatters_are_told_apart(tmp_path, gpu, gather_us, scatter_us, do) -> None:
    sharded_trace(tmp_path, gpu=gpu, gather_us=gather_us, scatter_us=scatter_us)
    [verdict] = open_postmortem(tmp_path).diagnosis.verdicts[:1]
    assert verdict.cause == "exposed-communication"
    gathers, scatters = 2 * gather_us / 1e3, scatter_us / 1e3
    if not gpu:  # on a GPU a step begins with its first computing kernel
        assert f"2 all_gathers {gathers:g} ms ({gathers * 0.75:g} exposed)" in verdict.evidence[1]
        assert f"1 reduce_scatter {scatters:g} ms ({scatters:g} exposed)" in verdict.evidence[1]
    assert verdict.change.startswith(do)


def test_operations_are_those_of_a_timeline_of_moments() -> None:
    """Brute force: a boolean for each microsecond."""
    chance = random.Random(3)
    names = {"gloo:all_gather": "all_gather", "gloo:broadcast": "broadcast", "gloo:novel": "other"}
    for _ in range(20):
        records = [span("user_annotation", f"ProfilerStep#{n}", 50 * n, 50, 1) for n in (0, 1)]
        computing = np.zeros(120, dtype=bool)
        busy = defaultdict(lambda: np.zeros(120, dtype=bool))
        calls: Counter[tuple[int, str]] = Counter()
        for _ in range(8):
            start, length = chance.randrange(0, 95), chance.randrange(1, 20)
            if chance.random() < 0.4:
                records.append(span("cpu_op", "aten::mm", start, length, 1))
                computing[start : start + length] = True
            else:
                name = chance.choice(sorted(names))
                records.append(span("user_annotation", name, start, length, 5))
                busy[names[name]][start : start + length] = True
                calls[start // 50, names[name]] += 1
        events = events_of(records)
        table = step_operations(events, step_windows(events), activity(events))
        found = table.set_index(["step", "operation"])
        for step in (0, 1):
            inside = slice(50 * step, 50 * step + 50)
            for name, moments in busy.items():
                if not moments[inside].any():
                    assert (step, name) not in found.index
                    continue
                row = found.loc[(step, name)]
                assert row["calls"] == calls[step, name]
                assert row["communication_ms"] * 1e3 == pytest.approx(moments[inside].sum())
                exposed = (moments & ~computing)[inside].sum()
                assert row["exposed_ms"] * 1e3 == pytest.approx(exposed)
