"""Emulated hosts: real namespaces, links and torchruns; nothing is left of them afterwards."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from command_line import refused
from interruptible import living, start_interruptible, wait_until
from quick_torchrun import REFUSE, write_quick_torchrun
from refusals import problem

from common.analysis.buckets.measurements import check_comparable
from common.cluster import emulated
from common.cluster.emulated import EmulatedCluster, parse_rate
from common.cluster.launch import launch
from common.cluster.switch import BURSTS_BYTES
from common.errors import UserError
from common.runtime.group.network import layout_name
from common.runtime.processes.process_identity import LAUNCHER
from common.runtime.records.run_directory import read_environment

pytestmark = pytest.mark.xdist_group("emulated")

DDPLAB = Path(sys.executable).with_name("ddplab")
ONE_HOST = EmulatedCluster.of(1, ["1gbit"])
REASON = emulated.why_no_hosts()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts here: {REASON}")

# The ranks do not import torch: that would take seconds, and torchrun does not ask for it.
REPORT = """
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
said = {name: os.environ[name] for name in names}
said |= {"host": socket.gethostname(), "arguments": sys.argv[1:]}
said |= {"found": socket.gethostbyname("host2"), "cards": sorted(os.listdir("/sys/class/net"))}
said |= {"network": json.loads(os.environ["DDPLAB_EMULATED_NETWORK"])}
print(json.dumps(said))
"""
MEASURE = """
import sys, time
from common.runtime.machine.environment import describe_environment
from common.runtime.records.run_directory import RunDirectory
RunDirectory.create(sys.argv[1], "probe", {}, describe_environment("gloo", "cpu"), "run")
time.sleep(600)
"""
FAIL = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit("rank 1 has had enough")
"""
WAIT = """
import pathlib, os, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"rank-{rank}").touch()
while len(list(folder.glob("rank-*"))) < int(sys.argv[2]):
    time.sleep(0.1)
(folder / "all").touch()
time.sleep(120)
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def quick_torchrun(tmp_path: Path) -> dict[str, str]:
    """Returns variables with which hosts start their ranks at once."""
    return write_quick_torchrun(tmp_path / "quick")


def start(
    *arguments: object, command: tuple = (DDPLAB,), variables: Mapping[str, str] | None = None
) -> subprocess.Popen:
    return start_interruptible(
        [*map(str, command), "emulate", *map(str, arguments)],
        env=os.environ | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_of(launcher: int) -> list[psutil.Process]:
    """Finds what runs on behalf of one ``ddplab emulate``."""
    return living(lambda own: own.get(LAUNCHER, "").startswith(f"{launcher}:"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Asserts after every test that no namespace with a name and no new link is left."""

    def visible() -> tuple[list[str], list[str]]:
        links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        return [line.split()[0] for line in links.splitlines()], spaces.splitlines()

    before = visible() if REASON is None else None
    yield
    assert before is None or visible() == before


