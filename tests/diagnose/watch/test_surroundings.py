"""The readers of the watcher, on made-up trees of /proc and /sys and on the machine itself."""

from __future__ import annotations

import ast
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch
from ddplab_watch import cgroups, interfaces, machine_cores, surroundings
from ddplab_watch.surroundings import COLUMNS

WATCHER = Path(surroundings.__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc and /sys")


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """Makes these files below a root, and folders where a path ends with a slash; returns it."""
    for path, content in files.items():
        target = root / path
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content + "\n")
    return root


# Version 2: every group has its file, "max" is no limit; version 1: a file for each half.
QUOTAS = {
    "the own group's": (
        {
            "proc/self/cgroup": "0::/pods/pod/box",
            "sys/fs/cgroup/pods/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/pod/cpu.max": "300000 100000",
            "sys/fs/cgroup/pods/pod/box/cpu.max": "150000 100000",
        },
        1.5,
    ),
    "one further up is smaller": (
        {
            "proc/self/cgroup": "0::/pods/pod/box",
            "sys/fs/cgroup/pods/cpu.max": "40000 50000",
            "sys/fs/cgroup/pods/pod/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/pod/box/cpu.max": "200000 100000",
        },
        0.8,
    ),
    "the host's path, seen in a container": (
        {"proc/self/cgroup": "0::/docker/1f", "sys/fs/cgroup/cpu.max": "250000 100000"},
        2.5,
    ),
    "a path that leaves the container": (
        {"proc/self/cgroup": "0::/../other", "sys/fs/cgroup/cpu.max": "250000 100000"},
        2.5,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:memory:/slurm\n4:cpu,cpuacct:/slurm/job\n1:name=systemd:/",
            "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_quota_us": "350000",
            "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_period_us": "100000",
        },
        3.5,
    ),
    "version 1, each controller by itself, beside version 2": (
        {
            "proc/self/cgroup": "2:cpuacct:/a\n1:cpu:/a\n0::/a",
            "sys/fs/cgroup/unified/a/": "",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        },
        0.5,
    ),
    "none set": (
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"},
        None,
    ),
    "no cgroups": ({}, None),
    "nonsense": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "?"}, None),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_smallest_quota_of_all_levels_holds(name: str, tmp_path: Path) -> None:
    files, expected = QUOTAS[name]
    assert cgroups.cpu_quota(tree(tmp_path, files)) == expected


def test_stops_are_counted_where_a_quota_is_and_between_two_readings(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.stat": "usage_usec 5\nnr_periods 10\nnr_throttled 10",
        "sys/fs/cgroup/a/b/cpu.max": "100000 100000",
        "sys/fs/cgroup/a/b/cpu.stat": "usage_usec 5\nnr_periods 200\nnr_throttled 50",
    }
    root = tree(tmp_path, files)
    assert cgroups.throttled_share(root) == 0.25  # a has no quota: nothing stops it
    before = machine_cores.read_cpu_times(root)
    tree(root, {"sys/fs/cgroup/a/b/cpu.stat": "nr_periods 300\nnr_throttled 130"})
    after = machine_cores.read_cpu_times(root)
    assert machine_cores.used_between(before, after)["interval_throttled_share"] == 0.8


def test_a_group_that_never_ran_has_no_share(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/cpu.max": "100000 100000",
        "sys/fs/cgroup/cpu.stat": "nr_periods 0\nnr_throttled 0",
    }
    root = tree(tmp_path, files)
    assert cgroups.throttled_share(root) is None  # unknown is not zero
    reading = machine_cores.read_cpu_times(root)
    later = machine_cores.read_cpu_times(root)
    assert machine_cores.used_between(reading, later)["interval_throttled_share"] is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/memory.max": "1000",
                "sys/fs/cgroup/a/b/memory.max": "max",
            },
            1000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            2000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_the_smallest_memory_limit_of_all_levels_holds(files, expected, tmp_path: Path) -> None:
    assert cgroups.memory_limit_bytes(tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("cores", "text"),
    [([], ""), ([0], "0"), ([3, 1, 2], "1-3"), ([0, 1, 2, 3, 8], "0-3,8"), ([0, 2], "0,2")],
)
def test_lists_of_cores_are_written_as_linux_does_and_read_back(cores, text) -> None:
    assert machine_cores.write_cores(cores) == text
    assert machine_cores.parse_cores(text) == frozenset(cores)


