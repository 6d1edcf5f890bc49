"""All causes by the names under which they are listed: of a run, and of what a job left behind."""

from __future__ import annotations

from collections.abc import Callable

from common.diagnose.causes import (
    beside,
    between_steps,
    communication,
    gpu,
    machine,
    over_steps,
    overlap,
    ranks,
    script,
    settings,
    sharing,
    validity,
)
from common.diagnose.causes.communication import LIMITS, NEEDLESS
from common.diagnose.causes.job import collectives, devices, failures, hangs, links, reports, traces
from common.diagnose.causes.needless_work import judge_of, sent_buffers
from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind

Judge = Callable[[Case], Verdict | None]
JudgeOfJob = Callable[[LeftBehind], Verdict | None]
NEEDLESS_WORK = ("left-on", "unused-gradients", "needless-recomputation", "sparse-embedding")
"""Causes of lean passes that are judged by nothing else."""


def first_of(*judges: Judge) -> Judge:
    """Returns the judge that gives the first verdict that any of these gives."""
    return lambda case: next(filter(None, (judge(case) for judge in judges)), None)


def first_judged(*judges: JudgeOfJob) -> JudgeOfJob:
    """Returns a judge that goes by the first of several whose evidence is there."""

    def judge(job: LeftBehind) -> Verdict | None:
        reasons: list[NotJudged] = []
        for candidate in judges:
            try:
                return candidate(job)
            except NotJudged as reason:
                reasons.append(reason)
        raise reasons[0]

    return judge


CAUSES: dict[str, Judge] = {
    "wrong-sampler": validity.wrong_sampler,
    "mixed-configurations": validity.mixed_configurations,
    "warm-up-counted": validity.warm_up_counted,
    "shared-device": sharing.shared_device,
    "oversubscribed-cores": first_of(
        judge_of("oversubscribed-cores"), sharing.oversubscribed_cores
    ),
    "slow-rank": first_of(ranks.larger_batch, ranks.slow_rank),
    "unequal-lengths": over_steps.unequal_lengths,
    "data-loading": between_steps.data_loading,
    "evaluation-or-logging": between_steps.evaluation_or_logging,
    NEEDLESS: communication.needless_synchronisation,
    "no-overlap": overlap.no_overlap,
    "bucket-cap": first_of(judge_of("bucket-cap"), communication.bucket_cap),
    ", ".join(LIMITS): communication.communication_bound,
}
MACHINE_CAUSES: dict[str, Judge] = {
    "cpu-quota": machine.cpu_quota,
    "too-few-threads": machine.too_few_threads,
    "wrong-interface": machine.wrong_interface,
    "nccl-settings": settings.nccl_settings,
    "gpu-surroundings": settings.gpu_surroundings,
    "lowered-clocks": settings.lowered_clocks,
}
"""Causes in the machine and its settings, which the watcher alone reads."""
GPU_CAUSES: dict[str, Judge] = {
    "synchronised-norms": first_of(gpu.synchronised_norms, beside.own_norms),
    "no-mixed-precision": gpu.wide_computation,
    "host-waits": gpu.host_waits,
    "unpinned-copies": gpu.unpinned_copies,
}
"""Causes in scripts on GPUs."""
OF_SCRIPTS: dict[str, Judge] = {
    "hang": script.hang,
    "slow-update": ranks.slow_update,
    **{cause: judge_of(cause) for cause in NEEDLESS_WORK},
    "heavy-update": beside.heavy_update,
    "own-exchange": beside.own_exchange,
    "beside-the-model": beside.beside_the_model,
    "epoch-start": over_steps.epoch_start,
    "sent-buffers": sent_buffers,
    "padding": script.padding,
    "needless-search": script.needless_search,
    "garbage-collection": script.collecting,
    "recompilation": script.recompiling,
    "allocator-retries": script.allocator_retries,
    "growing-memory": over_steps.growing_memory,
    "memory-imbalance": over_steps.unequal_memory,
    "reserved-memory": over_steps.reserved_memory,
    "wide-gradients": script.narrow_gradients,
    **GPU_CAUSES,
    **MACHINE_CAUSES,
}
"""Looked for in watched scripts only: this project's programs have no table of them."""
JOB_CAUSES: dict[str, JudgeOfJob] = {
    "failed-rank": failures.failed_rank,
    "hang": hangs.hang,
    "mismatched-collectives": hangs.mismatched_collectives,
    "stuck-stacks": hangs.stuck_stacks,
    "unused-parameters": reports.unused_parameters,
    "slow-rank": first_judged(
        traces.slow_rank, reports.slow_rank_by_tables, reports.slow_rank_by_ddp
    ),
    "exposed-communication": first_judged(
        traces.exposed_communication, reports.exposed_by_tables, reports.exposed_by_ddp
    ),
    "idle-device": first_judged(traces.idle_device, reports.idle_by_tables),
    "late-arrivals": reports.late_arrivals,
    "needless-search": reports.needless_search,
    "nccl-container": links.nccl_container,
    "nccl-connections": links.nccl_connections,
    "nccl-errors": links.nccl_errors,
    "slow-collectives": collectives.slow_collectives,
    "gpu-links": devices.gpu_links,
    "gpu-surroundings": devices.gpu_state,
}
"""Judged from the files that a job left."""
