"""``ddplab doctor``: what this machine can do, where ranks run, and a self-test of everything."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.cli import gpu_checks as checks
from common.cli.gpu_checks import OVERLAP, Check, gpu_rows, overlap, reachable_peers
from common.cli.printed import print_lines
from common.errors import RunFailed, UserError
from common.runtime.machine.device import granted_gpus, hides_gpus
from common.runtime.machine.environment import cpu_model, package_version, usable_cores
from common.runtime.processes.ranks import current_ranks
from common.runtime.wording import counted

if TYPE_CHECKING:
    from common.runtime.machine.gpus import GpuFacts

PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "numpy",
    "pandas",
    "matplotlib",
    "papermill",
    "jupyterlab",
    "nbconvert",
    "pypandoc_binary",
    "typst",
    "tyro",
    "rich",
)


@dataclass(frozen=True)
class Doctor:
    """Show devices, ranks, backends and versions, and what is missing for which feature.

    Started on several ranks (srun, torchrun) it shows the placement of every rank instead, and
    fails when two share a device or when there are more workers than GPUs.
    """

    selftest: bool = False
    """Run every benchmark at its smallest and show what passed (at most three minutes)."""
    pairs: bool = False
    """Time every pair of ranks and name the slow host or link: inside a job (srun, torchrun,
    ddplab emulate) its ranks, else ranks of this machine."""
    ranks: int | None = None
    """With --pairs, outside of a job: ranks to start here; by default one a GPU, else 2."""
    output_dir: str = "outputs"
    """Folder that the self-test writes to."""

    def run(self) -> None:
        """Prints the tables; exit status 2 when something the main job needs is missing."""
        if self.pairs and self.selftest:
            raise UserError("--selftest and --pairs: give one")
        if self.ranks is not None and (not self.pairs or current_ranks().world_size > 1):
            raise UserError("--ranks goes with --pairs, outside of a job")
        if self.pairs or self.selftest:
            from common.cli import doctor_ranks

            if self.pairs:
                doctor_ranks.time_pairs(self.ranks)
            else:
                doctor_ranks.run_selftest(self.output_dir)
        elif current_ranks().world_size > 1:
            show_placement()
        else:
            self.show_features()

    def show_features(self) -> None:
        """Prints what works on this machine. Raises UserError if the main job lacks something."""
        from rich.console import Console
        from rich.table import Table

        console = Console()
        facts = find_gpus()
        tables = {"This process": describe()}
        if facts.gpus:
            tables["GPUs"] = gpu_rows(facts)
        for title, rows in tables.items():
            about = Table("", "found", title=title, title_justify="left", show_header=False)
            for name, value in rows:
                about.add_row(name, value)
            console.print(about)
        features = Table("feature", "", "detail", title="What works here", title_justify="left")
        checks = [*check_features(facts), *check_gpus(facts)]
        for check in checks:
            features.add_row(check.feature, "yes" if check.works else "no", check.detail)
        console.print(features)
        broken = [check.feature for check in checks if check.required and not check.works]
        if broken:
            raise UserError(f"missing for the main job: {', '.join(broken)}; run `uv sync`")


def show_placement() -> None:
    """Prints where every rank runs. Raises UserError when that cannot go well."""
    from rich.console import Console
    from rich.table import Table

    from common.runtime.machine.placement import own_placement, placement_problems, too_many_workers

    _refuse(too_many_workers(own_placement()))
    from common.runtime.group.process_group import process_group, visible_gpus

    reachable = reachable_peers(find_gpus().listed, granted_gpus())
    with process_group("cpu") as worker:
        placements = worker.gather(own_placement(gpus=visible_gpus()))
        hidden = worker.gather(reachable.detail if reachable and not reachable.works else None)
    if worker.is_main and os.environ.get("SLURM_PROCID", "0") == "0":
        table = Table(
            "rank",
            "host",
            "local rank",
            "device",
            "CUDA_VISIBLE_DEVICES",
            "GPUs granted",
            title="Placement",
            title_justify="left",
        )
        for placement in placements:
            table.add_row(
                str(placement.rank),
                str(placement.host),
                str(placement.local_rank),
                str(placement.device),
                str(placement.visible or "not set"),
                "not said" if placement.granted_gpus is None else str(placement.granted_gpus),
            )
        console = Console(width=110)
        console.print(table)
        print_lines(console, (f"rank {rank}: {why}" for rank, why in enumerate(hidden) if why))
    _refuse(placement_problems(placements))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("; ".join(problems))


def describe() -> list[tuple[str, str]]:
    """Returns devices, ranks, backends and versions, as (name, value)."""
    import torch
    import torch.distributed as dist

    from common.runtime.machine.gpus import build_versions

    ranks, build = current_ranks(), build_versions()
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
    nccl = build["nccl"] or "none"
    if "build_nccl" in build:
        nccl += f" (torch was built with {build['build_nccl']})"
    # A name and its version stay on a line.
    versions = "  ".join(f"{name}=={package_version(name) or 'missing'}" for name in PACKAGES)
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
        ("CUDA build", f"{build['build_cuda'] or 'none'}, NCCL {nccl}"),
        ("packages", versions),
    ]


def check_features(facts: GpuFacts) -> list[Check]:
    """Makes one check per feature; each imports or runs the real thing."""
    return [
        _benchmarks(),
        _gpu(facts),
        _all_reduce(),
        _overlap(),
        _packages("notebooks", ("papermill", "jupyterlab", "ipykernel")),
        _packages("report", ("nbconvert", "pypandoc_binary", "typst")),
        _emulated_hosts(),
        _slurm(),
    ]


def find_gpus() -> GpuFacts:
    """Reads the GPUs that CUDA shows, or, where CUDA cannot be used, those that the driver lists.

    Nothing is looked for where CUDA_VISIBLE_DEVICES hides them all.
    """
    from common.runtime.machine.gpus import GpuFacts, cuda_devices, read_gpu_facts

    return GpuFacts() if hides_gpus() else read_gpu_facts(cuda_devices() or None)


def check_gpus(facts: GpuFacts) -> list[Check]:
    """Makes the checks that matter with GPUs only; none on a machine without."""
    import torch

    from common.runtime.machine.memory_limit import available_memory_bytes

    count = len(facts.gpus)
    if not count:
        return []
    rows = (
        checks.driver_for_build(facts.driver, facts.driver_cuda, torch.version.cuda),
        checks.several_processes(facts.gpus),
        checks.mig_slices(facts.gpus),
        reachable_peers(facts.listed, granted_gpus()),
        checks.peer_access(facts.pairs),
        checks.host_memory(count, checks.job_memory_bytes(available_memory_bytes())),
        checks.shared_memory(count, checks.free_shared_memory()),
    )
    return [row for row in rows if row is not None]


def _benchmarks() -> Check:
    import torch.distributed as dist

    works = dist.is_available() and dist.is_gloo_available()
    return Check("benchmarks on CPU", works, "gloo" if works else "torch lacks gloo", True)


def _gpu(facts: GpuFacts) -> Check:
    """Checks that torch can use a GPU.

    CUDA is not asked for free memory: that takes a context, which another process may forbid.
    """
    import torch

    if torch.cuda.is_available():
        detail = counted(torch.cuda.device_count(), "GPU")
        first = facts.gpus[0] if facts.gpus else None
        if first and first.memory_bytes and first.memory_used_bytes is not None:
            total, used = first.memory_bytes / 2**30, first.memory_used_bytes / 2**30
            detail += f", {used:.1f} of {total:.1f} GiB in use on the first"
        return Check("benchmarks on GPU", True, detail)
    driver = facts.driver or shutil.which("nvidia-smi")
    reason = "the driver is there but torch cannot use it" if driver else "no NVIDIA driver here"
    return Check("benchmarks on GPU", False, f"{reason}; the laptop preset needs none")


def _all_reduce() -> Check:
    import torch
    import torch.distributed as dist

    from common.runtime.group.process_group import process_group

    if current_ranks().world_size > 1:
        return Check("all-reduce", True, "not tried inside a job", True)
    with process_group("cpu"):
        value = torch.ones(4)
        dist.all_reduce(value)
    return Check("all-reduce", bool((value == 1).all()), "one gloo rank", True)


def _overlap() -> Check:
    """Tries the process group of this project's runs on a GPU, and torch's own choice."""
    import torch
    import torch.distributed as dist

    from common.runtime.group.network import GROUP_CHOICE
    from common.runtime.group.overlap_probe import try_group

    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return Check(OVERLAP, False, "not tried: no GPU here")
    chosen = GROUP_CHOICE in os.environ
    try:
        default = None if chosen or not hasattr(dist, "ProcessGroupNCCL2") else try_group("1")
        return overlap(try_group(), default)
    except RunFailed as error:
        return Check(OVERLAP, False, f"not tried: {error}")


def _packages(feature: str, names: tuple[str, ...]) -> Check:
    missing = [name for name in names if package_version(name) is None]
    detail = f"missing: {', '.join(missing)}" if missing else ", ".join(names)
    return Check(feature, not missing, detail, True)


def _emulated_hosts() -> Check:
    from common.cluster.emulated import why_no_hosts

    reason = why_no_hosts()
    return Check("emulated hosts", reason is None, reason or "namespaces, veth and tbf")


def _slurm() -> Check:
    sbatch = shutil.which("sbatch")
    return Check("cluster jobs", bool(sbatch), "sbatch found" if sbatch else "no sbatch here")