def test_hyper_threads_and_numa_nodes_of_cores(tmp_path: Path) -> None:
    # Four cores, two of each physical one, on two nodes; the last file has its older name.
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    files = {
        f"sys/devices/system/cpu/cpu{core}/topology/core_cpus_list": text
        for core, text in siblings.items()
        if core != 3
    }
    files["sys/devices/system/cpu/cpu3/topology/thread_siblings_list"] = siblings[3]
    files["sys/devices/system/cpu/online"] = "0-3"
    files["sys/devices/system/node/node0/cpulist"] = "0,2"
    files["sys/devices/system/node/node1/cpulist"] = "1,3"
    root = tree(tmp_path, files)
    assert machine_cores.online_cores(root) == {0, 1, 2, 3}
    assert machine_cores.physical_cores([0, 2], root) == 1
    assert machine_cores.physical_cores([3, 2], root) == 2
    assert machine_cores.physical_cores([0, 9], root) is None
    assert machine_cores.numa_nodes(frozenset({1}), root) == "1"
    assert machine_cores.numa_nodes(frozenset({0, 3}), root) == "0-1"
    assert machine_cores.numa_nodes(frozenset({0}), tmp_path / "nowhere") is None


def stat_of(user: int, system: int, waited_user: int = 0, waited_system: int = 0) -> str:
    """Returns a process's stat, whose name has a blank and a parenthesis."""
    return f"7 (py) thon) S {' '.join('0' * 10)} {user} {system} {waited_user} {waited_system} 20"


def test_processor_time_is_that_of_the_process_and_all_it_started(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    files = {
        "proc/7/stat": stat_of(1 * ticks, 2 * ticks, 3 * ticks, 4 * ticks),
        "proc/7/task/7/children": "8",
        "proc/7/task/70/children": "9 99",  # by a thread of it; 99 has ended meanwhile
        "proc/8/stat": stat_of(10 * ticks, 0),
        "proc/9/stat": stat_of(0, 20 * ticks),
        "proc/9/task/9/children": "",
        "proc/5/stat": stat_of(1000, 1000),
    }
    root = tree(tmp_path, files)
    assert machine_cores.process_tree_s(7, root) == 40
    assert machine_cores.process_tree_s(6, root) is None


def test_what_was_used_between_two_readings_is_their_difference_in_cores() -> None:
    before = machine_cores.CpuTimes(100.0, 50.0, 1.0, 10.0, {}, 5)
    after = machine_cores.CpuTimes(110.0, 80.0, 2.0, 25.0, {}, 8)
    assert machine_cores.used_between(before, after) == {
        "interval_s": 10.0,
        "interval_own_cores": 1.5,
        "interval_busy_cores": 3.0,
        "interval_stolen_cores": 0.1,
        "interval_throttled_share": None,
        "interval_heat_stops": 3,
    }
    unknown = machine_cores.CpuTimes(110.0, None, None, None, {})
    assert machine_cores.used_between(before, unknown)["interval_own_cores"] is None
    assert machine_cores.used_between(after, before) == {}


CPU1 = "sys/devices/system/cpu/cpu1"
PROC_CPUINFO = {
    "proc/cpuinfo": "processor\t: 0\ncpu MHz\t\t: 2200.5\n\nprocessor\t: 1\ncpu MHz\t\t: 2300.5"
}
ON_CORE_1 = {"proc/self/stat": f"7 (py) thon) S {' '.join('0' * 35)} 1 0"}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, (None, None)),
        (ON_CORE_1, (None, None)),
        (ON_CORE_1 | PROC_CPUINFO, (2300.5, None)),
        (
            ON_CORE_1
            | PROC_CPUINFO
            | {f"{CPU1}/cpufreq/scaling_cur_freq": "1800000"}
            | {f"{CPU1}/cpufreq/cpuinfo_max_freq": "3500000"},
            (1800.0, 3500.0),
        ),
    ],
)
def test_the_clock_is_that_of_the_core_that_the_process_is_on(tmp_path, files, told) -> None:
    assert machine_cores.clocks_mhz(tree(tmp_path, files)) == told


