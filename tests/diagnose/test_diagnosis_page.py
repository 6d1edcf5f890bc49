"""The web page of a diagnosis: what a reader sees on it, and that a browser shows it whole.

Pages are parsed; numbers are read off bars with the marks of their axis, as a reader would, and
compared with the tables of the run.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder

import pandas as pd
import pytest
from browser_support import axe_violations, open_page
from scaling_evidence import MIB, MadeUp, case_of, change_table, examined_for, made_verdict

from common.analysis.step_parts import PARTS
from common.diagnose.diagnosis import Diagnosis, examine_case
from common.diagnose.evidence.case import MINOR, Case
from common.diagnose.pages.bars import number
from common.diagnose.pages.page import diagnosis_page
from common.runtime.paths import project_root

RECORDED = project_root() / "data" / "xeon-2-cores" / "study-diagnosis"
VOID = {"meta"}
UNFOLD = "for (const each of document.querySelectorAll('details')) each.open = true"
COLOURS = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
ONE_RANK_MS = 0.2 + 10 + 20 + 1
"""A step of ``MadeUp`` on one rank: data, forward, backward, optimizer."""


class Parser(HTMLParser):
    """Builds a tree of a page; a tag that is not closed, or closes another, is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.builder, self.path = TreeBuilder(), []
        self.feed(page)
        self.close()
        assert self.path == []
        self.tree = self.builder.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self.builder.end(tag)
        else:
            self.path.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop() == tag
        self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        if self.path:
            self.builder.data(data)


def parsed(page: str) -> Element:
    return Parser(page).tree


