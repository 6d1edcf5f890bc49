"""Conclusions of assignment 2: the model of DDP's backward pass, its error, and larger clusters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd

from common.analysis.accuracy.study import recorded_study
from common.analysis.buckets import ablation, choice, networks
from common.analysis.buckets.measurements import WRITTEN_BY, open_run
from common.analysis.buckets.networks import NetworkRun
from common.analysis.buckets.sweep import BucketSweep
from common.analysis.clusters import nccl_accuracy, tables
from common.analysis.conclusions.conclusion import (
    Look,
    Seen,
    Status,
    above,
    below,
    counted,
    numbered,
    unsettled,
)
from common.csv_tables import read_table
from common.errors import UserError
from common.judged import Judged, compared, fastest
from common.perfmodel import uncertainty, whatif
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.cluster import published_sweep
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.scale_out import (
    ScaleOut,
    one_at_a_time,
    parse_gpus,
    predict_scale_out,
)
from common.perfmodel.collectives import PLAUSIBLE_ALPHA_S, AlphaBeta, as_alpha_beta, with_latency
from common.perfmodel.ddp.closed_form import closed_form
from common.perfmodel.model import COMPUTE, CURVE, FULL
from common.perfmodel.one_device.workload import Workload
from common.perfmodel.published import UMD_A100, load_recorded
from common.runtime.records.run_directory import find_table
from common.samples import paired_ratio, per_round, slowest_rank, student

LOOPBACK = "loopback"
LOCAL = "local-times.csv"
LOCAL_COLUMNS = ("round", "iteration", "rank", "backward_time_ms")
CLUSTERS = ("a100-ib", "a100-roce", "h100-ib", "h100-roce", "h200-ib")
FACTORS = (1, 16)

_run = cache(open_run)
_study = cache(recorded_study)
_models = cache(lambda run_dir: ablation.compare(_run(run_dir)))


@cache
def _networks(run_dir: str) -> networks.Networks:
    opened = networks.open_networks(run_dir)
    if opened.left_out:
        raise UserError(opened.left_out)
    return opened


def _rounds(sweep: BucketSweep) -> pd.DataFrame:
    """Returns the median backward pass: a row per round, a column per distinct bucketing (MiB)."""
    return per_round(sweep.distinct().steps, "backward_time_ms", "bucket_cap_mib")


def _best(rounds: pd.DataFrame) -> float:
    first = fastest(rounds)
    if first is None:
        raise UserError("a single bucketing was measured")
    return first.arm


# Part 1: the model.


def _embedding_last(run_dir: str) -> Seen:
    profile = _run(run_dir).profile
    share = profile.sizes_bytes[-1] / profile.total_bytes
    return counted("wte" in profile.names[-1], f"{profile.names[-1]}, {share:.0%} of the bytes")


def _passes(run_dir: str) -> tuple:
    """Returns the predicted passes with small buckets, medium ones and a single one."""
    run = _run(run_dir)
    caps = (run.gradient_mib / 26, run.gradient_mib / 3, max(64, 2 * run.gradient_mib))
    return tuple(map(run.model.at_cap, caps))


def _one_bucket_shortest(run_dir: str) -> Seen:
    totals_ms = [view.total_s * 1e3 for view in _passes(run_dir)]
    number = ", ".join(f"{total_ms:.1f}" for total_ms in totals_ms)
    return counted(totals_ms[-1] == min(totals_ms), f"{number} ms, predicted")


def _one_bucket_exposes(run_dir: str) -> Seen:
    exposed_ms = [view.exposed_communication_s * 1e3 for view in _passes(run_dir)]
    number = ", ".join(f"{exposed:.1f}" for exposed in exposed_ms)
    return counted(exposed_ms[-1] == max(exposed_ms), f"{number} ms, predicted")


def _computation_slowed(run_dir: str) -> Seen:
    small, _, single = (v.total_s - v.exposed_communication_s for v in _passes(run_dir))
    number = f"{small * 1e3:.1f} against {single * 1e3:.1f} ms, predicted"
    return counted(small > single, number)


def _compute_bound(run_dir: str) -> Seen:
    run = _run(run_dir)
    line = as_alpha_beta(run.all_reduce.curve)
    compute_ns = closed_form(run.profile, line).seconds_per_byte * 1e9
    send_ns = 1e9 / line.bandwidth_bytes_per_s
    return counted(compute_ns > send_ns, f"{compute_ns:.2f} against {send_ns:.2f} ns")


def _layers_decide(run_dir: str) -> Seen:
    run = _run(run_dir)
    by_hand = closed_form(run.profile, as_alpha_beta(run.all_reduce.curve))
    smallest_mib = run.gradient_mib / by_hand.layers
    best_mib = by_hand.best_bucket_bytes() / 2**20
    return counted(np.isclose(best_mib, smallest_mib), f"B/L is {smallest_mib:.2f} MiB")


def _hiding_saves_nothing(run_dir: str) -> Seen:
    run = _run(run_dir)
    if not run.costs.lost_compute:
        raise UserError("this run did not measure contention")
    sizes, lost_s = map(np.array, run.costs.lost_compute)
    longer = lost_s / run.all_reduce.curve.time_s(sizes) - 1
    return counted(bool((longer > 0).all()), f"takes {longer.min():+.0%} to {longer.max():+.0%}")


# Part 2: the prediction.


def _lines(run_dir: str) -> tuple[float, float]:
    """Returns the median errors of the course's line and of the fitted one."""
    curve = _run(run_dir).all_reduce.curve
    sizes, times_s = curve.sizes_bytes, curve.times_s
    lines = AlphaBeta.from_endpoints(sizes, times_s), AlphaBeta.fit(sizes, times_s)
    return tuple(float(np.median(abs(line.time_s(sizes) / times_s - 1))) for line in lines)


