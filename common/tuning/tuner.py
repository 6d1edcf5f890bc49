"""Tunes DDP for a model: measures, predicts every bucketing, verifies the best few, recommends.

All ranks call ``tune`` together. Nothing is trained: there is no optimizer step, the module's
buffers are put back, and its weights are rank 0's on all ranks, as under DDP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from torch import Tensor, nn

from common.benchmarks.steps import FixedBatchStep
from common.errors import UserError
from common.perfmodel.calibration import read_calibration
from common.perfmodel.expected_error import expectation
from common.perfmodel.uncertainty import chance_at
from common.runtime.group.process_group import Worker
from common.runtime.machine.environment import RankGroup, describe_environment
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, record_run
from common.samples import per_round
from common.tuning.candidates import Predicted, Prediction, ddp_model, predict_all
from common.tuning.ddp_setting import DEFAULT
from common.tuning.measured import Measured, WatchedPasses, measure_all, watch_passes
from common.tuning.results.recommendation import Recommendation, Verified, write_recommendation
from common.tuning.same_graph import check_same_graph, on_main, together
from common.tuning.tune_settings import SWEEP_ROUNDS, TuneSettings
from common.tuning.user_model import UserModel, checked_model, user_step
from common.tuning.visit_plan import (
    ROUNDS_PER_LEVEL,
    VisitPlan,
    plan_visits,
    rounds_with_time_left,
    saving,
    successive_halving,
    with_final_rounds,
)
from common.tuning.visits import (
    STEPS,
    WARMUP_STEPS,
    Visits,
    check_under_ddp,
    left_as_it_was,
    takes_cap_list,
)

FINAL = "final"
CAUTION = 0.9
"""The part of the promised time that visits are planned for: what a sweep takes is an estimate."""


@dataclass(frozen=True)
class Budget:
    """The time for tuning, in visits to DDP's default.

    Attributes:
        visits: number of visits whose time all of tuning may take.
        began, visiting: moments at which tuning and visits began, by this rank's ``perf_counter``.
    """

    visits: float
    began: float
    visiting: float

    def visits_left(self, visits: Visits) -> float:
        """Returns how many more fit, by the cost of those made; the same on every rank."""
        now = time.perf_counter()
        visit_s = (now - self.visiting) / visits.count
        return visits.worker.broadcast(self.visits - (now - self.began) / visit_s)


def tune(
    module: nn.Module,
    batch: object,
    loss: Callable[[nn.Module, object], Tensor],
    worker: Worker,
    settings: TuneSettings | None = None,
) -> Recommendation:
    """Finds the best DDP settings for ``module`` on the ranks of the running process group.

    Args:
        module: the model, not wrapped in DDP; moved to ``worker``'s device.
        batch: one example batch, tensors in any nest of tuples, lists and dicts.
        loss: ``loss(module, batch)`` → a scalar tensor; calls nothing of the module but itself.
        worker: this rank, from ``common.runtime.group.process_group.process_group``.
        settings: the share of a sweep's time to take, and the folder of the run directory.

    Raises:
        UserError: on all ranks, before anything is written: one rank only, the contract is not
            kept, no gradient reaches a parameter, or ranks run different graphs.
    """
    settings = settings or TuneSettings()
    name = settings.function or type(module).__name__
    check_ranks(worker)
    user = together(worker, lambda: checked_model((module, batch, loss), name, worker.device))
    return tune_model(user, worker, settings)


def check_ranks(worker: Worker) -> None:
    """Raises UserError on a single rank, which exchanges nothing."""
    if worker.world_size < 2:
        raise UserError("tune on 1 rank: there is nothing to exchange; start it on at least 2")


def tune_model(user: UserModel, worker: Worker, settings: TuneSettings) -> Recommendation:
    """Does what ``tune`` does, for a model that keeps the contract; writes the run directory."""
    step, began = user_step(user, worker), time.perf_counter()
    with left_as_it_was(user.module):
        check_same_graph(user, worker)
        check_under_ddp(user, step)
        passes = watch_passes(step)
        with record_run(settings, "tune", worker) as recorder:
            recommendation = _tune(step, passes, settings, recorder, began)
            if recorder.run:
                write_recommendation(recommendation, recorder.run.path)
    return recommendation


def _tune(
    step: FixedBatchStep,
    passes: WatchedPasses,
    settings: TuneSettings,
    recorder: Recorder,
    began: float,
) -> Recommendation:
    """Measures, predicts, visits and recommends; ``passes`` are those that were watched already."""
    worker = recorder.worker
    measured = measure_all(step, passes, recorder)
    predicted = on_main(worker, lambda: predict_all(measured, takes_cap_list()))
    spent_s = worker.broadcast(time.perf_counter() - began)
    allowed = CAUTION * settings.share * len(predicted.bucketings) * SWEEP_ROUNDS
    plan = plan_visits(
        _affordable(allowed, spent_s, measured, predicted),
        len(predicted.candidates),
        [option.setting.accumulation for option in predicted.options],
    )
    if recorder.run:
        recorder.run.write_table("predictions.csv", bucketing_table(predicted, measured))
    budget = Budget(allowed, began, visiting=time.perf_counter())
    visits = Visits(step, recorder, "visits.csv", Progress(plan.visits, worker.is_main))
    ranked = rank_by_measured_saving(visits, predicted.candidates, plan)
    best = ranked[0]
    if visits.count:
        plan = with_final_rounds(plan, budget.visits_left(visits))
    options = [option.setting for option in predicted.options[: len(plan.options)]]
    samples = visits.rounds(FINAL, [DEFAULT, best.setting, *options], plan.final_rounds)
    more = rounds_with_time_left(plan.final_rounds, budget.visits_left(visits))
    added = visits.rounds(FINAL, [DEFAULT, best.setting], more, first=plan.final_rounds)
    final = instance_times_s(pd.concat([samples, added]))
    now = time.perf_counter()
    visit_s = (now - budget.visiting) / visits.count
    sweep_s = len(predicted.bucketings) * SWEEP_ROUNDS * visit_s
    tuning_s, sweep_s = worker.broadcast((now - began, sweep_s))
    everything = instance_times_s(visits.samples)
    base = predicted.default
    base_s = float(everything[base.setting.label].median())

    def verified(prediction: Prediction, times: pd.DataFrame) -> Verified:
        label = prediction.setting.label
        gain, measured_s = None, None
        if prediction is base and label in times:
            measured_s = base_s
        elif label in times:
            gain = saving(times, label, DEFAULT.label)
            measured_s = base_s * (1 - gain.estimate)
        return Verified(
            setting=prediction.setting,
            num_buckets=prediction.num_buckets,
            predicted_step_s=prediction.step_s,
            predicted_gain=1 - prediction.step_s / base.step_s,
            measured_step_s=measured_s,
            gain=gain,
        )

    return Recommendation(
        model=step.name,
        hardware=on_main(worker, lambda: _hardware(worker)),
        parameters=sum(p.numel() for p in step.model.parameters()),
        tensors=len(measured.profile.names),
        gradient_bytes=measured.profile.total_bytes,
        forward_s=measured.forward_s,
        backward_s=measured.profile.backward_s,
        default=verified(base, everything),
        best=verified(best, final),
        candidates=(
            verified(best, final),
            *(verified(candidate, everything) for candidate in ranked[1:]),
        ),
        options=tuple(verified(option, final) for option in predicted.options),
        noise=float(final[DEFAULT.label].std() / final[DEFAULT.label].median()),
        bucketings=len(predicted.bucketings),
        tuning_s=tuning_s,
        sweep_s=sweep_s,
        run_dir=str(recorder.folder),
        on_gpu=worker.device.type == "cuda",
        expected_error=on_main(worker, lambda: _expected_error(measured, best, recorder)),
        machine=on_main(worker, lambda: recorder.machine().state),
    )


def _expected_error(measured: Measured, best: Prediction, recorder: Recorder) -> str:
    """Returns how far off to expect a prediction, and by how much chance moves it, on rank 0."""
    run, model = recorder.run, ddp_model(measured)
    calibration = read_calibration(
        run.path / "gradient-ready-times.csv",
        run.path / "allreduce-samples.csv",
        run.path / "overlap-times.csv",
        backend=measured.backend,
    )
    network = str(run.environment["network"])
    # A band is drawn at the setting's cap, and has the same relative width with its other options.
    chance = chance_at(calibration, best.setting.cap_mib).around(best.backward_s)
    expected = expectation(model, measured.backend, network, best.backward_s, chance.share)
    return f"{expected}\n{chance.text()}"


def rank_by_measured_saving(
    visits: Visits, candidates: Sequence[Prediction], plan: VisitPlan
) -> list[Prediction]:
    """Ranks all candidates by successive halving of what they save of the default's time.

    The best come first, unvisited ones last; every rank does alike.
    """

    def times_after(level: int, visited: list[Prediction]) -> pd.DataFrame:
        settings = [DEFAULT, *(candidate.setting for candidate in visited)]
        visits.rounds(f"choice {level + 1}", settings, ROUNDS_PER_LEVEL)
        return instance_times_s(visits.samples)

    def label(candidate: Prediction) -> str:
        return candidate.setting.label

    return successive_halving(candidates, plan.levels, times_after, label, DEFAULT.label)


def instance_times_s(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns seconds of each instance's step: a row per round of a stage, a column per setting."""
    stages = [
        per_round(stage, "step_time_ms", "setting")
        for _, stage in samples.groupby("stage", sort=False)
    ]
    return pd.concat(stages, ignore_index=True) / 1e3


