"""Causes in the machine, the settings and the GPUs, on surroundings made up for them."""

from __future__ import annotations

import csv
import dataclasses
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch
from ddplab_watch.machine_cores import read_cpu_times
from ddplab_watch.surroundings import surroundings
from scaling_evidence import MIB, MadeUp, as_watched, case_of, change_table, examined_for, judge

from common.diagnose.all_causes import MACHINE_CAUSES
from common.diagnose.causes.settings import NOT_ON_A_GPU
from common.diagnose.diagnosis import diagnose_folder
from common.diagnose.evidence.case import MINOR, PERFORMANCE, Verdict
from common.diagnose.evidence.evidence import SURROUNDING_COLUMNS, NotJudged
from common.diagnose.evidence.measured_surroundings import surroundings_of

# A healthy host of three cores, which gloo's ranks reach over its one card.
HEALTHY = {
    "host": "here",
    "machine": "m1",
    "backend": "gloo",
    "cores": 3,
    "core_list": "0-2",
    "own_physical_cores": 3,
    "core_numa_nodes": "0",
    "machine_cores": 3,
    "physical_cores": 3,
    "threads": 1,
    "omp_num_threads": 1,
    "load_1min": 2.0,
    "dev_shm_bytes": 2**30,
    "dev_shm_free_bytes": 2**30,
    "interval_stolen_cores": 0.0,
    "interface": "eth0",
    "interface_source": "route to MASTER_ADDR",
    "interface_mbit": 10000,
    "fastest_interface": "eth0",
    "fastest_interface_mbit": 10000,
}
GPU = {
    "backend": "nccl",
    "gpu_uuid": "GPU-1",
    "gpu_name": "NVIDIA Pretend",
    "gpu_bus_id": "00000000:17:00.0",
    "gpu_numa_node": 0,
    "gpu_pcie_width": 16,
    "gpu_pcie_width_max": 16,
    "gpu_pcie_generation": 1,  # an idle link
    "gpu_pcie_generation_max": 5,
    "gpu_sm_clock_mhz": 1500,
    "gpu_sm_clock_max_mhz": 1980,
    "gpu_throttle_reasons": "SwPowerCap",  # at its own limit a busy GPU always is
    "gpu_power_limit_w": 700,
    "gpu_power_default_w": 700,
    "gpu_utilisation_share": 0.0,
    "gpu_mig": False,
    "gpu_compute_mode": "DEFAULT",
    "gpu_other_processes": 0,
}
ON_GPU = MadeUp(placement={"device": "cuda:0"})
HOSTS = ({"host": "a", "machine": "m1"}, {"host": "b", "machine": "m2"})
GPUS = "gpu-surroundings"
EARLIER = {"cgroup_cpu_quota": 1.0, "interval_throttled_share": 0.0, "cgroup_throttled_share": 0.9}
THREE = {"cores": 3, "core_list": "0-2", "own_physical_cores": 3}
OTHERS_USE_THREE = {"interval_own_cores": 1.0, "interval_busy_cores": 5.0}
NOTHING_TOLD = dict.fromkeys(name for name in GPU if name not in ("backend", "gpu_uuid"))


def write(
    folder: Path,
    run: MadeUp = MadeUp(),  # noqa: B008  # frozen
    *,
    by_rank: Sequence[Mapping[str, object]] = (),
    **changed: object,
) -> Path:
    """Writes a made-up run with surroundings: ``changed`` on all ranks, ``by_rank`` on each."""
    as_watched(run.write(folder))
    rows = [
        HEALTHY | changed | {"rank": rank} | dict(by_rank[rank] if by_rank else {})
        for rank in range(run.ranks)
    ]
    table = pd.DataFrame(rows, columns=list(SURROUNDING_COLUMNS))
    table.to_csv(folder / "surroundings.csv", index=False)
    return folder


