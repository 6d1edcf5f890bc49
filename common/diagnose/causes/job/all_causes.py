"""All causes that are judged from what a job left behind.

Where several kinds of evidence tell of one cause, the best that is there decides.
"""

from __future__ import annotations

from collections.abc import Callable

from common.diagnose.causes.job import collectives, devices, failures, hangs, links, reports, traces
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
