"""The process that an emulated cluster lives in: ``python -m common.cluster.switch``.

Started by ``common.cluster.emulated.command`` as the first process of its own namespaces. It makes
the hosts, measures their links, starts torchrun on each as on a cluster (c10d rendezvous on the
first host) and forwards what they print. Its end is the end of every process and link in there:
the kernel sees to that, also when it is killed. It stops when its standard input is closed, which
happens too when the process that holds the other end dies.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import psutil

from common.cluster.emulated import RANK_PREFIX, EmulatedCluster
from common.cluster.launch import threads_per_rank
from common.cluster.link_probe import probe
from common.cluster.links import (
    CONGESTION_CONTROL,
    INTERFACE,
    SHALLOWEST_BYTES,
    address,
    build,
    run,
    shape,
)
from common.errors import UserError
from common.runtime.group.network import EMULATED_NETWORK
from common.runtime.group.socket_bytes import PAYLOAD_SHARE
from common.runtime.script import exit_status

# The shallowest with which the kernel sustains the rate.
BURSTS_BYTES = (SHALLOWEST_BYTES, 2**18, 2**20)
SUSTAINED = 0.95
RENDEZVOUS_PORT = 29400
OWN_END_S = 3.0  # for the other hosts to end by themselves after one failed
GRACE_S = 5.0  # for a host to end after it was told to
DRAIN_S, DRAIN_ALL_S = 1.0, 60.0  # for its last lines, after a failure and after success


def main() -> None:
    """Runs a program on a cluster: the arguments are the cluster as JSON, then the program's."""
    # As the first process of its namespace it would ignore this signal if it had no handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    description = json.loads(sys.argv[1])
    description["rates_bit_per_s"] = tuple(description["rates_bit_per_s"])
    cluster = EmulatedCluster(**description)
    hosts: list[Host] = []
    stop_at_end_of_input(hosts)
    with exit_status():
        try:
            network = connect(cluster)
        except OSError as error:
            raise UserError(f"emulated network: {error}") from None
        print(describe(cluster, network), file=sys.stderr, flush=True)
        for number in range(1, cluster.hosts + 1):
            hosts.append(Host(number, cluster, network, sys.argv[2:]))
        sys.exit(wait(hosts))


def connect(cluster: EmulatedCluster) -> dict:
    """Makes hosts and links, measures each link, and deepens the token buckets where they starve.

    Returns the record of the network: the cluster, ``burst_bytes``, ``congestion_control`` and
    ``probe``.
    """
    build(cluster, BURSTS_BYTES[0])
    write_names(cluster)
    tried: list[tuple[float, int, list]] = []
    for burst_bytes in (BURSTS_BYTES[0], *BURSTS_BYTES):  # a busy moment gets a second chance
        if tried:
            shape(cluster, burst_bytes)
        rates = [probe(host, rate) for host, rate in enumerate(cluster.rates_bit_per_s, start=1)]
        tried.append((reached(cluster, rates), burst_bytes, rates))
        if tried[-1][0] >= SUSTAINED or cluster.delay_ms:  # with a delay TCP starts slowly
            break
    # The shallowest bucket within 0.02 of the best share: a deeper one lets longer bursts pass.
    best = max(share for share, _, _ in tried)
    share, burst_bytes, rates = next(trial for trial in tried if trial[0] >= best - 0.02)
    shape(cluster, burst_bytes)
    if share < SUSTAINED and not cluster.delay_ms:
        print(
            f"warning: this machine moves only {share:.0%} of what the slowest link should carry",
            file=sys.stderr,
        )
    links = [{"host": f"host{i}", **link} for i, link in enumerate(rates, start=1)]
    network = {"hosts": cluster.hosts, **asdict(cluster), "burst_bytes": burst_bytes}
    return network | {"congestion_control": CONGESTION_CONTROL, "probe": links}


def reached(cluster: EmulatedCluster, measured: Sequence[dict[str, float]]) -> float:
    """Returns TCP's rate on the worst link, as a share of the payload that its rate allows."""
    rates = zip(measured, cluster.rates_bit_per_s, strict=True)
    return min(min(link.values()) / (PAYLOAD_SHARE * rate) for link, rate in rates)


def write_names(cluster: EmulatedCluster) -> None:
    """Writes the names by which the hosts find each other, in this cluster only."""
    names = Path("/run/cluster/hosts")
    # torch's sockets take IPv6 and ask for the mapped form of an IPv4 address.
    lines = [
        f"{prefix}{address(host)} host{host}"
        for host in range(1, cluster.hosts + 1)
        for prefix in ("", "::ffff:")
    ]
    names.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
    if Path("/etc/hosts").exists():
        run("mount", "--bind", str(names), "/etc/hosts")


def describe(cluster: EmulatedCluster, network: dict) -> str:
    """Returns a line with the hosts and the rates that a TCP stream reached on their links."""
    links = [f"{link['up'] / 1e6:.0f}/{link['down'] / 1e6:.0f}" for link in network["probe"]]
    texts = links if len(links) <= 4 else [*links[:3], "…", links[-1]]
    return f"{cluster}; a TCP stream up/down: {', '.join(texts)} Mbit/s"