def named(cause: str, folder: Path) -> Verdict:
    """Returns the verdict, after checking what holds for each."""
    verdict = judge(cause, folder)
    assert verdict is not None
    assert verdict.cause == cause
    assert any("[surroundings.csv]" in sentence for sentence in verdict.evidence)
    assert verdict.confidence in ("high", "medium", "low")
    assert verdict.change.endswith(".")
    assert verdict.group == (PERFORMANCE if verdict.lost_share else MINOR)
    assert (verdict.predicted_speedup is None) or verdict.lost_share
    return verdict


def test_without_surroundings_nothing_is_judged(tmp_path):
    folder = ON_GPU.write(tmp_path)
    for cause in MACHINE_CAUSES:
        with pytest.raises(NotJudged, match=r"no surroundings\.csv"):
            judge(cause, folder)
    # The programs of assignment 4 have no watcher: its causes are not listed as missing.
    assert not set(MACHINE_CAUSES) & set(dict(diagnose_folder(folder).not_judged))


@pytest.mark.parametrize(
    ("run", "changed"),
    [
        (MadeUp(), {}),
        (ON_GPU, GPU),
        (MadeUp(ranks=1), {"cores": 1, "core_list": "0", "own_physical_cores": 1}),
    ],
    ids=["processor", "gpu", "one rank"],
)
def test_healthy_surroundings_are_no_cause(run, changed, tmp_path):
    by_rank = [{"gpu_uuid": f"GPU-{rank}"} for rank in range(run.ranks)] if changed is GPU else ()
    folder = write(tmp_path, run, by_rank=by_rank, **changed)
    found = examined_for(case_of(folder), *MACHINE_CAUSES)
    assert found.verdicts == ()
    judged = set(MACHINE_CAUSES) - set(dict(found.not_judged))
    assert judged >= set(MACHINE_CAUSES) - ({"nccl-settings"} if run.ranks == 1 else set())


# A quota of processor time.


def test_a_quota_that_is_used_up_is_named(tmp_path):
    # Four threads use up one core's 100 ms in 25 ms and stand still for 75, in 8 of 10 periods.
    quota = {"cgroup_cpu_quota": 1.0, "interval_throttled_share": 0.8}
    folder = write(tmp_path, threads=2, cores=4, core_list="0-3", **quota)
    verdict = named("cpu-quota", folder)
    assert verdict.lost_share == pytest.approx(0.8 * 0.75)
    assert verdict.confidence == "high"
    assert verdict.predicted_speedup == pytest.approx(verdict.speedup_now / 0.4)
    text = " ".join(verdict.evidence)
    assert "grants its 2 ranks 1 core [" in text
    assert "4 threads on 4 cores" in text
    assert "80 % of the kernel's periods" in text
    assert "[steps.csv]" in text
    assert "--cpus 4" in verdict.change
    assert "OMP_NUM_THREADS=1." in verdict.change


ONE_CORE = {"cgroup_cpu_quota": 1.0}
TWO_CORES = {"cgroup_cpu_quota": 2.0, "interval_throttled_share": 0.5}
FOUR_THREADS = {"threads": 2, "cores": 2, "core_list": "0-1", "interval_throttled_share": 1.0}


@pytest.mark.parametrize(
    ("run", "changed", "level", "lost"),
    [
        # Four threads on two cores never use more than two.
        (MadeUp(), ONE_CORE | FOUR_THREADS, "high", 0.5),
        # Counted since the group was made: something else may have used it up.
        (MadeUp(), ONE_CORE | {"cgroup_throttled_share": 0.5}, "medium", 0.25),
        (MadeUp(), ONE_CORE, "low", 0.0),
        # Loader workers use it up: what that costs the ranks is not known.
        (MadeUp(), TWO_CORES, "medium", 0.0),
        (MadeUp(), TWO_CORES | {"threads": None}, "medium", 0),
        # Threads of ranks on GPUs say nothing of the loss.
        (ON_GPU, ONE_CORE | {"interval_throttled_share": 0.5}, "high", 0),
    ],
)
def test_what_is_not_known_of_a_quota_is_not_made_up(run, changed, level, lost, tmp_path):
    verdict = named("cpu-quota", write(tmp_path, run, **changed))
    assert (verdict.confidence, verdict.lost_share) == (level, pytest.approx(lost))


