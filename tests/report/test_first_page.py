"""The first page in its three forms, and a run's page that grows and survives an interrupt."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from browser_support import axe_violations, open_page
from command_line import ONE_STAGE, refused
from interruptible import start_interruptible
from rich.console import Console

from common.errors import RunFailed
from common.report import first_page, run_page
from common.report.document import write_pdf
from common.report.first_page import FirstPage
from common.report.pipeline import entry_titles
from common.report.presets import load_preset
from common.report.run_page import RunPage, RunWatch
from common.report.timetable import DONE, Entry, Timetable, plan
from common.runtime.paths import project_root
from common.runtime.stage_progress import StageProgress

DATA = project_root() / "data" / "epyc-2-cores"


class Texts(HTMLParser):
    """Collects the words of a page, and the targets of its links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: list[str] = []
        self.alts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        found = dict(attrs)
        self.links += [found["href"]] if tag == "a" else []
        self.alts += [found["alt"]] if tag == "img" else []

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def looked_at(page: RunPage, *assignments: str) -> RunPage:
    for assignment in assignments:
        page.open(assignment, DATA / assignment)
        page.look(assignment)
    return page


@pytest.fixture(scope="module")
def page() -> FirstPage:
    page = looked_at(RunPage(), "assignment0", "assignment3")
    page.state = first_page.COMPLETE
    return page.first()


def test_every_form_shows_every_finding_and_what_was_not_run(
    page: FirstPage, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=100)
    first_page.print_page(page, console)
    front, files = first_page.as_typst(page)
    write_pdf(tmp_path, [], front=front, front_files=files)
    forms = [Texts(first_page.as_html(page)).text, console.file.getvalue()]
    if shutil.which("pdftotext"):
        command = ["pdftotext", "-raw", tmp_path / "report.pdf", "-"]
        forms.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(page.answered) == 4
    for form in forms:
        plain = re.sub(r"\s+", " ", form)
        for one in page.answered:
            assert one.question.title in plain
            assert one.answer.text in plain
        assert plain.count("recorded data, not measured here") == 4
        assert "Not in this run: Assignment 1: Data-parallel training, Assignment 2" in plain


def test_a_finding_is_a_link_only_where_the_report_has_its_section(page: FirstPage) -> None:
    anchor = page.findings[0].question.anchor
    assert Texts(first_page.as_html(page)).links == []
    assert Texts(first_page.as_html(page, [anchor])).links == [f"#{anchor}"]


def test_figures_say_what_they_show(page: FirstPage) -> None:
    alts = Texts(first_page.as_html(page)).alts
    assert len(alts) == 2
    assert all(re.search(r"\d", alt) for alt in alts)


def test_a_run_measured_elsewhere_says_so() -> None:
    record = {"host": "another", "cpu": {"cores": 8, "model": "Xeon"}, "gpus": []}
    assert "another machine than this one" in first_page.machine_lines(record)[0]
    record["gpus"] = [{"name": "NVIDIA H100"}] * 4
    assert first_page.machine_lines(record)[0].startswith("4 × NVIDIA H100, 8 cores of Xeon")


def test_a_run_that_was_not_completed_says_where_it_ended(tmp_path: Path) -> None:
    timetable = Timetable([Entry("assignment0", "throughput", "throughput (1 rank)", 20.0)])
    watch = RunWatch(tmp_path, timetable, StageProgress(Console(file=io.StringIO())))
    watch.announce()
    running = Texts((tmp_path / "index.html").read_text()).text
    assert "Running: 0 of 1 stages are done, about 20 s left" in running
    run = tmp_path / "run"
    shutil.copytree(DATA / "assignment0" / "memory_analysis", run / "memory_analysis")
    watch.page.open("assignment0", run)

    def fail() -> None:
        with watch.until_the_end(), watch.stage("assignment0", "throughput"):
            raise RunFailed("rank 1 was killed")

    with pytest.raises(RunFailed):
        fail()
    ended = Texts((tmp_path / "index.html").read_text()).text
    assert "This run was not completed (failed): rank 1 was killed" in ended
    assert re.search(r"throughput \(1 rank\) failed", ended)


def test_a_report_that_cannot_be_written_leaves_no_page_that_says_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        monkeypatch.setattr(run_page, "write_page", full)  # nor can anything be written after it
        raise OSError(28, "No space left on device")

    timetable = Timetable([Entry("assignment0", "throughput", "throughput (1 rank)", 20.0)])
    watch = RunWatch(tmp_path, timetable, StageProgress(Console(file=io.StringIO())))
    watch.announce()
    monkeypatch.setattr(run_page, "write_pdf", full)

    def end() -> None:
        with watch.until_the_end():
            watch.page.state = first_page.COMPLETE
            watch.page.write_report(tmp_path)

    with pytest.raises(OSError, match="No space"):
        end()
    assert "Running: 0 of 1 stages" in Texts((tmp_path / "index.html").read_text()).text


