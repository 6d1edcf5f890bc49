"""Wrong solutions: the mistakes that students make, each with the check that must find it.

A mutant is the reference with one piece of text replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXERCISES = Path(__file__).resolve().parents[2] / "common" / "exercises"


@dataclass(frozen=True)
class Mutant:
    """A solution with a mistake.

    Attributes:
        name: the mistake, in words.
        exercise: the module below ``common/exercises``.
        right, wrong: the text that is replaced, which is there once, and what replaces it.
        check: of ``family_worker.py``, which fails.
    """

    name: str
    exercise: str
    right: str
    wrong: str
    check: str

    def source(self) -> str:
        """Return the module with the mistake."""
        text = (EXERCISES / f"{self.exercise}.py").read_text()
        assert text.count(self.right) == 1, (self.name, text.count(self.right))
        return text.replace(self.right, self.wrong)


MUTANTS = (
    Mutant(
        "the ring copies where it should add",
        "ring_all_reduce",
        "received += incoming",
        "received.copy_(incoming)",
        "ring",
    ),
    Mutant(
        "the ring passes on the wrong sums",
        "ring_all_reduce",
        "pass_on(chunks[(rank + 1 - step) % world], chunks[(rank - step) % world], group)",
        "pass_on(chunks[(rank - step) % world], chunks[(rank - step - 1) % world], group)",
        "ring",
    ),
    Mutant(
        "the ring sends every chunk to every rank",
        "ring_all_reduce",
        "    for step in range(world - 1):  # reduce-scatter\n",
        "    pass_on(work.view(-1), work.flatten() + 0, group)\n"
        "    for step in range(world - 1):  # reduce-scatter\n",
        "ring",
    ),
    Mutant(
        "the ring works on a copy",
        "ring_all_reduce",
        "work = tensor.contiguous()",
        "work = tensor.clone()\n    tensor = work",
        "ring",
    ),
    Mutant(
        "a sum for a mean",
        "naive_ddp",
        "            gradient /= dist.get_world_size(self.group)\n",
        "",
        "twin of naive",
    ),
    Mutant(
        "a sum for a mean, flat",
        "naive_ddp",
        "            flat /= dist.get_world_size(self.group)\n",
        "",
        "twin of flat",
    ),
    Mutant(
        "frozen parameters are not handed out",
        "naive_ddp",
        "(*module.parameters(), *module.buffers())",
        "(*(p for p in module.parameters() if p.requires_grad), *module.buffers())",
        "twin of naive",
    ),
    Mutant(
        "buffers are not handed out",
        "naive_ddp",
        "(*module.parameters(), *module.buffers())",
        "module.parameters()",
        "twin of naive",
    ),
    Mutant(
        "a tied weight is exchanged twice",
        "naive_ddp",
        "for parameter in module.parameters():  # each once, whatever the number of its names",
        "for _, parameter in module.named_parameters(remove_duplicate=False):",
        "all_reduces",
    ),
    Mutant(
        "nothing is launched before the backward pass has ended",
        "overlapped_ddp",
        "        if self.exchanging:\n",
        "        if False:\n",
        "early overlapped",
    ),
    Mutant(
        "no_sync exchanges",
        "overlapped_ddp",
        "before, self.exchanging = self.exchanging, False",
        "before, self.exchanging = self.exchanging, True",
        "accumulation overlapped",
    ),
    Mutant(
        "parameters in the order of registration",
        "overlapped_ddp",
        "reversed(list(module.parameters()))",
        "list(module.parameters())",
        "early overlapped",
    ),
    Mutant(
        "no mean while overlapping",
        "overlapped_ddp",
        "            parameter.grad /= dist.get_world_size(self.group)\n",
        "",
        "twin of overlapped",
    ),
    Mutant(
        "buckets are not copied back",
        "bucketed_ddp",
        "parameter.grad.copy_(part.view_as(parameter))",
        "pass",
        "twin of bucketed",
    ),
    Mutant(
        "buckets in the order of registration",
        "bucketed_ddp",
        "reversed(list(module.parameters()))",
        "list(module.parameters())",
        "early bucketed",
    ),
    Mutant(
        "counters of buckets are not set back",
        "bucketed_ddp",
        "self.sent.clear()\n        self.missing = [len(bucket) for bucket in self.buckets]\n",
        "self.sent.clear()\n",
        "twin of bucketed",
    ),
    Mutant(
        "a bucket closes one gradient too late",
        "bucket_assignment",
        "if total >= caps[min(closed, len(caps) - 1)]:",
        "if total > caps[min(closed, len(caps) - 1)] and len(members) > 1:",
        "buckets",
    ),
    Mutant(
        "updates stay with their owner",
        "sharded_optimizer",
        "for parameter, owner in self.owners.items()",
        "for parameter, owner in ()",
        "sharded",
    ),
    Mutant(
        "a changed learning rate is not seen",
        "sharded_optimizer",
        "own_group.update(changed)",
        "pass",
        "sharded",
    ),
    Mutant(
        "rank 0 has all states",
        "sharded_optimizer",
        "owner = min(range(len(self.shares_bytes)), key=self.shares_bytes.__getitem__)",
        "owner = 0",
        "sharded",
    ),
    Mutant(
        "the closure's loss is lost",
        "sharded_optimizer",
        "        return loss\n",
        "        return None\n",
        "sharded",
    ),
    Mutant(
        "gathered weights are never freed",
        "fsdp",
        "        self.blocks[index].free()\n        for tensor",
        "        for tensor",
        "fsdp",
    ),
    Mutant(
        "nothing is gathered ahead",
        "fsdp",
        "GATHERED_AHEAD = 2",
        "GATHERED_AHEAD = 0",
        "fsdp",
    ),
    Mutant(
        "too much is gathered ahead",
        "fsdp",
        "GATHERED_AHEAD = 2",
        "GATHERED_AHEAD = 5",
        "fsdp",
    ),
    Mutant(
        "a sum for a mean, sharded",
        "fsdp",
        "            own /= dist.get_world_size(self.group)\n",
        "",
        "fsdp",
    ),
    Mutant(
        "gradients replace those of the pass before",
        "fsdp",
        "mean.clone() if before is None else before + mean",
        "mean.clone()",
        "fsdp",
    ),
    Mutant(
        "gradients of replicated weights are not exchanged",
        "fsdp",
        "by_dtype(weight for weight in self.trained if not weight.is_sharded)",
        "by_dtype([])",
        "fsdp",
    ),
)