def _course_line(run_dir: str) -> Seen:
    course, fitted = _lines(run_dir)
    return counted(course < fitted, f"{course:.0%} against {fitted:.0%}")


def _no_line(run_dir: str) -> Seen:
    better = min(_lines(run_dir))
    return counted(better > 0.05, f"the better one by {better:.0%}")


def _single_chosen(run_dir: str) -> Seen:
    best = _run(run_dir).model.best_cap()
    last = best.candidates[-1]
    holds = last.num_buckets == 1 and best.near_mib[-1][1] >= last.high_mib
    return counted(holds, f"{choice.near_text(best)}, predicted")


def _published_band(_: str) -> Seen:
    system = load_recorded(UMD_A100)
    low, high = whatif.near_interval(calibrated_model(system.profile, system.all_reduce).best_cap())
    return counted(high / low > 10, f"a factor of {high / low:.0f}")


def _published_default(_: str) -> Seen:
    system = load_recorded(UMD_A100)
    model = calibrated_model(system.profile, system.all_reduce)
    longer = model.backward_s(None) / model.best_cap().total_s - 1
    return counted(longer < 0.01, f"{longer:+.1%}, predicted")


# Part 3: prediction against measurement.


def _imperfect(run_dir: str) -> Seen:
    return above(_models(run_dir)[FULL].error, "{:.1%}")


def _small_errors(run_dir: str) -> Seen:
    worst = _models(run_dir)[FULL].worst_error
    return counted(worst < 0.05, f"at most {worst:.1%}")


def _choice_not_worse(run_dir: str) -> Seen:
    rounds, chosen = _rounds(_run(run_dir).sweep), _models(run_dir)[FULL].predicted_best_mib
    best = _best(rounds)
    if chosen == best:
        return counted(True, f"{chosen:g} MiB is the best measured")
    outcome = above(compared(rounds, best, claims=1)[chosen])
    number = f"{chosen:g} MiB over {best:g}: {outcome.number}"
    return unsettled(number) if outcome.status is Status.OPEN else counted(False, number)


def _slower_than_best(sweep: BucketSweep, place: int) -> Seen:
    """Says whether the smallest cap (place 0) or the largest one (−1) is slower than the best."""
    rounds = _rounds(sweep)
    best, end = _best(rounds), rounds.columns[place]
    if best == end:
        return counted(False, f"{best:g} MiB is the best")
    return above(compared(rounds, best)[end])


def _speed_changed(run_dir: str) -> Seen:
    run = _run(run_dir)
    times = read_table(find_table(run.run_dir, LOCAL, WRITTEN_BY[LOCAL]), LOCAL_COLUMNS)
    steps = slowest_rank(times, "backward_time_ms", by=["round", "iteration"])
    by_round = steps.groupby("round").median()
    timed_ms = pd.Series(run.profile.backward_s * 1e3, by_round.index)
    return above(Judged(paired_ratio(by_round, timed_ms)))


