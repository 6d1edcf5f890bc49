"""All causes that are judged from what a job left behind.

Where several kinds of evidence tell of one cause, the best that is there decides.
"""

from __future__ import annotations

from collections.abc import Callable

from common.diagnose.causes.job.collectives import slow_collectives
from common.diagnose.causes.job.devices import gpu_links, gpu_state
from common.diagnose.causes.job.failures import failed_rank
from common.diagnose.causes.job.hangs import hang, mismatched_collectives, stuck_stacks
from common.diagnose.causes.job.links import nccl_connections, nccl_container, nccl_errors
from common.diagnose.causes.job.reports import (
    exposed_by_ddp,
    exposed_by_tables,
    idle_by_tables,
    late_arrivals,
    needless_search,
    slow_rank_by_ddp,
    slow_rank_by_tables,
    unused_parameters,
)
from common.diagnose.causes.job.traces import exposed_communication, idle_device, slow_rank
from common.diagnose.evidence.case import Verdict
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind

Judge = Callable[[LeftBehind], Verdict | None]


def first_judged(*judges: Judge) -> Judge:
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


JOB_CAUSES: dict[str, Judge] = {
    "failed-rank": failed_rank,
    "hang": hang,
    "mismatched-collectives": mismatched_collectives,
    "stuck-stacks": stuck_stacks,
    "unused-parameters": unused_parameters,
    "slow-rank": first_judged(slow_rank, slow_rank_by_tables, slow_rank_by_ddp),
    "exposed-communication": first_judged(exposed_communication, exposed_by_tables, exposed_by_ddp),
    "idle-device": first_judged(idle_device, idle_by_tables),
    "late-arrivals": late_arrivals,
    "needless-search": needless_search,
    "nccl-container": nccl_container,
    "nccl-connections": nccl_connections,
    "nccl-errors": nccl_errors,
    "slow-collectives": slow_collectives,
    "gpu-links": gpu_links,
    "gpu-surroundings": gpu_state,
}
