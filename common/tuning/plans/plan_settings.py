"""The settings of planning on ranks, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.errors import UserError
from common.planning.search import named_fields
from common.planning.space import CHECKPOINTING, PRECISIONS, STRATEGIES
from common.settings import AtLeast, NonEmpty, OneOf, RankOptions


@dataclass(frozen=True)
class PlanSettings(RankOptions):
    """Plan how to train a model on the ranks of this job.

    Recipe: uv run torchrun --nproc_per_node=2 common/tuning/plans/job.py --function my_model:make
    --memory_bytes 2e9 (or ddplab plan my_model:make --memory 2GB). Settings may also come from
    --config FILE (a YAML file; flags win).
    """

    function: str = ""
    """MODULE:FUNCTION that returns (module, batch, loss), and may take batch_size."""
    model: str = ""
    """In its place: a published size or a Hugging Face config.json."""
    seq_len: Annotated[int, AtLeast(0)] = 0
    """Tokens of a sample of --model; 0 for images."""
    folder: str = "."
    """Folder in which MODULE is looked for, besides the installed packages."""
    global_batch: Annotated[int, AtLeast(0)] = 0
    """Samples of a step on all ranks; 0 for what FUNCTION's batch has on each rank."""
    memory_bytes: Annotated[float, AtLeast(0)] = 0.0
    """Memory of a rank in bytes; 0 for a GPU's."""
    precisions: Annotated[tuple[str, ...], NonEmpty, OneOf(PRECISIONS, "precision")] = ("float32",)
    """Precisions that may be chosen."""
    strategies: Annotated[tuple[str, ...], NonEmpty, OneOf(STRATEGIES, "strategy")] = STRATEGIES
    """Strategies that may be chosen."""
    checkpointing: Annotated[tuple[str, ...], NonEmpty, OneOf(CHECKPOINTING, "checkpointing")] = (
        CHECKPOINTING
    )
    """Kinds of checkpointing that may be chosen."""
    keeps_batch: bool = False
    """Take FUNCTION's batch as the only micro-batch."""
    verify: bool = True
    """Run the best plans, and the nearest that was refused."""
    mine: tuple[str, ...] = ()
    """A plan of yours to run beside them: STRATEGY, then any of micro_batch=N, checkpointing=KIND,
    precision=TYPE and blocks_per_unit=N; the fastest of those that this leaves."""
    tune_seconds: Annotated[float, AtLeast(0)] = 30.0
    """Seconds in which settings of the verified plan are tried; 0 tries none."""
    options: Annotated[tuple[str, ...], OneOf(PRECISIONS, "precision")] = ()
    """Precisions that FSDP is tried in beside the plan's own, where products of this device are no
    slower in them; never chosen."""
    train_steps: Annotated[int, AtLeast(0)] = 0
    """Then train so many steps by the plan's lines of Python, on batches that FUNCTION makes."""
    seed: int = 42
    """Seed that is set before FUNCTION is called, the same on all ranks."""
    output_dir: str = "outputs/plan"
    json: str = ""
    """File that the answer is written to, besides plan.json of the run directory."""
    page: str = ""
    """File that the answer is written to as a web page."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.function) == bool(self.model):
            raise UserError("name MODULE:FUNCTION, or a model")
        if named_fields(self.mine) and not self.verify:
            raise UserError("--mine has no effect where nothing is run to verify the plans")