def test_stops_by_heat_are_those_of_all_cores_and_unknown_where_one_does_not_tell(tmp_path) -> None:
    counts = {f"sys/devices/system/cpu/cpu{core}/thermal_throttle/": "" for core in (0, 1)}
    files = {f"{folder}core_throttle_count": str(4 + n) for n, folder in enumerate(counts)}
    root = tree(tmp_path, files)
    assert machine_cores.heat_stops({0, 1}, root) == 9
    assert machine_cores.heat_stops({0, 2}, root) is None
    assert machine_cores.heat_stops((), root) is None


def test_waiting_and_stolen_time_are_not_computing(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    counts = [value * ticks for value in (1, 2, 3, 100, 200, 4, 5, 7, 1, 0)]
    root = tree(tmp_path, {"proc/stat": f"cpu  {' '.join(map(str, counts))}\ncpu0 1 2 3"})
    reading = machine_cores.read_cpu_times(root)
    assert (reading.busy_s, reading.stolen_s, reading.own_s) == (15, 7, None)


def card(name: str, speed: int | None, up: bool = True) -> dict[str, str]:
    """Returns a network card's files; a driver that does not tell a speed writes no number."""
    folder = f"sys/class/net/{name}"
    return {
        f"{folder}/flags": "0x1003" if up else "0x1002",
        f"{folder}/operstate": "up" if up else "down",
        f"{folder}/speed": "" if speed is None else str(speed),
        f"{folder}/device/vendor": "0x15b3",
    }


def virtual(name: str, speed: int = 10000, below: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns a virtual interface's files: the speed that its driver likes to tell, and no card."""
    folder = f"sys/class/net/{name}"
    files = {
        f"{folder}/flags": "0x1003",
        f"{folder}/operstate": "up",
        f"{folder}/speed": f"{speed}",
    }
    return files | {f"{folder}/lower_{lower}/": "" for lower in below}


LOOPBACK = {"sys/class/net/lo/flags": "0x9", "sys/class/net/lo/operstate": "unknown"}
CARDS = (
    LOOPBACK
    | card("eth0", 1000)
    | card("eth1", 25000)
    | card("eth2", 100000, up=False)
    | card("wlan0", None)
    | card("off0", -1)
    | virtual("veth1")
    | virtual("docker0", below=("veth1",))
    | virtual("eth1.7", below=("eth1",))
    | virtual("br-ex", below=("eth0", "veth1"))
    | {**virtual("bond0", 50000), "sys/class/net/bond0/bonding/mode": "802.3ad 4"}
    | {"sys/class/net/bonding_masters": "bond0"}
)


def test_speeds_are_those_of_cards_and_of_what_stands_on_them(tmp_path: Path) -> None:
    found = {one.name: one for one in interfaces.interfaces(tree(tmp_path, CARDS))}
    assert {name: one.speed_mbit for name, one in found.items()} == {
        "lo": None,
        "eth0": 1000,
        "eth1": 25000,
        "eth2": 100000,
        "wlan0": None,
        "off0": None,
        "veth1": None,
        "docker0": None,
        "eth1.7": 25000,
        "br-ex": 1000,
        "bond0": 50000,
    }
    assert not found["eth2"].is_up
    assert found["lo"].is_up
    assert found["lo"].is_loopback
    assert interfaces.fastest(list(found.values())).name == "bond0"  # eth2 is down
    assert interfaces.fastest([found["lo"], found["veth1"]]) is None
    assert interfaces.interfaces(tmp_path / "nowhere") == []


def route_line(interface: str, network: str, prefix: int, metric: int = 0, flags: int = 1) -> str:
    """Makes a line of /proc/net/route: addresses as numbers of this machine's byte order."""

    def shown(address: bytes) -> str:
        return f"{int.from_bytes(address, sys.byteorder):08X}"

    mask = (0xFFFFFFFF << (32 - prefix) & 0xFFFFFFFF).to_bytes(4, "big")
    words = (interface, shown(socket.inet_aton(network)), shown(bytes(4)), f"{flags:04X}", 0, 0)
    return "\t".join(map(str, (*words, metric, shown(mask), 0, 0, 0)))


ROUTES = "\n".join(
    [
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT",
        route_line("eth0", "0.0.0.0", 0, metric=100),
        route_line("wlan0", "0.0.0.0", 0, metric=600),
        route_line("eth0", "10.1.0.0", 16),
        route_line("eth1", "10.1.5.0", 24),
        route_line("docker0", "172.17.0.0", 16),
        route_line("*", "10.9.0.0", 16, flags=0x201),
    ]
)
ROUTES_6 = "\n".join(
    [
        f"fd00{'0' * 28} 40 {'0' * 32} 00 {'0' * 32} 00000100 00000001 00000000 00000001 eth1",
        f"fd00{'0' * 27}5 80 {'0' * 32} 00 {'0' * 32} 00000000 00000002 00000000 80200001 lo",
    ]
)
HOSTS = "127.0.0.1 localhost\n127.0.1.1 debian # the installer's\n10.1.5.2 node2 n2\nfd00::5 six"
NETWORK = CARDS | {
    "proc/net/route": ROUTES,
    "proc/net/ipv6_route": ROUTES_6,
    "etc/hosts": HOSTS,
}


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.1.7.9", "eth0"),
        ("10.1.5.9", "eth1"),  # the longer prefix
        ("8.8.8.8", "eth0"),  # the smaller metric
        ("172.17.0.2", "docker0"),
        ("127.0.0.1", "lo"),
        ("fd00::9", "eth1"),
        ("fd00::5", "eth1"),  # its own address is on the card, not on loopback
        ("fd01::1", None),
        ("::1", "lo"),
        ("0.0.0.0", "eth0"),
    ],
)
def test_the_route_with_the_longest_prefix_leads(address, interface, tmp_path: Path) -> None:
    assert interfaces.route_to(address, tree(tmp_path, NETWORK)) == interface


