"""What changes gained that a watch tried: from made-up trials, whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from scaling_evidence import MadeUp, as_watched, case_of, change_table, verdict_on, verdicts_on

from common.diagnose.causes.trials import tried_changes
from common.diagnose.diagnosis import examine_case, lines_of
from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.pages.page import diagnosis_page

STEP_MS = 40.0
PASS_SHARE = 0.75
"""Of a step, forward and backward passes."""
AS_IT_IS, AS_IT_LOADS = ("as it is", "as it is"), ("workers", "as it loads")
WORKERS = ("workers", "num_workers=2")
AFFINITY = ("affinity", "cores of its own for each rank")
SEARCHING = ("find_unused_parameters", "find_unused_parameters=False")


def trials(times_ms: dict[tuple[str, str], float], rounds: int = 6) -> pd.DataFrame:
    """Returns ``trials.csv`` of two ranks; rank 1 is the slower, by a tenth."""
    return pd.DataFrame(
        {
            "rank": rank,
            "kind": kind,
            "setting": setting,
            "round": round_,
            "order": 0,
            "iteration": iteration,
            "passes": 2 if kind == "no_sync" else 1,
            "step_time_ms": time_ms * (1.0 + 0.1 * rank) * (1 + 0.01 * round_),
        }
        for (kind, setting), time_ms in times_ms.items()
        for rank in (0, 1)
        for round_ in range(rounds)
        for iteration in range(3)
    )


def with_trials(
    folder: Path, times_ms: dict[tuple[str, str], float], rounds: int = 6, spread: float = 0.0
) -> Case:
    """Opens a run with these trials, of which changes are longer and shorter in turns."""
    rows = trials(times_ms, rounds)
    is_changed = ~rows["setting"].isin(["as it is", "as it loads"])
    rows.loc[is_changed, "step_time_ms"] *= 1 + spread * (-1.0) ** rows.loc[is_changed, "round"]
    rows.to_csv(folder / "trials.csv", index=False)
    return case_of(folder)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A watched run whose passes take ``PASS_SHARE`` of a step, on two ranks."""
    folder = as_watched(MadeUp(noise=0.0).write(tmp_path / "run"))
    backward_ms = PASS_SHARE * STEP_MS - 10.0
    times_ms = {"forward_time_ms": 10.0, "whole_backward_time_ms": backward_ms}
    change_table(folder, step_time_ms=STEP_MS, **times_ms)
    tried = {
        AS_IT_IS: 30.0,
        ("bucket_cap_mb", "bucket_cap_mb=8"): 24.0,
        ("compression", "fp16_compress_hook"): 33.0,
        ("no_sync", "no_sync() in all but the last of 2 passes"): 18.0,
    }
    return with_trials(folder, tried)


def test_gains_are_shares_of_a_pass_and_speedups_follow(case: Case) -> None:
    tried = {each.kind: each for each in tried_changes(case)}
    assert list(tried) == ["no_sync", "bucket_cap_mb", "compression"]  # the best first
    assert tried["bucket_cap_mb"].gain.estimate == pytest.approx(0.2)
    assert tried["compression"].gain.estimate == pytest.approx(-0.1)
    # 6 of 30 ms are saved of passes that are three quarters of a step.
    now = case.speedup_now
    assert tried["bucket_cap_mb"].speedup.estimate == pytest.approx(now / (1 - 0.75 * 0.2))
    assert tried["bucket_cap_mb"].passes is None
    assert tried["no_sync"].passes == 2  # another global batch


def load_longer(case: Case) -> None:
    """Lets the steps of a run spend 15 % of their time on data."""
    change_table(case.run.folder, data_time_ms=0.15 * STEP_MS)


def test_workers_are_held_against_passes_that_load(case: Case) -> None:
    """Loading is part of those steps: 30 of 40 ms are saved of passes and data, nine tenths."""
    load_longer(case)
    times = {AS_IT_IS: 30.0, ("bucket_cap_mb", "bucket_cap_mb=8"): 24.0}
    case = with_trials(case.run.folder, times | {AS_IT_LOADS: 40.0, WORKERS: 30.0})
    tried = {each.kind: each for each in tried_changes(case)}
    assert tried["bucket_cap_mb"].gain.estimate == pytest.approx(0.2)  # of passes alone, as before
    assert tried["workers"].gain.estimate == pytest.approx(0.25)
    assert tried["workers"].speedup.estimate == pytest.approx(case.speedup_now / (1 - 0.9 * 0.25))
    assert tried["workers"].said().startswith("num_workers=2: loading and a pass take 25 % less")