def test_the_page_is_made_again_after_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(DATA / "assignment0", run)
    shutil.move(run / "throughput", tmp_path / "later")
    entries = [Entry("assignment0", name, name) for name in ("memory_analysis", "throughput")]
    watch = RunWatch(tmp_path, Timetable(entries), StageProgress(Console(file=io.StringIO())))
    watch.announce()
    watch.page.open("assignment0", run)
    with watch.stage("assignment0", "memory_analysis"):
        pass
    text = Texts((tmp_path / "index.html").read_text()).text
    assert "17 sequences in 24 GB" in text
    assert "Not measured yet" in text
    with watch.stage("assignment0", "throughput"):
        shutil.move(tmp_path / "later", run / "throughput")
    text = Texts((tmp_path / "index.html").read_text()).text
    assert "how much another visit to the same batch would differ" in text
    assert "Not measured yet" not in text
    states = pd.read_csv(run / "stages.csv")
    assert states["stage"].tolist() == ["memory_analysis", "throughput"]
    assert states["state"].tolist() == [DONE, DONE]


def earlier_run(output: Path, name: str, label: str, seconds: float) -> None:
    folder = output / "assignment0" / name
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text(f'{{"label": "{label}", "start_time": "{name}"}}')
    row = f"throughput,throughput (1 rank),done,{seconds}\n"
    (folder / "stages.csv").write_text("stage,title,state,seconds\n" + row)


def test_the_time_left_is_that_of_earlier_runs_of_the_same_preset(tmp_path: Path) -> None:
    for place, seconds in enumerate((10, 30, 20)):
        earlier_run(tmp_path, f"2026-{place}", "smoke", seconds)
    earlier_run(tmp_path, "2026-9", "laptop", 500)
    for name, text in (("2026-7", ""), ("2026-8", "stage,took\nthroughput,500\n")):
        earlier_run(tmp_path, name, "smoke", 500)
        (tmp_path / "assignment0" / name / "stages.csv").write_text(text)  # cannot be read
    preset = load_preset("assignment0", "smoke")
    titles = {"assignment0": {"throughput": "throughput (1 rank)", "new": "never run"}}
    timetable = plan([preset], "smoke", tmp_path, titles, with_hosts=True)
    assert timetable.left_text() == "at least 20 s left"  # the median; one stage is unknown
    assert timetable.basis == "if it goes as it did here before"
    timetable.end(timetable.begin("assignment0", "throughput"), DONE)
    assert timetable.left_text() == ""
    assert timetable.place_text() == "1 of 2"


def test_the_first_run_expects_what_was_recorded_of_stages_that_run(tmp_path: Path) -> None:
    presets = [load_preset(name, "laptop") for name in ("assignment1", "assignment2")]
    titles = {p.assignment: {stage.key: stage.title for stage in p.stages} for p in presets}
    recorded = pd.read_csv(DATA / "stage-times.csv").query("preset == 'laptop'")
    own = recorded[recorded["assignment"].isin(titles)]
    own = own[~own["stage"].isin(("notebooks", "report"))]
    # The recorded run copied two calibrations between emulated hosts of assignment 1 for 2.
    timetable = plan(presets, "laptop", tmp_path, titles, with_hosts=True)
    assert "machine of the recorded runs" in timetable.source
    assert len(timetable.entries) == len(own) + 2
    assert timetable.left_text() == f"about {own['seconds'].sum() / 60:.0f} minutes left"
    timetable = plan(presets, "laptop", tmp_path, titles, with_hosts=False)
    here = own[~own["stage"].str.startswith("emulated-")]
    assert timetable.left_s() == pytest.approx((here["seconds"].sum(),) * 2)


def test_the_report_of_all_is_a_stage_of_the_run_and_expected_to_take_as_long_as_the_others(
    tmp_path: Path,
) -> None:
    recorded = pd.read_csv(DATA / "stage-times.csv").query("preset == 'laptop'")
    for names in (["assignment0"], ["assignment0", "assignment1"]):
        presets = [load_preset(name, "laptop") for name in names]
        timetable = plan(presets, "laptop", tmp_path, entry_titles(presets), with_hosts=True)
        own = recorded[recorded["assignment"].isin(names)]
        reports_s = own.loc[own["stage"] == "report", "seconds"].sum()
        # one entry more than was recorded: the last one
        assert len(timetable.entries) == len(own) + 1
        assert timetable.left_s()[1] == pytest.approx(own["seconds"].sum() + reports_s)
        for entry in timetable.entries[:-1]:
            timetable.end(entry, DONE)
        assert timetable.place_text() == f"{len(own)} of {len(own) + 1}"