@pytest.mark.parametrize(
    ("backend", "host", "variables", "expected"),
    [
        ("gloo", "x", {"GLOO_SOCKET_IFNAME": "eth1"}, ("eth1", "GLOO_SOCKET_IFNAME")),
        ("gloo", "x", {"GLOO_SOCKET_IFNAME": "eth"}, (None, "GLOO_SOCKET_IFNAME")),
        ("gloo", "node2", {"MASTER_ADDR": "10.1.7.9"}, ("eth1", interfaces.HOST)),
        ("gloo", "debian", {"MASTER_ADDR": "10.1.7.9"}, ("lo", interfaces.HOST)),
        ("gloo", "unknown", {"MASTER_ADDR": "n2"}, ("eth1", interfaces.MASTER)),
        ("gloo", "unknown", {"MASTER_ADDR": "elsewhere"}, ("eth0", interfaces.DEFAULT)),
        ("gloo", "six", {}, ("eth1", interfaces.HOST)),
        (None, "unknown", {"NCCL_SOCKET_IFNAME": "eth1"}, ("eth0", interfaces.DEFAULT)),
        ("nccl", "x", {"NCCL_SOCKET_IFNAME": "eth1"}, ("eth1", "NCCL_SOCKET_IFNAME")),
        ("nccl", "x", {"NCCL_SOCKET_IFNAME": "wl,eth"}, ("wlan0", "NCCL_SOCKET_IFNAME")),
        ("nccl", "x", {"NCCL_SOCKET_IFNAME": "=docker0"}, ("docker0", "NCCL_SOCKET_IFNAME")),
        ("nccl", "x", {"NCCL_SOCKET_IFNAME": "=eth1."}, (None, "NCCL_SOCKET_IFNAME")),
        ("nccl", "x", {"NCCL_SOCKET_IFNAME": "^bond,br"}, ("eth0", "NCCL_SOCKET_IFNAME")),
        ("nccl", "node2", {"MASTER_ADDR": "10.1.7.9"}, ("eth0", interfaces.MASTER)),
        ("nccl", "node2", {"MASTER_ADDR": "127.0.0.1"}, ("eth1", interfaces.HOST)),
    ],
)
def test_the_interface_in_use(backend, host, variables, expected, tmp_path: Path) -> None:
    root = tree(tmp_path, NETWORK)
    assert interfaces.interface_in_use(backend, host, variables, root) == expected


def test_nccl_prefers_interfaces_over_infiniband(tmp_path: Path) -> None:
    root = tree(tmp_path, NETWORK | card("ib0", 100000))
    found = interfaces.interface_in_use("nccl", "x", {"MASTER_ADDR": "10.1.7.9"}, root)
    assert found == ("ib0", interfaces.PREFERRED)


