"""``ddplab tune`` on two real ranks: what it writes and says, and what it refuses.

One run of the command inside a job, one exhaustive sweep of what it found, and one process group
in which every wrong FUNCTION is tried.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pandas as pd
import pytest
import yaml

from common.errors import RunFailed, UserError
from common.perfmodel.tables import read_all_reduce, read_costs, read_ready_times
from common.runtime.records.run_directory import read_environment
from common.samples import paired_gain
from common.studies import tune_check
from common.tuning import launched
from common.tuning.ddp_setting import DEFAULT
from common.tuning.results.figure import plot_recommendation
from common.tuning.results.recommendation import Recommendation, read_recommendation

pytestmark = [
    pytest.mark.two_ranks,
]

HERE = Path(__file__).parent
COMMON = HERE.parents[1] / "common"
FUNCTION = "tuned_models:make"
TRAINED = [16 * 96, 96, 96 * 64, 64, 64 * 200, 200, 200 * 32, 32, 32, 32, 32 * 3, 3]
"""Elements of the trained tensors of ``tuned_models.make``, counted by hand."""
REFUSED = {
    "unused": "no gradient reaches 2 of the module's parameters: spare.weight, spare.bias",
    "other_parameters": "where rank 0 has layers.0.weight (96 × 16 float32), rank 1 has "
    "layers.0.weight (97 × 16 float32)",
    "other_gradients": "extra got a gradient on rank 0 and none on rank 1",
    "raises_on_rank_1": "rank 1: tuned_models:raises_on_rank_1 raised OSError: disk is full",
    "changing": "the graph changes from pass to pass: in some of them no gradient reaches extra",
    "bypasses_ddp": "does not call the module it is given",
    "asks_ddp": "under DDP raised AttributeError",
}


@pytest.fixture(scope="module")
def tuned(rank_server, tmp_path_factory) -> tuple[Path, list[str]]:
    """Tunes in a job of two ranks; returns the run's directory and what each rank printed."""
    output = tmp_path_factory.mktemp("tuned")
    flags = ("--device", "cpu", "--output_dir", output, "--run_id", "run")
    done = rank_server.run(
        HERE / "few_visits_worker.py",
        # With so few bucketings a fifth of a sweep is next to nothing. This share leaves time for
        # the plan, however long a busy machine measured before.
        *("--function", FUNCTION, "--folder", HERE, "--share", 200, *flags),
        ranks=2,
        timeout_s=100,
    )
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return output / "run", done.stdout


@pytest.fixture(scope="module")
def found(tuned) -> Recommendation:
    return read_recommendation(tuned[0])


def test_the_run_directory_is_complete_and_other_readers_read_its_tables(tuned):
    folder, _ = tuned
    assert read_environment(folder)["status"] == "complete"
    assert yaml.safe_load((folder / "config.yaml").read_text())["function"] == FUNCTION
    profile = read_ready_times(folder / "gradient-ready-times.csv")
    assert sorted(profile.sizes_bytes) == sorted(4 * count for count in TRAINED)
    assert read_all_reduce(folder / "allreduce-samples.csv").world_size == 2
    assert min(read_costs(folder / "overlap-times.csv").delays[1]) >= 0
    for name in ("fp16", "bf16"):
        assert read_all_reduce(folder / f"allreduce-samples-{name}.csv").world_size == 2


def test_ddp_makes_the_buckets_that_were_predicted(tuned, found):
    visits = pd.read_csv(tuned[0] / "visits.csv")
    made = visits.groupby("setting")["num_buckets"].unique()
    predicted = {
        each.setting.label: each.num_buckets for each in (found.default, *found.candidates)
    }
    run = set(made.index) & set(predicted)
    assert len(run) >= 2
    for label in run:
        assert list(made[label]) == [predicted[label]]


def test_every_bucketing_was_predicted(tuned, found):
    # Brute force: all caps that could matter, one byte at a time around each sum of neighbours.
    sizes = read_ready_times(tuned[0] / "gradient-ready-times.csv").sizes_bytes.tolist()
    sums = {sum(sizes[i:j]) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)}
    distinct = {
        tuple(buckets_of(sizes, cap))
        for total in sums
        for cap in (total - 1, total, total + 1)
        if cap
    }
    table = pd.read_csv(tuned[0] / "predictions.csv")
    assert len(table) == found.bucketings == len(distinct)
    for row in table.itertuples():
        assert len(buckets_of(sizes, int(row.bucket_cap_mib * 2**20))) == row.num_buckets


