"""Runs of other GPUs or networks are not joined: run directories are made up, or copied and told
to be of another machine."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from assignment1_support import write_training

from common.analysis.buckets.measurements import added_latency_s, open_run
from common.analysis.comparable import device_of, difference, network_of, require_same
from common.analysis.data_parallel.training_runs import open_training
from common.cli.predict import Predict
from common.cli.prediction.report import with_tables_of_run
from common.errors import UserError
from common.runtime.paths import project_root

RECORDED = project_root() / "data" / "epyc-2-cores" / "assignment2"
BENCHMARKS = (
    "allreduce_benchmark",
    "allreduce_chunk_benchmark",
    "ddp_benchmark",
    "overlap_benchmark",
    "train_benchmark",
)
TWO_HOSTS = {
    "backend": "nccl",
    "world_size": 8,
    "ranks_per_node": 4,
    "network": "NCCL, 2 hosts × 4 ranks",
    "device_name": "NVIDIA A100-SXM4-80GB",
    "gpus": [{"name": "NVIDIA A100-SXM4-80GB"}] * 4,
}
ONE_HOST = TWO_HOSTS | {"network": "NCCL, 1 host × 8 ranks", "ranks_per_node": 8}
H100 = TWO_HOSTS | {"device_name": "NVIDIA H100 80GB HBM3"}
OLD = {"backend": "nccl", "world_size": 8, "ranks_per_node": 4, "network": None}


def gpu_run(folder: Path, **of_table: dict) -> Path:
    """Copies the recorded run of assignment 2 as one of 8 GPUs; ``of_table`` changes benchmarks."""
    for name in BENCHMARKS:
        shutil.copytree(RECORDED / name, folder / name)
        record = folder / name / "environment.json"
        kept = json.loads(record.read_text())
        # The tables are of two ranks, and stay so.
        changed = TWO_HOSTS | {"world_size": 2} | of_table.get(name, {})
        record.write_text(json.dumps({k: v for k, v in (kept | changed).items() if v != "gone"}))
    return folder


def test_tables_of_one_device_and_network_are_joined(tmp_path: Path, caplog) -> None:
    run = open_run(gpu_run(tmp_path))
    assert run.settings["world_size"] == 2
    assert not caplog.records


def predict(folder: Path) -> None:
    """Opens a run as ``ddplab predict --run-dir`` does."""
    with_tables_of_run(Predict(run_dir=str(folder)))


@pytest.mark.parametrize("opener", [open_run, predict])
@pytest.mark.parametrize(
    ("benchmark", "changed"),
    [
        ("overlap_benchmark", {"device_name": "NVIDIA H100 80GB HBM3"}),
        # without communication, but computed on a GPU
        ("train_benchmark", {"device_name": "NVIDIA H100 80GB HBM3"}),
        ("allreduce_benchmark", {"network": "NCCL, 1 host × 8 ranks"}),
        (
            "ddp_benchmark",
            {"network": "gloo, 2 ranks on one NVIDIA A100-SXM4-80GB", "ranks_per_gpu": 2},
        ),
    ],
)
def test_tables_of_different_gpus_or_layouts_are_refused(
    tmp_path: Path, opener: Callable[[Path], object], benchmark: str, changed: dict
) -> None:
    folder, its = gpu_run(tmp_path, **{benchmark: changed}), next(iter(changed))
    what = its.removesuffix("_name")
    with pytest.raises(UserError, match=f"^{what} differs between .* cannot be compared") as error:
        opener(folder)
    assert TWO_HOSTS[its] in str(error.value)
    assert changed[its] in str(error.value)
    assert "\n" not in str(error.value)


def test_gradients_without_communication_do_not_depend_on_the_network(tmp_path: Path) -> None:
    open_run(gpu_run(tmp_path, train_benchmark={"network": "NCCL, 1 host × 8 ranks"}))


def test_a_run_without_names_gets_them_from_its_gpus_and_ranks() -> None:
    old = OLD | {"gpus": [{"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 85}] * 4}
    assert device_of(old) == TWO_HOSTS["device_name"]
    assert network_of(old) == TWO_HOSTS["network"]
    assert difference([("new", TWO_HOSTS), ("old", old)]) is None
    assert "NVIDIA H100" in difference([("old", old), ("new", H100)])
    assert "1 host × 8 ranks" in difference([("old", old), ("new", ONE_HOST)])
    # on a CPU its model is the name
    assert device_of({"device": "cpu", "gpus": [], "cpu": {"model": "AMD EPYC"}}) == "AMD EPYC"
    # a process that was no rank itself started all of them on its host
    alone = OLD | {"ranks_per_node": 1, "launcher": "single"}
    assert network_of(alone) == "NCCL, 1 host × 8 ranks"


def test_a_record_that_says_nothing_is_joined_with_one_warning(tmp_path: Path, caplog) -> None:
    silent = {"device_name": "gone", "gpus": [], "device": "cuda"}
    with caplog.at_level(logging.WARNING):
        open_run(gpu_run(tmp_path, overlap_benchmark=silent))
    [record] = caplog.records
    assert "overlap-times.csv" in record.getMessage()
    assert "ddp-times.csv" not in record.getMessage()


def test_hosts_of_other_names_are_no_other_network() -> None:
    jobs = [("a", TWO_HOSTS | {"host_names": ["n1", "n2"], "host": "n1"})]
    jobs += [("b", TWO_HOSTS | {"host_names": ["n7", "n9"], "host": "n7"})]
    require_same(jobs)


def test_measurements_over_the_old_group_of_nccl_are_not_compared_with_those_over_another() -> None:
    known = TWO_HOSTS | {"process_group": "ProcessGroupNCCL"}
    assert difference([("recorded before the name was", TWO_HOSTS), ("known", known)]) is None
    new = TWO_HOSTS | {
        "process_group": "ProcessGroupNCCL2",
        "network": "NCCL (ProcessGroupNCCL2), 2 hosts × 4 ranks",
    }
    assert difference([("old", known), ("new", new)]).startswith("network differs")
    # A study of scaling: other numbers of ranks may have another network, but no other group.
    four = {"world_size": 4, "network": "NCCL, 1 host × 4 ranks"}
    assert difference([("4", known | four), ("8", TWO_HOSTS)]) is None
    assert difference([("4", known | four), ("8", new)]).startswith("network differs")


def test_jobs_of_more_ranks_may_lie_on_more_hosts_than_those_they_are_compared_with() -> None:
    four = TWO_HOSTS | {"world_size": 4, "network": "NCCL, 1 host × 4 ranks"}
    one = TWO_HOSTS | {"world_size": 1, "network": None}
    assert difference([("1", one), ("4", four), ("8", TWO_HOSTS)]) is None
    gloo = TWO_HOSTS | {"backend": "gloo", "world_size": 4, "network": "TCP over loopback"}
    assert difference([("4", gloo), ("8", TWO_HOSTS)]).startswith("network differs")
    emulated = four | {"network": "4 emulated hosts", "interconnect": {"emulated": {"hosts": 4}}}
    assert difference([("4", emulated), ("8", TWO_HOSTS)]).startswith("network differs")
    # an emulated network is always recorded, so that an unknown one is none
    assert difference([("a", emulated), ("b", {"world_size": 4})]).startswith("network differs")


@pytest.mark.parametrize(
    ("changed", "what"), [(H100, "device"), (ONE_HOST, "network"), (TWO_HOSTS, None)]
)
def test_training_runs_of_different_gpus_or_layouts_are_not_compared(
    tmp_path: Path, changed: dict, what: str | None
) -> None:
    for name, strategy, record in (("a", "DDP", TWO_HOSTS), ("b", "FULL_SHARD", changed)):
        path = write_training(tmp_path / name, strategy, 8) / "environment.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | record))
    if what is None:
        assert len(open_training(tmp_path).compared) == 2
        return
    with pytest.raises(UserError, match=f"^{what} differs between") as error:
        open_training(tmp_path)
    its = "device_name" if what == "device" else what
    assert TWO_HOSTS[its] in str(error.value)
    assert changed[its] in str(error.value)


@pytest.mark.parametrize("latency", ["x", -1, float("nan"), float("inf"), None])
def test_a_recorded_latency_that_is_none_gets_one_line(latency):
    with pytest.raises(UserError, match="added_latency_ms"):
        added_latency_s({"added_latency_ms": latency})
    assert added_latency_s({"added_latency_ms": 8}) == 0.008
    assert added_latency_s({}) == 0.0


def test_a_tree_in_which_the_rule_is_not_written_compares_unchecked(monkeypatch, caplog) -> None:
    from common.analysis import comparable
    from common.errors import NotYetWritten

    def unwritten(*_, **__):
        raise NotYetWritten("A4.1")

    for name in ("differing_conditions", "differing_setting"):
        monkeypatch.setattr(comparable, name, unwritten)
    runs = [("one", {"device_name": "A100"}), ("other", {"device_name": "H100"})]
    comparable.require_same(runs)
    comparable.require_same_settings([("one", {"a": 1}), ("other", {"a": 2})], {"a": "batch"})
    assert "task A4.1 is not written yet: what may be compared is not checked" in caplog.text
