"""Tables of text scaling: what the published epochs say, and runs made up for it."""

from pathlib import Path

import pandas as pd
import pytest
from text_run_support import write_text_run

from common.analysis.scaling.text_study import TextStudy, one_of, open_text_study
from common.analysis.scaling.text_tables import (
    LOCAL,
    PER_SAMPLE,
    PRINTED,
    PUBLISHED,
    SPEEDUPS,
    added_to_steps,
    equal_losses,
    file_facts,
    growth,
    times_to_accuracy,
)
from common.analysis.show import Table, show, told_of
from common.analysis.step_parts import PARTS


def by_title(table: Table) -> list[dict[str, str]]:
    """Returns the rows of a table as they are shown, by the titles of its columns."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.cells]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> TextStudy:
    """Opens the published study; the reader has no runs."""
    return open_text_study(tmp_path_factory.mktemp("empty"))


def test_the_published_runs_are_never_shown_as_the_readers(
    published: TextStudy, tmp_path: Path
) -> None:
    assert published.origin.startswith("> **Recorded data, not yours.** The published runs: ")
    assert published.origin.endswith(" holds no runs of train_text.py.")
    write_text_run(tmp_path / "one", 1)
    own = open_text_study(tmp_path).origin
    assert "> **Recorded data, not yours.** The published runs: " in own
    assert "The second part was measured in this run: a pretend machine; 2026-01-02; run " in own


def test_a_printed_ratio_is_first_of_all_no_speedup(published: TextStudy) -> None:
    facts = told_of(one_of(published.published["AGNews"], "small", 4), PRINTED)
    assert next(iter(facts.items())) == (
        "comparable by our rule",
        "no: samples per epoch not counted",
    )
    assert facts["ratio as printed"] == "0.46"
    assert facts["the study's verdict"] == "Negative scaling detected"


def test_the_mixed_file_is_two_jobs_that_hardly_shared_their_gpus() -> None:
    facts = file_facts("exp042_agnews_ddp_4gpu_20ep")
    assert (facts["rows"], facts["jobs"]) == ("35", "2")
    assert facts["epochs lost when a job opened the file anew"] == "5"
    assert facts["mean epoch while both ran"] == "42.3 s"
    assert facts["mean epoch after one had ended"] == "42.6 s"
    assert file_facts("exp041_agnews_1gpu_20ep")["jobs"] == "1"


def test_losses_tell_how_much_an_epoch_on_four_gpus_is_worth(published: TextStudy) -> None:
    agnews, imdb = published.published["AGNews"], published.published["IMDB"]
    table = equal_losses(one_of(agnews, "small", 1), one_of(agnews, "small", 4))
    # The loss after epoch 1 on four GPUs, 0.418515, lies between the first two on one GPU.
    expected = 1 + (0.569998 - 0.418515) / (0.569998 - 0.349245)
    assert table["alone"].iloc[0] == pytest.approx(expected, rel=1e-4)
    assert table["worth"].max() > 3  # no split of the data could do that
    split = equal_losses(one_of(imdb, "small", 1), one_of(imdb, "small", 4))
    assert split["worth"].max() < 0.5
    # 25,000 texts in batches of 32, by one rank or by four.
    assert split["updates"].iloc[-1] == 20 * 196
    assert split["updates_alone"].iloc[-1] == pytest.approx(3083, abs=1)


def test_published_ratios_and_what_they_rest_on(published: TextStudy) -> None:
    cases = published.published_on_several
    rows = {row["data"]: row for row in by_title(show(cases, PUBLISHED))}
    assert rows["AGNews"]["passes"] == "4"
    ratios = by_title(show(cases, PER_SAMPLE))
    assert [row["per sample"] for row in ratios] == ["3.49", "1.85", "3.20"]
    assert {row["samples counted"] for row in ratios} == {"no"}
    once = ", not certain: runs were not repeated"
    assert [row["verdict"] for row in ratios] == [
        f"Excellent scaling performance{once}",
        f"Low scaling efficiency{once}",
        f"Good scaling performance{once}",
    ]


def test_what_four_gpus_add_to_a_step(published: TextStudy) -> None:
    table = added_to_steps(published).set_index(["data", "model"])
    small = table.loc[("AGNews", "small")]
    # An epoch is 3,750 steps on one GPU and on each of four: nobody split the data.
    assert small["alone_ms"] == pytest.approx(19.53 / 3750 * 1e3, rel=1e-3)
    assert small["several_ms"] == pytest.approx(42.33 / 3750 * 1e3, rel=1e-3)
    assert small["share"] == pytest.approx(42.33 / 19.53 - 1, rel=1e-3)


def test_time_to_an_accuracy_that_is_never_reached_is_no_number(published: TextStudy) -> None:
    four = one_of(published.published["IMDB"], "small", 4)
    reached, never = times_to_accuracy([(four, 0.76), (four, 0.99)]).to_dict("records")
    # The second epoch on one GPU is the first above 76 %.
    assert reached["alone_s"] == pytest.approx(22.94, abs=0.01)
    assert reached["ratio"] == pytest.approx(reached["alone_s"] / reached["several_s"])
    assert pd.isna([never["alone_s"], never["several_s"], never["ratio"]]).all()


def test_the_readers_runs_say_first_whether_they_are_comparable(tmp_path: Path) -> None:
    write_text_run(tmp_path / "good" / "one", 1, (12.0, 10.0, 10.2))
    write_text_run(tmp_path / "good" / "two", 2, (7.0, 6.0, 6.1))
    study = open_text_study(tmp_path / "good")
    [row] = by_title(show(study.local_on_several, SPEEDUPS))
    assert (row["comparable"], row["speedup"]) == ("yes", f"{20.2 / 12.1:.2f}")
    speedups = [row["speedup"] for row in by_title(show(study.all_local, LOCAL))]
    assert speedups == ["base", f"{20.2 / 12.1:.2f}x"]
    assert (study.problems, study.left_out, study.recorded, study.warmup) == ((), "", False, 1)

    write_text_run(tmp_path / "bad" / "one", 1)
    write_text_run(tmp_path / "bad" / "two", 2, (14.0, 12.0, 12.0), passes=2)
    study = open_text_study(tmp_path / "bad")
    [row] = by_title(show(study.local_on_several, SPEEDUPS))
    assert row["comparable"].startswith("no: 2 ranks computed 2,000 samples an epoch")
    assert (row["speedup"], row["per sample"]) == ("–", f"{2 / 1.2:.2f}")


def test_the_part_that_grows_most_is_named(tmp_path: Path) -> None:
    write_text_run(tmp_path / "one", 1)
    write_text_run(tmp_path / "two", 2)
    study = open_text_study(tmp_path)
    assert [*study.parts] == ["data set", "run", "step (ms)", *PARTS]
    assert study.parts["step (ms)"].tolist() == pytest.approx([15, 18])
    [row] = growth(study).to_dict("records")
    # Made-up steps of 15 ms on one rank, to which two ranks add 3 ms of communication.
    assert (row["from"], row["to"], row["largest"]) == ("1 rank", "2 ranks", "communication")
    assert row["step_ms"] == pytest.approx(3)
    assert row["share"] == pytest.approx(3 / 18)
    assert row["forward"] == pytest.approx(0)


def test_a_run_that_cannot_be_used_is_shown_with_the_reason(tmp_path: Path) -> None:
    write_text_run(tmp_path / "one", environment={"status": "interrupted"})
    [problem] = open_text_study(tmp_path).problems
    assert problem.path.endswith("one")
    assert "not complete (interrupted)" in problem.what


def test_a_step_grows_from_that_of_the_configuration_it_is_compared_with(tmp_path: Path) -> None:
    for batch in (32, 128):
        write_text_run(tmp_path / f"one{batch}", 1, batch_per_rank=batch)
        write_text_run(tmp_path / f"two{batch}", 2, batch_per_rank=batch // 2)
    study = open_text_study(tmp_path)
    pairs = [(case.base.name, case.configuration.name) for case in study.local_on_several]
    assert len({base for base, _ in pairs}) == 2
    assert [(row["from"], row["to"]) for row in growth(study).to_dict("records")] == pairs