def text_of(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def section(tree: Element, heading: str) -> Element:
    return next(each for each in tree.iter("section") if heading in text_of(each.find("h2")))


def classed(element: Element, tag: str, name: str) -> list[Element]:
    return [each for each in element.iter(tag) if name in each.get("class", "").split()]


def per_cent(element: Element, attribute: str) -> float:
    return float(element.get(attribute).removesuffix("%"))


def axis_end(element: Element) -> float:
    """What 100 % of a row's width means, from the largest number on the axis."""
    numbers = element.iter("text")
    ticks = {float(each.text.replace(",", "")): per_cent(each, "x") for each in numbers}
    value = max(ticks)
    return value / ticks[value] * 100


@functools.cache
def page_of(run: Path, baseline: Path | None = None) -> str:
    case = case_of(run, baseline)
    return diagnosis_page(examine_case(case), case, "A diagnosis")


def page_without_causes(run: Path, baseline: Path | None = None) -> Element:
    """Returns the page of a run, of which no cause is looked for."""
    case = case_of(run, baseline)
    return parsed(diagnosis_page(examined_for(case), case, "A diagnosis"))


def timed_steps(folder: Path) -> pd.DataFrame:
    steps = pd.read_csv(folder / "steps.csv")
    return steps[(steps["kind"] == "timed") & ~steps["warmup"]]


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> tuple[Diagnosis, Case]:
    """A run with three causes, one of which makes its comparison void."""
    made_up = MadeUp(data_ms=8.0, slow={0: 1.6}, samples={"shared": 250, "distinct_all_ranks": 750})
    case = case_of(made_up.write(tmp_path_factory.mktemp("several") / "run"))
    return examine_case(case), case


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.05123, "0.0512"),
        (0.9999, "1.00"),
        (9.999, "10.0"),
        (89.18, "89.2"),
        (23512.4, "23,500"),
        (999.9, "1,000"),
        (float("nan"), "–"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    "name", ["slow-rank-seen", "healthy-benchmark", "data-loading-seen", "bucket-cap-held-out"]
)
def test_the_page_is_whole_and_asks_for_nothing(name):
    page = page_of(RECORDED / name)
    tree = parsed(page)  # which finds tags that do not match
    assert tree.get("lang") == "en"
    assert tree.find("head/title").text == "A diagnosis"
    levels = [int(each.tag[1]) for each in tree.iter() if re.fullmatch("h[1-6]", each.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    pictures = list(tree.iter("svg"))
    assert pictures
    assert all(each.get("role") == "img" and each.get("aria-label") for each in pictures)
    assert not [each for each in tree.iter() if {"src", "href"} & set(each.attrib)]
    assert "url(" not in page
    assert "@import" not in page
    assert len(page.encode()) < 100_000


def test_the_baseline_comes_first_and_gains_last(several):
    headings = [text_of(each) for each in parsed(diagnosis_page(*several, "t")).iter("h2")]
    assert [heading.split(":")[0] for heading in headings] == [
        "Baseline",
        "Verdict",
        "A step by rank",
        "Steps in time, by rank",
        "What a change would gain",
    ]


def test_every_cause_is_told_in_full_and_all_but_the_main_one_are_folded(several):
    found, case = several
    verdict = section(parsed(diagnosis_page(found, case, "t", ["No GPU was seen."])), "Verdict")
    assert len(found.verdicts) == 3
    assert [text_of(each).split(". ")[-1] for each in verdict.iter("h3")] == [
        each.title for each in found.verdicts
    ]
    assert ["".join(each.itertext()) for each in classed(verdict, "pre", "change")] == [
        each.change for each in found.verdicts
    ]
    told = text_of(verdict)
    for each in found.verdicts:
        assert all(sentence in told for sentence in each.evidence)
        assert f"Confidence: {each.confidence} ({each.reason})" in told
        assert f"Predicted speedup after the change: {number(each.predicted_speedup)}" in told
    folded = " ".join(text_of(each) for each in verdict.iter("details"))
    assert found.verdicts[0].title not in folded
    assert found.verdicts[1].title in folded
    assert all(why in folded for _, why in found.not_judged)
    assert "No GPU was seen." in folded
    assert "makes the comparison void" in told


def test_a_cause_costs_on_the_page_what_it_costs_in_the_text(several):
    found, case = several
    minor = [replace(made_verdict("wide-gradients", share), group=MINOR) for share in (0.05, 0.0)]
    page = diagnosis_page(replace(found, verdicts=tuple(minor)), case, "t")
    verdict = text_of(section(parsed(page), "Verdict"))
    assert "Main cause: it takes 5 % of the time" in verdict
    assert "not known to cost time" in verdict


def test_a_healthy_run_is_called_healthy_and_others_are_not(several, tmp_path):
    healthy = page_of(MadeUp().write(tmp_path / "run"))
    [answer] = classed(parsed(healthy), "div", "answer")
    assert "Healthy" in text_of(answer)
    assert "Nothing is wrong" in text_of(answer)
    [answer] = classed(parsed(diagnosis_page(*several, "t")), "div", "answer")
    assert "Healthy" not in text_of(answer)


def test_the_baseline_says_where_it_comes_from(tmp_path):
    run = MadeUp(slow={1: 1.5}, noise=0.0).write(tmp_path / "run")
    one = MadeUp(ranks=1, noise=0.0).write(tmp_path / "one")
    slow_ms = 0.2 + 45 + 2 + 1
    measured = text_of(section(page_without_causes(run, one), "Baseline"))
    assert "baseline is measured" in measured
    assert f"Speedup now {number(2 * ONE_RANK_MS / slow_ms)}" in measured
    assert f"Efficiency {ONE_RANK_MS / slow_ms * 100:.3g} %" in measured
    assert f"per second {number(64 / slow_ms * 1e3)}" in measured
    assert f"{number(32 / slow_ms * 1e3)} per rank" in measured
    assert "Global batch 64" in measured
    # 32 samples on each rank as on one: weak scaling, whose perfect step is one rank's.
    assert f"weak scaling): a perfect step would take {number(ONE_RANK_MS)} ms" in measured
    assert "predicted from passes alone" in text_of(section(page_without_causes(run), "Baseline"))
    (run / "probes.csv").unlink()
    nothing = text_of(section(page_without_causes(run), "Baseline"))
    assert "Nothing to compare with" in nothing
    assert "no probes.csv" in nothing
    assert "Speedup" not in nothing


def test_the_baseline_may_be_of_twice_the_batch_and_not_of_another_model(tmp_path):
    run = MadeUp(batch=16, noise=0.0).write(tmp_path / "run")
    one = MadeUp(ranks=1, noise=0.0).write(tmp_path / "one")
    told = text_of(section(page_without_causes(run, one), "Baseline"))
    assert f"strong scaling): a perfect step would take {number(ONE_RANK_MS / 2)} ms" in told
    change_table(one, "facts.csv", parameters=7)
    told = text_of(section(page_without_causes(run, one), "Baseline"))
    assert "baseline is measured" not in told
    assert "of something else (parameters)" in told


def test_a_cause_outside_of_steps_is_counted_in(tmp_path):
    # Steps of 33.2 ms and 15 between two of them.
    folder = MadeUp(between_ms=15.0, noise=0.0).write(tmp_path / "run")
    one = MadeUp(ranks=1, noise=0.0).write(tmp_path / "one")
    tree = parsed(page_of(folder, one))
    told = text_of(section(tree, "Baseline"))
    assert f"Speedup now {number(2 * ONE_RANK_MS / 33.2)}" in told
    assert f"in the time of a step, it is {number(2 * ONE_RANK_MS / 48.2)}:" in told
    assert "by steps alone" in text_of(section(tree, "gain"))


def test_one_rank_has_nothing_to_scale(tmp_path):
    tree = page_without_causes(MadeUp(ranks=1).write(tmp_path / "run"))
    assert "no scaling to explain" in text_of(section(tree, "Baseline"))
    assert "there is one rank" in text_of(section(tree, "gain"))


@pytest.mark.parametrize("name", ["slow-rank-seen", "data-loading-seen", "network-too-slow-seen"])
def test_bars_and_table_of_a_step_are_the_medians_of_its_table(name):
    columns = [*PARTS.values(), "between_time_ms"]
    medians = timed_steps(RECORDED / name).groupby("rank")[columns].median()
    step_ms = timed_steps(RECORDED / name).groupby("rank")["step_time_ms"].median()
    ranks = section(parsed(page_of(RECORDED / name)), "A step by rank")
    end_ms = axis_end(ranks)
    rows = [row for row in classed(ranks, "div", "row") if "scale" not in row.get("class")]
    assert len(rows) == len(medians) == 2
    for rank, row in enumerate(rows):
        start_ms = 0.0
        drawn = {bar.get("class"): bar for bar in row.iter("rect")}
        for part, column in zip([*PARTS, "between"], columns, strict=True):
            value_ms = medians.loc[rank, column]
            if not value_ms > 0:
                assert part not in drawn
                continue
            # Places are written with two decimals of a per cent.
            near = pytest.approx(per_cent(drawn[part], "width") / 100 * end_ms, abs=1e-4 * end_ms)
            assert value_ms == near
            begun_ms = per_cent(drawn[part], "x") / 100 * end_ms
            assert begun_ms == pytest.approx(start_ms, abs=1e-4 * end_ms)
            start_ms += value_ms
    [table] = ranks.iter("table")
    for rank, row in enumerate(table.find("tbody")):
        shown = [float(cell.text.replace(",", "")) for cell in row.iter("td")]
        assert row.find("th").text == str(rank)
        own_ms = [*medians.loc[rank].dropna(), step_ms[rank]]  # nobody noted what is between
        assert shown == pytest.approx(own_ms, rel=0.005)


def test_the_slowest_rank_is_marked(tmp_path):
    folder = MadeUp(slow={1: 1.5}).write(tmp_path / "run")
    ranks = section(page_without_causes(folder), "A step by rank")
    labels = [text_of(each) for each in classed(ranks, "p", "label")]
    assert [label for label in labels if "slowest" in label] == ["rank 1 on here – the slowest"]


def test_three_steps_are_drawn_and_buckets_from_ready_to_done(tmp_path):
    folder = MadeUp(early={0: 2.0, 1: 3.0}).write(tmp_path / "run")
    timeline = section(page_without_causes(folder), "Steps in time")
    # Buckets were noted in steps 0 to 2, which take two, three and one times as long.
    headings = [text_of(each) for each in timeline.iter("h3")]
    assert headings == ["The shortest: step 2", "The median: step 0", "The longest: step 1"]
    assert "no common clock" in text_of(timeline)
    steps = timed_steps(folder).set_index(["step", "rank"])
    end_ms = axis_end(timeline)
    for panel, step in zip(classed(timeline, "div", "panel"), (2, 0, 1), strict=True):
        rows = [row for row in classed(panel, "div", "row") if "scale" not in row.get("class")]
        for rank, row in enumerate(rows):
            own = steps.loc[(step, rank)]
            whole, *_ = classed(row, "rect", "whole")
            drawn_ms = per_cent(whole, "width") / 100 * end_ms
            assert drawn_ms == pytest.approx(own["step_time_ms"], abs=1e-4 * end_ms)
            buckets = classed(row, "rect", "bucket")
            assert len(buckets) == 2
            for bucket in buckets:
                start_ms = per_cent(bucket, "x") / 100 * end_ms
                long_ms = per_cent(bucket, "width") / 100 * end_ms
                # Ready 5 ms into the backward pass, done 1 ms later.
                backward_ms = own["data_time_ms"] + own["forward_time_ms"]
                assert start_ms == pytest.approx(backward_ms + 5, abs=1e-4 * end_ms)
                assert long_ms == pytest.approx(1, abs=1e-4 * end_ms)


def test_buckets_of_several_micro_batches_end_with_the_last_pass(tmp_path):
    folder = MadeUp(accumulation=4, noise=0.0).write(tmp_path / "run")
    timeline = section(page_without_causes(folder), "Steps in time")
    end_ms = axis_end(timeline)
    ready_ms = 0.2 + 4 * (10 + 20)
    starts = [per_cent(each, "x") / 100 * end_ms for each in classed(timeline, "rect", "bucket")]
    assert starts == pytest.approx([ready_ms] * len(starts), abs=1e-4 * end_ms)
    assert "several micro-batches" in text_of(timeline)


def test_a_run_without_buckets_says_so(tmp_path):
    folder = MadeUp(slow={1: 1.5}).write(tmp_path / "run")
    (folder / "buckets.csv").unlink()
    timeline = section(page_without_causes(folder), "Steps in time")
    assert "Buckets are not drawn: no buckets.csv" in text_of(timeline)
    assert not classed(timeline, "rect", "bucket")
    assert classed(timeline, "rect", "forward")


def test_a_run_whose_steps_nobody_watched_says_so(tmp_path):
    parts = dict.fromkeys([*PARTS.values(), "between_time_ms"])
    folder = change_table(MadeUp().write(tmp_path / "run"), kind="plain", **parts)
    tree = page_without_causes(folder)
    for heading in ("A step by rank", "Steps in time"):
        assert "no steps measured in parts" in text_of(section(tree, heading))


def test_gains_are_drawn_to_scale_with_the_ideal(several):
    found, case = several
    gains = section(parsed(diagnosis_page(found, case, "t")), "gain")
    end = axis_end(gains)
    drawn = [per_cent(bar, "width") / 100 * end for bar in classed(gains, "rect", "predicted")]
    assert drawn == pytest.approx([each.predicted_speedup for each in found.verdicts], rel=0.01)
    now, *_ = classed(gains, "rect", "now")
    assert per_cent(now, "width") / 100 * end == pytest.approx(case.speedup_now, rel=0.01)
    marks = {per_cent(line, "x1") / 100 * end for line in classed(gains, "line", "mark")}
    assert list(marks) == pytest.approx([2.0], rel=0.01)


def test_an_interval_is_drawn_where_a_verdict_has_one(several):
    found, case = several
    now = found.verdicts[0].speedup_now
    first = replace(found.verdicts[0], gain_low=1.0 / now, gain_high=2.5 / now)
    others = [replace(v, gain_low=None, gain_high=None) for v in found.verdicts[1:]]
    found = replace(found, verdicts=(first, *others))
    tree = parsed(diagnosis_page(found, case, "t"))
    gains = section(tree, "gain")
    end = axis_end(gains)
    ends = sorted(per_cent(line, "x1") / 100 * end for line in classed(gains, "line", "interval"))
    assert ends == pytest.approx([1, 1, 2.5], rel=0.01)  # the line itself begins at the lower one
    assert "(1.00 to 2.50)" in text_of(section(tree, "Verdict"))


def test_a_change_without_a_prediction_is_left_out_of_the_gains(tmp_path):
    folder = MadeUp(facts={1: {"compute_dtype": "bfloat16"}}).write(tmp_path / "run")
    tree = parsed(page_of(folder))
    assert "No speedup is predicted" in text_of(section(tree, "Verdict"))
    assert not classed(section(tree, "gain"), "rect", "predicted")


def test_text_of_data_is_text_on_the_page(tmp_path):
    wicked = '<script>alert("1")</script>'
    folder = MadeUp(slow={1: 1.5}, hosts=(wicked, "b & c")).write(tmp_path / "run")
    case = case_of(folder)
    found = examined_for(case, "slow-rank")
    verdict = replace(found.verdicts[0], title=wicked, evidence=(wicked,), change=wicked)
    found = replace(found, verdicts=(verdict,), not_judged=((wicked, wicked),))
    page = diagnosis_page(found, case, wicked, [wicked])
    tree = parsed(page)
    assert wicked not in page
    assert len(list(tree.iter("script"))) == 1
    assert tree.find("head/title").text == wicked
    labels = {text_of(each) for each in classed(tree, "p", "label")}
    assert f"rank 0 on {wicked}" in labels
    assert "rank 1 on b & c – the slowest" in labels
    assert classed(tree, "pre", "change")[0].text == wicked


def test_many_ranks_are_a_sample_and_the_page_stays_small(tmp_path):
    made_up = MadeUp(ranks=64, slow={37: 1.5, 11: 0.8}, hosts=("a.cluster",) * 64, steps=4)
    folder = replace(made_up, buckets=(MIB // 8,) * 32).write(tmp_path / "run")
    page = page_of(folder)
    assert len(page.encode()) < 300_000
    ranks = section(parsed(page), "A step by rank")
    labels = [text_of(each) for each in classed(ranks, "p", "label")]
    assert "16 of 64 ranks" in text_of(ranks)
    assert "rank 37 on a.cluster – the slowest" in labels
    assert "rank 11 on a.cluster" in labels
    assert len(ranks.find(".//tbody")) == 64


@pytest.fixture
def shown(several, tmp_path) -> Path:
    """Writes a page with several causes to a file."""
    path = tmp_path / "diagnosis.html"
    path.write_text(diagnosis_page(*several, "A diagnosis", ["Not seen."]))
    return path


@pytest.mark.slow
def test_a_browser_shows_the_page_at_any_width_in_light_and_dark(chromium, shown):
    with open_page(chromium, shown) as (page, problems):
        page.evaluate(UNFOLD)
        for width in (360, 768, 1300, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("innerWidth") == width
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        brightness = {}
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            colours = page.evaluate(COLOURS)
            brightness[scheme] = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours]
    assert problems == []
    (paper, ink), (dark_paper, dark_ink) = brightness["light"], brightness["dark"]
    assert paper > ink
    assert dark_paper < dark_ink


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1300])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_against_the_page(width, dark, chromium, shown):
    with open_page(chromium, shown, width, dark=dark) as (page, problems):
        page.evaluate(UNFOLD)
        assert axe_violations(page) == []
    assert problems == []
