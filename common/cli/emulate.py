"""``ddplab emulate``: run a script on hosts emulated on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from common.errors import UserError


@dataclass(frozen=True)
class Emulate:
    """Run a script on emulated hosts: ddplab emulate --hosts 2 --rate 1gbit -- SCRIPT [FLAG …]

    Each host is a network namespace whose link carries the stated rate in both directions, and
    torchrun starts the script on each as on a cluster. Any script will do; what its ranks print
    is prefixed with host and rank, and the exit status is torchrun's. The hosts share this
    machine's cores and have no GPU. Needs Linux with iproute2; root, or user namespaces.
    """

    hosts: int = 2
    """Number of hosts, 1 to 16."""
    rate: tuple[str, ...] = ("1gbit",)
    """Rate of the links, such as 500mbit: one for all hosts, or one for each."""
    nproc_per_host: int = 1
    """Ranks on each host."""
    delay_ms: float = 0.0
    """Delay of every packet that a host sends; the kernel must have netem."""
    clean: bool = False
    """Remove what is left of clusters whose launcher is gone, and do nothing else."""
    program: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()

    def run(self) -> None:
        """Runs the script and leaves with torchrun's status."""
        from common.cluster.emulated import EmulatedCluster
        from common.cluster.launch import emulate, end_orphaned_clusters

        if self.clean:
            ended = end_orphaned_clusters()
            print(f"{ended} left-over processes ended" if ended else "nothing was left")
            return
        if not self.program:
            raise UserError("nothing to run: end the command with -- SCRIPT [FLAG …]")
        cluster = EmulatedCluster.of(self.hosts, self.rate, self.nproc_per_host, self.delay_ms)
        sys.exit(emulate(cluster, self.program))
