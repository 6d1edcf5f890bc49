"""A sweep opened for its notebook: made-up runs whose speedups, laws and predictions are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from common.analysis.scaling.prediction import smaller_ring
from common.analysis.scaling.sweep_run import LABEL, ScalingLab, Series, open_assignment4
from common.analysis.scaling.sweep_tables import (
    PARTS_OF_STEP,
    SPEEDUPS,
    fitted_parameters,
    limits_table,
    on_several_ranks,
    parts_facts,
    prediction_facts,
)
from common.analysis.show import show
from common.diagnose.evidence.evidence import ARMS, STEPS
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.collectives import MeasuredAllReduce
from common.samples import Interval
from common.tables import ARM_COLUMNS, BUCKET_COLUMNS, COST_COLUMNS, PROBE_COLUMNS, STEP_COLUMNS

SIGMA, KAPPA = 0.06, 0.01
FORWARD, BACKWARD, UPDATE = 1 / 3, 2 / 3, 0.0
"""Milliseconds per sample, and of an update."""
GRADIENT_BYTES = 4096


def exchange_ms(ranks: int, batch: int) -> float:
    """Computes the exchange that makes weak scaling follow the Universal Scalability Law."""
    return batch * (SIGMA * (ranks - 1) + KAPPA * ranks * (ranks - 1))


def write_run(folder: Path, **record: object) -> None:
    folder.mkdir(parents=True)
    written = {"status": "complete", "start_time": "2026-11-21T10:00:00", "hardware": "made up"}
    (folder / "environment.json").write_text(json.dumps(written | record))


def write_sweep(folder: Path, world_sizes: list[int], workload: str, rounds: int = 4) -> None:
    """Writes weak scaling with 30 samples a rank, without noise but for the speed of a round."""
    write_run(folder, label=LABEL, network="made up")
    batch = 30
    arms, steps, buckets = [], [], []
    for arm, ranks in enumerate(world_sizes):
        row = dict.fromkeys(ARM_COLUMNS, "none") | {"arm": arm, "regime": "weak"}
        row |= {"world_size": ranks, "batch_per_rank": batch, "global_batch": batch * ranks}
        arms.append(row | {"accumulation": 1, "bucket_cap_mb": 25, "precision": "float32"})
        kinds = ("plain", "timed") if ranks > 1 else ("timed",)
        for round_ in range(rounds):
            speed = 1 + 0.1 * round_
            for kind, step, rank in np.ndindex(len(kinds), 4, ranks):
                parts = {
                    "data_time_ms": 0.0,
                    "forward_time_ms": FORWARD * batch * speed,
                    "backward_time_ms": BACKWARD * batch * speed,
                    "waiting_time_ms": 0.0,
                    "communication_time_ms": exchange_ms(ranks, batch) * speed,
                    "optimizer_time_ms": UPDATE,
                }
                steps.append(
                    dict.fromkeys(STEP_COLUMNS)
                    | {"rank": rank, "arm": arm, "kind": kinds[kind], "round": round_}
                    | {"epoch": 0, "step": step, "warmup": step == 0, "samples": batch}
                    | {"exchanged_bytes": GRADIENT_BYTES, "step_time_ms": sum(parts.values())}
                    | (parts if kinds[kind] == "timed" else {})
                )
            if ranks > 1:
                end = BACKWARD * batch * speed
                for rank in range(ranks):
                    done = end + exchange_ms(ranks, batch) * speed
                    buckets.append([rank, arm, round_, 1, 0, GRADIENT_BYTES, end, done])
    pd.DataFrame(arms, columns=[*ARM_COLUMNS]).to_csv(folder / "arms.csv", index=False)
    pd.DataFrame(steps, columns=[*STEP_COLUMNS]).to_csv(folder / "steps.csv", index=False)
    pd.DataFrame(buckets, columns=[*BUCKET_COLUMNS]).to_csv(folder / "buckets.csv", index=False)
    (folder / "config.yaml").write_text(yaml.safe_dump({"workload": workload}))


def write_probes(folder: Path, ranks: int) -> None:
    """Writes passes as in the steps; an all-reduce takes what the exchange of 30 samples does."""
    rows = [
        [rank, 0, batch, together, repeat, FORWARD * batch, BACKWARD * batch, 1e-6]
        for rank in range(ranks)
        for batch, together in ((15, True), (30, True), (60, True), (30, False))
        for repeat in range(3)
    ]
    pd.DataFrame(rows, columns=[*PROBE_COLUMNS]).to_csv(folder / "probes.csv", index=False)
    pd.DataFrame([], columns=[*COST_COLUMNS]).to_csv(folder / "costs.csv", index=False)
    gradient = {"parameter": "weight", "registration_index": 0, "ready_index": 0}
    gradient |= {"dtype": "float32", "size_bytes": GRADIENT_BYTES, "ready_time_ms": BACKWARD * 30}
    ready = [{"rank": rank, "iteration": 0} | gradient for rank in range(ranks)]
    pd.DataFrame(ready).to_csv(folder / "gradient-ready-times.csv", index=False)
    reduced = [
        {"mode": "sequential", "total_elements": size // 4, "total_bytes": size, "in_flight": 1}
        | {"round": 0, "iteration": iteration, "rank": rank}
        | {"time_ms": exchange_ms(ranks, 30) * size / GRADIENT_BYTES}
        for size in (GRADIENT_BYTES // 2, GRADIENT_BYTES)
        for iteration in range(3)
        for rank in range(ranks)
    ]
    pd.DataFrame(reduced).to_csv(folder / "allreduce-samples.csv", index=False)


def written_lab(folder: Path, world_sizes: list[int], workload: str, rounds: int = 4) -> ScalingLab:
    """Writes a run with one sweep and opens it."""
    write_run(folder / "run", label="assignment4")
    write_sweep(folder / "run" / "sweep", world_sizes, workload, rounds)
    return open_assignment4(folder / "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab") / "run"
    write_run(folder, label="assignment4")
    write_sweep(folder / "sweep", [1, 2], "mlp")
    write_probes(folder / "sweep", 2)
    write_sweep(folder / "emulated-8x1gbit" / "replay_sweep", [1, 2, 3, 4, 6, 8], "replay")
    return folder


def test_the_machines_sweep_and_the_replay_are_told_apart(run: Path) -> None:
    lab = open_assignment4(run)
    assert (lab.sweep.workload, lab.sweep.ranks) == ("mlp", 2)
    assert (lab.replay.workload, lab.replay.ranks) == ("replay", 8)
    assert lab.left_out == ""
    assert lab.sweep.origin == "> Measured in this run: made up; 2026-11-21; run sweep. mlp."
    assert "made up; 2026-11-21; run sweep" in lab.sweep.caption


def test_a_recorded_replay_says_why_it_is_shown_and_not_to_run_again_what_was_just_run(
    tmp_path: Path,
) -> None:
    text = written_lab(tmp_path, [1, 2], "mlp").replay_origin
    assert text.startswith("> **Recorded data, not yours.**")
    assert "this run measured no replay on emulated hosts" in text
    assert "ddplab run" not in text


def test_speedups_and_laws_are_those_the_run_was_made_with(run: Path) -> None:
    [series] = open_assignment4(run).replay.series
    ranks = series.table["world_size"].to_numpy()
    expected = ranks / (1 + SIGMA * (ranks - 1) + KAPPA * ranks * (ranks - 1))
    assert series.table["speedup"].to_numpy() == pytest.approx(expected)
    assert series.rounds == pytest.approx(np.tile(expected, (4, 1)))  # a slow round is slow for all
    _, usl = series.laws[0]
    assert usl.parameters["σ"].estimate == pytest.approx(SIGMA)
    assert usl.parameters["κ"].estimate == pytest.approx(KAPPA)


def test_the_step_adds_up_and_is_predicted_from_what_was_measured_apart(run: Path) -> None:
    sweep = open_assignment4(run).sweep
    assert sweep.parts["adds_up"].all()
    predicted, reason = sweep.predictions
    assert reason == ""
    # The passes that were probed are those of the first round; later ones were made slower, so what
    # is taken from steps is the mean of 1.0, 1.1, 1.2 and 1.3 times that.
    several = predicted[predicted["arm"] == 1].iloc[0]
    assert several["predicted_step_ms"] == pytest.approx(30 + exchange_ms(2, 30), rel=1e-3)
    assert several["adjusted_step_ms"] == pytest.approx(1.15 * (30 + exchange_ms(2, 30)), rel=1e-3)
    assert predicted[predicted["arm"] == 0]["predicted_step_ms"].item() == pytest.approx(30, 1e-3)


def test_the_same_step_measured_twice_is_the_noise_floor(run: Path) -> None:
    sweep = open_assignment4(run).sweep
    assert sweep.noise_floor is None  # weak arms alone: no two are the same
    twins = sweep.arms.assign(arm=sweep.arms["arm"] + 10, regime="strong", global_batch=60)
    slower = sweep.steps.assign(arm=sweep.steps["arm"] + 10)
    slower["step_time_ms"] *= 1.04
    both = replace(
        sweep,
        tables={
            **sweep.tables,
            ARMS: pd.concat([sweep.arms, twins]),
            STEPS: pd.concat([sweep.steps, slower]),
        },
    )
    assert both.noise_floor == pytest.approx(0.04)


def test_a_smaller_ring_sends_less_in_fewer_turns() -> None:
    # 1 ms of latency and 8 ms a MiB on 8 ranks; 2 take a seventh of the turns, 4/7 of the bytes.
    mib = np.array([1.0, 2.0, 4.0]) * 2**20
    network = MeasuredAllReduce(mib, (1 + 8 * mib / 2**20) / 1e3)
    expected = (1 / 7 + 8 * mib / 2**20 * (1 / 2) / (7 / 8)) / 1e3
    assert smaller_ring(network, 8, 2).time_s(mib) == pytest.approx(expected)


def test_a_sweep_without_probes_is_not_predicted_and_says_why(run: Path) -> None:
    replay = open_assignment4(run).replay
    _, reason = replay.predictions
    assert "no probes.csv" in reason
    assert prediction_facts(replay) == {"no prediction": reason}
    assert replay.errors is None


def test_a_run_without_a_complete_sweep_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", label="assignment4-benchmark")
    with pytest.raises(UserError, match="no complete sweep"):
        open_assignment4(tmp_path / "run")
    write_sweep(tmp_path / "run" / "sweep", [1, 2], "mlp", rounds=1)
    cut = tmp_path / "run" / "sweep" / "environment.json"
    cut.write_text(cut.read_text().replace("complete", "interrupted"))
    with pytest.raises(UserError, match="no complete sweep"):
        open_assignment4(tmp_path / "run")
    with pytest.raises(UserError, match="no such run directory"):
        open_assignment4(tmp_path / "nowhere")


def test_without_a_replay_the_reason_is_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "run", label="assignment4", emulated_hosts_left_out="no namespaces here")
    write_sweep(tmp_path / "run" / "sweep", [1, 2], "mlp", rounds=1)
    assert open_assignment4(tmp_path / "run").left_out == "no namespaces here"


def test_a_part_table_says_first_whether_parts_are_a_plain_steps(run: Path) -> None:
    sweep = open_assignment4(run).sweep
    table = show(sweep.parts, PARTS_OF_STEP)
    adds_up = [row[table.columns.index("adds up")] for row in table.cells]
    assert adds_up == ["–", "yes"]  # one rank has no plain steps
    facts = parts_facts(sweep)
    assert facts["noise floor: the same step under two names differs by"] == "not known"
    assert facts["arms whose parts add up to the plain step within 3%"] == "1 of 1"
    # Computation was made alike on one rank and on two, in each of four rounds.
    name = "passes of the largest batch on the most ranks, over one rank's (weak)"
    assert facts[name] == "1.00 (1.00 to 1.00): hidden by noise"
    name = "communication's share of a step, smallest batch above largest (weak)"
    assert facts[name] == "not measured: a single batch"


def test_speedups_of_all_ranks_are_shown_with_their_interval(tmp_path: Path) -> None:
    lab = written_lab(tmp_path, [1, 2, 3, 4, 6, 8], "replay", rounds=6)
    table = show(on_several_ranks(lab.replay), SPEEDUPS)
    columns = dict(zip(table.columns, zip(*table.cells, strict=True), strict=True))
    assert columns["ranks"] == ("2", "3", "4", "6", "8")
    assert set(columns["compared with one rank"]) == {"faster"}
    assert columns["95 % interval"][0] == "1.85 to 1.85"  # rounds differ in speed alone


def test_an_arm_without_one_on_one_rank_is_shown_with_the_reason(tmp_path: Path) -> None:
    table = show(on_several_ranks(written_lab(tmp_path, [2, 4], "mlp").sweep), SPEEDUPS)
    reasons = [row[table.columns.index("compared with one rank")] for row in table.cells]
    assert [reason.startswith("no arm on one rank") for reason in reasons] == [True, True]


def test_communication_after_the_backward_pass_hides_nothing(run: Path) -> None:
    [row] = open_assignment4(run).sweep.exchanges.to_dict("records")
    expected = exchange_ms(2, 30) / 30
    assert row["total_ratio"] == pytest.approx(expected)
    assert row["exposed_ratio"] == pytest.approx(expected)


def test_errors_of_predictions_are_those_of_their_steps(run: Path) -> None:
    sweep = open_assignment4(run).sweep
    # Predicted at the speed of the first round, measured at 1.15 times that; the only arm on
    # several ranks is the one that the adjustment was taken from.
    facts = prediction_facts(sweep)
    assert facts["error, nothing taken from a step: median over arms"] == "± 13%"
    assert not any("adjusted" in name for name in facts)
    assert sweep.errors["adjusted_error"].isna().all()


def test_a_law_that_describes_the_points_says_where_it_ends(tmp_path: Path, run: Path) -> None:
    of_four = fitted_parameters(open_assignment4(run).replay.series)
    assert set(of_four["describes_points"]) == {"not settled: 2 more rounds"}
    assert limits_table(open_assignment4(run).replay.series)["most speedup"].isna().all()
    write_run(tmp_path / "run", label="assignment4")
    write_sweep(tmp_path / "run" / "sweep", [1, 2], "mlp")
    write_sweep(tmp_path / "run" / "replay", [1, 2, 3, 4, 6, 8], "replay", rounds=6)
    lab = open_assignment4(tmp_path / "run")
    laws = fitted_parameters(lab.replay.series)
    assert dict(zip(laws["parameter"], laws["describes_points"], strict=True)) == {
        "s": "no",
        "σ": "yes",
        "κ": "yes",
    }
    gustafson, usl = limits_table(lab.replay.series).to_dict("records")
    peak = np.sqrt((1 - SIGMA) / KAPPA)
    highest = peak / (1 + SIGMA * (peak - 1) + KAPPA * peak * (peak - 1))
    assert (usl["on ranks"], usl["most speedup"]) == (f"{peak:.1f}", f"{highest:.3g}")
    assert usl["measured up to (ranks)"] == 8
    assert pd.isna(gustafson["most speedup"])  # it is off, so it says nothing of more ranks
    of_two = limits_table(lab.sweep.series)["describes the points"]
    assert of_two.str.startswith("not fitted: ").tolist() == [True, True]


def test_a_parameter_that_is_0_whatever_is_drawn_has_no_interval() -> None:
    ranks = np.array([1.0, 2, 3, 4, 6])
    table = pd.DataFrame(
        {"world_size": ranks, "speedup": ranks, "speedup_low": ranks, "speedup_high": ranks}
    )
    table["judged"] = [Judged(Interval(n, n, n, rounds=6)) for n in ranks]
    ideal = Series("strong", 64, table, np.tile(ranks, (3, 1)))
    assert set(fitted_parameters([ideal])["interval"]) == {"at its bound"}
    assert set(limits_table([ideal])["most speedup"]) == {"no bound"}


def test_the_step_that_was_fitted_to_is_no_test_in_the_other_regime_either(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    write_sweep(folder, [1, 2], "mlp")
    write_probes(folder, 2)
    arms, steps = (pd.read_csv(folder / f"{name}.csv") for name in ("arms", "steps"))
    twins = arms.assign(arm=arms["arm"] + 2, regime="weak")
    pd.concat([arms, twins]).to_csv(folder / "arms.csv", index=False)
    again = steps.assign(arm=steps["arm"] + 2)
    pd.concat([steps, again]).to_csv(folder / "steps.csv", index=False)
    predicted, reason = open_assignment4(tmp_path).sweep.predictions
    assert reason == ""
    assert predicted.set_index("arm")["reference"].to_dict() == dict(
        zip(range(4), [False, True, False, True], strict=True)
    )
