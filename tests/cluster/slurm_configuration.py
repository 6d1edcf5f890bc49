"""The files of a private Slurm: its configuration, its pretended GPUs and munge's key."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

PARTITIONS = ("gpu", "other")
"""Both have all nodes; the first is the default."""

# linuxproc and no cgroups: it takes no rights but root's, and changes nothing of the machine.
# config_overrides: a node may have more cores than the machine. MinJobAge: ended jobs stay listed.
# FirstJobId: job files make ports from job ids, and there may be two private Slurms on a machine.
# cred_expire: a requeued job waits that long, which by default are two minutes.
CONFIGURATION = """
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
FirstJobId={first_job_id}
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=86400
KillWait=5
GresTypes=gpu
"""


def write_configuration(folder: Path, names: list[str], gpus: int, cores: int) -> None:
    """Writes slurm.conf, gres.conf with the device files it names, and a key for munge."""
    host = socket.gethostname().split(".")[0]
    controller_port, *ports = _free_ports(1 + len(names))
    configuration = CONFIGURATION.format(
        host=host,
        controller_port=controller_port,
        folder=folder,
        first_job_id=1 + secrets.randbelow(10_000),
    )
    lines = [configuration]
    gpu_lines = []
    for name, port in zip(names, ports, strict=True):
        gres = f"Gres=gpu:{gpus} " if gpus else ""
        place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        lines.append(f"NodeName={name} {place} CPUs={cores} {gres}State=UNKNOWN")
        for number in range(gpus):
            # A GPU without a File= leaves the node in the state INVAL.
            device = folder / f"{name}-gpu{number}"
            os.mknod(device, 0o20666, os.stat(os.devnull).st_rdev)
            gpu_lines.append(f"NodeName={name} Name=gpu File={device}")
    for partition in PARTITIONS:
        default = "YES" if partition == PARTITIONS[0] else "NO"
        lines.append(f"PartitionName={partition} Nodes={','.join(names)} Default={default}")
    for spool in ("state", *names):
        (folder / spool).mkdir()
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "gres.conf").write_text("\n".join(gpu_lines) + "\n")
    key = os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o400)
    with os.fdopen(key, "wb") as file:
        file.write(secrets.token_bytes(128))


def _free_ports(count: int) -> list[int]:
    """Finds ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
