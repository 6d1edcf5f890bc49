"""Decisions of a reader on how to train a model, beside what ``ddplab plan`` answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.analysis.show import Titles
from common.errors import UserError
from common.perfmodel.architectures.published_sizes import sized_architecture
from common.perfmodel.cluster.clusters import load_cluster
from common.planning.answer import GB, difference_in_words, missing_memory_in_words
from common.planning.cluster_times import search_cluster
from common.planning.search import (
    Searched,
    TimedPlan,
    matches,
    named_fields,
    named_plan,
    named_plans,
)
from common.planning.space import Question, SizedPlan
from common.runtime.wording import digits

MODEL, CLUSTER, GPUS, GLOBAL_BATCH = "gpt2-large", "rtx3090-pcie", 2, 32
"""The job that assignment 1 decides on, as flags of ``ddplab plan``."""
NOTHING = "nothing"


@dataclass(frozen=True)
class Decision:
    """A decision for a memory, and the answer.

    Attributes:
        memory_gb: memory of a rank.
        words: the decision as ``--mine`` has it, or NOTHING; None where nothing was decided.
        searched: the answer.
        mine: the plan of the decision: the one to take where the words fit it, else the fastest
            with them, and where none fits the smallest.
        refusal: why the words are no plan; empty where they are.
    """

    memory_gb: float
    words: str | None
    searched: Searched
    mine: TimedPlan | SizedPlan | None
    refusal: str = ""

    @property
    def step_s(self) -> float | None:
        """Returns the predicted step of the decision; None where it has none."""
        return self.mine.time.step_s if isinstance(self.mine, TimedPlan) else None

    @property
    def best(self) -> TimedPlan | None:
        """Returns the plan to take; None where nothing fits, and until something is decided."""
        return self.searched.best if self.words else None

    @property
    def answer(self) -> str | None:
        """Returns the plan to take, in words; None until something is decided."""
        if not self.words:
            return None
        return self.best.plan.label if self.best else "nothing fits"

    @property
    def verdict(self) -> str | None:
        """Returns what the decision is beside the answer, in words; None without a decision."""
        best = self.searched.best
        if not self.words or self.refusal:
            return self.refusal or None
        if self.mine is None:
            return f"{best.plan.label} fits" if best else "right: nothing fits"
        if isinstance(self.mine, SizedPlan):
            return missing_memory_in_words(self.searched, self.mine)
        if self.mine == best:
            return "right: the plan to take"
        return f"fits: {difference_in_words(best, self.mine)} ({self.mine.plan.label})"


def _in_gb(size_bytes: float) -> str:
    return digits(size_bytes / GB)


TITLES: Titles = {
    "memory_gb": ("memory (GB)", "{:g}"),
    "words": "decided",
    "mine.peak_bytes": ("its peak (GB)", _in_gb),
    "step_s": ("its step (s)", digits),
    "verdict": "the decision",
    "answer": "ddplab plan",
    "best.peak_bytes": ("peak (GB)", _in_gb),
    "best.time.step_s": ("step (s)", digits),
}
"""Titles of ``beside_plans``."""


def beside_plans(decided: Mapping[float, str | None]) -> list[Decision]:
    """Plans the job for each memory, and returns the decisions beside the answers.

    Args:
        decided: memory of a rank in GB → a plan as ``--mine`` has it, NOTHING, or None.
    """
    return [_beside_plan(memory_gb, words) for memory_gb, words in decided.items()]


def _beside_plan(memory_gb: float, words: str | None) -> Decision:
    cluster = load_cluster(CLUSTER)
    question = Question(
        architecture=sized_architecture(MODEL, None)[0],
        ranks=GPUS,
        ranks_per_node=cluster.gpus_per_node,
        global_batch=GLOBAL_BATCH,
        memory_bytes=memory_gb * GB,
    )
    fields, refusal = {}, ""
    try:
        fields = named_fields(str(words).split() if words and words != NOTHING else ())
        named_plans(question, fields)
    except UserError as error:
        fields, refusal = {}, str(error)
    searched = search_cluster(question, cluster, fields)
    best, mine = searched.best, named_plan(searched, fields)
    if mine and best and matches(best.plan, fields):
        mine = best
    return Decision(memory_gb, words, searched, mine, refusal)
