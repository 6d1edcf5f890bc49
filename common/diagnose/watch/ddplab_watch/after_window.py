"""The measurements of all ranks after the window: probes and trials, or why there are none."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel

from ddplab_watch import torch_internals
from ddplab_watch.changes import exchange_of
from ddplab_watch.kept import Kept, left_as_it_was
from ddplab_watch.lean import NOT_TOGETHER, SCATTERED, Lean, LeanPasses
from ddplab_watch.probes import LONGEST_S, Probes
from ddplab_watch.session import Session
from ddplab_watch.sharded import ShardedPasses
from ddplab_watch.team import Team, all_are_here, telling
from ddplab_watch.trials import Trials

PASSES, CHANGES = "passes without exchange", "changes that were to be tried"


def probe(session: Session) -> None:
    """Probes what a step is made of, and tries changes if that was asked for."""
    unseen, step = session.record.unseen, session.loop.step
    if session.ranks > 1:
        job = f"ddplab-watch/{session.record.path.parent}"
        sees = f"{session.calls.kept_kind} {session.is_sharded()} {session.trains_others()}"
        if not all_are_here(torch_internals.job_store(), job, session.rank, session.ranks, sees):
            unseen(PASSES, "not every rank is watched, or not all see the same model called")
            return
    if not session.calls.kept_kind:
        unseen(PASSES, "the model's call was not seen")
        return
    if session.trains_others():
        unseen(PASSES, "the script trains several models")
        return
    kept = session.calls.take(session.updated_parameters)
    if session.is_sharded():
        unseen(PASSES, "FSDP")
        probe_sharded(session, kept, len(step.passes))
        return
    is_ddp = isinstance(kept.module, DistributedDataParallel)
    group = kept.module.process_group if is_ddp else None  # under torch.compile it is further in
    is_alone = group is None and dist.is_initialized() and session.ranks > 1
    team = Team(dist.group.WORLD if is_alone else group, kept.device, session.loop.clock)
    if is_alone:  # a script that exchanges gradients by itself
        has_ddp = any(isinstance(part, DistributedDataParallel) for part in kept.inner.modules())
        can_be = team.all_agree(not (has_ddp or kept.is_compiled))
        if not can_be or len(set(team.gather(kept.gradient_bytes))) > 1:
            unseen(PASSES, "the model is not under DDP, nor the same on all ranks by itself")
            return
    buckets_bytes = [bucket.size_bytes for bucket in step.buckets]
    Probes(kept, team, session.record, session.steps.usual_s(), buckets_bytes).run()
    if not session.options.verify:
        return
    if is_ddp and team.ranks > 1:
        try_changes(session, kept, team)
    else:
        unseen(CHANGES, "nothing is exchanged")


def probe_sharded(session: Session, kept: Kept, micro_batches: int) -> None:
    """Compares passes of a model under FSDP2 with lean ones; both have its exchange."""
    if session.ranks == 1 or not torch_internals.is_fsdp2(kept.inner):
        return
    team = Team(dist.group.WORLD, kept.device, session.loop.clock)
    passes, began = ShardedPasses(kept, team.clock), time.monotonic()
    step_s = session.steps.usual_s()

    def may_go_on(count: int) -> bool:
        return time.monotonic() - began + count * step_s < LONGEST_S

    with ExitStack() as stack, telling(session.record, "passes of a sharded model"):
        putting_back = left_as_it_was(kept.inner, kept.device, parameters=False)
        team.on_all(lambda: stack.enter_context(putting_back))
        team.on_all(passes.try_out)
        further = {SCATTERED: Lean(passes.unscattered)} if micro_batches > 1 else {}
        about = (kept, None, may_go_on, NOT_TOGETHER)
        LeanPasses(team, session.record, passes.one_pass, *about).run(further)


def try_changes(session: Session, kept: Kept, team: Team) -> None:
    """Tries what a diagnosis may propose."""
    step, steps = session.loop.step, session.steps
    sent_bytes = sum(bucket.size_bytes for bucket in step.buckets)
    Trials(
        kept=kept,
        team=team,
        record=session.record,
        now=exchange_of(kept.module, len(step.passes), sent_bytes),
        step_s=steps.usual_s(),
        waits=steps.share_waited(),
        loading=session.feed.loading,
    ).run()