def bucketing_table(predicted: Predicted, measured: Measured) -> pd.DataFrame:
    """Returns ``predictions.csv``: a row for every distinct bucketing, by cap."""
    return pd.DataFrame(
        {
            "bucket_cap_mib": bucketing.short_cap_mib,
            "low_mib": bucketing.low_mib,
            "high_mib": bucketing.high_mib,
            "num_buckets": bucketing.num_buckets,
            "backward_time_ms": bucketing.total_s * 1e3,
            "step_time_ms": (measured.forward_s + bucketing.total_s) * 1e3,
        }
        for bucketing in predicted.bucketings
    )


def _affordable(allowed: float, spent_s: float, measured: Measured, predicted: Predicted) -> int:
    """Returns how many of the ``allowed`` visits there is time for, before any was made."""
    # A visit is its steps at the predicted time, and making the instance, which sends all weights.
    wrapping_s = float(measured.networks["none"].curve.time_s(measured.profile.total_bytes))
    visit_s = wrapping_s + (WARMUP_STEPS + STEPS) * predicted.default.step_s
    return int(allowed - spent_s / visit_s)


def environment_of(worker: Worker) -> dict:
    """Returns the description of this job's ranks, as a run directory records it."""
    return describe_environment(
        worker.backend,
        worker.device.type,
        worker.world_size,
        group=RankGroup(process_group=worker.group_class),
    )


def _hardware(worker: Worker) -> str:
    environment = environment_of(worker)
    network = environment["network"]
    added = worker.backend == "gloo" and network and network not in environment["hardware"]
    return environment["hardware"] + (f", {network}" if added else "")
