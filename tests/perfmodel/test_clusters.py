"""Clusters: those that come with the course, a user's own file, and values that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from perfmodel_support import refused

from common.perfmodel.architectures.published_sizes import architecture_of
from common.perfmodel.cluster.assumptions import LEAST_DRAWS, Assumptions
from common.perfmodel.cluster.clusters import (
    CLUSTERS,
    COURSE_CLUSTERS,
    Cluster,
    known_clusters,
    load_cluster,
)
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.judged_table import judge_rows, nccl_models
from common.perfmodel.cluster.scale_out import OTHERS, STRATEGIES, predict_scale_out
from common.perfmodel.one_device.peaks import known_peak
from common.perfmodel.printed.collectives import READ, PrintedCollective


def written(folder: Path, **changes: object) -> Path:
    """Writes h100-ib as a user's file with some keys changed; None removes a key."""
    values = yaml.safe_load((CLUSTERS / "h100-ib.yaml").read_text())
    values.update(changes)
    path = folder / "mine.yaml"
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(yaml.safe_dump(kept))
    return path


@pytest.mark.parametrize("name", known_clusters())
def test_every_cluster_of_the_course_loads_and_states_its_source_and_assumptions(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.source
    assert any("congestion" in one for one in cluster.assumptions)
    assert known_peak(cluster.gpu).memory_bytes
    assert cluster.nodes(cluster.gpus_per_node * cluster.max_nodes) == cluster.max_nodes


@pytest.mark.parametrize("name", COURSE_CLUSTERS)
def test_the_clusters_of_the_course_train_in_bfloat16_on_thousands_of_gpus(name: str) -> None:
    cluster = load_cluster(name)
    assert known_peak(cluster.gpu).flops("bfloat16")
    # 16,384 GPUs, the largest job that predictions are asked for
    assert cluster.nodes(16_384) == 2048


def test_fewer_gpus_of_a_mesh_have_fewer_channels() -> None:
    # the links of a DGX-1: one between GPUs 0 and 1, and four rings through GPUs 0 to 3
    dgx = load_cluster("v100-dgx1")
    assert [dgx.channels_of(gpus) for gpus in (2, 3, 4, 5, 8, 16)] == [1, 2, 4, 4, 6, 6]
    # switches give any two GPUs all of their links
    assert load_cluster("v100-dgx2").channels_of(2) == 6


def test_a_part_of_a_nodes_gpus_has_its_share_of_the_network() -> None:
    dgx = load_cluster("v100-dgx1")
    two, three = dgx.with_fewer(2), dgx.with_fewer(3)
    assert (two.interconnect, two.channels, two.channels_of_fewer) == ("nvlink", 1, {})
    assert (three.interconnect, three.channels, three.channels_of_fewer) == (
        "nvlink-mesh",
        2,
        {2: 1},
    )
    assert two.network_gb_per_s == dgx.network_gb_per_s / 4
    assert dgx.with_fewer(8) == dgx


@pytest.mark.parametrize("name", known_clusters())
def test_every_cluster_predicts_every_strategy_on_any_part_of_its_nodes(name: str) -> None:
    cluster = load_cluster(name)
    nodes = min(2, cluster.max_nodes)
    job = Job(architecture_of("gpt2", 128), precision="float16")
    predicted = predict_scale_out(
        job=job,
        cluster=cluster,
        gpus=[nodes * cluster.gpus_per_node],
        assumptions=Assumptions(draws=LEAST_DRAWS),
        caps_mib=[25],
        strategies=(*STRATEGIES, *OTHERS),
    )
    assert len(predicted.table) == 2 * 5
    assert (predicted.table["step_s"] > 0).all()
    for gpus in range(2, nodes * cluster.gpus_per_node + 1, nodes):
        for collective in READ:
            table = PrintedCollective(collective, gpus, (2.0**20, 2.0**30), (1.0, 1.0))
            for model in nccl_models(cluster, table, nodes):
                assert 0 < model.time_s(2**20) < model.time_s(2**30)


@pytest.mark.parametrize(
    ("gpu", "ranks", "nodes"),
    [("GH200 120GB", 8, 2), ("V100-SXM3-32GB", 16, 1), ("H100 80GB HBM3", 16, 2), ("", 16, 2)],
)
def test_a_table_without_hosts_is_of_as_few_nodes_as_such_gpus_have(gpu, ranks, nodes) -> None:
    table = PrintedCollective("all_reduce", ranks, (2.0**30,), (1.0,))
    assert judge_rows(table, gpu=gpu).nodes == nodes


def test_one_node_has_no_network(tmp_path: Path) -> None:
    alone = load_cluster(
        written(tmp_path, network="none", network_gb_per_s=0, max_nodes=1, nvls_channels=0)
    )
    assert alone.nodes(8) == 1
    with refused("16 GPUs", "at most 8"):
        alone.nodes(16)


def test_a_users_file_has_the_same_keys_and_is_named_by_its_file(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, name=None, network_gb_per_s=100, cpu=None))
    assert cluster.name == "mine"
    assert cluster.network_gb_per_s == 100
    assert cluster.cpu == "intel"
    assert load_cluster(str(tmp_path / "mine.yaml")) == cluster