@pytest.mark.parametrize(
    ("tried_ms", "rounds", "spread", "is_low"),
    [
        (45.0, 6, 0.0, True),
        (30.0, 6, 0.0, False),
        (45.0, 5, 0.0, False),
        # Rounds differ by a fifth, so that neither 2.5 % nor 15 % are told from no change.
        (39.0, 6, 0.2, True),
        (34.0, 6, 0.2, False),
    ],
)
def test_loading_that_workers_do_not_shorten_has_low_confidence(
    case: Case, tried_ms: float, rounds: int, spread: float, is_low: bool
) -> None:
    load_longer(case)
    case = with_trials(case.run.folder, {AS_IT_LOADS: 40.0, WORKERS: tried_ms}, rounds, spread)
    verdict = verdict_on(case, "data-loading")
    assert (verdict.confidence == "low") == is_low
    if not spread:  # it comes after what surely costs time
        assert (verdict.sure_share == 0.0) == is_low
    # Workers hide loading; what better data would gain is what the loading takes.
    assert verdict.predicted_speedup == pytest.approx(case.speedup_now / (1 - 0.15))


def test_text_and_page_say_what_was_tried(case: Case) -> None:
    diagnosis = examine_case(case)
    text = "\n".join(lines_of(diagnosis))
    assert "Tried on a copy of the model" in text
    assert "bucket_cap_mb=8: a pass takes 20 % less" in text
    assert "fp16_compress_hook: a pass takes 10 % more" in text
    page = diagnosis_page(diagnosis, case, "made up")
    assert "What changes gained when they were tried" in page
    assert "bucket_cap_mb=8: 80.0\u00a0%, speedup" in page


def test_a_change_that_noise_hides_is_not_told_from_none(case: Case) -> None:
    times = {AS_IT_IS: 30.0, ("static_graph", "static_graph=True"): 30.0}
    [tried] = tried_changes(with_trials(case.run.folder, times, spread=0.05))
    assert "not told from no change" in tried.said()


def test_a_run_without_trials_says_nothing_of_them(case: Case) -> None:
    (case.run.folder / "trials.csv").unlink()
    diagnosis = examine_case(case_of(case.run.folder))
    assert diagnosis.tried == ()
    assert "Tried" not in "\n".join(lines_of(diagnosis))
    assert "when they were tried" not in diagnosis_page(diagnosis, case, "made up")


def test_a_trial_that_gains_shows_a_cause_that_nothing_else_does(case: Case) -> None:
    folder = change_table(case.run.folder, "placement.csv", threads=4, cores=2)
    times = {AS_IT_IS: 30.0, ("threads", "a thread for each core"): 24.0}
    verdict = verdict_on(with_trials(folder, times), "oversubscribed-cores")
    # A fifth is saved of the passes, three quarters of a step, and of an update of 1 ms in 40.
    assert verdict.lost_share == pytest.approx(0.775 * 0.2)
    assert verdict.predicted_speedup == pytest.approx(verdict.speedup_now / (1 - 0.775 * 0.2))
    # Of five rounds an interval is not sure enough; a gain of a twentieth may be chance.
    for times_ms, rounds in ((24.0, 5), (28.5, 6)):
        times["threads", "a thread for each core"] = times_ms
        tried = with_trials(folder, times, rounds)
        assert verdict_on(tried, "oversubscribed-cores") is None


@pytest.fixture
def one_core(tmp_path: Path) -> Path:
    """Writes a run whose ranks compute 1.9 times as fast alone as together."""
    run = MadeUp(noise=0.0, together=1.9, forward_ms=19.0, backward_ms=38.0)
    backward = ["backward_time_ms", "communication_time_ms"]
    return change_table(
        as_watched(run.write(tmp_path / "run")),
        whole_backward_time_ms=lambda steps: steps[backward].sum(axis=1),
    )


@pytest.mark.parametrize(
    ("affinity_ms", "threads_ms", "saved"),
    [
        (20.0, 33.0, 1 / 3),  # cores of their own, where each rank has one thread
        (30.0, 24.0, 0.2),  # fewer threads, where ranks have too many
    ],
)
def test_ranks_that_share_cores_gain_what_cores_of_their_own_gained(
    one_core: Path, affinity_ms: float, threads_ms: float, saved: float
) -> None:
    """Two ranks hinder each other on two cores, too: alone each is faster than it will be."""
    threads = ("threads", "a thread for each core of a rank")
    times = {AS_IT_IS: 30.0, AFFINITY: affinity_ms, threads: threads_ms}
    verdict = verdict_on(with_trials(one_core, times), "oversubscribed-cores")
    steps = pd.read_csv(one_core / "steps.csv")
    shortened = ["forward_time_ms", "whole_backward_time_ms", "optimizer_time_ms"]
    if affinity_ms < threads_ms:
        shortened.append("data_time_ms")
    share = float((steps[shortened].sum(axis=1) / steps["step_time_ms"]).median())
    assert verdict.lost_share == pytest.approx(saved * share)
    gain = verdict.predicted_speedup / verdict.speedup_now
    assert gain == pytest.approx(1 / (1 - saved * share))