def test_emulated_hosts_share_a_quota_and_others_do_not(tmp_path):
    quota = {"cgroup_cpu_quota": 3.0, "interval_throttled_share": 0.5, "threads": 2}
    cores = {"cores": 4, "core_list": "0-3"}
    two = write(tmp_path / "two", by_rank=HOSTS, **quota, **cores)
    assert named("cpu-quota", two).lost_share == 0  # two threads each, of three granted cores
    emulated = [{"host": "a"}, {"host": "b"}]
    one = write(tmp_path / "one", by_rank=emulated, **quota, **cores)
    as_watched(one, network="2 emulated hosts at 1 Gbit/s")
    assert named("cpu-quota", one).lost_share == pytest.approx(0.5 * 0.25)


# One thread, and idle cores.

SIX = {"cores": 6, "core_list": "0-5", "own_physical_cores": 6, "machine_cores": 6}


def test_one_thread_beside_idle_cores_is_named_with_an_upper_bound(tmp_path):
    # Passes take 30 of 33.2 ms; three threads would save two thirds of that, at most.
    folder = write(tmp_path, MadeUp(noise=0.0), **SIX)
    verdict = named("too-few-threads", folder)
    assert verdict.lost_share == pytest.approx(30 / 33.2 * 2 / 3)
    assert verdict.confidence == "low"
    assert "OMP_NUM_THREADS=3 " in verdict.change
    assert "OMP_NUM_THREADS=1" in verdict.evidence[0]
    assert "upper bound" in " ".join(verdict.evidence)
    idle = {"interval_own_cores": 1.0, "interval_busy_cores": 2.1}
    seen = named("too-few-threads", write(tmp_path / "seen", MadeUp(noise=0.0), **SIX, **idle))
    assert seen.confidence == "medium"
    # It may bring all of that or nothing.
    interval = (seen.speedup_low, seen.predicted_speedup)
    assert interval == (seen.speedup_now, seen.speedup_high)


@pytest.mark.parametrize(
    ("factor", "found"), [(0.5, False), (0.8, True), (1.4, True), (1.6, False)]
)
def test_a_rank_that_sleeps_or_has_other_threads_gains_nothing(factor, found, tmp_path):
    folder = write(tmp_path, **SIX)
    change_table(folder, cpu_time_ms=lambda steps: factor * steps["step_time_ms"])
    assert (judge("too-few-threads", folder) is not None) == found


def test_the_machine_with_the_fewest_idle_cores_decides(tmp_path):
    few = {"cores": 1, "core_list": "0", "own_physical_cores": 1, "machine_cores": 1}
    full = [SIX | HOSTS[0], few | HOSTS[1]]
    assert judge("too-few-threads", write(tmp_path / "full", by_rank=full)) is None
    # Two containers of one machine share its cores.
    shared = [SIX | {"host": "a"}, SIX | {"host": "b"}]
    verdict = named("too-few-threads", write(tmp_path / "shared", by_rank=shared))
    assert "OMP_NUM_THREADS=3 " in verdict.change


# The network interface.

SLOW_CARD = {"interface_mbit": 1000, "fastest_interface": "ib0", "fastest_interface_mbit": 100000}
BUSY_LINK = MadeUp(noise=0.0, communication_ms=42.0, bandwidth=1e5, buckets=(4 * MIB,))


def test_a_slow_interface_is_named_where_a_faster_is_up(tmp_path):
    folder = write(tmp_path, BUSY_LINK, by_rank=HOSTS, **SLOW_CARD)
    verdict = named("wrong-interface", folder)
    # At most the bytes' share of what is exposed, 42 of 73.2 ms: what is latency stays.
    assert 0.3 < verdict.lost_share <= 42 / 73.2 * 0.99 + 1e-9
    assert "a exchanges over eth0 (route to MASTER_ADDR) at 1,000 Mbit/s" in verdict.evidence[0]
    assert "100,000 Mbit/s [surroundings.csv]" in verdict.evidence[1]
    assert verdict.change.startswith("export GLOO_SOCKET_IFNAME=ib0 on every host")
    assert verdict.confidence == "medium"
    (folder / "probes.csv").unlink()  # without the model's tables
    assert named("wrong-interface", folder).lost_share == pytest.approx(42 / 73.2 * 0.99)
    change_table(folder, "surroundings.csv", interface_source="default route")  # a guess
    assert named("wrong-interface", folder).confidence == "low"