def test_gpus_fill_whole_nodes_above_one() -> None:
    cluster = load_cluster("h100-ib")
    held = {gpus: cluster.nodes(gpus) for gpus in (1, 2, 3, 8, 16, 24)}
    assert held == {1: 1, 2: 1, 3: 1, 8: 1, 16: 2, 24: 3}
    with refused("0 GPUs", "at least 1"):
        cluster.nodes(0)
    with refused("12 GPUs", "multiples of 8"):
        cluster.nodes(12)
    with refused("16392", "at most 16384"):
        cluster.nodes(16_392)
    with refused("2.5 GPUs"):
        cluster.nodes(2.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network_gb_per_s": 0}, ["network_gb_per_s", "above 0"]),
        ({"network_gb_per_s": -3}, ["network_gb_per_s", "above 0"]),
        ({"network_gb_per_s": "fast"}, ["network_gb_per_s", "'fast'"]),
        ({"network_gb_per_s": float("nan")}, ["network_gb_per_s"]),
        ({"network_gb_per_s": 3200}, ["3200", "504", "not gigabits"]),
        ({"channel_gb_per_s": 60}, ["channels", "720", "450"]),
        ({"nvls_channel_gb_per_s": 90}, ["nvls", "720"]),
        ({"nvls_channels": 1}, ["at least 2"]),
        ({"nvls_channel_gb_per_s": 0}, ["or 0 and 0"]),
        ({"generation": "ampere"}, ["no NVLink SHARP"]),
        ({"interconnect": "pcie"}, ["no NVLink SHARP"]),
        ({"interconnect": "pcie", "nvls_channels": 0}, ["channels", "360", "PCIe", "63"]),
        ({"interconnect": "wires"}, ["interconnect", "nvlink-mesh"]),
        ({"interconnect": "nvlink-mesh", "nvls_channels": 0}, ["channels_of_fewer", "2 GPUs"]),
        ({"channels_of_fewer": {2: 4}}, ["channels_of_fewer", "nvlink"]),
        ({"channels_of_fewer": {8: 4}}, ["channels_of_fewer", "below 8"]),
        ({"channels_of_fewer": [2, 4]}, ["channels_of_fewer"]),
        ({"network": "none"}, ["network", "max_nodes 1"]),
        ({"generation": "pascal"}, ["generation", "volta, turing, ampere"]),
        ({"network": "pigeon"}, ["network", "infiniband"]),
        ({"cpu": "sparc"}, ["cpu", "intel, amd"]),
        ({"gpu": "H1000"}, ["gpu", "did you mean"]),
        ({"gpus_per_node": 0}, ["gpus_per_node", "at least 1"]),
        ({"gpus_per_node": 7.5}, ["gpus_per_node", "whole number"]),
        ({"channels": True}, ["channels", "whole number"]),
        ({"max_nodes": "many"}, ["max_nodes"]),
        ({"network_latency_us": -1}, ["network_latency_us", "at least 0"]),
        ({"ll128": "yes"}, ["ll128", "true or false"]),
        ({"source": ""}, ["source"]),
        ({"assumptions": "none"}, ["assumptions", "list"]),
        ({"chanels": 3}, ["chanels", "did you mean 'channels'"]),
        ({"generation": None, "gpu": None}, ["no generation, gpu"]),
    ],
)
def test_a_file_with_impossible_values_is_one_clear_line(tmp_path, changes, words) -> None:
    with refused("mine.yaml", *words):
        load_cluster(written(tmp_path, **changes))


def test_what_is_no_cluster_is_one_clear_line(tmp_path: Path) -> None:
    with refused("unknown cluster 'h100-1b'", "did you mean 'h100-ib'"):
        load_cluster("h100-1b")
    with refused("nowhere.yaml", "no such"):
        load_cluster(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [unclosed\nchannels: 3")
    with refused("broken.yaml", "YAML"):
        load_cluster(broken)
    broken.write_text("- a\n- list\n")
    with refused("broken.yaml", "mapping"):
        load_cluster(broken)
    with refused("broken.yaml"):
        broken.write_bytes(b"\xff\xfe\x00")
        load_cluster(broken)


def test_a_cluster_made_in_code_is_checked_too() -> None:
    values = {**vars(load_cluster("a100-ib")), "channels": 0}
    with refused("channels = 0"):
        Cluster(**values)