def _communication_short(run_dir: str) -> Seen:
    run, table = _run(run_dir), _models(run_dir)[FULL].table
    rounds = _rounds(run.sweep)[table["bucket_cap_mib"]]
    computed_ms = (run.profile.backward_s - run.local_s) * 1e3
    other_ms = table["predicted_ms"].to_numpy() - rounds - computed_ms
    return below(Judged(student(other_ms.median(axis=1)), null=0.0), "{:+.1f} ms")


def _exposes_less(run_dir: str) -> Seen:
    table = ablation.exposed_communication(_run(run_dir))
    less_ms = table["recorded_ms"] - table["predicted_ms"]
    return counted(bool((less_ms > 0).all()), f"by {less_ms.min():.1f} to {less_ms.max():.1f} ms")


def _contention_most(run_dir: str) -> Seen:
    models = _models(run_dir)
    errors = pd.Series({name: models[name].median_error for name in _run(run_dir).model.ladder()})
    drop = -errors.diff()
    before, after = errors.shift()[COMPUTE], errors[COMPUTE]
    return counted(drop.idxmax() == COMPUTE, f"{before:.1%} → {after:.1%}; most: {drop.idxmax()}")


def _slow_link_terms(run_dir: str) -> Seen:
    slowest = _networks(run_dir).runs[0]
    ladder = slowest.model.ladder()
    names = list(ladder)[list(ladder).index(CURVE) :]
    errors = [slowest.sweep.accuracy_of(ladder[name]).median_error for name in names]
    return counted(max(errors) < 0.03, f"{min(errors):.1%} to {max(errors):.1%}")


def _bands(run_dir: str) -> pd.DataFrame:
    run = _run(run_dir)
    caps = list(run.sweep.distinct().measured_s())
    return uncertainty.prediction_bands(run.calibration, caps).table


def _bands_apart(run_dir: str) -> Seen:
    table = _bands(run_dir)
    single, smallest = table.iloc[-1], table.iloc[0]
    number = f"{single['high_ms']:.1f} and {smallest['low_ms']:.1f} ms"
    return counted(single["high_ms"] < smallest["low_ms"], number)


def _in_bands(run_dir: str) -> Seen:
    table, measured = _bands(run_dir), _models(run_dir)[FULL].table["measured_ms"].to_numpy()
    inside = int(((measured >= table["low_ms"]) & (measured <= table["high_ms"])).sum())
    return counted(inside > len(table) / 2, f"{inside} of {len(table)}")


def _regret(name: str) -> pd.Series:
    return _study().regrets()[f"regret of {name}"].dropna()


def _study_one_bucket(_: str) -> Seen:
    regret = _regret("largest").median()
    return counted(regret > 0.1, f"{regret:.0%} longer")


def _study_smallest(_: str) -> Seen:
    regrets = _regret("smallest")
    number = f"{regrets.median():.0%} longer, at worst {regrets.max():.0%}"
    return counted(regrets.median() < 0.1 < regrets.max(), number)


def _study_hardest(_: str) -> Seen:
    medians = _study().by_regime()["median"]
    hidden, dominant = medians["compute-bound"], medians["communication-bound"]
    return counted(hidden > dominant, f"{hidden:.1%} against {dominant:.1%}")


def _copies_told(run_dir: str) -> Seen:
    added_ms = _run(run_dir).calibration.overlap.bookkeeping_s * 1e3
    return above(Judged(student(added_ms), null=0.0), "{:+.1f} ms")


def _at_end(place: int) -> Look:
    return lambda run_dir: _slower_than_best(_run(run_dir).sweep, place)


# Emulated hosts.


def _on_slowest(look: Callable[[NetworkRun], Seen]) -> Look:
    return lambda run_dir: look(_networks(run_dir).runs[0])


def _on_loopback(look: Callable[[NetworkRun], Seen]) -> Look:
    def on_last(run_dir: str) -> Seen:
        fastest_run = _networks(run_dir).runs[-1]
        if fastest_run.name != LOOPBACK:
            raise UserError("the ranks were not on loopback")
        return look(fastest_run)

    return on_last


def _streams(run_dir: str) -> Seen:
    reached = networks.links(_networks(run_dir))[networks.REACHED]
    return counted(bool((reached <= 1).all()), f"{reached.min():.1%} to {reached.max():.1%}")


def _single_slower(run: NetworkRun) -> Seen:
    return _slower_than_best(run.sweep, -1)


def _off(run: NetworkRun) -> Seen:
    return above(run.accuracy().error, "{:.1%}")


