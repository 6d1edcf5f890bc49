"""Names that published tables give to GPUs and networks, and what this project calls them."""

from __future__ import annotations

from common.errors import UserError
from common.studies.public.jobs import PublishedJob

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
    "GH200": "GH200 120GB",
    "H100 96GB HBM2e 2.4 TB/s, 500 W": "H100 96GB HBM2e",
    "TITAN RTX 24GB": "TITAN RTX",
    "H100": "H100 80GB HBM3",
    "H100 80GB PCIe Gen5": "H100 PCIe",
    "H100 80GB SXM5": "H100 80GB HBM3",
    "H200": "H200",
    "V100 16GB": "V100-SXM2-16GB",
    "V100 32GB": "V100-SXM2-32GB",
    "a100_80gb": "A100-SXM4-80GB",
}
"""Published name of a GPU → its name among ``peaks.GPUS``."""

CLUSTERS = {
    ("A100-SXM4-80GB", "1600 Gbit/s per node RoCE"): "a100-roce",
    ("A100-SXM4-80GB", "400 Gbit/s per node"): "a100-400g",
    ("GH200 120GB", "NVLink; Slingshot 11, 4 x 200 Gbit/s a node"): "gh200-alps",
    ("H100 80GB HBM3", "NVLink; DGX H100 InfiniBand"): "h100-ib",
    ("H100 80GB HBM3", "800 Gbit/s per node"): "h100-800g",
    ("H100 96GB HBM2e", "NVLink; 400 Gbit/s per GPU RDMA"): "h100-96-roce",
    ("H200", "NVLink; 400 Gbit/s per GPU CX-7"): "h200-ib",
}
"""GPU among ``peaks.GPUS`` and published network → cluster below data/clusters."""

NODES = {
    ("A10", "PCIe"): "a10-pcie",
    ("A100-PCIE-40GB", "PCIe"): "a100-40-pcie",
    ("A100-SXM4-40GB", ""): "a100-40-ib",
    ("A100-SXM4-40GB", "NVSwitch"): "a100-40-ib",
    ("A100 80GB PCIe", "PCIe"): "a100-pcie-vm",
    ("A100-SXM4-80GB", "NVLink 3"): "a100-ib",
    ("A100-SXM4-80GB", "NVLink/NVSwitch"): "a100-vm",
    ("A100-SXM4-80GB", "NVSwitch"): "a100-ib",
    ("B200", "NVLink"): "b200-ib",
    ("H100 80GB HBM3", "NVLink"): "h100-ib",
    ("H100 80GB HBM3", "NVLink/NVSwitch"): "h100-ib",
    ("H100 PCIe", "PCIe"): "h100-pcie",
    ("H200", "NVLink"): "h200-ib",
    ("H200", "NVLink 4"): "h200-ib",
    ("H200", "NVLink 4, NVLS"): "h200-ib",
    ("TITAN RTX", "NCCL_P2P_DISABLE=1 (PCIe via host)"): "titan-rtx-pcie",
    ("TITAN RTX", "NVLink NV2"): "titan-rtx-nvlink",
    ("V100-SXM2-16GB", "LambdaCloud V100 (NVLink)"): "v100-vm",
    ("V100-SXM2-16GB", "NVLink hybrid cube mesh"): "v100-dgx1",
    ("V100-SXM2-32GB", "NVLink hybrid cube mesh"): "v100-32-dgx1",
    ("V100-SXM2-32GB", "NVSwitch"): "v100-dgx2",
}
"""(GPU, network) of one node, whose published network ends at the node → name of a cluster."""

REGIMES = ("one GPU", "one node, NVLink", "one node, PCIe", "nodes", "not published")


def cluster_name(job: PublishedJob) -> str:
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


def regime(job: PublishedJob) -> str:
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
