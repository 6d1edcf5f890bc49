"""``ddplab plan``: how to train a model on what there is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from common.cli.flags import check_output, refuse_given, write_output
from common.cli.printed import console_of
from common.errors import UserError

if TYPE_CHECKING:
    from common.planning.search import Searched, TimedPlan

BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
RANKS = 2
ON_CLUSTER = ("gpus", "tf32", "compile", "fused_loss", "allreduce", "from_traces")
HERE = ("ranks", "device", "mine", "verify", "tune_seconds", "output_dir")
"""Fields of ``Plan`` that have an effect with a cluster only, and without one."""


@dataclass(frozen=True)
class Plan:
    """Find out how to train your model here or on a cluster: ddplab plan my_model:make

    Which strategy (one rank, DDP, ZeRO-1, FSDP), which micro-batch and accumulation, what to
    compute again, how to wrap: the fastest plan that fits into the memory, at a fixed global
    batch. FUNCTION returns (module, batch, loss) as for ddplab tune, and may take batch_size. Here
    passes and collectives are measured on --ranks, the best plans are run, and then other settings
    of the best one, as ddplab tune does; with --cluster nothing is measured, and --model also takes
    a name or a config.json.
    """

    function: Annotated[str | None, tyro.conf.Positional] = None
    """MODULE:FUNCTION that makes the model."""
    model: str | None = None
    """In its place: name of a published size, such as llama-3.1-8b, or a Hugging Face
    config.json."""
    ranks: int | None = None
    """Ranks on this machine, by default 2."""
    cluster: str | None = None
    """Cluster: a name of data/clusters, or a YAML file of yours."""
    gpus: int | None = None
    """GPUs of the cluster, by default those of one node."""
    allreduce: str | None = None
    """With --cluster: all-reduces that were measured there, in place of the model of NCCL: a table
    as for ddplab predict, or what nccl-tests, all_reduce_bench.py or NCCL Inspector print."""
    from_traces: str | None = None
    """With --cluster: folder with the traces of a job there, for the same."""
    global_batch: int | None = None
    """Samples of a step on all ranks; by default 8 a rank, or what FUNCTION's batch has."""
    memory: str | None = None
    """Memory of a rank, such as 80GB or 24GiB; by default the device's. On a CPU it must be
    said."""
    seq_len: int | None = None
    """Tokens of a sample of --model, by default 1024."""
    precision: str | None = None
    """float32 or bfloat16: by autocast, or FSDP's policy, which casts norms and the loss, too. By
    default bfloat16 on GPUs and float32 on a CPU."""
    changes_training: str = "no"
    """yes: also the other precision may be chosen, which changes what is computed. Accumulation at
    a fixed global batch changes nothing."""
    strategies: tuple[str, ...] = ()
    """Strategies that may be chosen: single, DDP, ZERO1, SHARD_GRAD_OP, FULL_SHARD,
    HYBRID_SHARD."""
    tf32: bool = False
    """With --cluster: let float32 products use TensorFloat-32."""
    compile: bool = False
    """With --cluster: a compiler joins operators (torch.compile)."""
    fused_loss: bool = False
    """With --cluster and --model: a kernel makes the loss and keeps no float32 logits. A FUNCTION's
    own loss is followed."""
    verify: bool = True
    """Here: run the best three plans and the nearest that was refused, in rotated rounds."""
    mine: tuple[str, ...] = ()
    """Here: your own plan, run beside the best ones: a strategy, then any of micro_batch=4,
    checkpointing=block, precision=bfloat16, blocks_per_unit=2. What you leave open is chosen."""
    tune_seconds: float = 30.0
    """Here, after verification: seconds in which other settings of the plan are tried beside it in
    rotated rounds (DDP's buckets; FSDP's units, when they are dropped, and how many are gathered
    ahead); 0 tries none."""
    json: str | None = None
    """Write the answer to this file."""
    page: str | None = None
    """Write the answer to this file as a web page, with memory for time as a figure."""
    seed: int = 42
    """Seed that is set before FUNCTION is called, the same on all ranks."""
    device: str | None = None
    """Here: cpu or cuda; by default CUDA where it is."""
    output_dir: str = "outputs/plan"
    """Here: folder of the run directory."""

    def run(self) -> None:
        """Plans and prints the answer."""
        self._check()
        if self.cluster is not None:
            self._on_cluster()
        else:
            self._here()

    def _check(self) -> None:
        if (self.function is None) == (self.model is None):
            raise UserError("name MODULE:FUNCTION, or --model with a name or a config.json")
        check_changes_training(self.changes_training)
        check_output("--json", self.json)
        check_output("--page", self.page)
        if self.cluster is None:
            why = "has an effect with --cluster only"
            refuse_given(self, f"{why}; here it is --ranks", only=["gpus"])
            refuse_given(self, why, only=ON_CLUSTER)
        else:
            why = "has no effect with --cluster"
            refuse_given(self, f"{why}, whose GPUs are --gpus", only=["ranks"])
            refuse_given(self, f"{why}, where nothing is run", only=HERE)
        if self.function is not None:
            refuse_given(self, "has an effect with --model only", only=("seq_len", "fused_loss"))

    def precisions(self, default: str) -> tuple[str, ...]:
        """Returns the precisions that may be chosen, the asked or default one first."""
        first = self.precision or default
        if self.changes_training == "no":
            return (first,)
        from common.planning.space import PRECISIONS

        return tuple(dict.fromkeys((first, *PRECISIONS)))

    def _on_cluster(self) -> None:
        from common.cli.prediction.asked_model import asked_model
        from common.cli.prediction.network import measured_cluster
        from common.perfmodel.cluster.clusters import load_cluster
        from common.planning.cluster_times import peak_of, search_cluster
        from common.planning.space import STRATEGIES, Question

        cluster = measured_cluster(load_cluster(self.cluster), self.allreduce, self.from_traces)
        peak = peak_of(cluster)
        gpus = cluster.gpus_per_node if self.gpus is None else self.gpus
        cluster.nodes(gpus)
        memory = parse_bytes(self.memory) if self.memory else peak.memory_bytes
        if memory is None:
            raise UserError(
                f"cluster {cluster.name}: the memory of a {cluster.gpu} is not known; give --memory"
            )
        if self.function is None:
            user, (architecture, _) = None, asked_model(self.model, self.seq_len)
        else:
            from common.tuning.plans.sized_model import SizedModel

            user = SizedModel.of_fakes(self.function, Path.cwd(), self.seed)
            architecture = user.architecture(user.samples, "cuda")
        question = Question(
            architecture=architecture,
            ranks=gpus,
            ranks_per_node=cluster.gpus_per_node,
            global_batch=8 * gpus if self.global_batch is None else self.global_batch,
            memory_bytes=memory,
            precisions=self.precisions("bfloat16"),
            strategies=self.strategies or STRATEGIES,
            fused_loss=self.fused_loss,
        )
        if user is not None:
            question = question.without(user.refusals(question.sizes))
        searched = search_cluster(question, cluster, tf32=self.tf32, compile=self.compile)
        self._tell(searched, searched.best, f"{gpus:,} × {cluster.gpu} ({cluster.name})")

    def _here(self, **fixed: object) -> None:
        """Plans on ranks of this machine, or of this job; ``fixed`` are further settings."""
        from common.runtime.processes.ranks import current_ranks
        from common.tuning.plans.plan_settings import PlanSettings
        from common.tuning.tune_settings import parse_target

        if self.function is not None:
            parse_target(self.function)
        on_cpu = self.device == "cpu" or (self.device is None and not cuda_is_there())
        if on_cpu and self.memory is None:
            raise UserError("a CPU has no memory of its own: say --memory, as in --memory 2GB")
        flags = {
            "function": self.function,
            "model": self._model_path(),
            "seq_len": self.seq_len,
            "global_batch": self.global_batch,
            "memory_bytes": parse_bytes(self.memory) if self.memory else None,
            "precisions": self.precisions("float32" if on_cpu else "bfloat16"),
            "strategies": self.strategies,
            "mine": self.mine,
            "device": self.device,
        }
        settings = {name: value for name, value in flags.items() if value not in (None, ())}
        settings |= {"verify": self.verify, "seed": self.seed, "output_dir": self.output_dir}
        settings |= {"tune_seconds": self.tune_seconds}
        settings |= fixed
        for name in ("json", "page"):
            if path := getattr(self, name):
                settings[name] = str(Path(path).absolute())
        PlanSettings(**settings)
        if current_ranks().launcher != "single":
            from common.runtime.flags import as_flags
            from common.runtime.script import run_script
            from common.tuning.plans.job import main

            run_script(main, PlanSettings, arguments=as_flags(settings))
            return
        self._launch(settings)

    def tune(self) -> None:
        """Plans with FUNCTION's batch as it is, and nothing computed again.

        Unless training may change, bfloat16 is tried where it costs nothing, and never chosen.
        """
        options = {"options": ("bfloat16",)} if self.changes_training == "no" else {}
        self._here(keeps_batch=True, checkpointing=("none",), **options)

    def _model_path(self) -> str | None:
        """Returns the model's name, or its path as ranks find it, which run in another folder."""
        if self.model is None or not Path(self.model).exists():
            return self.model
        return str(Path(self.model).absolute())

    def _launch(self, settings: dict[str, object]) -> None:
        """Plans on ranks that are started for it, and prints what they print in the end."""
        from common.runtime.records.run_directory import new_run_id
        from common.runtime.stage_progress import StageProgress
        from common.tuning.launched import run_job
        from common.tuning.plans import JOB, PRINTED
        from common.tuning.tune_settings import check_module_exists

        folder, ranks = Path.cwd(), RANKS if self.ranks is None else self.ranks
        if ranks < 1:
            raise UserError(f"--ranks {ranks}: at least 1")
        if self.function is not None:
            check_module_exists(self.function, folder)
        settings |= {"folder": folder, "run_id": new_run_id("plan")}
        progress = StageProgress()
        with progress.stage(f"plan {self.function or self.model} ({ranks} ranks)") as update:
            run = run_job(JOB, settings, ranks, on_output=update)
        print((run / PRINTED).read_text(), end="")
        for path in filter(None, (self.json, self.page)):
            print(f"Written: {path}")

    def _tell(self, searched: Searched, best: TimedPlan | None, where: str) -> None:
        import json

        from common.planning.answer import as_json
        from common.planning.terminal import WIDTH, print_answer

        console = console_of(WIDTH)
        print_answer(searched, best, where, console)
        if self.json is not None:
            text = json.dumps(as_json(searched, best=best), indent=1)
            write_output("--json", self.json, f"{text}\n")
        if self.page is not None:
            from common.analysis.plans.page import page

            write_output("--page", self.page, page(searched, best, where))
        for path in filter(None, (self.json, self.page)):
            console.print(f"Written: {path}", highlight=False)


def check_changes_training(value: str) -> None:
    """Raises UserError unless ``--changes-training`` is no or yes."""
    if value not in ("no", "yes"):
        raise UserError(f"--changes-training {value}: no or yes")


def cuda_is_there() -> bool:
    """Returns True if PyTorch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def parse_bytes(text: str) -> float:
    """Parses a size in bytes: 80GB, 24GiB, 512 MB, or a number of bytes.

    Raises UserError for anything else, and unless it is above 0.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    legal = "a size like 80GB, 24GiB or 512MB"
    try:
        size = float(match[1]) * BYTES[match[2].upper()]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"--memory {text}: expected {legal}") from None
    if not 0 < size < math.inf:
        raise UserError(f"--memory {text}: above 0 and finite; expected {legal}")
    return size
