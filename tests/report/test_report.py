"""Notebooks and report: executed on recorded data, without outputs in git, one PDF and one page.

A recorded notebook is executed here; ``ddplab run --preset smoke`` and the guard execute all in CI.
"""

import dataclasses
import functools
import json
import re
import runpy
import shutil
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from common.analysis.buckets import measurements
from common.analysis.buckets import networks as emulated_networks
from common.errors import RunFailed, UserError
from common.report.document import Document, render
from common.report.notebooks import execute_notebooks
from common.report.presets import (
    Preset,
    Stage,
    known_assignments,
    load_preset,
    with_dividing_batches,
)
from common.report.stages import Measured
from common.runtime.script import parse_settings
from common.training.texts.config import TextScalingConfig

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RECORDED = ROOT / "data" / "epyc-2-cores" / "assignment2"
ASSIGNMENTS = [f"assignment{number}" for number in range(5)]

pytestmark = pytest.mark.xdist_group("report")  # the notebooks are executed once


def cells(path: Path, kind: str) -> list:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_as_the_style_has_them(path: Path) -> None:
    code = cells(path, "code")
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[0].metadata.get("tags") == ["parameters"]
    # load, call, explain: no process group and no training in the kernel
    text = "\n".join(cell.source for cell in code)
    assert not re.search(r"init_process_group|torch|backward\(", text)
    assert max(cell.source.count("\n") + 1 for cell in code) <= 15


def test_answers_are_in_a_report_only_when_they_are_asked_for(
    tmp_path: Path, executed: dict[str, Path]
) -> None:
    notebook = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    staff = {"metadata": {"tags": ["staff"]}}
    parameters = nbformat.v4.new_code_cell("run_dir = ''", metadata={"tags": ["parameters"]})
    question, answer = map(nbformat.v4.new_markdown_cell, ("Why is it so?", "It is slower."))
    answer.update(staff)
    evidence = nbformat.v4.new_code_cell("print('it holds in', run_dir)", **staff)
    notebook.cells = [parameters, question, answer, evidence]
    nbformat.write(notebook, tmp_path / "asking.ipynb")
    [path], _ = execute_notebooks([tmp_path / "asking.ipynb"], tmp_path / "out", {"run_dir": "a"})
    page = render(Document("assignment2", (path,))).html
    assert "Why is it so?" in page
    assert "It is slower." not in page
    assert "it holds in" not in page
    for kind in ("markdown", "code"):
        asked = cells(executed["assignment1_ddp"], kind)  # executed with the answers
        assert any("staff" in cell.metadata.get("tags", []) for cell in asked)
    evidence.outputs = [nbformat.v4.new_output("stream", text="it holds in a run")]
    nbformat.write(notebook, tmp_path / "answered.ipynb")
    page = render(Document("assignment2", (tmp_path / "answered.ipynb",))).html
    assert "It is slower." in page
    assert "it holds in a run" in page


def test_recorded_data_is_never_shown_as_the_readers_own(executed: dict[str, Path]) -> None:
    outputs = json.dumps([cell.outputs for cell in cells(executed["assignment1_ddp"], "code")])
    assert "Recorded data, not yours" in outputs


