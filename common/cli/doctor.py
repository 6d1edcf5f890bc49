"""``ddplab doctor``: what this machine can do, where ranks run, and a self-test of everything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

from common.errors import UserError

PACKAGES = (
    *("torch", "transformers", "datasets", "numpy", "pandas", "matplotlib"),
    *("papermill", "jupyterlab", "nbconvert", "pypandoc_binary", "typst", "tyro", "rich"),
)


@dataclass(frozen=True)
class Doctor:
    """Show devices, ranks, backends and versions, and what is missing for which feature.

    Started on several ranks (srun, torchrun) it shows the placement of every rank instead, and
    fails when two share a device or when there are more workers than GPUs.
    """

    selftest: bool = False
    """Run every benchmark at its smallest and show what passed (at most three minutes)."""
    output_dir: str = "outputs"
    """Where the self-test writes."""

    def run(self) -> None:
        """Print the tables; exit status 2 when something the main job needs is missing."""
        from common.cli.selftest import run_selftest
        from common.runtime.ranks import current_ranks

        if self.selftest:
            run_selftest(self.output_dir)
        elif current_ranks().world_size > 1:
            show_placement()
        else:
            self.show_features()

    def show_features(self) -> None:
        """What works on this machine."""
        from rich.console import Console
        from rich.table import Table

        console = Console()
        about = Table("", "found", title="This process", title_justify="left", show_header=False)
        for name, value in describe():
            about.add_row(name, value)
        console.print(about)
        features = Table("feature", "", "detail", title="What works here", title_justify="left")
        checks = check_features()
        for check in checks:
            features.add_row(check.feature, "yes" if check.works else "no", check.detail)
        console.print(features)
        broken = [check.feature for check in checks if check.required and not check.works]
        if broken:
            raise UserError(f"missing for the main job: {', '.join(broken)}; run `uv sync`")


def show_placement() -> None:
    """Print where every rank runs. Raises UserError when that cannot go well."""
    from rich.console import Console
    from rich.table import Table

    from common.runtime.placement import own_placement, placement_problems, too_many_workers

    _refuse(too_many_workers(own_placement()))
    from common.runtime.process_group import process_group, visible_gpus

    with process_group("cpu") as worker:
        places = worker.gather(own_placement(gpus=visible_gpus()))
    if worker.is_main and os.environ.get("SLURM_PROCID", "0") == "0":
        table = Table(
            *("rank", "host", "local rank", "device", "CUDA_VISIBLE_DEVICES", "GPUs granted"),
            title="Placement",
            title_justify="left",
        )
        for place in places:
            row = (place.rank, place.host, place.local_rank, place.device)
            granted = "not said" if place.granted_gpus is None else place.granted_gpus
            table.add_row(*map(str, (*row, place.visible or "not set", granted)))
        Console(width=110).print(table)
    _refuse(placement_problems(places))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("; ".join(problems))


@dataclass(frozen=True)
class Check:
    """Whether a feature works here, and why or what would make it work."""

    feature: str
    works: bool
    detail: str
    required: bool = False


def describe() -> list[tuple[str, str]]:
    """Devices, ranks, backends and versions, as (name, value)."""
    import torch
    import torch.distributed as dist

    from common.runtime.environment import cpu_model, usable_cores
    from common.runtime.ranks import current_ranks

    ranks = current_ranks()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = [
        name
        for name, available in (
            ("nccl", dist.is_nccl_available() and bool(gpus)),
            ("gloo", dist.is_gloo_available()),
            ("mpi", dist.is_mpi_available()),
        )
        if available
    ]
    versions = "  ".join(f"{name} {version(name) or 'missing'}" for name in PACKAGES)
    return [
        ("CPU", f"{usable_cores()} cores of {cpu_model()}"),
        ("GPUs", ", ".join(gpus) or "none visible"),
        ("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "not set")),
        (
            "rank",
            f"{ranks.rank} of {ranks.world_size}, local {ranks.local_rank} of "
            f"{ranks.local_world_size}, started by {ranks.launcher}",
        ),
        ("backends", ", ".join(backends)),
        (
            "threads per rank",
            os.environ.get("OMP_NUM_THREADS", f"not set ({torch.get_num_threads()})"),
        ),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.release()}"),
        ("CUDA build", f"{torch.version.cuda or 'none'}"),
        ("packages", versions),
    ]


def check_features() -> list[Check]:
    """One check per feature; each imports or runs the real thing."""
    return [
        _benchmarks(),
        _gpu(),
        _all_reduce(),
        _packages("notebooks", ("papermill", "jupyterlab", "ipykernel")),
        _packages("report", ("nbconvert", "pypandoc_binary", "typst")),
        _emulated_hosts(),
        _slurm(),
    ]


def version(package: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _benchmarks() -> Check:
    import torch.distributed as dist

    works = dist.is_available() and dist.is_gloo_available()
    return Check("benchmarks on CPU", works, "gloo" if works else "torch lacks gloo", True)


def _gpu() -> Check:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        detail = f"{torch.cuda.device_count()} GPUs, {free / 2**30:.0f} of {total / 2**30:.0f} GiB"
        return Check("benchmarks on GPU", True, f"{detail} free on the first")
    driver = shutil.which("nvidia-smi")
    reason = "the driver is there but torch cannot use it" if driver else "no NVIDIA driver here"
    return Check("benchmarks on GPU", False, f"{reason}; the laptop preset needs none")


def _all_reduce() -> Check:
    import torch
    import torch.distributed as dist

    from common.runtime.process_group import process_group
    from common.runtime.ranks import current_ranks

    if current_ranks().world_size > 1:
        return Check("all-reduce", True, "not tried inside a job", True)
    with process_group("cpu"):
        value = torch.ones(4)
        dist.all_reduce(value)
    return Check("all-reduce", bool((value == 1).all()), "one gloo rank", True)


def _packages(feature: str, names: tuple[str, ...]) -> Check:
    missing = [name for name in names if version(name) is None]
    detail = f"missing: {', '.join(missing)}" if missing else ", ".join(names)
    return Check(feature, not missing, detail, True)


def _emulated_hosts() -> Check:
    from common.cluster.emulated import why_not

    reason = why_not()
    return Check("emulated hosts", reason is None, reason or "namespaces, veth and tbf")


def _slurm() -> Check:
    sbatch = shutil.which("sbatch")
    return Check("cluster jobs", bool(sbatch), "sbatch found" if sbatch else "no sbatch here")