@pytest.mark.parametrize("setting", ["NCCL_IB_DISABLE=1", "NCCL_NET=Socket"])
def test_with_infiniband_off_nccls_interface_counts(setting, tmp_path):
    changed = SLOW_CARD | {"backend": "nccl", "infiniband": "mlx5_0:1 100 Gb/sec"}
    changed |= {"nccl_settings": setting}
    verdict = named("wrong-interface", write(tmp_path, BUSY_LINK, by_rank=HOSTS, **changed))
    assert "NCCL_SOCKET_IFNAME" in verdict.change


@pytest.mark.parametrize("name", ["lo", "docker0", "br-5c1f"])
def test_an_interface_that_leads_to_no_other_machine_is_named(name, tmp_path):
    inside = {"interface": name, "interface_mbit": None}
    named_so = {"interface_source": "GLOO_SOCKET_IFNAME"}
    verdict = named("wrong-interface", write(tmp_path, by_rank=HOSTS, **inside, **named_so))
    assert verdict.lost_share == 0
    assert verdict.confidence == "high"
    assert "leads to no other machine" in verdict.evidence[0]


def test_hosts_whose_fastest_interfaces_differ_are_told_so(tmp_path):
    by_rank = [HOSTS[0], HOSTS[1] | {"fastest_interface": "eth3"}]
    verdict = named("wrong-interface", write(tmp_path, by_rank=by_rank, **SLOW_CARD))
    assert "on each host" in verdict.change
    assert "eth3, ib0" in verdict.change


# Settings of the exchange.

ACTIVE = {"infiniband": "mlx5_0:1 100 Gb/sec (4X EDR) InfiniBand"}


@pytest.mark.parametrize(
    ("setting", "by_rank", "level"),
    [
        ("NCCL_P2P_DISABLE=1", ({}, {}), "medium"),
        ("NCCL_P2P_LEVEL=LOC", ({}, {}), "medium"),
        ("NCCL_SHM_DISABLE=1", ({}, {}), "medium"),
        ("NCCL_IB_DISABLE=1", HOSTS, "high"),
        ("NCCL_NET=Socket", HOSTS, "high"),
        ("NCCL_ALGO=Tree", ({}, {}), "low"),
        ("NCCL_PROTO=Simple", ({}, {}), "low"),
        ("TORCH_NCCL_BLOCKING_WAIT=1", ({}, {}), "medium"),
        ("CUDA_LAUNCH_BLOCKING=1", ({}, {}), "high"),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL", ({}, {}), "high"),
        ("NCCL_DEBUG_SUBSYS=INIT,COLL", ({}, {}), "low"),
    ],
)
def test_a_setting_that_slows_nccl_is_named(setting, by_rank, level, tmp_path):
    changed = (
        GPU | ACTIVE | {"nccl_settings": f"NCCL_NET_GDR_LEVEL='a b' NCCL_DEBUG=INFO {setting}"}
    )
    verdict = named("nccl-settings", write(tmp_path, ON_GPU, by_rank=by_rank, **changed))
    [sentence] = verdict.evidence
    assert f"{setting} is set on all ranks" in sentence
    assert verdict.change == f"unset {setting.partition('=')[0]}."
    assert verdict.confidence == level
    assert verdict.lost_share == 0
    assert (NOT_ON_A_GPU in verdict.reason) == ("DETAIL" not in setting)


