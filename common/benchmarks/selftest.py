"""A minute before class: does everything work here, on every rank, with the devices at hand?

Recipe: ``ddplab doctor --selftest``, or on a cluster ``sbatch sbatch/selftest.sbatch``. All checks
run in one process group; each is agreed on by all ranks, and after one that breaks the group the
rest is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common.benchmarks import allreduce, allreduce_chunks, ddp, layers, overlap
from common.data.markov_text import synthetic_shards
from common.errors import RunFailed, UserError
from common.runtime.child import run_child
from common.runtime.environment import describe_environment
from common.runtime.placement import own_placement, placement_problems
from common.runtime.process_group import Worker, process_group, visible_gpus
from common.runtime.run_directory import RunDirectory, new_run_id
from common.runtime.script import run_script
from common.training.config import DdpConfig, FsdpConfig, TrainingConfig
from common.training.trainer import train

TIMEOUT_S = 60
LOST = "a rank was lost"


@dataclass(frozen=True)
class Selftest:
    """Run every script at its smallest and check devices, network and output folder.

    Prints a table of what passed and what failed, with a remedy; exit status 1 if any failed.
    """

    output_dir: str = "outputs"
    """Where results will go; the self-test writes below selftest/ in it."""
    device: str | None = None
    """cpu or cuda; by default CUDA where it is."""
    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""
    results: str = ""
    """Write each result to this file too, as it comes, one JSON object a line."""


@dataclass(frozen=True)
class Check:
    """One line of the table; ``run`` returns a detail to show, or raises.

    ``run`` is called on every rank with the worker and the folder to write to.
    """

    name: str
    run: Callable[[Worker, Path], str]
    remedy: str


@dataclass(frozen=True)
class Result:
    """How a check ended: ``passed``, ``failed`` or ``not run``."""

    name: str
    outcome: str
    detail: str
    remedy: str = ""


def main(settings: Selftest) -> None:
    """Run all checks. Raises RunFailed when one failed."""
    logging.getLogger().setLevel(logging.WARNING)
    with process_group(settings.device, settings.backend, TIMEOUT_S) as worker:
        folder = Path(settings.output_dir) / "selftest"
        folder = folder / str(worker.broadcast(new_run_id("selftest")))
        results = []
        for check in CHECKS:
            announce(settings, worker, check)
            results.append(attempt(check, worker, folder, results))
            report(settings, worker, results[-1])
        if worker.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            print_results(results)
        failed = [result.name for result in results if result.outcome != "passed"]
        if failed:
            raise RunFailed(f"self-test: {', '.join(failed)}")


def attempt(check: Check, worker: Worker, folder: Path, before: Sequence[Result]) -> Result:
    """Run one check on all ranks; it passes when it passed on each."""
    if any(result.detail.startswith(LOST) or result.outcome == "not run" for result in before):
        return Result(check.name, "not run", "the ranks no longer reach each other", check.remedy)
    start = time.monotonic()
    detail, error = "", None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            detail = check.run(worker, folder)
    except Exception as raised:  # whatever it is belongs in the table
        said = str(raised).splitlines() or [type(raised).__name__]
        error = f"{socket.gethostname()}: {said[0]}"
    try:
        errors = [found for found in worker.gather(error) if found]
    except Exception:  # the group is broken, or in the middle of another collective
        errors = [f"{LOST}; {error}" if error else LOST]
    took = f"{time.monotonic() - start:.1f} s"
    if errors:
        return Result(check.name, "failed", errors[0], check.remedy)
    return Result(check.name, "passed", f"{detail}, {took}" if detail else took)


def announce(settings: Selftest, worker: Worker, check: Check) -> None:
    """Leave word of what is being tried, for the case that it takes this process with it."""
    report(settings, worker, Result(check.name, "failed", "ended the process", check.remedy))


def report(settings: Selftest, worker: Worker, result: Result) -> None:
    if settings.results and worker.is_main:
        with Path(settings.results).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read_results(path: Path) -> list[Result]:
    """The last word on each check, in order."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [Result(**json.loads(line)) for line in lines]
    return list({result.name: result for result in found}.values())