def buckets_of(sizes: list[int], cap: int) -> list[int]:
    """Computes bytes of the buckets: full ones are closed."""
    made = [0]
    for size in sizes:
        made[-1] += size
        if made[-1] >= cap:
            made.append(0)
    return [size for size in made if size]


def test_the_gain_is_from_rounds_that_had_no_part_in_the_choice(tuned, found):
    visits = pd.read_csv(tuned[0] / "visits.csv")
    final = visits[visits["stage"] == "final"]
    slowest = final.groupby(["setting", "round", "iteration"])["step_time_ms"].max()
    instances = slowest.groupby(["setting", "round"]).median()
    ratio = instances[found.best.setting.label] / instances[DEFAULT.label]
    assert found.best.gain.rounds == len(ratio)
    assert 1 - ratio.max() <= found.best.gain.estimate <= 1 - ratio.min()
    assert found.best.gain.low <= found.best.gain.estimate <= found.best.gain.high
    assert found.worth_it == (found.best.gain.low > 0)


def test_what_changes_the_numbers_is_never_recommended(found):
    same = [each.setting for each in (found.best, *found.candidates)]
    assert {(setting.compression, setting.accumulation) for setting in same} == {("none", 1)}
    compressed, accumulated = (option.setting for option in found.options)
    assert compressed.compression != "none"
    assert (compressed.accumulation, accumulated.accumulation) == (1, 2)
    assert found.setting in (DEFAULT, found.best.setting)


def test_the_choice_halves_and_ends_with_the_best_of_its_last_level(tuned, found):
    visits = pd.read_csv(tuned[0] / "visits.csv")
    settings = visits.groupby("stage", sort=False)["setting"].unique().map(set)
    *levels, final = settings
    assert len(levels) >= 2
    assert all(DEFAULT.label in level for level in settings)
    assert all(after < before for before, after in itertools.pairwise(levels))
    assert final - levels[-1] <= {option.setting.label for option in found.options}
    slowest = visits[visits["stage"] != "final"]
    slowest = slowest.groupby(["stage", "setting", "round", "iteration"])["step_time_ms"].max()
    instances = slowest.groupby(["setting", "stage", "round"]).median()
    saved = {
        label: paired_gain(instances[label], instances[DEFAULT.label]).estimate
        for label in levels[-1] - {DEFAULT.label}
    }
    assert max(saved, key=saved.__getitem__) == found.best.setting.label


def test_the_table_shows_the_best_first_and_then_who_was_left_out_last(found):
    assert found.candidates[0] == found.best
    visited = [each.gain for each in found.candidates if each.gain]
    assert [each.gain for each in found.candidates[: len(visited)]] == visited
    rounds = [gain.rounds for gain in visited]
    assert rounds == sorted(rounds, reverse=True)
    for one, other in itertools.pairwise(visited[1:]):
        # Of those that were left out at one level, the one that had saved more comes first.
        assert one.rounds > other.rounds or one.estimate >= other.estimate


def test_rank_0_prints_the_recommendation_and_its_lines_are_python(tuned, found):
    said, silent = tuned[1]
    text = " ".join(said.split())
    assert silent == ""
    for words in ("27,435 trained parameters in 12 tensors", "change the numbers", "Took"):
        assert words in text
    assert ("Recommended:" if found.worth_it else "Nothing beats DDP's default") in text
    assert len(ast.parse(found.python).body) == 2


def test_the_figure_has_a_line_points_and_a_caption(found):
    figure = plot_recommendation(found)
    assert len(figure.axes[0].containers) >= 1
    assert "2 ranks" in figure.get_supxlabel()