def test_the_ranks_with_a_setting_are_listed_and_all_settings_told_together(tmp_path):
    detail = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    by_rank = [{}, {"nccl_settings": f"NCCL_ALGO=Ring {detail}"}]
    verdict = named("nccl-settings", write(tmp_path, ON_GPU, by_rank=by_rank, **GPU))
    assert len(verdict.evidence) == 2
    assert "is set on rank 1:" in verdict.evidence[0]
    assert verdict.confidence == "high"
    assert verdict.change == "unset NCCL_ALGO; unset TORCH_DISTRIBUTED_DEBUG."


@pytest.mark.parametrize(
    ("workers", "size", "found"),
    [(4, 8 * 64 * MIB - 1, True), (4, 8 * 64 * MIB, False), (0, 64 * MIB, False)],
)
def test_shared_memory_must_hold_what_loader_workers_hand_over(workers, size, found, tmp_path):
    run = dataclasses.replace(MadeUp(), facts={r: {"loader_workers": workers} for r in range(2)})
    folder = write(tmp_path, run, dev_shm_bytes=size)
    if not found:
        assert judge("nccl-settings", folder) is None
        return
    verdict = named("nccl-settings", folder)
    assert "for 8 loader workers [facts.csv]" in verdict.evidence[0]
    assert "--shm-size=1g" in verdict.change
    assert NOT_ON_A_GPU not in verdict.reason


def test_where_workers_are_not_counted_only_dockers_default_is_too_small_for_nccl(tmp_path):
    small = {"dev_shm_bytes": 64 * MIB}
    verdict = named("nccl-settings", write(tmp_path / "nccl", ON_GPU, **GPU | small))
    assert verdict.confidence == "low"
    assert judge("nccl-settings", write(tmp_path / "gloo", **small)) is None
    larger = {"dev_shm_bytes": 65 * MIB}
    assert judge("nccl-settings", write(tmp_path / "larger", ON_GPU, **GPU | larger)) is None


# The GPU's surroundings.


@pytest.mark.parametrize(
    ("changed", "said", "do"),
    [
        ({"gpu_pcie_width": 4}, "4 of 16 lanes", "seat the card"),
        (
            {"gpu_pcie_generation": 3, "gpu_utilisation_share": 0.9},
            "generation 3 of 5 while the GPU computes in 90 %",
            "seat the card",
        ),
        ({"gpu_numa_node": 1}, "NUMA node 1, the process may run on cores of node 0", "numactl"),
        ({"gpu_other_processes": 2}, "2 processes of another job", "nvidia-smi shows"),
        ({"gpu_other_processes": 1}, "as many other processes as ranks", "map_location='cpu'"),
    ],
)
def test_what_holds_a_gpu_back_is_named(changed, said, do, tmp_path):
    by_rank = [{"gpu_uuid": "GPU-0"}, {"gpu_uuid": "GPU-1"} | changed]
    verdict = named("gpu-surroundings", write(tmp_path, ON_GPU, by_rank=by_rank, **GPU))
    [sentence] = verdict.evidence
    assert sentence.startswith("Rank 1: ")
    assert said in sentence
    assert do in verdict.change
    assert NOT_ON_A_GPU in verdict.reason
    assert verdict.lost_share == 0


# Clocks.


def twice(tmp_path: Path, run: MadeUp, before: Mapping, after: Mapping) -> Path:
    """Writes surroundings that were read twice; what is given is of rank 1."""
    folder = write(tmp_path, run, by_rank=({}, dict(before)))
    file = folder / "surroundings.csv"
    first = pd.read_csv(file)
    write(tmp_path, run, by_rank=({}, dict(after)))
    pd.concat([first, pd.read_csv(file)]).to_csv(file, index=False)
    return folder


MHZ = {"cpu_mhz": 3000.0}
OTHER_GPU = GPU | {"gpu_uuid": "GPU-2", "gpu_name": "NVIDIA Another"}