def print_results(results: Sequence[Result]) -> None:
    """The table of passed and failed."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "", "detail", "remedy", title="Self-test", title_justify="left")
    colours = {"passed": "green", "failed": "red"}
    for result in results:
        colour = colours.get(result.outcome, "yellow")
        outcome = f"[{colour}]{result.outcome}[/{colour}]"
        table.add_row(result.name, outcome, escape(result.detail), escape(result.remedy))
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    console.print(table)


def check_driver(worker: Worker, folder: Path) -> str:
    """torch's CUDA against the driver, and a product of two matrices on this rank's device."""
    driver = shutil.which("nvidia-smi")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    if driver and not hidden and worker.device.type == "cpu":
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        if listed.returncode == 0 and "GPU " in listed.stdout and torch.cuda.device_count() == 0:
            raise RuntimeError(
                f"the driver lists GPUs, torch {torch.__version__} (CUDA {torch.version.cuda}) "
                "cannot use them"
            )
    ones = torch.ones(64, 64, device=worker.device)
    if not bool(((ones @ ones) == 64).all()):
        raise RuntimeError(f"a product of matrices is wrong on {worker.device}")
    if worker.device.type == "cpu":
        return "no GPU in use, CPU"
    name = torch.cuda.get_device_name(worker.device)
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def check_placement(worker: Worker, folder: Path) -> str:
    """No shared device, not more workers than GPUs."""
    places = worker.gather(own_placement(gpus=visible_gpus()))
    # What Slurm granted is no limit for ranks that do without a GPU.
    if worker.device.type == "cpu":
        places = [
            dataclasses.replace(place, granted_gpus=None, device="cpu", identity="cpu")
            for place in places
        ]
    problems = placement_problems(places)
    if problems:
        raise RuntimeError("; ".join(problems))
    hosts = {place.host for place in places}
    return f"{worker.world_size} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"


def check_all_reduce(worker: Worker, folder: Path) -> str:
    """A sum over all ranks of all nodes is right, with 4 MiB."""
    allreduce.check_sum(torch.empty(2**20, device=worker.device), worker)
    return f"{dist.get_backend()}, 4 MiB, sum over {worker.world_size} ranks"


def check_output(worker: Worker, folder: Path) -> str:
    """Rank 0 writes a run directory, which is what a job ends with."""
    if worker.is_main:
        environment = describe_environment(worker.backend, worker.device.type, worker.world_size)
        with RunDirectory.create(folder, "selftest", {}, environment, "write"):
            pass
        free = shutil.disk_usage(folder).free / 2**30
        if free < 1:
            raise OSError(f"{folder}: {free:.1f} GiB free")
        return f"{free:.0f} GiB free"
    return ""


def tiny(main: Callable, settings_type: type, **tiny_settings: object) -> Callable:
    """A check that runs a benchmark with small settings."""

    def run(worker: Worker, folder: Path) -> str:
        common = {"device": worker.device.type, "output_dir": str(folder)}
        if "backend" in {field.name for field in dataclasses.fields(settings_type)}:
            common["backend"] = worker.backend
        main(settings_type(**common, **tiny_settings))
        return ""

    return run


def alone(script: str, *flags: str) -> Callable:
    """A check that runs a script on each node's first device, as no rank."""

    def run(worker: Worker, folder: Path) -> str:
        if worker.ranks.local_rank == 0:
            name = script.rpartition(".")[2]
            where = ("--device", worker.device.type, "--output_dir", str(folder / name))
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{name}-{socket.gethostname()}.log"
            ended = run_child(f"assignments.{script}", [*flags, *where], log)
            if ended.reason:
                raise RunFailed(ended.reason)
        return ""

    return run


def tiny_training(config_type: type[TrainingConfig], **tiny_settings: object) -> Callable:
    """A check that trains for two steps on all ranks."""

    def run(worker: Worker, folder: Path) -> str:
        common = {"device": worker.device.type, "backend": worker.backend}
        settings = TRAINING | {"global_batch_size": 2 * worker.world_size} | tiny_settings
        data = own_tokens(worker, folder)
        train(config_type(data=data, output_dir=str(folder), **common, **settings))
        return ""

    return run


