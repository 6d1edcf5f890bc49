"""Names that published tables give to GPUs and networks, and what this project calls them."""

from __future__ import annotations

from common.errors import UserError
from common.studies.public.jobs import Job

PEAK_NAMES = {
    "A10": "A10",
    "A100": "A100-SXM4-80GB",
    "A100 40GB": "A100-SXM4-40GB",
    "A100 40GB PCIe": "A100-PCIE-40GB",
    "A100 80GB": "A100-SXM4-80GB",
    "A100 80GB PCIe": "A100 80GB PCIe",
    "A100 80GB SXM4": "A100-SXM4-80GB",
    "B200": "B200",
    "DGX-H100": "H100 80GB HBM3",
    "GH200": "GH200 480GB",
    "H100": "H100 80GB HBM3",
    "H100 80GB PCIe Gen5": "H100 PCIe",
    "H100 80GB SXM5": "H100 80GB HBM3",
    "H200": "H200",
    "V100 16GB": "V100-SXM2-16GB",
    "V100 32GB": "V100-SXM2-32GB",
    "a100_80gb": "A100-SXM4-80GB",
}
"""Published name of a GPU → its name among ``peaks.GPUS``."""

MEMORY_GIB = {
    "A100-SXM4-40GB": 39,
    "A100-SXM4-80GB": 79,
    "H100 80GB HBM3": 79,
    "H200": 139,
}
"""Memory that PyTorch finds on the GPU, in whole GiB."""

CLUSTERS = {
    ("A100-SXM4-80GB", "1600 Gbit/s per node RoCE"): "a100-roce",
    ("H100 80GB HBM3", "NVLink; DGX H100 InfiniBand"): "h100-ib",
    ("H200", "NVLink; 400 Gbit/s per GPU CX-7"): "h200-ib",
}
"""GPU among ``peaks.GPUS`` and published network → cluster below data/clusters."""

NODES = {
    ("A100-SXM4-80GB", "NVLink 3"): "a100-ib",
    ("A100-SXM4-80GB", "NVLink/NVSwitch"): "a100-ib",
    ("A100-SXM4-80GB", "NVSwitch"): "a100-ib",
    ("H100 80GB HBM3", "NVLink"): "h100-ib",
    ("H100 80GB HBM3", "NVLink/NVSwitch"): "h100-ib",
    ("H200", "NVLink"): "h200-ib",
    ("H200", "NVLink 4"): "h200-ib",
    ("H200", "NVLink 4, NVLS"): "h200-ib",
}
"""The same for one node, whose published network ends at the node."""

REGIMES = ("one GPU", "one node, NVLink", "one node, PCIe", "nodes", "not published")


def cluster_name(job: Job) -> str:
    """Returns the cluster below data/clusters that the job ran on, by its GPU and network.

    Raises UserError, which says what is not known.
    """
    if job.gpu not in PEAK_NAMES:
        raise UserError(f"GPU not known: {job.gpu}")
    key = PEAK_NAMES[job.gpu], job.network
    if key in CLUSTERS:
        return CLUSTERS[key]
    if key in NODES and job.gpus <= (job.gpus_per_node or job.gpus):
        return NODES[key]
    raise UserError(f"no cluster of {job.gpu} over {job.network or 'a network not published'}")


def regime(job: Job) -> str:
    """Returns which of ``REGIMES`` the job's exchange ran in.

    A network that is named by its rate per node or GPU says nothing of the node itself: those GPUs
    are all of the kind that NVLink joins.
    """
    if job.gpus == 1:
        return "one GPU"
    if job.gpus_per_node and job.gpus > job.gpus_per_node:
        return "nodes"
    if "PCIe" in f"{job.network} {job.gpu}":
        return "one node, PCIe"
    if "NVLink" in job.network or "NVSwitch" in job.network or "Gbit/s per" in job.network:
        return "one node, NVLink"
    return "not published"