def _over_default(run: NetworkRun) -> Seen:
    rounds = per_round(run.sweep.steps, "backward_time_ms", "bucket_cap_mib")
    if rounds.columns.notna().all():
        raise UserError("the sweep has no steps with the default")
    default = rounds.loc[:, rounds.columns.isna()].iloc[:, 0]
    saved = Judged(paired_ratio(rounds[run.accuracy().predicted_best_mib], default))
    return below(saved)


# Discussion.


def _simpler_worse(run_dir: str) -> Seen:
    models = _models(run_dir)
    rounds = _rounds(_run(run_dir).sweep)
    full, simple = (
        (models[name].table["predicted_ms"].to_numpy() / rounds - 1).abs().median(axis=1)
        for name in (FULL, CURVE)
    )
    return above(Judged(student(simple - full), null=0.0), "{:+.1%}")


def _moves(run_dir: str) -> pd.DataFrame:
    run = _run(run_dir)
    cases = whatif.cases(run.model, run.all_reduce.world_size, FACTORS)
    return choice.moves(whatif.best_caps(cases), *FACTORS).set_index("quantity")


def _latency_moves(run_dir: str) -> Seen:
    before, after, *simulated = _moves(run_dir).loc["latency α"]
    stays = np.isclose(*simulated)
    number = f"equation {before:.2f} → {after:.2f} MiB, simulation "
    number += " → ".join(f"{cap:.3g}" for cap in simulated)
    return counted(stays and after > before, number)


@cache
def _there() -> pd.DataFrame:
    system = load_recorded(UMD_A100)
    model = calibrated_model(system.profile, with_latency(system.all_reduce, PLAUSIBLE_ALPHA_S))
    cases = whatif.cases(model, system.world_size, FACTORS)
    return choice.moves(whatif.best_caps(cases), *FACTORS).set_index("quantity")


def _directions(_: str) -> Seen:
    before, after = (_there()[column] for column in choice.MOVED[:2])
    up = after > before
    grows = up.drop(["bandwidth β", "compute time g"]).all()
    falls = not up[["bandwidth β", "compute time g"]].any()
    return counted(bool(grows and falls), ", ".join(up.index[up]) + " raise it")


# Part 4: clusters.


def _predicted(strategies: list[str] | None = None, name: str = "h100-ib") -> ScaleOut:
    work = Workload(model="gpt2-large", precision="bfloat16")
    more = {"strategies": strategies} if strategies else {}
    return predict_scale_out(work, load_cluster(name), parse_gpus("8..16384"), **more)


@cache
def _clusters() -> dict[str, ScaleOut]:
    return {name: _predicted(["DDP"], name) for name in CLUSTERS}


def _analytic_error(_: str) -> Seen:
    table = nccl_accuracy.accuracy_by_model()
    errors = table[table["model"] == nccl_accuracy.ANALYTIC].set_index("table")["mean_error"]
    number = ", ".join(f"{error:.0%}" for error in errors)
    return counted(errors["a100-8"] < 0.1 < errors.drop("a100-8").min(), number)


def _nothing_to_win(_: str) -> Seen:
    sweeps = [published_sweep.explain_sweep(name) for name in ("gpt2", "gpt2-large")]
    shares = tables.flatness(sweeps)["their share"]
    return counted(shares.max() < 0.01, ", ".join(f"{share:.1%}" for share in shares))


def _falls_mostly(_: str) -> Seen:
    table = tables.best_caps(_clusters())
    falls = (table["b*"] == "falls").sum()
    return counted(falls == len(table) - 1, f"on {falls} of {len(table)}")


def _default_cheap(_: str) -> Seen:
    longer = tables.best_caps(_clusters())["default / best"] - 1
    return counted(longer.max() < 0.05, f"{longer.min():.0%} to {longer.max():.0%}")


def _default_costly(_: str) -> Seen:
    table = tables.outgrown(_clusters())
    counts, ratios = table["costly from (GPUs)"], table["default / best"]
    number = f"from {counts.min():,.0f} GPUs; {ratios.min():.1f} to {ratios.max():.1f} times"
    return counted(counts.min() >= 1024, number)


def _sharding_falls_behind(_: str) -> Seen:
    shares = tables.efficiency(_predicted()).set_index("strategy")["efficiency"]
    number = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return counted(shares["DDP"] > 2 * shares["FULL_SHARD"], number)


