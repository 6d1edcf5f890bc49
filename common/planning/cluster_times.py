"""The time of plans on a cluster that nobody has measured: ``ClusterSteps`` for each plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from common.errors import NotYetWritten, UserError
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.variants import in_units
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.pass_time import adamw_s, step_s
from common.perfmodel.cluster.steps import BAND, ClusterSteps
from common.perfmodel.one_device.peaks import DevicePeak, known_peak
from common.planning.search import Searched, StepTime, in_one_bucket, search
from common.planning.space import SINGLE, Plan, Question, numerics_of


class ClusterTimes:
    """Predicts steps from operations, kept bytes and the model of NCCL; nothing is measured.

    ``job`` has settings of the passes besides the plan's (tf32, compile).
    """

    def __init__(
        self, question: Question, cluster: Cluster, assumptions: Assumptions, job: Job
    ) -> None:
        self.question, self.cluster, self.job = question, cluster, job
        self.assumptions = assumptions
        self.peak = peak_of(cluster)
        for precision in question.precisions:
            if self.peak.flops(precision, job.tf32) is None:
                raise UserError(f"cluster {cluster.name}: no peak of {cluster.gpu} in {precision}")
        passes = f"{cluster.gpu} by its data sheet and shares of its peak"
        network = f"collectives by the model of NCCL for {cluster.name}"
        self.basis = (
            f"times of passes are assumed: {passes}; {network}, held to what was measured: "
            f"{cluster.assumptions[-1]}"
            if cluster.measured
            else f"times are assumed, nothing was measured: {passes}, {network}; ddplab predict "
            "--cluster lists every assumption",
            "no time counts what a host takes to launch kernels: two steps that waited for it, of "
            "small micro-batches or models, took 1.5 times as long (data/h200-1/study-models)",
            *_left_out(question.architecture),
        )

    def _job(self, plan: Plan) -> Job:
        return replace(
            self.job,
            architecture=self.question.architecture,
            batch_size=plan.micro_batch,
            accumulation=plan.accumulation,
            checkpointing=plan.checkpointing,
            precision=plan.precision,
            reduces_each=plan.reduces_each,
            prefetch=plan.prefetch,
            types=numerics_of(self.question, plan),
            tf32=self.job.tf32 and plan.precision == "float32",
        )

    def at_least_s(self, plan: Plan) -> float:
        """Returns the seconds of one GPU's passes at the assumed speed, without its update."""
        job = self._job(plan)
        update_s = adamw_s(job.architecture.num_trained, self.peak.memory_bytes_per_s)
        if self.assumptions.mfu:
            flops_per_s = self.peak.flops(job.precision, job.tf32) * self.assumptions.mfu.value
            passes = sum(
                layer.count
                * (1 + layer.backward_ratio + job.recomputed(layer))
                * layer.forward_flops
                for layer in job.architecture.layers
            )
            return plan.accumulation * plan.micro_batch * passes / flops_per_s
        return (step_s(job, self.peak) - update_s) / self.assumptions.pass_rate.value

    def step(self, plan: Plan) -> StepTime:
        """Predicts a step, at DDP's best cap."""
        job = self._job(plan)
        if plan.is_sharded and plan.blocks_per_unit > 1:
            job = replace(job, architecture=in_units(job.architecture, plan.blocks_per_unit))
        steps = ClusterSteps(
            job=job,
            cluster=self.cluster,
            peak=self.peak,
            gpus=[1 if plan.strategy == SINGLE else self.question.ranks],
            global_batch_size=self.question.global_batch,
            assumptions=self.assumptions,
        )
        if plan.is_sharded:
            row = steps.fsdp(plan.strategy)[0]
        else:
            row = self._in_buckets(steps, "DDP" if plan.strategy == SINGLE else plan.strategy)
        return StepTime(
            step_s=float(row["step_s"]),
            low_s=float(row["step_low_s"]),
            high_s=float(row["step_high_s"]),
            computation_s=float(row["computation_s"]),
            bucket_cap_mib=float(f"{row['bucket_cap_mib']:.3g}")
            if "bucket_cap_mib" in row
            else None,
            confidence=BAND,
        )

    def _in_buckets(self, steps: ClusterSteps, strategy: str) -> dict:
        """Predicts a step of DDP or ZeRO-1 at the best cap, or in one bucket without A2.1."""
        try:
            return steps.ddp(None, strategy)[0]
        except NotYetWritten as error:
            self.basis = in_one_bucket(self.basis, error)
            return steps.ddp((), strategy)[0]


def _left_out(architecture: Architecture) -> list[str]:
    """Returns a sentence on what is not timed of layers that run under ``no_grad``, if any do."""
    for layer in architecture.layers:
        moved = sum(sum(piece.sizes) for piece in layer.activations.moved)
        if layer.frozen and layer.forward_flops and not moved:
            return ["layers that run without gradients are timed by their products alone"]
    return []


def search_cluster(
    question: Question,
    cluster: Cluster,
    named: Mapping[str, object] | None = None,
    **job: bool,
) -> Searched:
    """Finds the best plan of a question on a cluster, as ``search`` does.

    Args:
        cluster: nodes and network; on as many GPUs as it was measured on it is that fast.
        named: fields of plans that are predicted in any case.
        job: settings of the passes besides the plan's (tf32, compile).

    Raises UserError where times or memory are not known.
    """
    passes = Job(question.architecture, precision="float32", **job)
    return search(question, ClusterTimes(question, cluster, Assumptions(), passes), named)


def peak_of(cluster: Cluster) -> DevicePeak:
    """Returns the peak of a cluster's GPU. Raises UserError where it is not known."""
    peak = known_peak(cluster.gpu)
    if peak is None:
        raise UserError(f"cluster {cluster.name}: nothing is known of a {cluster.gpu}")
    return peak