@pytest.mark.parametrize(
    ("run", "before", "after", "said", "do"),
    [
        (
            *(ON_GPU, GPU, GPU | {"gpu_throttle_reasons": "GpuIdle HwThermalSlowdown"}),
            *("Rank 1: clocks are lowered by HwThermalSlowdown (at 1500 of 1980", "nvidia-smi -q"),
        ),
        (
            *(ON_GPU, GPU, GPU | {"gpu_power_limit_w": 400}),
            *("Rank 1: power is limited to 400 W, below the 700 W", "nvidia-smi -pl 700"),
        ),
        (
            *(MadeUp(), MHZ, {"cpu_mhz": 2100.0}),
            *("Rank 1: its core runs at 2.10 GHz, and at 3.00 GHz as the watch began", "cpupower"),
        ),
        (MadeUp(), MHZ, MHZ | {"interval_heat_stops": 7}, "Rank 1: heat has lowered", "turbostat"),
        (
            *(MadeUp(), {}, {"host": "b", "machine": "m2", "interval_stolen_cores": 0.6}),
            *("b: the hypervisor gave 0.6 of 3 cores, 20 %, to other machines", "an instance"),
        ),
    ],
)
def test_a_processor_that_became_slow_is_named(run, before, after, said, do, tmp_path):
    verdict = named("lowered-clocks", twice(tmp_path, run, before, after))
    [sentence] = verdict.evidence
    assert sentence.startswith(said)
    assert do in verdict.change
    assert (NOT_ON_A_GPU in verdict.reason) == (run is ON_GPU)


def test_a_gpu_that_is_slower_than_its_like_is_said_where_its_rank_is_slow(tmp_path):
    run = dataclasses.replace(ON_GPU, slow={1: 1.5})
    by_rank = ({}, {"gpu_uuid": "GPU-2", "gpu_sm_clock_mhz": 1000})
    folder = write(tmp_path, run, by_rank=by_rank, **GPU)
    sentence = "Rank 1: its GPU runs at 1000 MHz, the other ranks' at 1500 MHz [surroundings.csv]."
    assert named("lowered-clocks", folder).evidence == (sentence,)
    [slow] = examined_for(case_of(folder), "slow-rank").verdicts
    assert sentence in slow.evidence


@pytest.mark.parametrize(
    ("run", "before", "after"),
    [
        (ON_GPU, GPU, GPU | {"gpu_throttle_reasons": "ApplicationsClocksSetting GpuIdle"}),
        (ON_GPU, GPU, GPU | {"gpu_throttle_reasons": "none", "gpu_power_limit_w": 400}),
        (ON_GPU, GPU, OTHER_GPU | {"gpu_sm_clock_mhz": 900}),  # a card of another kind
        (MadeUp(), MHZ, {"cpu_mhz": 2500.0}),  # a turbo of one core, and of all
        (MadeUp(), {}, MHZ),  # nobody told how it was before
        (MadeUp(), MHZ, MHZ | {"interval_heat_stops": 0, "interval_stolen_cores": 0.1}),
    ],
)
def test_a_clock_that_is_as_usual_or_unknown_is_no_cause(run, before, after, tmp_path):
    assert judge("lowered-clocks", twice(tmp_path, run, before, after)) is None


# No cause.

SOCKETS = {"backend": "nccl", "infiniband": "mlx5_0:1 100 Gb/sec"}


def set_to(settings: str, **changed: object) -> dict[str, object]:
    return GPU | ACTIVE | {"nccl_settings": settings} | changed


def one_gpu(**changed: object) -> tuple[dict, dict]:
    return {"gpu_uuid": "GPU-0"}, {"gpu_uuid": "GPU-1"} | changed