def _stragglers_most(_: str) -> Seen:
    table = one_at_a_time(_predicted(), "weak", "DDP", 1024)
    named = table["assumption"].str.rpartition(" ")[0]
    ranges = table.groupby(named)["efficiency"].agg(np.ptp).drop("as")
    number = ", ".join(f"{name} {range_:.0%}" for name, range_ in ranges.items())
    return counted(ranges.idxmax() == "straggler spread", number)


GOOD = (1, "the prediction can be told from a perfect one", _imperfect)
CONCLUSIONS = {
    "assignment2_part1_model": numbered(
        [
            (1, "the last gradient is the token embedding's", _embedding_last),
            (2, "a single bucket exposes the most", _one_bucket_exposes),
            (2, "small buckets make computation longer", _computation_slowed),
            (2, "a single bucket has the shortest pass", _one_bucket_shortest),
            (3, "a byte takes longer to compute than to send", _compute_bound),
            (3, "b* by hand is limited by B/L", _layers_decide),
            (4, "hiding an all-reduce takes more than it saves", _hiding_saves_nothing),
        ]
    ),
    "assignment2_part2_prediction": (
        *numbered(
            [
                (1, "the course's line is closer than the fitted one", _course_line),
                (1, "both lines are off by more than 5 % in the median", _no_line),
                (3, "one bucket is within 1 % of b*", _single_chosen),
                (3, "measured, the smallest cap is slower than the best", _at_end(0)),
                (3, "what is chosen is not slower than the best", _choice_not_worse),
            ]
        ),
        *numbered(
            [
                (4, "caps within 1 % of b* span a factor of ten", _published_band),
                (4, "DDP's default is within 1 % of b*", _published_default),
            ],
            of_run=False,
        ),
    ),
    "assignment2_part3_evaluation": (
        *numbered(
            [
                GOOD,
                (1, "no error is above 5 %", _small_errors),
                (1, "the smallest cap is slower than the best", _at_end(0)),
                (1, "what is chosen is not slower than the best", _choice_not_worse),
                (2, "the pass without DDP was slower in the sweep", _speed_changed),
                (2, "communication is predicted too short", _communication_short),
                (2, "less is exposed than DDP recorded, at every cap", _exposes_less),
                (3, "contention removes the most error over loopback", _contention_most),
                (3, "on the slowest link a(x) is enough for 3 %", _slow_link_terms),
                (4, "bands tell one bucket from the smallest cap", _bands_apart),
                (4, "most measured medians lie in their band", _in_bands),
            ]
        ),
        *numbered(
            [
                (5, "one bucket costs over 10 % in the median", _study_one_bucket),
                (5, "the smallest cap does so at worst, not in the median", _study_smallest),
                (5, "errors are larger where computation hides all", _study_hardest),
            ],
            of_run=False,
        ),
        *numbered([(6, "DDP's copies can be told from nothing", _copies_told)]),
    ),
    "assignment2_emulated_hosts": numbered(
        [
            (1, "no stream is faster than its link", _streams),
            (2, "over loopback the smallest cap is slower than the best", _at_end(0)),
            (
                2,
                "on the slowest link one bucket is slower than the best",
                _on_slowest(_single_slower),
            ),
            (
                2,
                "on the slowest link the chosen cap beats the default",
                _on_slowest(_over_default),
            ),
            (2, "over loopback the error is told from noise", _on_loopback(_off)),
            (2, "on the slowest link the error is told from noise", _on_slowest(_off)),
        ]
    ),
    "assignment2_discussion": (
        *numbered(
            [
                GOOD,
                (1, "without copies and contention the error is larger", _simpler_worse),
                (2, "more latency raises b* by hand, not the simulated one", _latency_moves),
            ]
        ),
        *numbered(
            [(3, "bandwidth and computation lower b*, all else raises it", _directions)],
            of_run=False,
        ),
    ),
    "assignment2_part4_scale": numbered(
        [
            (1, "within 10 % on the node it was fitted to, beyond on others", _analytic_error),
            (2, "all-reduces take less than 1 % of a step", _nothing_to_win),
            (3, "b* falls on all clusters but one", _falls_mostly),
            (3, "the default costs less than 5 % on the most GPUs", _default_cheap),
            (4, "under strong scaling it is costly, from 1,024 GPUs at least", _default_costly),
            (5, "FULL_SHARD has less than half of DDP's efficiency", _sharding_falls_behind),
            (6, "of all assumptions, stragglers move efficiency most", _stragglers_most),
        ],
        of_run=False,
    ),
}
"""Conclusions by notebook."""
