"""A cluster emulated on this machine: its parts, and a test that this machine can have one.

Every host is a network namespace with an address of its own; a switch joins them, and the link of
each host lets through a stated rate in both directions. All of it lives in namespaces that belong
to one process (``common.cluster.switch``): when that process ends, however it ends, the kernel
removes hosts, links and processes with it. Nothing has a name outside, so clusters do not meet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from common.errors import UserError
from common.runtime.group.network import emulated_name
from common.runtime.paths import search_path

MAX_HOSTS = 16
RANK_PREFIX = r"^\[host\d+ rank \d+\] ?:?"
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST_BIT_PER_S, FASTEST_BIT_PER_S = 1e6, 100e9


@dataclass(frozen=True)
class EmulatedCluster:
    """Hosts, their links and how many ranks run on each.

    Attributes:
        rates_bit_per_s: rate of each host's link, in both directions; one entry per host.
        ranks_per_host: ranks that torchrun starts on each host.
        delay_ms: delay added to every packet that a host sends, where the kernel has netem.
    """

    rates_bit_per_s: tuple[float, ...]
    ranks_per_host: int = 1
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise UserError(f"{self.hosts} hosts: an emulated cluster has 1 to {MAX_HOSTS}")
        if self.ranks_per_host < 1:
            raise UserError(f"{self.ranks_per_host} ranks per host: at least 1")
        for rate in self.rates_bit_per_s:
            if not SLOWEST_BIT_PER_S <= rate <= FASTEST_BIT_PER_S:
                raise UserError(f"rate {rate:.6g} bit/s: a link has 1mbit to 100gbit")
        if not 0 <= self.delay_ms <= 1000:
            raise UserError(f"delay {self.delay_ms} ms: 0 to 1000")

    @classmethod
    def of(
        cls, hosts: int, rates: Sequence[str], ranks_per_host: int = 1, delay_ms: float = 0.0
    ) -> EmulatedCluster:
        """Makes a cluster from rates as text: one for all hosts, or one for each."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise UserError(f"{hosts} hosts: an emulated cluster has 1 to {MAX_HOSTS}")
        parsed = tuple(parse_rate(rate) for rate in rates)
        if len(parsed) not in (1, hosts):
            raise UserError(f"{len(parsed)} rates for {hosts} hosts: give one for all, or {hosts}")
        return cls(parsed if len(parsed) == hosts else parsed * hosts, ranks_per_host, delay_ms)

    @property
    def hosts(self) -> int:
        return len(self.rates_bit_per_s)

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return emulated_name(self.hosts, self.rates_bit_per_s, delay_ms=self.delay_ms)


def parse_rate(text: str) -> float:
    """Parses a rate in tc's notation, such as ``100mbit`` or ``2.5gbit``, into bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.strip().lower())
    if match is None:
        raise UserError(f"rate {text!r} is not one; like 100mbit, 1gbit or 2.5gbit")
    rate = float(match[1]) * UNITS[match[2]]
    if not SLOWEST_BIT_PER_S <= rate <= FASTEST_BIT_PER_S:
        raise UserError(f"rate {text!r}: a link has 1mbit to 100gbit")
    return rate


def command(cluster: EmulatedCluster, program: Sequence[str]) -> list[str]:
    """Returns the command that starts ``program`` on the ranks of the cluster.

    The process ends with the status of the first torchrun that failed, and stops when its
    standard input is closed. Lines that a rank prints begin as ``RANK_PREFIX`` says.

    Raises:
        UserError: this machine cannot emulate hosts.
    """
    # -P: a folder called common where the user is must not be taken for ours.
    switch = [sys.executable, "-P", "-m", "common.cluster.switch", json.dumps(asdict(cluster))]
    return [*own_namespaces(), *switch, *program]


def own_namespaces() -> list[str]:
    """Returns the ``unshare`` command that starts a program in namespaces of its own.

    Root needs no user namespace; everyone else is root inside one. Raises UserError with the
    reason where this machine does not allow it.
    """
    if not sys.platform.startswith("linux"):
        raise UserError("emulated hosts need Linux: its network namespaces and traffic control")
    for tool, package in TOOLS.items():
        if not shutil.which(tool, path=search_path()):
            raise UserError(f"emulated hosts: no {tool} here; install {package}")
    kinds = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    ways = [["unshare", "--user", "--map-root-user", *kinds]]
    if os.geteuid() == 0:
        ways.insert(0, ["unshare", *kinds])
    refusals = []
    for way in ways:
        tried = _run([*way, "true"])
        if tried.returncode == 0:
            return way
        refusals.append(tried.stderr.strip().splitlines()[-1:] or ["no reason given"])
    raise UserError(
        f"emulated hosts need namespaces, which this machine refuses ({refusals[-1][0]}); run as "
        "root, or allow user namespaces: sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns"
    )


def why_no_hosts() -> str | None:
    """Returns the reason why this machine cannot emulate hosts, or None. Tries the real thing."""
    try:
        namespaces = own_namespaces()
    except UserError as error:
        return str(error)
    needed = (
        "mount -t tmpfs tmpfs /run",
        "ip link add switch type bridge",
        "ip link add port1 type veth",
        "tc qdisc add dev lo root tbf rate 1gbit burst 64kb limit 1mb",
        "echo reno >/proc/sys/net/ipv4/tcp_congestion_control",
    )
    for step in needed:
        tried = _run([*namespaces, "sh", "-c", step])
        if tried.returncode:
            return f"emulated hosts: `{step}`: {' '.join(tried.stderr.split())}"
    return None


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"PATH": search_path()}
    return subprocess.run(arguments, capture_output=True, text=True, env=environment)