@pytest.mark.parametrize(
    ("cause", "run", "by_rank", "changed"),
    [
        ("cpu-quota", MadeUp(), (), {"cgroup_cpu_quota": 1.0, "interval_throttled_share": 0.04}),
        ("cpu-quota", MadeUp(), (), {"interval_throttled_share": 0.9}),  # no quota on any level
        ("cpu-quota", MadeUp(), (), {"cgroup_cpu_quota": 2.0}),  # one for each thread, no count
        ("cpu-quota", MadeUp(), (), EARLIER),  # what stopped it was before this run
        ("too-few-threads", MadeUp(), (), SIX | THREE),  # 1.5 for each
        ("too-few-threads", MadeUp(), (), SIX | {"threads": 2}),
        # Six hyper-threads of three cores.
        ("too-few-threads", MadeUp(), (), SIX | {"own_physical_cores": 3}),
        ("too-few-threads", MadeUp(), (), SIX | {"cgroup_cpu_quota": 3.0}),
        ("too-few-threads", MadeUp(), (), SIX | OTHERS_USE_THREE),
        ("too-few-threads", ON_GPU, (), SIX),
        # Passes are a tenth of the step: most is communication.
        ("too-few-threads", MadeUp(communication_ms=300.0), (), SIX),
        ("wrong-interface", MadeUp(), ({}, {}), SLOW_CARD),  # one host
        # Containers or emulated hosts of one machine.
        ("wrong-interface", MadeUp(), ({"host": "a"}, {"host": "b"}), SLOW_CARD),
        ("wrong-interface", MadeUp(), HOSTS, SLOW_CARD | {"fastest_interface_mbit": 1900}),
        ("wrong-interface", MadeUp(), HOSTS, {"interface": "br-ex"}),  # a card is behind it
        # NCCL exchanges over InfiniBand; sockets are for its beginning.
        ("wrong-interface", MadeUp(), HOSTS, SLOW_CARD | SOCKETS),
        ("nccl-settings", ON_GPU, (), set_to("NCCL_P2P_DISABLE=0")),
        ("nccl-settings", ON_GPU, (), set_to("NCCL_P2P_LEVEL=NVL")),
        ("nccl-settings", ON_GPU, HOSTS, set_to("NCCL_P2P_DISABLE=1")),  # one GPU on each host
        ("nccl-settings", MadeUp(), (), {"nccl_settings": "NCCL_P2P_DISABLE=1"}),  # gloo
        # There is no InfiniBand.
        ("nccl-settings", ON_GPU, HOSTS, set_to("NCCL_IB_DISABLE=1", infiniband=None)),
        ("nccl-settings", ON_GPU, (), set_to("NCCL_IB_DISABLE=1")),  # one host
        ("nccl-settings", ON_GPU, HOSTS, set_to("NCCL_NET=IB")),
        ("nccl-settings", MadeUp(), (), {"nccl_settings": "CUDA_LAUNCH_BLOCKING=1"}),
        ("nccl-settings", MadeUp(), (), {"nccl_settings": "TORCH_DISTRIBUTED_DEBUG=INFO"}),
        # Of nothing that is logged.
        ("nccl-settings", ON_GPU, (), set_to("NCCL_DEBUG_SUBSYS=COLL")),
        ("nccl-settings", ON_GPU, (), set_to("NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT")),
        # An idle link saves power.
        (GPUS, ON_GPU, one_gpu(gpu_pcie_generation=3, gpu_utilisation_share=0.4), GPU),
        (GPUS, ON_GPU, one_gpu(core_numa_nodes="0-1", gpu_numa_node=1), GPU),  # cores of both
        (GPUS, ON_GPU, one_gpu(core_numa_nodes=None, gpu_numa_node=1), GPU),
        # The other rank, which is shared-device.
        (GPUS, ON_GPU, one_gpu(gpu_other_processes=1, gpu_uuid="GPU-0"), GPU),
        (GPUS, ON_GPU, one_gpu(**NOTHING_TOLD), GPU),
        (GPUS, MadeUp(), (), {}),
    ],
)
def test_what_is_right_unknown_or_not_in_use_is_no_cause(cause, run, by_rank, changed, tmp_path):
    assert judge(cause, write(tmp_path, run, by_rank=by_rank, **changed)) is None


