"""The checks of the self-test: devices, placement, network, output folder, and scripts once.

Not run are ``simulate_modes`` (no ranks), ``verify_changes`` (it needs a sweep), the scripts that
read what others measured, and ``ddplab tune`` and ``plan``.
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.benchmarks import strategies
from common.benchmarks.buckets import allreduce, allreduce_chunks, ddp, overlap
from common.benchmarks.micro_batches import compare_modes
from common.benchmarks.one_device import layers
from common.benchmarks.scaling import scaling
from common.data.markov_text import synthetic_shards
from common.errors import RunFailed
from common.runtime.group.collective_timing import check_sum
from common.runtime.group.process_group import Worker, visible_gpus
from common.runtime.machine.device import hides_gpus, why_unusable
from common.runtime.machine.environment import describe_environment
from common.runtime.machine.gpus import cuda_devices, read_gpu_facts
from common.runtime.machine.placement import own_placement, placement_problems
from common.runtime.processes.child import run_child
from common.runtime.records.run_directory import RunDirectory
from common.runtime.wording import counted
from common.training.config import DdpConfig, FsdpConfig, TrainingConfig
from common.training.micro_batches.config import MicroBatchConfig
from common.training.parallel import can_shard
from common.training.texts.config import TextScalingConfig
from common.training.texts.text_trainer import train_text
from common.training.trainer import train


class LeftOut(Exception):
    """A check that cannot be tried here, and why; no failure."""


@dataclass(frozen=True)
class Check:
    """One line of the table; ``run`` returns a detail to show, or raises (LeftOut, or a failure).

    ``run`` is called on every rank with the worker and the folder to write to.
    """

    name: str
    run: Callable[[Worker, Path], str]
    remedy: str


def of_script(script: str, run: Callable[[Worker, Path], str], name: str = "") -> Check:
    """Makes the check that a script runs, named after it unless ``name`` is given."""
    remedy = f"run assignments/{script}.py by itself to see more"
    return Check(name or script.rpartition("/")[2], run, remedy)


def check_driver(worker: Worker, folder: Path) -> str:
    """Checks torch's CUDA against the driver, and a matrix product on this rank's device."""
    if worker.device.type == "cpu" and not torch.cuda.is_available() and not hides_gpus():
        facts = read_gpu_facts(None)
        if facts.gpus:
            raise RuntimeError(f"the driver lists {len(facts.gpus)} GPUs, but {why_unusable()}")
    ones = torch.ones(64, 64, device=worker.device)
    if not bool(((ones @ ones) == 64).all()):
        raise RuntimeError(f"a product of matrices is wrong on {worker.device}")
    if worker.device.type == "cpu":
        return "no GPU in use, CPU"
    name = torch.cuda.get_device_name(worker.device)
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def check_placement(worker: Worker, folder: Path) -> str:
    """Checks that ranks share no device and that there are not more workers than GPUs."""
    places = worker.gather(own_placement(gpus=visible_gpus(), ranks_per_gpu=worker.ranks_per_gpu))
    # What Slurm granted is no limit for ranks that do without a GPU.
    if worker.device.type == "cpu":
        places = [
            dataclasses.replace(rank, granted_gpus=None, device="cpu", identity="cpu")
            for rank in places
        ]
    problems = placement_problems(places, worker.ranks_per_gpu)
    if problems:
        raise RuntimeError("; ".join(problems))
    hosts = {rank.host for rank in places}
    shared = f", {worker.ranks_per_gpu} on one GPU" if worker.ranks_per_gpu > 1 else ""
    return f"{worker.world_size} ranks on {counted(len(hosts), 'host')}{shared}"


def check_all_reduce(worker: Worker, folder: Path) -> str:
    """Checks a sum of 4 MiB over all ranks of all nodes."""
    check_sum(torch.empty(2**20, device=worker.device), worker)
    return f"{worker.backend}, 4 MiB, sum over {worker.world_size} ranks"


def check_output(worker: Worker, folder: Path) -> str:
    """Checks that rank 0 can write a run directory, which is what a job ends with."""
    if worker.is_main:
        environment = describe_environment(worker.backend, worker.device.type, worker.world_size)
        with RunDirectory.create(folder, "selftest", {}, environment, "write"):
            pass
        free = shutil.disk_usage(folder).free / 2**30
        if free < 1:
            raise OSError(f"{folder}: {free:.1f} GiB free")
        return f"{free:.0f} GiB free"
    return ""


SCALING = {
    "batch_size": 4,
    "epochs": 1,
    "steps_per_epoch": 3,
    "warmup_steps": 1,
    "timed_steps": 2,
    "input_dim": 16,
    "hidden_dim": 16,
    "num_layers": 1,
    "output_dim": 4,
}
TEXT_SCALING = {
    "dataset": "synthetic",
    "max_train_samples": 256,
    "eval_samples": 16,
    "epochs": 1,
    "batch_size": 4,
    "d_model": 16,
    "d_ff": 16,
    "vocab_size": 64,
    "max_length": 16,
    "workers": 0,
    "warmup_steps": 1,
    "discard_steps": 1,
}


TEXTS = {
    "dataset": "synthetic",
    "model_name": "small",
    "max_length": 16,
    "vocab_size": 64,
    "max_local_batch_cap": 4,
}


def tiny(
    main: Callable, settings_type: type, least_ranks: int = 1, **tiny_settings: object
) -> Callable:
    """Makes a check that runs a benchmark with small settings."""

    def run(worker: Worker, folder: Path) -> str:
        if worker.world_size < least_ranks:
            raise LeftOut(f"{counted(worker.world_size, 'rank')} here; it takes {least_ranks}")
        common = {"device": worker.device.type, "output_dir": str(folder)}
        if "backend" in {field.name for field in dataclasses.fields(settings_type)}:
            common["backend"] = worker.backend
        main(settings_type(**common, **tiny_settings))
        return ""

    return run


def alone(script: str, *flags: str) -> Callable:
    """Makes a check that runs a script on each node's first device, as no rank."""

    def run(worker: Worker, folder: Path) -> str:
        if worker.ranks.local_rank == 0:
            leave_out_if_exclusive(worker.device)
            name = script.rpartition(".")[2]
            where = ("--device", worker.device.type, "--output_dir", str(folder / name))
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{name}-{socket.gethostname()}.log"
            ended = run_child(f"assignments.{script}", [*flags, *where], log)
            if ended.reason:
                raise RunFailed(ended.reason)
        return ""

    return run