class Host:
    """One emulated host: torchrun in its network, and the forwarding of what it prints."""

    def __init__(
        self, number: int, cluster: EmulatedCluster, network: dict, program: Sequence[str]
    ) -> None:
        self.name = f"host{number}"
        self.muted = False
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={cluster.hosts}",
            f"--nproc-per-node={cluster.ranks_per_host}",
            "--rdzv-backend=c10d",
            "--rdzv-id=emulated",
            f"--rdzv-endpoint={address(1)}:{RENDEZVOUS_PORT}",
            f"--rdzv-conf=is_host={int(number == 1)}",
            f"--local-addr={address(number)}",
            f"--log-dir=/run/cluster/logs/{self.name}",
            "--tee=3",
            *program,
        ]
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",  # the GPUs are this machine's, not a host's
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "HOSTNAME": self.name,
            "OMP_NUM_THREADS": str(threads_per_rank(cluster.ranks)),
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{self.name} rank ${{rank}}] ",
            "TP_SOCKET_IFNAME": INTERFACE,
            EMULATED_NETWORK: json.dumps(network),
        }
        rename = f'hostname {self.name} 2>/dev/null; exec "$@"'
        self.process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self.name,
                "unshare",
                "--uts",
                "sh",
                "-c",
                rename,
                "sh",
                *torchrun,
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._forwarders = [
            threading.Thread(target=self._forward, args=streams, daemon=True)
            for streams in (
                (self.process.stdout, sys.stdout),
                (self.process.stderr, sys.stderr),
            )
        ]
        for thread in self._forwarders:
            thread.start()

    def _forward(self, source: TextIO, target: TextIO) -> None:
        for line in source:
            from_rank = re.match(RANK_PREFIX, line)
            if from_rank or not self.muted:
                text = line.rstrip("\n") if from_rank else f"[{self.name}] {line.rstrip()}"
                try:
                    target.write(f"{text}\n")  # in one piece, so that lines stay whole
                    target.flush()
                except BrokenPipeError:  # nobody reads any more, as after `| head`
                    os._exit(128 + signal.SIGPIPE)

    def drain(self, deadline: float) -> None:
        """Waits until all that the host printed is forwarded, until ``deadline`` at most."""
        for thread in self._forwarders:
            thread.join(timeout=max(0, deadline - time.monotonic()))

    @property
    def status(self) -> int | None:
        """Returns a shell's exit status (128 + n after signal n), or None while it runs."""
        status = self.process.poll()
        return status if status is None or status >= 0 else 128 - status


def wait(hosts: Sequence[Host]) -> int:
    """Waits for all hosts; returns the status of the first that failed, else 0.

    After a failure the others have a moment to end by themselves, because what their ranks say
    helps to find the cause; then they are told to, and what is left ends with this process.
    """
    while all(host.status in (None, 0) for host in hosts):
        if all(host.status == 0 for host in hosts):
            break
        time.sleep(0.05)
    failed = next((host for host in hosts if host.status), None)
    if failed:
        if failed.status - 128 in set(signal.Signals):
            name = signal.Signals(failed.status - 128).name
            print(f"failed: {failed.name} died of {name}", file=sys.stderr, flush=True)
        wait_for_end(hosts, OWN_END_S)
        end(hosts, signal.SIGTERM)
    deadline = time.monotonic() + (DRAIN_S if failed else DRAIN_ALL_S)
    for host in hosts:
        host.drain(deadline)
    return failed.status if failed else 0


def end(hosts: Sequence[Host], number: signal.Signals) -> None:
    """Sends a signal to every process of the cluster but this one, and waits a while."""
    for host in hosts:
        host.muted = True  # torchrun's own words about having been ended help nobody
    try:
        os.kill(-1, number)
    except ProcessLookupError:  # there is none
        return
    wait_for_end(hosts, GRACE_S)


def wait_for_end(hosts: Sequence[Host], seconds: float) -> None:
    """Waits until no rank is left, for ``seconds`` at most.

    A torchrun without ranks waits minutes for its peers and has nothing more to say.
    """
    launchers = {host.process.pid for host in hosts}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and running_processes() - launchers:
        time.sleep(0.05)


def running_processes() -> set[int]:
    """Returns the ids of the cluster's processes without this one and without zombies."""
    return {
        process.pid
        for process in psutil.process_iter(["status"])
        if process.pid != 1 and process.info["status"] != psutil.STATUS_ZOMBIE
    }


def stop_at_end_of_input(hosts: Sequence[Host]) -> None:
    """Ends everything as Ctrl-C would once nobody holds the other end of standard input."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        end(hosts, signal.SIGINT)
        deadline = time.monotonic() + DRAIN_S
        for host in hosts:
            host.drain(deadline)
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