def test_without_routes_and_names_nothing_is_said(tmp_path: Path) -> None:
    assert interfaces.interface_in_use("gloo", "x", {}, tmp_path) == (None, None)
    facts = surroundings.network_facts("gloo", "x", {}, tmp_path)
    assert set(facts.values()) == {None}


def test_only_active_adapters_are_listed(tmp_path: Path) -> None:
    def port(name: str, state: str, layer: str) -> dict[str, str]:
        folder = f"sys/class/infiniband/{name}/ports/1"
        rate = "100 Gb/sec (4X EDR)"
        return {f"{folder}/state": state, f"{folder}/rate": rate, f"{folder}/link_layer": layer}

    down = port("mlx5_1", "1: DOWN", "InfiniBand")
    assert interfaces.infiniband(tree(tmp_path / "none", down)) is None
    active = port("mlx5_0", "4: ACTIVE", "InfiniBand") | port("mlx5_2", "4: ACTIVE", "Ethernet")
    assert interfaces.infiniband(tree(tmp_path, down | active)) == (
        "mlx5_0:1 100 Gb/sec (4X EDR) InfiniBand; mlx5_2:1 100 Gb/sec (4X EDR) Ethernet"
    )


def test_variables_count_more_than_a_users_file_and_that_more_than_the_systems(
    tmp_path: Path,
) -> None:
    files = {
        "etc/nccl.conf": "NCCL_ALGO=Tree\nNCCL_P2P_DISABLE = 1  # old\nNCCL_NET=Socket\nnonsense",
        "home/me/.nccl.conf": "NCCL_ALGO=Ring\nNCCL_NET=IB",
        "other.conf": "NCCL_ALGO=NVLS",
    }
    root = tree(tmp_path, files)
    env = {"HOME": "/home/me", "NCCL_NET": "a b", "PATH": "/bin"}
    text = surroundings.write_settings(surroundings.with_nccl_files(env, root))
    read = dict(word.partition("=")[::2] for word in shlex.split(text))
    assert read == {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_NET": "a b"}
    named = surroundings.with_nccl_files(env | {"NCCL_CONF_FILE": "/other.conf"}, root)
    assert named["NCCL_ALGO"] == "NVLS"
    assert surroundings.write_settings({"PATH": "/bin"}) is None


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("4,2", 4), ("", None), ("x", None)])
def test_the_first_number_of_threads_counts(value, expected) -> None:
    facts = surroundings.thread_facts({"OMP_NUM_THREADS": value})
    assert facts == {"threads": torch.get_num_threads(), "omp_num_threads": expected}


def test_a_system_that_tells_nothing_gives_none_and_never_zero(tmp_path: Path) -> None:
    assert set(surroundings.limit_facts(tmp_path).values()) == {None}
    assert set(surroundings.memory_facts(tmp_path).values()) == {None}
    facts = surroundings.core_facts(tmp_path)
    known = {"cores", "core_list", "machine_cores"}  # by the system's calls
    assert {name for name, value in facts.items() if value is not None} <= known
    reading = machine_cores.read_cpu_times(tmp_path)
    assert (reading.busy_s, reading.own_s, reading.throttling) == (None, None, {})


# The machine that the test runs on.


def own_row(**arguments: object) -> dict[str, object]:
    return surroundings.surroundings(None, socket.gethostname(), **arguments)


@linux
def test_a_row_has_every_column_and_can_be_written() -> None:
    before = machine_cores.read_cpu_times()
    row = own_row(earlier=before)
    assert list(row) == list(COLUMNS)
    assert all(value is None or type(value) in (int, float, str, bool) for value in row.values())
    assert json.loads(json.dumps(row)) == row
    assert row["interval_s"] is not None
    assert own_row()["interval_s"] is None
    assert row["machine"] == own_row()["machine"]