@pytest.mark.parametrize(
    ("cause", "run", "by_rank", "changed", "said"),
    [
        ("too-few-threads", MadeUp(), (), SIX | {"threads": None}, "how many threads"),
        ("wrong-interface", MadeUp(), HOSTS, {"interface": None}, "which interface"),
        ("wrong-interface", MadeUp(), HOSTS, {"interface_mbit": None}, "speed of eth0"),
        ("nccl-settings", MadeUp(ranks=1), (), {}, "one rank"),
        (GPUS, ON_GPU, (), {"backend": "nccl"}, "pynvml"),
        ("lowered-clocks", MadeUp(), (), {"interval_stolen_cores": None}, "nothing of clocks"),
    ],
)
def test_what_nobody_tells_is_not_judged(cause, run, by_rank, changed, said, tmp_path):
    with pytest.raises(NotJudged, match=said):
        judge(cause, write(tmp_path, run, by_rank=by_rank, **changed))


@pytest.mark.parametrize(
    ("cause", "name", "columns", "said"),
    [
        ("cpu-quota", "surroundings.csv", {"rank": 0}, "no row of some rank"),
        ("too-few-threads", "placement.csv", None, r"no placement\.csv"),
        ("too-few-threads", "steps.csv", {"cpu_time_ms": None}, "no cpu_time_ms"),
    ],
)
def test_a_table_that_lacks_something_is_named(cause, name, columns, said, tmp_path):
    folder = write(tmp_path, **SIX)
    if columns is None:
        (folder / name).unlink()
    else:
        change_table(folder, name, **columns)
    with pytest.raises(NotJudged, match=said):
        judge(cause, folder)


# From the watcher to the diagnosis.


def test_what_the_watcher_reads_here_is_read_back_and_judged(tmp_path):
    folder = MadeUp().write(tmp_path)
    host = socket.gethostname()
    earlier = read_cpu_times()
    rows = [{"rank": r, "host": host} | surroundings(None, host, earlier) for r in range(2)]
    with (folder / "surroundings.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, SURROUNDING_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    table = surroundings_of(case_of(folder))
    for name in ("host", "machine", "core_list", "interface", "interface_source"):
        assert list(table[name]) == [row[name] or "" for row in rows], name
    for name in ("cores", "dev_shm_bytes", "interval_s", "load_1min"):
        assert list(table[name]) == [row[name] for row in rows], name
    assert set(table["threads"]) == {torch.get_num_threads()}
    found = dict(examined_for(case_of(folder), *MACHINE_CAUSES).not_judged)
    system_may_not_tell = {"wrong-interface", "cpu-quota", "lowered-clocks"}
    assert not set(MACHINE_CAUSES) & set(found) - system_may_not_tell


def test_a_list_of_one_core_is_text_again(tmp_path):
    # pandas reads a column of "0" and blanks as 0.0 and NaN.
    by_rank = [{"core_list": "0"}, {"core_list": None}]
    table = surroundings_of(case_of(write(tmp_path, by_rank=by_rank)))
    assert list(table["core_list"]) == ["0", ""]


def test_the_newest_reading_of_a_rank_counts_and_an_older_one_where_it_says_nothing(tmp_path):
    # At the end of a run the process group may be gone; processor time is known only then.
    folder = write(tmp_path, threads=2)
    first = pd.read_csv(folder / "surroundings.csv")
    later = first.assign(backend=None, threads=1, interval_s=9.5)
    pd.concat([first, later]).to_csv(folder / "surroundings.csv", index=False)
    table = surroundings_of(case_of(folder))
    assert list(table["rank"]) == [0, 1]
    assert set(table["backend"]) == {"gloo"}
    assert set(table["threads"]) == {1}
    assert set(table["interval_s"]) == {9.5}


@pytest.mark.parametrize(
    ("cause", "by_rank", "changed"),
    [
        ("cpu-quota", (), {"cgroup_cpu_quota": 1.0, "interval_throttled_share": 0.051}),
        ("too-few-threads", (), {"cores": 4, "core_list": "0-3", "own_physical_cores": 4}),
        ("wrong-interface", HOSTS, SLOW_CARD | {"fastest_interface_mbit": 2000}),
    ],
)
def test_just_above_its_threshold_a_cause_is_named(cause, by_rank, changed, tmp_path):
    # Just below it, the tests above find none.
    changed = {"machine_cores": 4} | changed
    named(cause, write(tmp_path, by_rank=by_rank, **changed))
