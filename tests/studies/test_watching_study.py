"""The study of what a watch adds: its estimate in closed form, its visits, and another tool's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from common.errors import UserError
from common.report.progress import StageProgress
from common.studies.watching import AGAIN, BARE, WatchingStudy, added, run_study

FOLLOWED = Path(__file__).with_name("traceml_worker.py")


def test_what_comes_in_each_step_and_what_comes_in_one_of_ten_are_told_apart():
    rows = []
    for round_ in range(6):
        for arm, each_ms, tenth_ms in (BARE, 0, 0), (AGAIN, 0, 0), ("tool", 1, 50):
            bare_ms = 100 + 10 * round_  # the machine becomes slower: pairs of a round remain
            tenths_ms = np.where(np.arange(20) % 10 == 0, tenth_ms, 0)
            steps_ms = bare_ms + each_ms + tenths_ms
            for rank, faster in (0, 0.9), (1, 1.0):  # a step is the slowest rank's
                keys = {"rank": rank, "width": 8, "arm": arm, "round": round_}
                for step, ms in enumerate(steps_ms):
                    times = {"step_time_ms": ms * faster, "hooks_time_ms": 0.2 * (arm == "tool")}
                    rows.append(keys | {"step": step} | times)
    found = added(pd.DataFrame(rows)).set_index(["step", "arm"])
    bare_ms = np.arange(100, 160, 10)
    assert found.loc[("median", "tool"), "added"] == pytest.approx(np.median(1 / bare_ms))
    assert found.loc[("mean", "tool"), "added"] == pytest.approx(np.median(6 / bare_ms))
    assert found.loc[("mean", "tool"), "low"] >= 6 / 150 - 1e-9
    assert found.loc[("mean", "tool"), "high"] <= 6 / 100 + 1e-9
    assert found.loc[("median", AGAIN), "added"] == pytest.approx(0)
    assert found.loc[("median", "tool"), "hooks_us"] == pytest.approx(200)


@pytest.mark.slow
@pytest.mark.two_ranks
def test_every_arm_is_visited_and_only_a_watch_has_hooks(tmp_path):
    study = WatchingStudy(widths=(16,), rounds=2, visit_s=0.3)
    folder = run_study(study, str(tmp_path), StageProgress())
    samples = pd.read_csv(folder / "ranks" / "step-samples.csv")
    arms = {BARE, AGAIN, "plain window", "bucket window"}
    arms |= {"TraceML"} if find_spec("traceml_ai") else set()
    assert set(samples["arm"]) == arms
    assert samples.groupby(["rank", "arm", "round"]).size().nunique() == 1
    hooks = samples.groupby("arm")["hooks_time_ms"].median()
    assert set(hooks.index[hooks > 0]) == {"plain window", "bucket window"}
    verdicts = pd.read_csv(folder / "verdicts.csv")
    assert verdicts["promise"].str.contains("plain window, hooks of").sum() == 1
    assert not list(folder.glob("**/traceml*"))


@pytest.mark.two_ranks
def test_traceml_is_there_for_a_while_and_then_gone(rank_server):
    pytest.importorskip("traceml_ai")
    finished = rank_server.run(FOLLOWED, ranks=2, timeout_s=120)
    assert finished.exit_codes == [0, 0], finished.stderr
    assert finished.stdout[0].splitlines() == ["traced: 3, then 3", "left: nothing"]


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"visit_s": -1.0}, {"visit_s": float("nan")}])
def test_a_study_of_nothing_is_refused(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is .*; it must be above 0"):
        WatchingStudy(**wrong)
