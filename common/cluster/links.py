"""The hosts and links of an emulated cluster, made with ``ip`` and ``tc``.

Runs inside the cluster's own namespaces (``common.cluster.switch``). The switch is a bridge; each
host has one end of a veth pair, called eth0, and the bridge has the other. A token bucket (tbf)
on both ends limits what the host sends and what it receives.

Two settings make all-reduces on these links as steady as on a switch. Packets that the network
stack hands over at once are smaller than the bucket: larger ones would be cut up one by one, which
takes more of the processor than it has at 1 Gbit/s on four hosts, and overflows its queues. The
switch, which sends when links are probed, obeys, too: with its own, larger packets a stream to a
host reached 400 to 800 Mbit/s of 1 Gbit/s. And TCP is Reno: nothing is lost here, so it sends at
the link's rate, where BBR, which some machines use, keeps trying lower rates (4 hosts at 250
Mbit/s: 422 ± 0 against 430 to 510 ms for 8 MiB).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from common.cluster.emulated import EmulatedCluster
from common.errors import UserError

INTERFACE = "eth0"
SWITCH_ADDRESS = "10.77.0.254"
QUEUE_S = 0.05
PACKET_BYTES = 60_000
SHALLOWEST_BYTES = 2**16
"""The least depth of a token bucket: one packet fits."""
CONGESTION_CONTROL = "reno"
OWN = ("netns", "cluster", "mount")
"""Folders of /run that are the cluster's own; the last is that of the command."""


def address(host: int) -> str:
    """Returns the address of a host, counted from 1.

    As text the addresses sort like the hosts, which gives host 1 rank 0: torchrun orders nodes by
    the text of their addresses.
    """
    return f"10.77.0.{100 + host}"


def build(cluster: EmulatedCluster, burst_bytes: int) -> None:
    """Makes the switch, the hosts and their links; UserError has a refused command's words."""
    replace_run()
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    choose_tcp = ("sh", "-c", f"echo {CONGESTION_CONTROL} >{setting}")
    run(*choose_tcp)  # of the switch, which sends to the hosts when links are probed
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "address", "add", f"{SWITCH_ADDRESS}/24", "dev", "switch")
    run("ip", "link", "set", "switch", "gso_max_size", str(PACKET_BYTES))
    run("ip", "link", "set", "switch", "up")
    for host in range(1, cluster.hosts + 1):
        name, port = f"host{host}", f"port{host}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        run("ip", "link", "set", port, "gso_max_size", str(PACKET_BYTES))
        run("ip", "-n", name, "link", "set", INTERFACE, "gso_max_size", str(PACKET_BYTES))
        run("ip", "netns", "exec", name, *choose_tcp)
        run("ip", "link", "set", port, "master", "switch", "up")
        run("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
        run("ip", "-n", name, "link", "set", INTERFACE, "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        if cluster.delay_ms:
            delay(name, cluster.delay_ms)
    shape(cluster, burst_bytes)


def replace_run() -> None:
    """Mounts an empty /run, which hides the machine's netns, and shows its other folders there.

    The project, Python or the user's temporary files may lie in one of them.
    """
    before = os.open("/run", os.O_PATH)
    try:
        kept = [entry for entry in os.scandir("/run") if entry.is_dir() and entry.name not in OWN]
        run("mount", "-t", "tmpfs", "tmpfs", "/run")
        for name in OWN:
            Path("/run", name).mkdir(exist_ok=True)
        for entry in kept:
            if entry.is_symlink():
                os.symlink(os.readlink(f"/proc/self/fd/{before}/{entry.name}"), entry.path)
                continue
            os.mkdir(entry.path)
            old = f"/proc/self/fd/{before}/{entry.name}"
            # Not every folder can be shown again; few are asked for.
            bind = ["mount", "--no-canonicalize", "--rbind", old, entry.path]
            subprocess.run(bind, pass_fds=[before], stderr=subprocess.DEVNULL)
    finally:
        os.close(before)


def shape(cluster: EmulatedCluster, burst_bytes: int) -> None:
    """Limits every link, both ways, with token buckets of this depth; may be called again."""
    for host, rate in enumerate(cluster.rates_bit_per_s, start=1):
        parent = ("parent", "1:1") if cluster.delay_ms else ("root",)
        _token_bucket(rate, burst_bytes, "dev", INTERFACE, *parent, netns=f"host{host}")
        _token_bucket(rate, burst_bytes, "dev", f"port{host}", "root")


def limit_own_link(rate_bit_per_s: float) -> None:
    """Limits what this host sends; to be called on an emulated host, whose own end this is.

    The other end of the link, which limits what the host receives, stays as it was built: no rate
    above that one is reached. Raises UserError where the link is not this process's to limit.
    """
    _token_bucket(rate_bit_per_s, SHALLOWEST_BYTES, "dev", INTERFACE, "root")


def _token_bucket(rate: float, burst_bytes: int, *where: str, netns: str | None = None) -> None:
    limit = int(max(4 * burst_bytes, rate / 8 * QUEUE_S))
    inside = ("-n", netns) if netns else ()
    bucket = ("tbf", "rate", f"{rate:.0f}bit", "burst", str(burst_bytes), "limit", str(limit))
    try:
        run("tc", *inside, "qdisc", "replace", *where, *bucket)
    except UserError as error:
        if "Unknown qdisc" in str(error) or "kind is unknown" in str(error):
            raise UserError("this kernel has no tbf (sch_tbf), which limits the links") from None
        raise


def delay(netns: str, delay_ms: float) -> None:
    """Delays what a host sends. Raises UserError where the kernel has no netem."""
    netem = ("handle", "1:", "netem", "delay", f"{delay_ms}ms", "limit", "100000")
    try:
        run("tc", "-n", netns, "qdisc", "add", "dev", INTERFACE, "root", *netem)
    except UserError as error:
        if "nknown" not in str(error):
            raise
        raise UserError(
            "this kernel has no netem (sch_netem), which --delay-ms needs; ddp_benchmark.py "
            "--added_latency_ms adds latency in a comm hook instead"
        ) from None


def run(*arguments: str) -> None:
    """Runs one command. Raises UserError with what it said where it fails."""
    process = subprocess.run(arguments, capture_output=True, text=True)
    if process.returncode:
        message = " ".join(process.stderr.split())
        raise UserError(f"emulated network: `{' '.join(arguments)}`: {message}")
