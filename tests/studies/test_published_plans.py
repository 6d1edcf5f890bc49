"""Published rows that ran, each as a plan of ``ddplab plan``: it is listed, and it fits."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from common.perfmodel.one_device.peaks import known_peak
from common.planning.space import SINGLE, Plan, Question, candidates, fits, sized
from common.studies.public import predictor
from common.studies.public.hardware import PEAK_NAMES
from common.studies.public.jobs import PublishedJob, job_of, read_published, with_defaults

PUBLIC = Path(__file__).parents[3] / "shared" / "measured" / "public-gpus"


def asked(job: PublishedJob) -> tuple[Question, Plan]:
    """Returns the question that a row answers, and its plan. Raises UserError without one."""
    if job.is_model_parallel or predictor._has_adapters(job):
        raise UserError("not a plan of data-parallel training")
    if any(re.search(words, f"{job.model} {job.strategy}") for words, _ in predictor.NOT_MODELLED):
        raise UserError("not modelled")
    if job.source_repo in predictor.UNSTATED_CHECKPOINTING and not job.act_ckpt:
        raise UserError("checkpointing not published")
    strategy = predictor._strategy(job)
    work = predictor._work(job, strategy)
    gpu = known_peak(PEAK_NAMES.get(job.gpu, job.gpu))
    if gpu is None or gpu.memory_bytes is None:
        raise UserError("memory not known")
    plan = Plan(
        strategy if job.gpus > 1 else SINGLE,
        work.batch_size,
        work.accumulation,
        work.checkpointing,
        "float32" if work.precision == "float32" else "bfloat16",
    )
    if plan.is_sharded and plan.accumulation > 1:
        plan = replace(plan, reduces_each=True)
    question = Question(
        architecture=work.architecture,
        ranks=job.gpus,
        ranks_per_node=min(job.gpus_per_node or job.gpus, job.gpus),
        global_batch=job.gpus * work.batch_size * work.accumulation,
        memory_bytes=gpu.memory_bytes,
        precisions=(plan.precision,),
        fused_loss=work.types.fused_loss,
    )
    return question, plan


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("followed")  # models that a process follows once
@pytest.mark.skipif(not PUBLIC.is_dir(), reason="needs the table of published rows")
def test_what_ran_is_a_plan_that_fits():
    table, _ = read_published(PUBLIC)
    rows = table[(table["kind"] == "training") & (table["problem"] == "")]
    alike: dict[str, list[tuple[Question, Plan, str]]] = {}  # many rows differ in speed alone
    for _, row in rows.iterrows():
        job = job_of(with_defaults(row))
        with suppress(UserError):
            question, plan = asked(job)
            alike.setdefault(repr((question, plan)), []).append((question, plan, job.source_repo))
    planned, too_large = 0, []
    for jobs in alike.values():
        question, plan, source = jobs[0]
        try:
            memory = sized(question, plan)
        except UserError:
            continue
        planned += len(jobs)
        of_plan = replace(question, strategies=(plan.strategy,), micro_batches=(plan.micro_batch,))
        assert plan in candidates(of_plan)
        if not fits(question, memory):
            too_large.append((source, memory.peak_bytes / question.usable_bytes))
    assert planned > 600
    assert too_large == []