def test_sharing_cores_that_no_trial_mends_has_low_confidence(one_core: Path) -> None:
    assert verdict_on(one_core, "oversubscribed-cores").confidence == "high"
    case = with_trials(one_core, {AS_IT_IS: 30.0, AFFINITY: 30.5})
    assert verdict_on(case, "oversubscribed-cores").confidence == "low"


def test_a_trial_with_another_batch_shows_no_cause(case: Case) -> None:
    times = {AS_IT_IS: 30.0, ("no_sync", "no_sync() of 2 passes"): 15.0}
    tried = with_trials(case.run.folder, times)
    assert verdict_on(tried, "needless-synchronisation") is None


def _with_search(case: Case) -> Path:
    """Lets the run's script look for unused parameters, of which there are none."""
    return change_table(case.run.folder, "facts.csv", find_unused_parameters=True)


@pytest.mark.parametrize(
    ("pass_ms", "confidence", "lost"),
    [
        (30.2, "low", 0.0),  # it costs nothing
        (24.0, "high", 0.75 * 0.2),
    ],
)
def test_a_trial_decides_what_a_needless_search_costs(
    case: Case, pass_ms: float, confidence: str, lost: float
) -> None:
    case = with_trials(_with_search(case), {AS_IT_IS: 30.0, SEARCHING: pass_ms})
    verdict = verdict_on(case, "needless-search")
    assert verdict.confidence == confidence
    assert verdict.lost_share == pytest.approx(lost)
    if lost:
        assert verdict.predicted_speedup == pytest.approx(verdict.speedup_now / (1 - lost))


def test_the_luckiest_of_several_trials_does_not_come_before_a_cause_that_is_seen(
    case: Case,
) -> None:
    # Compression saves more in most rounds, and 8 % in one; the search costs 20 % in each.
    folder = _with_search(case)
    rows = trials({AS_IT_IS: 30.0, SEARCHING: 24.0, ("compression", "fp16"): 30.0})
    spread = rows["round"].map(dict(enumerate((0.92, 0.8, 0.75, 0.73, 0.7, 0.6))))
    rows["step_time_ms"] *= spread.where(rows["kind"] == "compression", 1.0)
    rows.to_csv(folder / "trials.csv", index=False)
    case = case_of(folder)
    gains = {each.kind: each.gain for each in tried_changes(case)}
    assert gains["compression"].estimate > gains["find_unused_parameters"].estimate
    causes = [*verdicts_on(case)]
    assert causes.index("needless-search") < causes.index("wide-gradients")


def test_a_needless_search_that_nobody_tried_to_leave_out_is_a_guess(case: Case) -> None:
    (_with_search(case) / "trials.csv").unlink()
    assert verdict_on(case.run.folder, "needless-search").confidence == "low"


@pytest.fixture
def late_bucket(tmp_path: Path) -> Path:
    """Writes a run whose one bucket begins as the backward pass ends.

    Other caps are predicted to gain a fifth.
    """
    run = MadeUp(
        noise=0.0, buckets=(4 * 2**20,), bandwidth=4e5, latency_ms=0.1, communication_ms=10.6,
        forward_ms=5.0, hosts=("first", "second"),
    )  # fmt: skip
    return change_table(
        as_watched(run.write(tmp_path / "run")),
        whole_backward_time_ms=lambda steps: steps["step_time_ms"] - steps["forward_time_ms"],
    )


def verdict_of_cap(folder: Path, tried_ms: float, rounds: int) -> Verdict | None:
    """Returns the verdict on caps, one of which made 30 ms of ``tried_ms`` in so many rounds."""
    times = {AS_IT_IS: 30.0, ("bucket_cap_mb", "bucket_cap_mb=0.5"): tried_ms}
    return verdict_on(with_trials(folder, times, rounds), "bucket-cap")


@pytest.mark.parametrize(("rounds", "named"), [(5, True), (6, False)])
def test_a_cap_that_surely_costs_time_is_no_remedy(
    late_bucket: Path, rounds: int, named: bool
) -> None:
    assert (verdict_of_cap(late_bucket, 31.5, rounds) is not None) == named


@pytest.mark.parametrize(("tried_ms", "rounds", "is_low"), [(29.9, 6, True), (29.9, 5, False)])
def test_a_predicted_gain_that_its_trial_does_not_show_has_low_confidence(
    late_bucket: Path, tried_ms: float, rounds: int, is_low: bool
) -> None:
    verdict = verdict_of_cap(late_bucket, tried_ms, rounds)
    assert (verdict.confidence == "low") == is_low
    # Enough rounds decide what the remedy, here the tried cap, brings; fewer leave it to the model.
    as_tried = pytest.approx(1 / (1 - 0.1 / 30), rel=1e-6)  # passes are all of these steps
    assert (verdict.predicted_speedup / verdict.speedup_now == as_tried) == is_low
    assert (verdict.proposed.bucket_cap_mb == 0.5) == is_low
    assert ("bucket_cap_mb=0.5" in verdict.change) == is_low
    assert verdict.speedup_low < verdict.predicted_speedup < verdict.speedup_high