@pytest.fixture(scope="module")
def swept(rank_server, tuned) -> Path:
    """Runs the exhaustive sweep of what was tuned."""
    folder, _ = tuned
    flags = ("--rounds", 1, "--runoff_rounds", 2, "--most_runoff_rounds", 3, "--within", 1e-9)
    flags += ("--device", "cpu", "--run_id", "sweep")
    done = rank_server.run(
        COMMON / "studies" / "exhaustive_sweep.py",
        *("--function", FUNCTION, "--folder", HERE, "--tune_run", folder),
        *("--output_dir", folder.parent, *flags),
        ranks=2,
        timeout_s=100,
    )
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return folder.parent / "sweep"


@pytest.mark.slow
def test_a_sweep_visits_every_bucketing_and_runs_off_the_best(found, swept):
    visits = pd.read_csv(swept / "sweep-visits.csv")
    assert visits["setting"].nunique() == found.bucketings
    row = tune_check.compare(found, swept)
    assert row["recommended"] == found.setting.label
    assert row["regret_low"] <= row["regret"] <= row["regret_high"]
    assert row["share"] == pytest.approx(found.tuning_s / row["sweep_s"])
    runoff = pd.read_csv(swept / "runoff-visits.csv")
    assert {found.setting.label, DEFAULT.label} <= set(runoff["setting"])
    # It goes on while the regret is not known, up to the most that is allowed.
    assert sorted(runoff["round"].unique()) == [0, 1, 2]
    assert row["half_width"] == pytest.approx((row["regret_high"] - row["regret_low"]) / 2)


def test_the_study_judges_the_cases_whose_intervals_tell():
    cases = pd.DataFrame(
        {
            "regret": [0.002, 0.03, 0.02, 0.3],
            "regret_low": [-0.004, 0.015, 0.005, 0.2],
            "regret_high": [0.008, 0.045, 0.035, 0.4],
            "rounds": [12, 60, 60, 5],  # the third may be below 1 %, the last has too few
            "share": [0.15, 0.16, 0.21, 0.1],
        }
    )
    verdicts = tune_check.judge(cases)
    assert verdicts["found"].tolist() == [0.5, 0.5, 0.21]
    assert verdicts["held"].tolist() == [False, False, False]
    assert tune_check.judge(cases[:1])["held"].tolist() == [True, True, True]
    none = tune_check.judge(cases[2:])
    assert none["held"].tolist() == [False, False, False]


@pytest.fixture(scope="module")
def refusals(rank_server, tmp_path_factory) -> list[list[dict]]:
    """Returns what both ranks were told of each FUNCTION of REFUSED."""
    output = tmp_path_factory.mktemp("refused") / "output"
    done = rank_server.run(HERE / "refusals_worker.py", HERE, output, *REFUSED, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return [done.lines(rank) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_one_line_and_write_nothing(refusals, name):
    for rank in refusals:
        (told,) = [each for each in rank if each["name"] == name]
        assert REFUSED[name] in told["said"]
        assert "\n" not in told["said"]
        assert not told["left"]


def test_a_launched_run_is_read_back_and_a_refused_one_leaves_nothing(
    tuned, found, tmp_path, monkeypatch
):
    def finished(script, arguments, ranks, log, *, hosts, on_output):
        log.write_text("")
        output = Path(next(a.split("=")[1] for a in arguments if a.startswith("--output_dir=")))
        (output / "run").symlink_to(tuned[0])

    monkeypatch.setattr(launched, "launch", finished)
    assert launched.tune_on_ranks(FUNCTION, output_dir=tmp_path / "a", run_id="run") == found
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["run"]

    def refused(script, arguments, ranks, log, *, hosts, on_output):
        log.write_text("")
        raise UserError("tuned_models:make returned None")

    monkeypatch.setattr(launched, "launch", refused)
    with pytest.raises(UserError, match="returned None"):
        launched.tune_on_ranks(FUNCTION, output_dir=tmp_path / "b" / "c", run_id="run")
    assert not (tmp_path / "b").exists()

    def died(script, arguments, ranks, log, *, hosts, on_output):
        log.write_text("why")
        raise RunFailed(f"a rank died; log: {log}")

    monkeypatch.setattr(launched, "launch", died)
    with pytest.raises(RunFailed):
        launched.tune_on_ranks(FUNCTION, output_dir=tmp_path / "d", run_id="run")
    assert (tmp_path / "d" / "run.log").read_text() == "why"
