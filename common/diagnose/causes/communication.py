"""Causes that lie in the exchange of gradients, from what can be removed to what must be borne."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from common.diagnose.causes.overlap import first_let_it_overlap
from common.diagnose.evidence.case import Case, Verdict, confidence, percent
from common.diagnose.evidence.evidence import (
    ALL_REDUCE,
    BUCKETS,
    PLACEMENT,
    PROBES,
    READY_TIMES,
    STEPS,
)
from common.diagnose.evidence.measured_step import bucket_sizes, latency_share, sent_over_gradients
from common.perfmodel.collectives import bus_bandwidth
from common.perfmodel.scaling.scaled_step import (
    TARGET_EFFICIENCY,
    at_bandwidth,
    best_cap_mb,
    needed_bandwidth,
    smallest_that_suffices,
)
from common.perfmodel.scaling.step_model import (
    WIRE_SHARES,
    WIRE_TYPES,
    Prediction,
    StepModel,
    StepSettings,
    apart,
    predict,
)
from common.runtime.wording import counted, size_text

NEEDLESS = "needless-synchronisation"
LIMITS = ("model-too-small", "batch-too-small", "network-too-slow")
"""Causes in the exchange itself, judged as if no part of it were needless."""
COMMUNICATION = "communication_time_ms"
CAP_GAIN = 0.08
"""Predictions of a step are good to a few percent: a gain of less than this may be none."""
NOISE_FACTOR, MOST_NOISE = 3.0, 0.2
"""A gain must also be three times the standard error of the step, but no more than a fifth."""
EXPOSED_SHARE = 0.20
"""With a fifth of the step exposed, efficiency cannot be above 80 %."""
LEAST_EXPOSED = 1e-3
"""A model that predicts less exposed communication is taken to predict so much."""
LATENCY_SHARE = 0.5
"""Latency-bound: latencies are most of the exchange, so that a smaller model would be no faster."""
BELIEVED = 3.0
"""All-reduces in a step may take three times what they take apart, among computing ranks. What is
beyond that is no communication: the machine did something else. Small messages are excepted: each
waits for a processor among computing ranks, however short it is itself."""
MOST_BATCH = 16
"""The largest batch worth proposing, as a multiple."""
SKIPPED = 1.5
"""Exchanges of a step above one: 1.5 lies between one (and rounding) and two."""


def needless_synchronisation(case: Case) -> Verdict | None:
    """Judges whether gradients are exchanged after each micro-batch instead of once a step."""
    micro = case.run.timed.groupby("rank")["micro_batches"].median().max()
    if micro <= 1:
        return None
    gradient_bytes = float(sum(bucket_sizes(case.run))) or case.run.gradient_bytes
    exchanges = sent_over_gradients(case.run, gradient_bytes)
    if not exchanges > SKIPPED:
        return None
    parts = case.run.parts
    lost = parts.parts_ms["communication"] / parts.step_ms * (1 - 1 / exchanges)
    predicted = {}
    model = case.model_or_none()
    if model is not None and model.settings.exchanges > 1:
        after = replace(model.settings, exchanges=1)
        lost = 1 - predict(model, after).step_n_s / predict(model).step_n_s
        predicted = {"gain": case.gain_with(after)}
    return case.verdict(
        cause=NEEDLESS,
        title="gradients are exchanged after every micro-batch",
        evidence=(
            f"A step of {micro:g} micro-batches sends {size_text(exchanges * gradient_bytes)} "
            f"[{STEPS}]; its gradients are {size_text(gradient_bytes)} "
            f"[{BUCKETS}]: {exchanges:.1f} exchanges where one is enough.",
            f"Communication that nothing hides takes {parts.parts_ms['communication']:.3g} of "
            f"{parts.step_ms:.3g} ms [{STEPS}].",
        ),
        lost=lost,
        sure=("high", "bytes are counted, not timed"),
        change="Run all micro-batches but the last inside model.no_sync(), forward pass included.",
        **predicted,
    )


def bucket_cap(case: Case) -> Verdict | None:
    """Judges whether other buckets would hide or shorten the exchange."""
    case.run.need(BUCKETS)
    if case.run.waits:  # as long as passes wait for each bucket, the model knows no best cap
        return None
    model = case.model
    best, now, after = _at_best_cap(model, model.settings)
    gain = min(
        1 - after.step_n_s / now.step_n_s,
        case.share(COMMUNICATION)[0],
        _gain_on_a_line(model, best),
    )
    if gain < max(CAP_GAIN, min(MOST_NOISE, NOISE_FACTOR * case.run.noise)):
        return None
    sizes = bucket_sizes(case.run)
    return _proposing(
        case,
        replace(model.settings, bucket_cap_mb=best),
        cause="bucket-cap",
        title="another bucket cap would be faster",
        evidence=(
            f"With {counted(len(sizes), 'bucket')} of {size_text(np.median(sizes))} (median) "
            f"[{BUCKETS}], these all-reduce times [{ALL_REDUCE}] and gradient-ready times "
            f"[{READY_TIMES}] a step is predicted to take {now.step_n_s * 1e3:.3g} ms, and "
            f"{after.step_n_s * 1e3:.3g} ms with "
            f"{counted(after.exchange.num_buckets, 'bucket')}, by a cap of {best:.3g} MiB.",
        ),
        lost=gain,
        sure=confidence(gain, CAP_GAIN, case.run.noise, case.steps, of="predicted gain"),
        change=cap_change(case, best) + first_let_it_overlap(case),
    )


def _proposing(case: Case, settings: StepSettings, **fields: object) -> Verdict:
    """Returns a verdict whose change is other settings of the step, which the model predicts."""
    return case.verdict(**fields, proposed=settings, gain=case.gain_with(settings))


def cap_change(case: Case, cap_mb: float) -> str:
    """Returns how a bucket cap is changed."""
    return case.change(
        f"--bucket-cap-mb {cap_mb:.3g}",
        f"DistributedDataParallel(model, ..., bucket_cap_mb={cap_mb:.3g})",
    )


def _at_best_cap(model: StepModel, settings: StepSettings) -> tuple[float, Prediction, Prediction]:
    best = float(f"{best_cap_mb(model, settings):.4g}")
    after = predict(model, replace(settings, bucket_cap_mb=best))
    return best, predict(model, settings), after


def _gain_on_a_line(model: StepModel, cap_mb: float) -> float:
    """Returns the gain by an α–β fit: a dip of the measured curve is no reason to change."""
    line = at_bandwidth(model, 1.0)
    after = predict(line, replace(line.settings, bucket_cap_mb=cap_mb))
    return 1 - after.step_n_s / predict(line).step_n_s


@dataclass(frozen=True)
class _Exposed:
    """Communication that stays exposed when all that is needless is gone, at the best cap.

    Attributes:
        share: share of the step that stays exposed.
        settings, prediction: settings and prediction of the step without what is needless.
        latency: share of its exchange that is latency.
        measured_ms, step_ms: exposed communication, and the step, as they were measured.
    """

    share: float
    settings: StepSettings
    prediction: Prediction
    latency: float
    measured_ms: float
    step_ms: float

    @property
    def beyond_model(self) -> float:
        """Returns the exposed share over the one that the model predicts; at least 1.

        A change has to bring down what was measured, not what is predicted.
        """
        predicted = 1 - self.prediction.exchange_efficiency
        return max(1.0, self.share / max(predicted, LEAST_EXPOSED))


def communication_bound(case: Case) -> Verdict | None:
    """Judges whether the exchange itself is too much for this model, batch or network."""
    case.need_ranks("exchanges nothing")
    share, error = case.share(COMMUNICATION)
    if share < EXPOSED_SHARE:
        return None
    exposed = _exposed(case)
    if exposed.share < EXPOSED_SHARE:
        return None
    model, settings = case.model, exposed.settings
    network = model.networks[WIRE_TYPES[settings.compression]]
    count = exposed.prediction.exchange.num_buckets
    wire = _wire_bytes(settings, exposed.prediction)
    active_s = predict(apart(model), settings).exchange.communication_s
    compute_s = settings.accumulation * model.together.time_s(settings.batch_per_rank)
    bus = float(bus_bandwidth(wire, float(network.time_s(float(wire))), case.ranks))
    evidence = [
        f"Communication that nothing hides takes {exposed.measured_ms:.3g} of "
        f"{exposed.step_ms:.3g} ms [{STEPS}]"
        + (
            f"; {percent(exposed.share)} of the step would remain at the best bucket cap and with "
            f"one exchange a step{' that overlaps' if case.run.waits else ''}."
            if exposed.settings != model.settings or case.run.waits
            else f", {percent(exposed.share)} of the step."
        ),
        f"Computation takes {compute_s * 1e3:.3g} ms [{PROBES}], sending "
        f"{size_text(wire)} in {counted(count, 'bucket')} {active_s * 1e3:.3g} ms, "
        f"{exposed.latency * active_s * 1e3:.3g} ms of it latency [{ALL_REDUCE}].",
    ]
    sure = confidence(exposed.share, EXPOSED_SHARE, error, case.steps)
    judgement = {"lost": exposed.share, "sure": sure}
    if exposed.latency >= LATENCY_SHARE:
        return _model_too_small(case, settings, evidence, judgement)
    target = 1 - (1 - TARGET_EFFICIENCY) / exposed.beyond_model
    enough = {
        name: smallest_that_suffices(
            model, settings, name, getattr(settings, name) * MOST_BATCH, target
        )
        for name in ("batch_per_rank", "accumulation")
    }
    if any(enough.values()):
        return _batch_too_small(case, enough, exposed, evidence, judgement)
    return _network_too_slow(case, settings, bus, evidence, judgement)


def _exposed(case: Case) -> _Exposed:
    """Computes the communication that remains exposed when all that is needless is gone.

    Needless are exchanges beyond one a step, what a better bucket cap saves, and waiting for each
    bucket. The model predicts how long the step would then be; what it saves is taken from the
    communication that was measured and from the step. Measured communication is limited to
    ``BELIEVED`` times the predicted one, if that is not for the most part latency.

    Raises NotJudged without a step model: nothing could tell the causes apart.
    """
    model = case.model
    settings = replace(model.settings, exchanges=1)
    best, plain, after = _at_best_cap(model, settings)
    if after.step_n_s < plain.step_n_s * (1 - CAP_GAIN):
        settings = replace(settings, bucket_cap_mb=best)
    else:
        after = plain
    now_s = case.run.step_ms / 1e3 if case.run.waits else predict(model).step_n_s
    avoidable_ms = max(0.0, (now_s - after.step_n_s) * 1e3)
    active_s = predict(apart(model)).exchange.communication_s * model.settings.exchanges
    each_bytes = _wire_bytes(settings, after) / after.exchange.num_buckets
    latency = latency_share(case.run, WIRE_TYPES[settings.compression], each_bytes)
    step_ms = float(case.run.slowest_ms.median())
    measured_ms = case.share(COMMUNICATION)[0] * step_ms
    if latency < LATENCY_SHARE:
        measured_ms = min(measured_ms, BELIEVED * active_s * 1e3)
    share = max(0.0, measured_ms - avoidable_ms) / (step_ms - min(avoidable_ms, measured_ms))
    return _Exposed(share, settings, after, latency, measured_ms, step_ms)


def _wire_bytes(settings: StepSettings, prediction: Prediction) -> int:
    gradients = sum(event.size_bytes for event in prediction.exchange.events)
    return round(gradients * WIRE_SHARES[settings.compression])


def _model_too_small(
    case: Case, settings: StepSettings, evidence: list[str], judgement: dict[str, object]
) -> Verdict:
    larger = replace(settings, batch_per_rank=settings.batch_per_rank * MOST_BATCH)
    reached = predict(case.model, larger).efficiency
    return _proposing(
        case,
        larger,
        cause="model-too-small",
        title="the model is too small: most of its exchange is latency",
        evidence=(
            *evidence,
            "More than half of the exchange is latency, which no bandwidth and no smaller gradient "
            f"shortens [{ALL_REDUCE}].",
        ),
        change=(
            "Train it on one rank, or give each step more to compute: a larger model, or "
            + case.change("--batch-size", "a batch per rank of")
            + f" {larger.batch_per_rank} (predicted efficiency {percent(reached)})."
        ),
        **judgement,
    )


def _batch_too_small(
    case: Case,
    enough: Mapping[str, StepSettings | None],
    exposed: _Exposed,
    evidence: list[str],
    judgement: dict[str, object],
) -> Verdict:
    now = exposed.settings
    batch, passes = enough["batch_per_rank"], enough["accumulation"]
    changed = batch or passes
    lost = (1 - predict(case.model, changed).exchange_efficiency) * exposed.beyond_model
    what = (
        f"a batch per rank of {batch.batch_per_rank} in place of {now.batch_per_rank}"
        if batch
        else f"{passes.accumulation} micro-batches a step in place of {now.accumulation}"
    )
    return _proposing(
        case,
        changed,
        cause="batch-too-small",
        title="the batch is too small for this exchange",
        evidence=(
            *evidence,
            f"With {what} the exchange is predicted to leave {percent(1 - lost)} of the step to "
            f"the rest, and with less it does not reach {percent(TARGET_EFFICIENCY)} "
            f"[{PROBES}] [{ALL_REDUCE}].",
        ),
        change=_larger_by(case, batch, passes)
        + "this changes the global batch, so adapt the learning rate and look at accuracy.",
        **judgement,
    )


def _larger_by(case: Case, batch: StepSettings | None, passes: StepSettings | None) -> str:
    """Returns the ways to a larger step that suffice; at least one does."""
    ways = []
    if batch is not None:
        size = batch.batch_per_rank
        ways.append(case.change(f"--batch-size {size}", f"A batch per rank of {size}"))
    if passes is not None:
        count = passes.accumulation
        ways.append(
            case.change(
                f"--accumulation {count}",
                f"{count} micro-batches a step inside model.no_sync() (all but the last)",
            )
            + (" where memory is short" if ways else "")
        )
    return f"{', or '.join(ways)}; "


def _network_too_slow(
    case: Case,
    settings: StepSettings,
    bus: float,
    evidence: list[str],
    judgement: dict[str, object],
) -> Verdict:
    needed = needed_bandwidth(case.model, TARGET_EFFICIENCY, settings)
    hosts = case.run.rows(PLACEMENT)["host"].nunique()
    where = f"The ranks are on {hosts} hosts [{PLACEMENT}]. " if hosts > 1 else ""
    if needed is None:
        wanted = f"No bandwidth reaches {percent(TARGET_EFFICIENCY)} at this latency"
    else:
        needed_bus = needed * 2 * (case.ranks - 1) / case.ranks
        wanted = (
            f"{percent(TARGET_EFFICIENCY)} efficiency needs a bus bandwidth of "
            f"{needed_bus / 1e9:.3g} GB/s"
        )
    wide = replace(settings, accumulation=settings.accumulation * MOST_BATCH)
    return _proposing(
        case,
        wide,
        cause="network-too-slow",
        title="the network is too slow for this model",
        evidence=(
            *evidence,
            f"{where}{wanted}; measured: {bus / 1e9:.3g} GB/s [{ALL_REDUCE}].",
            f"Even {MOST_BATCH} times the batch does not reach {percent(TARGET_EFFICIENCY)}.",
        ),
        change=(
            "Use faster links (the right interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; ranks "
            "on fewer hosts), or send less: "
            + case.change(
                f"--compression fp16, --accumulation {wide.accumulation}.",
                "ddp.register_comm_hook(None, default_hooks.fp16_compress_hook), or "
                f"{wide.accumulation} micro-batches a step inside model.no_sync().",
            )
        ),
        **judgement,
    )