def test_a_notebook_that_fails_is_named(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    with pytest.raises(RunFailed, match="broken, cell 1: ZeroDivisionError"):
        execute_notebooks([tmp_path / "broken.ipynb"], tmp_path / "out", {})


def test_a_notebook_that_needs_an_unwritten_task_is_left_out(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    raises = "from common.errors import NotYetWritten\nraise NotYetWritten('A2.2')"
    notebook.cells = [nbformat.v4.new_code_cell(raises)]
    nbformat.write(notebook, tmp_path / "open.ipynb")
    done, [error] = execute_notebooks([tmp_path / "open.ipynb"], tmp_path / "out", {})
    assert done == []
    assert str(error) == "open: task A2.2 is not written yet"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_kernel_that_is_slow_to_finish_its_last_answer_ends_without_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # nbclient's last request is for the kernel's name; it ends the kernel as soon as that is sent
    notebook = nbformat.v4.new_notebook()
    slow = """import time
handlers = get_ipython().kernel.shell_handlers
answer = handlers["kernel_info_request"]
async def slow(*message):
    await answer(*message)
    time.sleep(0.5)
handlers["kernel_info_request"] = slow"""
    notebook.cells = [nbformat.v4.new_code_cell(slow)]
    nbformat.write(notebook, tmp_path / "slow.ipynb")
    [done], errors = execute_notebooks([tmp_path / "slow.ipynb"], tmp_path / "out", {})
    assert (done.name, errors) == ("slow.ipynb", [])
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_ctrl_c_ends_the_kernels_of_notebooks_that_are_being_executed(tmp_path: Path) -> None:
    began, ended = tmp_path / "began", tmp_path / "ended"
    long = f"""import os, pathlib, time
pathlib.Path({str(began)!r}).write_text(str(os.getpid()))
time.sleep(30)
pathlib.Path({str(ended)!r}).touch()"""
    for name, code in (("first", "pass"), ("long", long)):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")

    def on_progress(name: str) -> None:
        if name == "first":  # what a thread raises reaches the caller as Ctrl-C does
            while not (began.exists() and began.read_text()):
                time.sleep(0.05)
            raise KeyboardInterrupt

    notebooks, before = [tmp_path / f"{name}.ipynb" for name in ("first", "long")], Path.cwd()
    with pytest.raises(KeyboardInterrupt):
        execute_notebooks(notebooks, tmp_path / "out", {}, on_progress)
    assert not psutil.pid_exists(int(began.read_text()))
    assert not ended.exists()
    assert Path.cwd() == before  # a notebook's folder is its kernel's alone


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Copies the recorded run."""
    return shutil.copytree(RECORDED, tmp_path / "run")


def test_benchmarks_of_different_batches_are_not_compared(run: Path) -> None:
    config = run / "ddp_benchmark" / "config.yaml"
    config.write_text(re.sub(r"batch_size: \d+", "batch_size: 32", config.read_text()))
    with pytest.raises(UserError, match="batch_size differs"):
        measurements.open_run(run)


def test_benchmarks_on_different_numbers_of_ranks_are_not_compared(run: Path) -> None:
    table = run / "allreduce_benchmark" / "allreduce-samples.csv"
    header, *rows = table.read_text().splitlines()
    rank = header.split(",").index("rank")
    kept = [row for row in rows if row.split(",")[rank] == "0"]
    table.write_text("\n".join([header, *kept]) + "\n")
    with pytest.raises(UserError, match="all-reduces were measured on 1 rank"):
        measurements.open_run(run)


def test_a_failed_part_of_a_run_is_not_read(run: Path) -> None:
    record = run / "ddp_benchmark" / "environment.json"
    record.write_text(record.read_text().replace('"complete"', '"failed"'))
    with pytest.raises(UserError, match="no complete run with ddp-times"):
        measurements.open_run(run)


@pytest.mark.parametrize("preset", ["smoke", "laptop", "gpu"])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_presets_give_every_stage_settings_that_it_accepts(assignment: str, preset: str) -> None:
    assert known_assignments() == ASSIGNMENTS
    loaded = load_preset(assignment, preset)
    # each stage has a run directory of its own
    folders = [(stage.folder, stage.name) for stage in loaded.stages]
    assert len(set(folders)) == len(folders)
    for stage in loaded.stages:
        flags = ["--config", str(loaded.path), *stage.flags()]
        parse_settings(settings_type_of(stage.script), flags, stage.script.stem)


@functools.cache
def settings_type_of(script: Path) -> type:
    """Returns the settings that a script of an assignment takes: the one dataclass it imports."""
    if script.stem == "train_text" and script.parent.name == "assignment4":
        return TextScalingConfig  # by way of the named experiments
    [found] = [
        value
        for value in runpy.run_path(str(script)).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    ]
    return found


def test_a_stage_that_runs_a_script_again_has_settings_of_its_own() -> None:
    stages = {stage.name: stage for stage in load_preset("assignment1", "laptop").stages}
    sharded = [stages["train_fsdp_full_shard"], stages["train_fsdp_shard_grad_op"]]
    assert len({stage.script for stage in sharded}) == 1
    assert [stage.flags() for stage in sharded] == [
        ["--strategy=FULL_SHARD"],
        ["--strategy=SHARD_GRAD_OP"],
    ]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_presets_global_batches_are_chosen_so_that_its_ranks_divide_them(ranks: int) -> None:
    gpu = load_preset("assignment1", "gpu")
    on_ranks = [
        stage if stage.ranks == 1 else dataclasses.replace(stage, ranks=ranks)
        for stage in gpu.stages
    ]
    said: list[str] = []
    fitted = with_dividing_batches(dataclasses.replace(gpu, stages=tuple(on_ranks)), said.append)
    found = {}
    for stage in fitted.stages:
        script = stage.script.stem
        flags = ["--config", str(gpu.path), *stage.flags()]
        settings = parse_settings(settings_type_of(stage.script), flags, script)
        if script != "compare_strategies":  # whose batches are those of a rank
            assert settings.global_batch_size % (stage.ranks * settings.micro_batch_size) == 0
            found[stage.name] = settings.global_batch_size
    # One device takes what the ranks take, with which it is compared.
    assert len({batch for name, batch in found.items() if name != "learning"}) == 1
    divides = ranks in (1, 2, 4, 8)
    assert (found["train_ddp"] == 32, found["learning"] == 16) == (divides, divides)
    assert len(said) == (0 if divides else 2)


def test_emulated_stages_go_to_folders_apart_from_loopback() -> None:
    stages = load_preset("assignment2", "laptop").stages
    emulated = [stage for stage in stages if stage.hosts]
    assert {str(stage.hosts) for stage in emulated} == {"2 emulated hosts at 1 Gbit/s"}
    assert all(stage.folder.startswith("emulated-2x") and stage.ranks == 2 for stage in emulated)


def test_a_stage_that_another_assignment_has_measured_is_copied_and_says_so(tmp_path: Path) -> None:
    first, second = (load_preset(name, "laptop") for name in ("assignment1", "assignment2"))

    def at_1_gbit(preset: Preset) -> dict[str, Stage]:
        stages = [stage for stage in preset.stages if stage.folder == "emulated-2x1gbit"]
        return {stage.name: stage for stage in stages}

    measured = Measured()
    source = tmp_path / "first" / "emulated-2x1gbit" / "overlap_benchmark"
    source.mkdir(parents=True)
    (source / "overlap-times.csv").write_text("arm\nlocal\n")
    (source / "environment.json").write_text('{"status": "complete"}')
    stage = at_1_gbit(first)["overlap_benchmark"]
    assert measured.copy(stage, first, tmp_path / "first") is None
    measured.add(stage, first, tmp_path / "first")

    again = at_1_gbit(second)["overlap_benchmark"]
    assert measured.copy(again, second, tmp_path / "second") == source
    copy = tmp_path / "second" / "emulated-2x1gbit" / "overlap_benchmark"
    assert (copy / "overlap-times.csv").read_text() == "arm\nlocal\n"
    record = json.loads((copy / "environment.json").read_text())
    assert record["status"] == "complete"
    assert record["copied_from"].endswith("first/emulated-2x1gbit/overlap_benchmark")
    # other settings, another network or another script are no copy
    others = {stage.name: stage for stage in second.stages if stage.folder != again.folder}
    for other in (others["overlap_benchmark"], at_1_gbit(second)["ddp_benchmark"]):
        assert measured.copy(other, second, tmp_path / "third") is None
    changed = dataclasses.replace(again, settings=dict(again.settings) | {"rounds": 3})
    assert measured.copy(changed, second, tmp_path / "third") is None


def test_where_hosts_cannot_be_emulated_recorded_ones_are_shown_and_it_says_why(run: Path) -> None:
    for folder in run.glob("emulated-*"):
        shutil.rmtree(folder)
    record = json.loads((run / "environment.json").read_text())
    record["emulated_hosts_left_out"] = "no tc here"
    (run / "environment.json").write_text(json.dumps(record))
    networks = emulated_networks.open_networks(run)
    assert (networks.recorded, networks.left_out) == (True, "no tc here")
    text = networks.origin
    assert "Recorded data, not yours" in text
    assert "no tc here" in text


def test_networks_are_those_of_the_record_slowest_first() -> None:
    networks = emulated_networks.open_networks(RECORDED)
    rates = [run.rate_bit_per_s for run in networks.runs]
    assert rates == [1e9, 2e9, float("inf")]
    for run in networks.runs[:-1]:
        # each network is predicted from its own all-reduces: no link carries more than its rate
        slowest = run.model.network
        bit_per_s = 8 * slowest.sizes_bytes[-1] / slowest.times_s[-1]
        assert bit_per_s < run.rate_bit_per_s
        assert len(run.links) == 2
        assert run.name in run.caption