@pytest.mark.parametrize(
    ("text", "bit_per_s"),
    [("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("100mbit", 1e8), ("64000kbit", 6.4e7)],
)
def test_rates_are_in_the_notation_of_tc(text: str, bit_per_s: float) -> None:
    assert parse_rate(text) == bit_per_s


@pytest.mark.parametrize(
    "text", ["fast", "", "1", "1gb", "1gbps", "-1gbit", "0gbit", "nangbit", "1e9gbit", "1kbit"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    assert "rate " in problem(parse_rate, text)


def test_a_cluster_has_1_to_16_hosts_and_a_rate_for_all_or_for_each() -> None:
    assert EmulatedCluster.of(3, ["1gbit"]).rates_bit_per_s == (1e9, 1e9, 1e9)
    assert EmulatedCluster.of(2, ["1gbit", "500mbit"], 2).ranks == 4
    assert str(EmulatedCluster.of(2, ["1gbit", "500mbit"])) == "2 emulated hosts at 1, 0.5 Gbit/s"
    for hosts, rates in ((0, ["1gbit"]), (17, ["1gbit"]), (3, ["1gbit", "2gbit"]), (2, [])):
        problem(EmulatedCluster.of, hosts, rates)
    for delay_ms in (-1.0, float("nan")):
        assert "delay" in problem(EmulatedCluster.of, 2, ["1gbit"], delay_ms=delay_ms)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hosts", 0, "--", "x.py"), "0 hosts: an emulated cluster has 1 to 16"),
        (("--hosts", 17, "--", "x.py"), "17 hosts"),
        (("--rate", "fast", "--", "x.py"), "rate 'fast' is not one; like 100mbit"),
        (("--hosts", 3, "--rate", "1gbit", "1gbit", "--", "x.py"), "2 rates for 3 hosts"),
        (("--", "nowhere.py"), "script nowhere.py: no such file"),
        ((), "nothing to run"),
        (("--nproc-per-host", 0, "--", "x.py"), "0 ranks per host"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple, said: str) -> None:
    assert said in refused("emulate", *arguments)


def test_only_emulate_runs_a_program() -> None:
    assert "only ddplab emulate" in refused("doctor", "--", "x.py")


def test_missing_tools_are_named_with_their_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(emulated, "search_path", lambda: str(tmp_path))
    assert "no ip here; install iproute2" in problem(emulated.own_namespaces)


@needs_hosts
def test_what_lies_below_run_is_seen_by_emulated_hosts(quick_torchrun) -> None:
    if not os.access("/run", os.W_OK):
        pytest.skip("only root may write to /run")
    with tempfile.TemporaryDirectory(dir="/run", prefix="with spaces ü ") as name:
        script, folder = Path(name) / "script.py", Path(name) / "temporary"
        folder.mkdir()
        script.write_text("import tempfile; print(tempfile.gettempdir())")
        variables = quick_torchrun | {"TMPDIR": str(folder)}
        process = start("--hosts", 1, "--", script, variables=variables)
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert out.strip().endswith(str(folder))


@needs_hosts
def test_a_machine_that_refuses_namespaces_says_so(script) -> None:
    # A user namespace whose limits allow no namespaces below it is such a machine.
    refuse = "for kind in net user; do echo 0 > /proc/sys/user/max_${kind}_namespaces; done"
    program = shlex.join([str(DDPLAB), "emulate", "--", str(script(REPORT))])
    command = f"{refuse}; exec {program}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "emulated hosts need namespaces, which this machine refuses" in done.stderr


@needs_hosts
def test_a_kernel_without_tbf_says_so(script, tmp_path: Path) -> None:
    # tc's words for a kind of queue that the kernel does not have (seen with netem)
    fake = tmp_path / "tools" / "tc"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    fake.chmod(0o755)
    path = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    process = start("--", script(REPORT), variables=path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == "error: this kernel has no tbf (sch_tbf), which limits the links\n"


@needs_hosts
def test_delay_needs_netem(script, tmp_path: Path) -> None:
    tried = subprocess.run(
        [*emulated.own_namespaces(), "tc", "qdisc", "add", "dev", "lo", "root", "netem"],
        capture_output=True,
    )
    if tried.returncode == 0:
        pytest.skip("this kernel has netem")
    late = EmulatedCluster.of(1, ["1gbit"], delay_ms=5)
    said = problem(launch, script(""), [], 1, tmp_path / "log", hosts=late)
    assert said.startswith("this kernel has no netem")


@needs_hosts
@pytest.mark.slow
def test_two_clusters_at_once_each_with_its_own_hosts_and_rates(script) -> None:
    report, fail = script(REPORT), script(FAIL, "fail.py")
    good = start("--rate", "200mbit", "20mbit", "--", report, "--flag", "a b")
    bad = start("--hosts", 1, "--nproc-per-host", 2, "--", fail)
    out, errors = good.communicate(timeout=100)
    assert good.returncode == 0, errors
    lines = dict(re.findall(r"^\[host(\d) rank \d\]:?\s*(\{.*\})$", out, flags=re.M))
    said = {host: json.loads(line) for host, line in lines.items()}
    assert sorted(said) == ["1", "2"], out
    for host, rank in (("1", "0"), ("2", "1")):
        # the first host has rank 0 and holds the rendezvous; gloo uses the link and not loopback
        assert said[host]["RANK"] == rank
        assert said[host]["host"] == f"host{host}"
        assert said[host]["WORLD_SIZE"] == "2"
        assert said[host]["LOCAL_RANK"] == "0"
        assert said[host]["GLOO_SOCKET_IFNAME"] == "eth0"
        assert said[host]["cards"] == ["eth0", "lo"]
        assert said[host]["arguments"] == ["--flag", "a b"]
    assert said["2"]["MASTER_ADDR"] != "127.0.0.1"
    assert said["1"]["network"]["rates_bit_per_s"] == [2e8, 2e7]

    _, errors = bad.communicate(timeout=100)
    assert bad.returncode == 1  # torchrun's
    assert "[host1 rank 1]" in errors
    assert "rank 1 has had enough" in errors


@needs_hosts
@pytest.mark.alone
def test_each_link_carries_its_own_rate(script, quick_torchrun) -> None:
    program = script("import os; print(os.environ['DDPLAB_EMULATED_NETWORK'])")
    process = start("--rate", "200mbit", "20mbit", "--", program, variables=quick_torchrun)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    network = json.loads(re.search(r"\{.*\}$", out.splitlines()[0])[0])
    assert network["burst_bytes"] in BURSTS_BYTES  # which one depends on how busy the machine is
    fast, slow = network["probe"]
    for direction in ("up", "down"):
        assert slow[direction] < 1.1 * 2e7
        # ten times the rate: three times is beyond what a busy machine can blur
        assert fast[direction] > 3 * slow[direction]


@needs_hosts
def test_killed_interrupted_or_bereft_of_a_host_nothing_is_left(
    script, quick_torchrun, tmp_path: Path
) -> None:
    def started(name: str, *command: object, hosts: int = 1) -> subprocess.Popen:
        folder = tmp_path / name
        folder.mkdir()
        more = ("--hosts", hosts, "--", script(WAIT), folder, hosts)
        return start(*more, command=command or (DDPLAB,), variables=quick_torchrun)

    def running(name: str) -> bool:
        return (tmp_path / name / "all").exists()

    measure = script(MEASURE, "measure.py")
    # As any user but root would start it: in a user namespace.
    as_user = "import os; os.geteuid = lambda: 1000; from common.cli.main import main; main()"
    clusters = {
        "killed": start("--hosts", 1, "--", measure, tmp_path, variables=quick_torchrun),
        "interrupted": started("interrupted", sys.executable, "-c", as_user),
        "terminated": started("terminated"),
        "bereft": started("bereft", hosts=2),
    }
    run = tmp_path / "run"
    wait_until((run / "environment.json").exists)
    assert read_environment(run)["host"] != socket.gethostname()
    assert read_environment(run)["status"] == "running"
    for name in list(clusters)[1:]:
        wait_until(lambda name=name: running(name))
    pids = {name: process.pid for name, process in clusters.items()}
    user_space = os.stat("/proc/self/ns/user").st_ino
    inside = {os.stat(f"/proc/{p.pid}/ns/user").st_ino for p in processes_of(pids["interrupted"])}
    assert inside - {user_space}  # it really was in one

    clusters["killed"].kill()
    clusters["interrupted"].send_signal(signal.SIGINT)
    clusters["terminated"].terminate()
    torchruns = [
        process
        for process in processes_of(pids["bereft"])
        if "torch.distributed.run" in process.cmdline()
        and "--log-dir=/run/cluster/logs/host2" in process.cmdline()
    ]
    torchruns[0].kill()

    assert clusters["interrupted"].wait(timeout=30) == 130
    assert clusters["terminated"].wait(timeout=30) == 128 + signal.SIGTERM
    # those that had time to say goodbye have waited for the end of all they started
    assert processes_of(pids["interrupted"]) + processes_of(pids["terminated"]) == []
    assert clusters["bereft"].wait(timeout=30) == 128 + signal.SIGKILL
    assert "failed: host2 died of SIGKILL" in clusters["bereft"].stderr.read()
    clusters["killed"].wait(timeout=30)
    assert read_environment(run)["status"] == "failed"
    subprocess.run([DDPLAB, "emulate", "--clean"], check=True, capture_output=True)
    for pid in pids.values():
        assert processes_of(pid) == []


README_COMMAND = """ddplab emulate --hosts 2 --rate 1gbit --
    assignments/assignment2/ddp_benchmark.py
    --config assignments/assignment2/configs/smoke.yaml"""


@needs_hosts
@pytest.mark.slow
def test_a_benchmark_records_the_emulated_network_and_is_not_mixed_with_loopback(
    tmp_path: Path,
) -> None:
    _, *words = shlex.split(README_COMMAND)
    words += ["--output_dir", str(tmp_path), "--run_id", "run"]
    root = Path(__file__).resolve().parents[2]
    subprocess.run([DDPLAB, *words], cwd=root, check=True, capture_output=True)
    record = read_environment(tmp_path / "run")
    assert record["status"] == "complete"
    assert record["network"] == "2 emulated hosts at 1 Gbit/s"
    assert "2 ranks on 2 emulated hosts at 1 Gbit/s" in record["hardware"]
    assert [link["host"] for link in record["interconnect"]["emulated"]["probe"]] == [
        "host1",
        "host2",
    ]
    loopback = tmp_path / "loopback"
    shutil.copytree(tmp_path / "run", loopback)
    (loopback / "environment.json").write_text(
        json.dumps(record | {"network": layout_name("gloo", [2])})
    )
    tables = [run / "ddp-times.csv" for run in (tmp_path / "run", loopback)]
    assert "network differs" in problem(check_comparable, tables)


@needs_hosts
def test_what_a_rank_refuses_comes_back_from_emulated_hosts(
    script, quick_torchrun, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", quick_torchrun["PYTHONPATH"])
    refuse = script(REFUSE)
    with pytest.raises(UserError, match="rounds is 1; it must be above 0"):
        launch(refuse, [], 1, tmp_path / "log", hosts=ONE_HOST)
