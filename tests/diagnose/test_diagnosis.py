"""Every cause on a run made up for it, none on a run with nothing but noise, and broken runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scaling_evidence import (
    MIB,
    MadeUp,
    as_watched,
    case_of,
    change_table,
    made_verdict,
    verdict_on,
    verdicts_on,
)

from common.diagnose.changes import Changes, changes_facts, judged_changes
from common.diagnose.diagnosis import (
    WIDTH,
    diagnose_folder,
    diagnosis_lines,
    in_order,
    lines_of,
)
from common.diagnose.evidence.evidence import open_evidence
from common.diagnose.evidence.measured_step import latency_share, model_from_evidence
from common.errors import UserError
from common.perfmodel.scaling.scaled_step import predict
from common.runtime.paths import project_root

# Of one bucket of 4 MiB, which a backward pass cannot hide, at 0.1 GB/s: 42 ms beside 30.
SLOW_LINK = {"bandwidth": 1e5, "communication_ms": 42.0, "buckets": (4 * MIB,)}
CASES = {
    "wrong-sampler": MadeUp(samples={"processed": 1000, "distinct": 1000, "shared": 1000}),
    "wrong-sampler: overlap": MadeUp(samples={"shared": 250, "distinct_all_ranks": 750}),
    "wrong-sampler: repeated": MadeUp(samples={"distinct": 300, "distinct_all_ranks": 600}),
    "wrong-sampler: order": MadeUp(samples={"order": "same"}),
    "mixed-configurations": MadeUp(facts={1: {"compute_dtype": "bfloat16"}}),
    "warm-up-counted": MadeUp(early={0: 12.0, 1: 4.0}),
    "shared-device": MadeUp(placement={"device": "cuda:0", "identity": "GPU-1"}, together=1.9),
    "oversubscribed-cores": MadeUp(together=1.95),
    "oversubscribed-cores: threads": MadeUp(together=1.4, placement={"threads": 2}),
    "slow-rank": MadeUp(slow={1: 1.5}),
    "unequal-lengths": MadeUp(tokens=0.5),
    "data-loading": MadeUp(data_ms=12.0),
    "evaluation-or-logging": MadeUp(between_ms=15.0),
    "needless-synchronisation": MadeUp(accumulation=4, exchanges=4, communication_ms=10.0),
    # One bucket of 4 MiB in 10.6 ms, which begins as the backward pass ends.
    "bucket-cap": MadeUp(
        buckets=(4 * MIB,), bandwidth=4e5, latency_ms=0.1, communication_ms=10.6, forward_ms=5.0,
        hosts=("first", "second"),
    ),
    # Four buckets, each of which costs 4 ms, whatever its size.
    "bucket-cap: too many": MadeUp(
        buckets=(MIB,) * 4, latency_ms=4.0, communication_ms=16.0, backward_ms=40.0
    ),
    "model-too-small": MadeUp(
        forward_ms=0.3, backward_ms=0.6, optimizer_ms=0.05, latency_ms=1.5, bandwidth=1e8,
        communication_ms=1.5, data_ms=0.01, between_ms=0.05, buckets=(4 * MIB,),
    ),
    "batch-too-small": MadeUp(**SLOW_LINK),
    "network-too-slow": MadeUp(
        bandwidth=2e3, communication_ms=2100.0, buckets=(4 * MIB,), steps=12
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_planted_cause_is_named_first(name, tmp_path):
    verdicts = diagnose_folder(CASES[name].write(tmp_path / "run")).verdicts
    assert verdicts, "nothing was found"
    first = verdicts[0]
    assert first.cause == name.split(":")[0]
    assert any("[" in sentence and ".csv" in sentence for sentence in first.evidence)
    assert first.change
    assert first.confidence in ("high", "medium", "low")
    if first.speedup_now is not None and first.predicted_speedup is not None:
        assert first.predicted_speedup >= first.speedup_now


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
def test_noise_alone_is_no_cause(seed, tmp_path):
    # A tenth of jitter, a rank 8 % slower, ranks that take 30 % longer together: a shared machine.
    run = MadeUp(seed=seed, noise=0.1, slow={1: 1.08}, together=1.3, samples={})
    diagnosis = diagnose_folder(run.write(tmp_path / "run"))
    assert not diagnosis.verdicts, [verdict.cause for verdict in diagnosis.verdicts]
    assert "efficiency" in diagnosis.summary
    # Two ranks are 1.34 times as fast as one: then nothing found does not mean nothing wrong.
    assert not diagnosis.healthy
    told = "\n".join(lines_of(diagnosis))
    assert "No limiting cause found" not in told
    assert "spends most on communication" in told


@pytest.mark.parametrize(
    ("latency_ms", "bandwidth", "causes"),
    [(1.2, 1e8, ["model-too-small"]), (0.01, 3.4e6, [])],
)
def test_only_messages_that_wait_for_a_processor_take_many_times_as_long_in_a_step(
    tmp_path, latency_ms, bandwidth, causes
):
    """A bucket that takes 1.2 ms apart, and 5.5 ms in a step of some 22."""
    run = MadeUp(
        forward_ms=5.0, backward_ms=10.0, communication_ms=5.5, latency_ms=latency_ms,
        bandwidth=bandwidth, buckets=(4 * MIB,), noise=0.0,
    )  # fmt: skip
    assert [*verdicts_on(run.write(tmp_path / "run"))] == causes


def test_latency_is_told_by_calls_that_nothing_disturbed(tmp_path):
    """0.3 ms + x / 1 GB/s; one element goes another way, and most small calls wait for a core."""
    folder = MadeUp().write(tmp_path / "run")
    random = np.random.default_rng(5)
    rows = [
        {
            "mode": "sequential", "total_elements": size // 4, "total_bytes": size, "in_flight": 1,
            "round": round_, "iteration": iteration, "rank": rank,
            "time_ms": 0.08 if size == 4 else 0.3 + size / 1e6 + wait,
        }
        for size in (4, 400, 4_000, 40_000)
        for round_ in range(3)
        for iteration in range(12)
        for wait in [random.choice([0.0, 3.0], p=[0.3, 0.7]) if size > 400 else 0.0]
        for rank in (0, 1)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "allreduce-samples.csv", index=False)
    share = latency_share(open_evidence(folder), "float32", bucket_bytes=40_000)
    assert share == pytest.approx(0.3 / 0.34)


# Of which a larger share was measured to be exposed than the model predicts.
BEYOND_MODEL = (
    project_root() / "data" / "xeon-2-cores" / "study-diagnosis" / "mixed-configurations-held-out"
)


@pytest.mark.parametrize("run", [MadeUp(**SLOW_LINK), MadeUp(**SLOW_LINK, batch=5), BEYOND_MODEL])
def test_the_smallest_batch_and_accumulation_that_hide_an_exchange_are_named(run, tmp_path):
    folder = run.write(tmp_path / "run") if isinstance(run, MadeUp) else run
    verdict = verdict_on(folder, "batch-too-small")
    model = model_from_evidence(open_evidence(folder))
    predicted = 1 - predict(model).exchange_efficiency
    # What was measured has to come down, not what is predicted.
    scale = max(1.0, verdict.lost_share / predicted)
    assert (scale > 1) == (run is BEYOND_MODEL)
    now = model.settings

    def smallest(name: str) -> int:
        """Tries each in turn."""
        for value in range(getattr(now, name) + 1, 2000):
            settings = replace(now, **{name: value})
            if (1 - predict(model, settings).exchange_efficiency) * scale <= 0.2:
                return value
        return -1

    batch, passes = smallest("batch_per_rank"), smallest("accumulation")
    assert f"--batch-size {batch}, or --accumulation {passes} where" in verdict.change
    assert (
        f"With a batch per rank of {batch} in place of {now.batch_per_rank} "
        in verdict.evidence[-1]
    )
    assert verdict.predicted_speedup > verdict.speedup_now


def test_where_only_accumulation_hides_an_exchange_only_that_is_named(tmp_path):
    # A pass takes as long whatever its batch: a larger one hides no more.
    run = MadeUp(**SLOW_LINK, fixed_share=1.0)
    verdict = verdict_on(run.write(tmp_path / "run"), "batch-too-small")
    assert verdict.change.startswith("--accumulation ")
    assert "--batch-size" not in verdict.change
    assert "micro-batches a step in place of 1" in verdict.evidence[-1]


def test_one_hiccup_is_no_warm_up(tmp_path):
    # The first step is slow, but so are later ones.
    run = MadeUp(early={0: 5.0, 20: 5.0, 25: 5.0})
    assert diagnose_folder(run.write(tmp_path / "run")).healthy


@pytest.mark.parametrize(("label", "first"), [("watch", "slow-rank"), ("", "warm-up-counted")])
def test_a_watch_chose_its_own_window_so_its_first_step_comes_last(tmp_path, label, first):
    folder = MadeUp(early={0: 12.0, 1: 4.0}, slow={1: 1.5}).write(tmp_path / "run")
    causes = [*verdicts_on(as_watched(folder, label=label))]
    assert causes[0] == first
    assert "warm-up-counted" in causes


def test_a_window_after_a_change_has_no_warm_up(tmp_path):
    folder = as_watched(MadeUp(early={0: 12.0, 1: 4.0}).write(tmp_path / "run"))
    assert [*verdicts_on(folder)] == ["warm-up-counted"]
    change_table(folder, step=lambda steps: steps["step"] + 500)
    assert not verdicts_on(folder)


def test_speedup_and_its_prediction_follow_from_the_baseline(tmp_path):
    # One rank: 0.2 + 10 + 20 + 1 = 31.2 ms for 32 samples; two with a rank 1.5 times as slow.
    base = MadeUp(ranks=1, noise=0.0).write(tmp_path / "one")
    run = MadeUp(slow={1: 1.5}, noise=0.0).write(tmp_path / "two")
    [verdict] = diagnose_folder(run, base).verdicts
    slow_ms = 0.2 + 45 + 2 + 1
    assert verdict.speedup_now == pytest.approx(2 * 31.2 / slow_ms)
    assert verdict.predicted_speedup == pytest.approx(2 * 31.2 / (slow_ms - 15))
    assert verdict.lost_share == pytest.approx(15 / slow_ms)
    assert verdict.confidence == "high"


@pytest.mark.parametrize(
    ("baseline", "differs"),
    [
        (MadeUp(ranks=1, facts={0: {"parameters": 7}}), "parameters: 7"),
        (MadeUp(ranks=1, facts={0: {"input_shape": "256"}}), "input_shape: 256"),
        (MadeUp(ranks=1, batch=48), "neither strong nor weak"),
    ],
)
def test_a_baseline_of_something_else_makes_the_comparison_void(baseline, differs, tmp_path):
    run = MadeUp(slow={1: 2.0}).write(tmp_path / "run")
    verdicts = verdicts_on(case_of(run, baseline.write(tmp_path / "one")))
    assert [*verdicts] == ["mixed-configurations", "slow-rank"]
    assert differs in " ".join(verdicts["mixed-configurations"].evidence)
    assert verdicts["mixed-configurations"].title == "the baseline is of something else"
    assert verdicts["mixed-configurations"].lost_share is None


@pytest.mark.parametrize("batch", [32, 64])
def test_strong_and_weak_baselines_are_both_fair(batch, tmp_path):
    run = MadeUp().write(tmp_path / "run")
    assert not diagnose_folder(run, MadeUp(ranks=1, batch=batch).write(tmp_path / "one")).verdicts


def test_without_a_table_its_causes_are_listed_as_not_judged(tmp_path):
    folder = MadeUp(slow={1: 1.5}).write(tmp_path / "run")
    for name in ("probes.csv", "buckets.csv", "facts.csv"):
        (folder / name).unlink()
    diagnosis = diagnose_folder(folder)
    assert [verdict.cause for verdict in diagnosis.verdicts] == ["slow-rank"]
    reasons = dict(diagnosis.not_judged)
    assert "no samples.csv" in reasons["wrong-sampler"]
    assert "no probes.csv" in reasons["oversubscribed-cores"]
    assert "no buckets.csv" in reasons["bucket-cap"]
    assert "no facts.csv" in reasons["mixed-configurations"]
    assert any("no buckets.csv" in line for line in lines_of(diagnosis))


def test_validity_comes_before_speed_and_then_what_costs_most(tmp_path):
    run = MadeUp(data_ms=8.0, slow={0: 1.6}, samples={"shared": 250, "distinct_all_ranks": 750})
    folder = run.write(tmp_path / "run")
    assert [*verdicts_on(folder)] == ["wrong-sampler", "slow-rank", "data-loading"]
    lines = "\n".join(diagnosis_lines(folder))
    assert lines.index("1. wrong sampler") < lines.index("2. rank 0") < lines.index("3. the step")


@pytest.mark.parametrize(
    ("cause", "share", "level", "is_first"),
    [
        ("needless-synchronisation", 0.05, "high", True),
        ("sparse-embedding", 0.25, "medium", True),
        ("sent-buffers", 0.25, "medium", True),
        ("sparse-embedding", 0.15, "medium", False),  # most of the limit is left without it
        ("oversubscribed-cores", 0.25, "low", False),
        ("data-loading", 0.25, "high", False),  # that lengthens no exchange
    ],
)
def test_what_lengthens_an_exchange_comes_before_its_limit(cause, share, level, is_first):
    limit = made_verdict("network-too-slow", 0.4)
    mistake = made_verdict(cause, share, level)
    assert in_order([limit, mistake])[0] == (mistake if is_first else limit)


@pytest.mark.parametrize(("share", "is_first"), [(0.24, True), (0.1, False)])
@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        ("beside-the-model", "own-exchange"),
        ("bucket-cap", "own-exchange"),
        ("exposed-communication", "own-exchange"),
        ("evaluation-or-logging", "garbage-collection"),
    ],
)
def test_a_reason_comes_before_a_cause_that_sees_its_time_alone(seen, cause, share, is_first):
    longer, reason = made_verdict(seen, 0.26), made_verdict(cause, share)
    assert in_order([longer, reason])[0] == (reason if is_first else longer)


@pytest.mark.parametrize(
    ("hint", "share", "level", "is_first"),
    [
        ("slow-rank", 0.12, "medium", True),
        ("slow-rank", 0.08, "high", False),  # less than half of it
        ("slow-rank", 0.12, "low", False),
        ("network-too-slow", 0.12, "high", False),  # that is what is left without its reasons
    ],
)
def test_a_hint_comes_after_what_is_surer_and_takes_about_as_much(hint, share, level, is_first):
    unsure, surer = made_verdict(hint, 0.2, "low"), made_verdict("data-loading", share, level)
    assert in_order([unsure, surer])[0] == (surer if is_first else unsure)


def test_a_hint_comes_after_a_surer_cause_that_has_a_reason_itself():
    unsure = made_verdict("slow-rank", 0.4, "low")
    sees = made_verdict("evaluation-or-logging", 0.26)
    reason = made_verdict("garbage-collection", 0.22)
    assert in_order([unsure, sees, reason]) == [reason, sees, unsure]


def test_a_loader_that_is_slow_on_one_rank_can_be_as_quick_as_the_others(tmp_path):
    folder = MadeUp(data_ms=4.0).write(tmp_path / "run")
    change_table(
        folder,
        data_time_ms=lambda steps: steps["data_time_ms"] + 20.0 * steps["rank"],
        waiting_time_ms=lambda steps: steps["waiting_time_ms"] + 20.0 * (1 - steps["rank"]),
        step_time_ms=lambda steps: steps["step_time_ms"] + 20.0,
    )
    verdict, steps = verdict_on(folder, "data-loading"), pd.read_csv(folder / "steps.csv")
    slowest = steps[~steps["warmup"]].groupby(["round", "epoch", "step"])["step_time_ms"].max()
    assert verdict.lost_share == pytest.approx(20.0 / slowest.mean(), rel=0.02)


def test_no_line_is_longer_than_a_report_is_wide(tmp_path):
    diagnosis = diagnose_folder(MadeUp(data_ms=8.0, slow={0: 1.6}).write(tmp_path / "run"))
    long = "rank 0 is slower than the others, and one word after another makes its title longer"
    verdicts = tuple(replace(verdict, title=f"{long}, as here") for verdict in diagnosis.verdicts)
    lines = lines_of(replace(diagnosis, verdicts=verdicts))
    assert max(map(len, lines)) <= WIDTH
    place = next(n for n, line in enumerate(lines) if line.startswith("1. "))
    # It goes on below its first word, and all of it is there.
    title = f"1. {long}, as here ({diagnosis.verdicts[0].cause}; takes "
    assert lines[place + 1].startswith("   ")
    assert " ".join(line.strip() for line in lines[place : place + 2]).startswith(title)


def test_what_was_done_is_not_read_from_the_settings(tmp_path):
    folder = CASES["needless-synchronisation"].write(tmp_path / "run")
    (folder / "config.yaml").write_text("{not: [yaml")
    assert diagnose_folder(folder).verdicts[0].cause == "needless-synchronisation"


def test_the_model_of_a_run_predicts_the_step_it_was_made_from(tmp_path):
    run = open_evidence(MadeUp(noise=0.0, **SLOW_LINK).write(tmp_path / "run"))
    model = model_from_evidence(run)
    assert predict(model).step_n_s * 1e3 == pytest.approx(run.step_ms, rel=0.01)
    assert model.settings.bucket_cap_mb * MIB >= 4 * MIB
    # Alone passes take 1.1 times less; one rank makes no exchange.
    assert predict(model).step_1_s * 1e3 == pytest.approx(30 / 1.1 + 1 + 0.2, rel=0.01)


def test_an_arm_is_picked_and_its_baseline_found(tmp_path):
    folder = MadeUp().write(tmp_path / "run")
    two, one = (
        pd.read_csv(p / "steps.csv") for p in (folder, MadeUp(ranks=1).write(tmp_path / "b"))
    )
    arms = pd.read_csv(folder / "arms.csv").assign(arm=1)
    single = arms.assign(arm=0, world_size=1, global_batch=32)
    pd.concat([single, arms]).to_csv(folder / "arms.csv", index=False)
    pd.concat([one, two.assign(arm=1)]).to_csv(folder / "steps.csv", index=False)
    diagnosis = diagnose_folder(folder)
    assert "(measured)" in diagnosis.summary
    assert "2 ranks are" in diagnosis.summary
    assert "no scaling to explain" in diagnose_folder(folder, arm=0).summary
    with pytest.raises(UserError, match=r"no arm 7; arms\.csv has 0, 1"):
        diagnose_folder(folder, arm=7)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("steps.csv", None, "no steps.csv; a diagnosis needs a complete run"),
        ("arms.csv", None, "no arms.csv"),
        ("steps.csv", "epoch,train_loss\n1,2\n", "steps.csv: no column 'rank'"),
        ("steps.csv", "", "empty, without even a header"),
    ],
)
def test_a_broken_run_gets_one_line(name, text, message, tmp_path):
    folder = MadeUp().write(tmp_path / "run")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        diagnose_folder(folder)
    assert "\n" not in str(refused.value)


def test_a_run_of_warm_up_only_and_one_that_is_not_there_get_one_line(tmp_path):
    folder = MadeUp().write(tmp_path / "run")
    change_table(folder, warmup=True)
    with pytest.raises(UserError, match="no step after its warm-up"):
        diagnose_folder(folder)
    with pytest.raises(UserError, match="no such run directory"):
        diagnose_folder(tmp_path / "nowhere")


def test_emulated_hosts_share_the_cores_of_one_machine(tmp_path):
    run = MadeUp(together=1.4, placement={"threads": 2})
    folder = change_table(run.write(tmp_path / "run"), "placement.csv", host=["host0", "host1"])
    assert not verdicts_on(folder)  # two machines of two cores each
    as_watched(folder, label="", network="2 emulated hosts at 1 Gbit/s")
    assert next(iter(verdicts_on(folder))) == "oversubscribed-cores"


def test_right_predictions_and_changes_that_suffice_are_counted():
    table = pd.DataFrame(
        {
            "change": ["none", "accumulation=8", "compression=fp16"],
            "world_size": 2,
            "global_batch": [16, 128, 16],
            "global_batch_changed": [False, True, False],
            "predicted_speedup": [0.5, 1.5, 0.9],
            "speedup": [0.5, 1.64, 0.55],
            "speedup_low": [0.45, 1.6, 0.5],
            "speedup_high": [0.55, 1.7, 0.6],
            "efficiency": [0.25, 0.82, 0.275],
        }
    )
    # The unchanged step was predicted exactly, so the error of a gain is that of the speedup.
    error = table["predicted_speedup"] / table["speedup"] - 1
    off = np.array([0.0, 0.01, -0.01, 0.02, -0.02, 0.01])  # of the rounds, for all alike
    noise = {"none": off[::-1], "accumulation=8": 3 * off}
    noise["compression=fp16"] = [0.3, -0.3, 0.1, 0, -0.2, 0.2]
    rounds = pd.DataFrame(
        {
            row["change"]: row["speedup"] * (1 + off + np.array(noise[row["change"]]))
            for _, row in table.iterrows()
        }
    )
    changes = Changes(table.assign(error=error, gain_error=error), "made up", "a model", rounds)
    facts = changes_facts(changes)
    assert facts["predicted speedups within 10% of the achieved"] == "1 of 2"
    assert facts["largest error of a gain"] == "+63.6% (compression=fp16)"
    assert facts["changes that reach 80% of the ideal"] == "1 of 2"
    # Rounds do not agree on fp16: nothing can be told.
    assert judged_changes(changes)["told"].tolist() == ["–", "settled", "hidden by noise"]
    assert facts["the change that helps most"] == "accumulation=8"
    # The first page asks for more rounds than four, and so does what stands on it.
    few = replace(changes, rounds=rounds[:4])
    said = {words.split(":")[0] for words in judged_changes(few)["told"]}
    assert said == {"–", "not settled"}
    words = changes_facts(few)["the change that helps most"]
    assert words.startswith("not settled, ")


def test_where_nothing_is_proposed_nothing_is_counted():
    table = pd.DataFrame({"change": ["none"], "world_size": 2})
    nothing = Changes(table, "made up", "a model", pd.DataFrame({"none": [0.5, 0.6]}))
    assert nothing.best is None
    assert changes_facts(nothing) == {
        "changes proposed": "none that would help by more than the noise"
    }