def own_tokens(worker: Worker, folder: Path) -> str:
    """Synthetic text of this rank's own, as nodes need not share a folder; all ranks or none."""
    path, problem = "", None
    try:
        path = str(synthetic_shards(folder / f"tokens-{worker.rank}", num_tokens=4096))
    except UserError as error:
        problem = str(error)
    problems = [found for found in worker.gather(problem) if found]
    if problems:
        raise UserError(problems[0])
    return path


STEP = {"model": "gpt2-nano", "batch_size": 1, "max_seq_len": 16}
SGD = {"optimizer": "sgd"}  # torch needs seconds to import the machinery of AdamW
SMALL = "--model gpt2-nano --batch_size 1 --seq_len 16"
ONE_DEVICE = {
    "assignment0.memory_analysis": SMALL,
    "assignment0.throughput": f"{SMALL} --optimizer sgd --batch_sizes 1 --num_steps 2 "
    "--warmup_steps 1",
    "assignment0.options": f"{SMALL} --optimizer sgd --arms sdpa --rounds 1 --num_steps 1",
    "assignment0.profile_training": f"{SMALL} --optimizer sgd --wait_steps 0 --warmup_steps 1 "
    "--active_steps 1",
    "assignment1.train_baseline": "--model gpt2-pico --global_batch_size 2 --micro_batch_size 1 "
    "--seq_len 16 --num_steps 2 --optimizer sgd --no-profile",
}
TRAINING = {"model": "gpt2-pico", "micro_batch_size": 1, "seq_len": 16, "num_steps": 2}
TRAINING |= SGD | {"profile": False}
CHECKS = (
    Check(
        "torch and driver",
        check_driver,
        "load the driver's module, or install the torch build for this driver's CUDA",
    ),
    Check(
        "placement",
        check_placement,
        "one torchrun per node and one rank per GPU; see ddplab doctor in the job",
    ),
    Check(
        "all-reduce over all ranks",
        check_all_reduce,
        "check that the nodes reach each other; set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
    ),
    Check("output folder", check_output, "free space, or set OUTPUT_DIR to a folder of yours"),
    Check(
        "train_benchmark",
        tiny(layers.main, layers.LayerBenchmark, **STEP, **SGD, warmup_steps=1, num_steps=2),
        "run assignments/assignment2/train_benchmark.py by itself to see more",
    ),
    Check(
        "allreduce_benchmark",
        tiny(allreduce.main, allreduce.AllReduceBenchmark, numel=(1, 1024), rounds=1, iterations=2),
        "run assignments/assignment2/allreduce_benchmark.py by itself to see more",
    ),
    Check(
        "allreduce_chunk_benchmark",
        tiny(
            allreduce_chunks.main,
            allreduce_chunks.ChunkBenchmark,
            **{"numel": 10_000, "rounds": 1, "iterations": 1},
        ),
        "run assignments/assignment2/allreduce_chunk_benchmark.py by itself to see more",
    ),
    Check(
        "overlap_benchmark",
        tiny(
            overlap.main,
            overlap.OverlapBenchmark,
            **STEP,
            **{"message_mib": (0.01,), "rounds": 1, "num_steps": 1, "warmup_steps": 0},
        ),
        "run assignments/assignment2/overlap_benchmark.py by itself to see more",
    ),
    Check(
        "ddp_benchmark",
        tiny(
            ddp.main,
            ddp.DdpBenchmark,
            **STEP,
            **SGD,
            **{"bucket_cap_mb": ("1", "25"), "rounds": 1, "num_steps": 1, "initial_steps": 0},
        ),
        "run assignments/assignment2/ddp_benchmark.py by itself to see more",
    ),
    *(
        Check(
            script.rpartition(".")[2],
            alone(script, *flags.split()),
            f"run assignments/{script.replace('.', '/')}.py by itself to see more",
        )
        for script, flags in ONE_DEVICE.items()
    ),
    Check(
        "train_ddp",
        tiny_training(DdpConfig, save_every=1),
        "run assignments/assignment1/train_ddp.py by itself to see more",
    ),
    Check(
        "train_fsdp",
        tiny_training(FsdpConfig),
        "run assignments/assignment1/train_fsdp.py by itself to see more",
    ),
)

if __name__ == "__main__":
    sys.argv[0] = "selftest"
    run_script(main, Selftest)
