"""Where a rank computes, by column of ``placement.csv``."""

from __future__ import annotations

import os
import socket

import torch

from ddplab_watch.machine_cores import own_cores


def placement(device: torch.device) -> dict[str, object]:
    """Returns this rank's host, device, cores and threads.

    ``identity`` is equal for two ranks on one device, or on the same cores.
    """
    cores = sorted(own_cores())
    listed = " ".join(map(str, cores))
    identity = f"cores {listed}"
    if device.type == "cuda":
        identity = str(torch.cuda.get_device_properties(device).uuid)
    return {
        "host": socket.gethostname(),
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "device": str(device),
        "identity": identity,
        "cores": len(cores) or os.cpu_count(),
        "core_list": listed,
        "threads": torch.get_num_threads(),
    }