def test_stages_that_take_longer_than_before_correct_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = [0.0]
    clock = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr("common.report.timetable.time", clock)
    stages = [Entry("assignment0", name, name, 100.0) for name in "abcd"]
    timetable = Timetable(stages, "as it did here before")
    assert timetable.left_text() == "about 7 minutes left"
    # ranks begin 20 s before the stage does: these are a part of it, as the run takes them
    seconds[0] = 20
    entry = timetable.begin("assignment0", "a")
    seconds[0] = 150
    timetable.end(entry, DONE)
    assert entry.took_s == 150
    # three to come: 1.5 times as long, too; or as before, so that four take 450 s
    assert timetable.left_s() == pytest.approx((3 * 450 / 4, 450))
    assert timetable.left_text() == "6 to 8 minutes left"
    assert timetable.basis == "by the stages so far"
    timetable.begin("assignment0", "b")
    seconds[0] = 250
    assert timetable.left_s() == pytest.approx((3 * 450 / 4 - 100, 350))
    seconds[0] = 700  # longer than anything foretold: the others are still to come
    assert timetable.left_s() == pytest.approx((2 * 450 / 4, 300))
    for left in stages[1:]:
        timetable.end(left, DONE)
    assert timetable.left_text() == ""


def test_a_run_counts_its_seconds_from_the_end_of_the_stage_before() -> None:
    progress = StageProgress(Console(file=io.StringIO(), width=80))
    time.sleep(0.3)
    for name in ("a", "b"):
        with progress.stage(name):
            time.sleep(0.1)
        time.sleep(0.2)
    said = re.findall(r"([\d.]+) s$", progress.console.file.getvalue(), re.MULTILINE)
    assert 0.7 <= sum(map(float, said)) <= progress.elapsed_s


def test_a_stage_that_is_repeated_stands_behind_itself_and_closes_nothing() -> None:
    entries = [Entry("assignment0", key, key) for key in ("sweep", "report", "first page")]
    timetable = Timetable(entries)
    timetable.end(timetable.begin("assignment0", "sweep-again"), DONE)
    keys = [entry.key for entry in timetable.entries]
    assert keys == ["sweep", "sweep-again", "report", "first page"]


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    line = refused("run", "assignment0", "--preset", "smoke", "--output-dir", file / "below")
    assert "output folder" in line


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("moment", "number"),
    [("… memory of a step", signal.SIGTERM), ("… 1 notebook", signal.SIGINT)],
)
def test_an_interrupted_run_leaves_a_page_that_opens(
    moment: str, number: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ONE_STAGE, "run", "assignment0", "--preset", "smoke"]
    with start_interruptible(
        [*command, "--output-dir", str(tmp_path)],
        cwd=project_root(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            if line.startswith(moment):
                break
        time.sleep(1)
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 130
    text = Texts((tmp_path / "index.html").read_text()).text
    why = "ended by SIGTERM" if number == signal.SIGTERM else "interrupted by the user"
    assert f"This run was not completed (interrupted): {why}" in text
    assert not (tmp_path / "report.pdf").exists()
    assert list(tmp_path.glob("*.partial")) == []
    # an analysis that was interrupted between two of its tables answers nothing
    records = tmp_path.glob("assignment0/*/memory_analysis/environment.json")
    finished = any(json.loads(record.read_text())["status"] == "complete" for record in records)
    assert ("sequences in 24 GB" in text) == finished


def test_the_page_of_a_run_without_a_record_of_its_own_names_the_machine(tmp_path: Path) -> None:
    # the folder of cluster jobs holds their runs and nothing else
    run = tmp_path / "jobs"
    shutil.copytree(DATA / "assignment0", run)
    (run / "environment.json").unlink(missing_ok=True)
    page = run_page.RunPage()
    page.open("assignment0", run)
    page.look("assignment0")
    assert "AMD EPYC" in page.first(only="assignment0").machine[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    timetable = Timetable([Entry("assignment0", "throughput", "throughput (1 rank)", 20.0)])
    folder = tmp_path_factory.mktemp("first-page")
    looked_at(RunPage(timetable), "assignment0", "assignment1", "assignment3").write(folder)
    return folder / "index.html"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(360, True), (1920, False)])
def test_a_browser_shows_it_whole(chromium, written: Path, width: int, dark: bool) -> None:
    with open_page(chromium, written, width=width, dark=dark) as (shown, problems):
        wide = shown.evaluate("document.scrollingElement.scrollWidth")
        assert wide <= width
        sizes = shown.eval_on_selector_all(".first img", "all => all.map(one => one.naturalWidth)")
        assert len(sizes) == 2
        assert min(sizes) > 0  # every picture could be drawn
        assert axe_violations(shown) == []
        assert problems == []