@linux
def test_a_row_agrees_with_psutil_and_os() -> None:
    row = own_row()
    assert row["cores"] == len(os.sched_getaffinity(0))
    assert machine_cores.parse_cores(row["core_list"]) == os.sched_getaffinity(0)
    assert row["machine_cores"] == psutil.cpu_count()
    assert row["physical_cores"] == psutil.cpu_count(logical=False)
    assert row["memory_bytes"] == psutil.virtual_memory().total
    assert row["load_1min"] == pytest.approx(os.getloadavg()[0], abs=1.0)
    assert row["threads"] == torch.get_num_threads()
    shared = os.statvfs("/dev/shm")
    assert row["dev_shm_bytes"] == shared.f_blocks * shared.f_frsize
    if row["interface"] is not None:
        assert row["interface"] in psutil.net_if_addrs()
    if row["fastest_interface"] is not None:
        its = psutil.net_if_stats()[row["fastest_interface"]]
        assert its.isup
        assert its.speed == row["fastest_interface_mbit"]


@linux
def test_own_addresses_lie_behind_an_interface_that_psutil_gives_such_an_address() -> None:
    by_interface = {
        name: {one.address for one in addresses if one.family == socket.AF_INET}
        for name, addresses in psutil.net_if_addrs().items()
        if psutil.net_if_stats()[name].isup
    }
    for address in set().union(*by_interface.values()):
        interface = interfaces.route_to(address)
        network = address.rpartition(".")[0]
        assert any(one.startswith(network) for one in by_interface[interface]), address


@linux
def test_processor_time_of_this_process_is_psutils() -> None:
    before = psutil.Process().cpu_times()
    tree_s = machine_cores.process_tree_s(os.getpid())
    living = sum(sum(one.cpu_times()[:4]) for one in psutil.Process().children(recursive=True))
    after = psutil.Process().cpu_times()
    assert sum(before[:4]) - 0.02 <= tree_s <= sum(after[:4]) + living + 0.02


READ_ONLY = """
import sys
seen = []
def note(event, arguments):
    if event == "open" and set(str(arguments[1])) & set("wax+") and arguments[1] is not None:
        seen.append((event, str(arguments[0])))
    if event.startswith(("subprocess", "os.fork", "os.exec", "os.posix_spawn", "os.system",
                         "socket.connect", "socket.getaddrinfo", "socket.gethostby", "os.remove",
                         "os.putenv", "os.mkdir", "os.rename")):
        seen.append((event, ""))
from ddplab_watch import machine_cores, surroundings
sys.addaudithook(note)
surroundings.surroundings(None, "a-host", machine_cores.read_cpu_times())
print(seen)
"""


@linux
def test_reading_writes_nothing_starts_nothing_and_asks_nobody() -> None:
    # Python tells its audit hooks what it opens, starts, changes and looks up.
    environment = os.environ | {"PYTHONPATH": str(WATCHER.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_a_reader_that_fails_takes_nobody_else_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> dict[str, object]:
        raise RuntimeError("a system nobody thought of")

    monkeypatch.setattr(surroundings, "core_facts", fails)
    row = own_row()
    assert row["cores"] is None
    assert row["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("path", sorted(WATCHER.glob("*.py")), ids=lambda path: path.name)
def test_the_watcher_is_python_310(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 10))


UNDER_A_QUOTA = """
import sys, time
from pathlib import Path
from ddplab_watch import cgroups, machine_cores
Path(sys.argv[1], "cgroup.procs").write_text("0")
before = machine_cores.read_cpu_times()
end = time.monotonic() + 0.6
while time.monotonic() < end:
    pass
used = machine_cores.used_between(before, machine_cores.read_cpu_times())
print(cgroups.cpu_quota(), used["interval_throttled_share"])
"""


@linux
def test_the_kernels_own_quota_is_read_and_its_stops_are_counted() -> None:
    # A tenth of a core, which a loop uses up in every period, however busy the machine is.
    parent = next(iter(cgroups.own_groups("cpu")), None)
    group = parent / f"ddplab-test-{os.getpid()}" if parent else None
    try:
        group.mkdir()
    except (AttributeError, OSError):
        pytest.skip("may not make a cgroup")
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("10000 100000")
        elif (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            pytest.skip("this cgroup hands no processor time on")
        done = subprocess.run(
            [sys.executable, "-c", UNDER_A_QUOTA, str(group)],
            env=os.environ | {"PYTHONPATH": str(WATCHER.parent)},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        group.rmdir()
    quota, share = map(float, done.stdout.split())
    assert quota == 0.1
    assert share > 0.5