def leave_out_if_exclusive(device: torch.device) -> None:
    """Raises LeftOut where this rank's context on the GPU keeps out its children."""
    if device.type == "cpu":
        return
    gpu = read_gpu_facts([cuda_devices()[device.index]]).gpus[0]
    if (gpu.compute_mode or "").startswith("EXCLUSIVE"):
        raise LeftOut(
            f"compute mode {gpu.compute_mode}: this process has the GPU, and no other can; run the "
            "script by itself"
        )


def tiny_training(config_type: type[TrainingConfig], **tiny_settings: object) -> Callable:
    """Makes a check that trains for two steps on all ranks."""

    def run(worker: Worker, folder: Path) -> str:
        common = {"device": worker.device.type, "backend": worker.backend}
        if issubclass(config_type, FsdpConfig) and not can_shard(worker):
            raise LeftOut(f"FSDP on GPUs needs NCCL, and these ranks use {worker.backend}")
        settings = TRAINING | {"global_batch_size": 2 * worker.world_size} | tiny_settings
        data = own_tokens(worker, folder)
        train(config_type(data=data, output_dir=str(folder), **common, **settings))
        return ""

    return run


def tiny_texts(main: Callable, settings_type: type, **settings: object) -> Callable:
    """Makes a check on texts of varying length, with micro-batches as ranks can take them."""

    def run(worker: Worker, folder: Path) -> str:
        batch = 2 * worker.world_size
        sizes = {"global_batch": batch, "max_train_samples": 2 * batch}
        return tiny(main, settings_type, **TEXTS | sizes | settings)(worker, folder)

    return run


def own_tokens(worker: Worker, folder: Path) -> str:
    """Writes synthetic text of this rank's own, as nodes need not share a folder.

    Returns its path. Raises UserError on all ranks where one of them could not write.
    """
    with worker.mistakes_shared():
        return str(synthetic_shards(folder / f"tokens-{worker.rank}", num_tokens=4096))


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
    of_script(
        "assignment2/train_benchmark",
        tiny(layers.main, layers.LayerBenchmark, **STEP, **SGD, warmup_steps=1, num_steps=2),
    ),
    of_script(
        "assignment2/allreduce_benchmark",
        tiny(allreduce.main, allreduce.AllReduceBenchmark, numel=(1, 1024), rounds=1, iterations=2),
    ),
    of_script(
        "assignment2/allreduce_chunk_benchmark",
        tiny(
            allreduce_chunks.main,
            allreduce_chunks.ChunkBenchmark,
            numel=10_000,
            rounds=1,
            iterations=1,
        ),
    ),
    of_script(
        "assignment2/overlap_benchmark",
        tiny(
            overlap.main,
            overlap.OverlapBenchmark,
            **STEP,
            message_mib=(0.01,),
            rounds=1,
            num_steps=1,
            warmup_steps=0,
        ),
    ),
    of_script(
        "assignment2/ddp_benchmark",
        tiny(
            ddp.main,
            ddp.DdpBenchmark,
            **STEP,
            **SGD,
            bucket_cap_mb=("1", "25"),
            rounds=1,
            num_steps=1,
            initial_steps=0,
        ),
    ),
    *(
        of_script(script.replace(".", "/"), alone(script, *flags.split()))
        for script, flags in ONE_DEVICE.items()
    ),
    of_script("assignment1/train_ddp", tiny_training(DdpConfig, save_every=1)),
    of_script("assignment1/train_fsdp", tiny_training(FsdpConfig)),
    of_script(
        "assignment1/compare_strategies",
        tiny(
            strategies.main,
            strategies.StrategyBenchmark,
            least_ranks=2,
            strategies=("local", "DDP"),
            model="gpt2-pico",
            micro_batch_size=1,
            seq_len=16,
            rounds=1,
            num_steps=1,
        ),
    ),
    of_script(
        "assignment3/train_ddp",
        tiny_texts(train_text, MicroBatchConfig, eval_samples=8, steps=2, mode="dynamic"),
        "micro-batches",
    ),
    of_script(
        "assignment3/compare_modes",
        tiny_texts(
            compare_modes.main,
            compare_modes.ModeComparison,
            least_ranks=2,
            steps=1,
            warmup=0,
            slow_steps=0,
        ),
    ),
    of_script(
        "assignment4/benchmark", tiny(scaling.main, scaling.ScalingBenchmark, **SCALING), "scaling"
    ),
    of_script(
        "assignment4/train_text",
        tiny(train_text, TextScalingConfig, **TEXT_SCALING),
        "text scaling",
    ),
)
