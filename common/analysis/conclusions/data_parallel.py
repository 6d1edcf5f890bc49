"""Conclusions of assignment 1: DDP's loss curves, its exchange, and sharded strategies."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pandas as pd

from common.analysis.conclusions.conclusion import (
    Look,
    Seen,
    above,
    below,
    by_prediction,
    counted,
    is_first,
)
from common.analysis.data_parallel import tables
from common.analysis.data_parallel.emulated_strategies import EmulatedStrategies, open_emulated
from common.analysis.data_parallel.loss_curves import agreement, learned
from common.analysis.data_parallel.strategies import StrategyTimes, open_strategies
from common.analysis.data_parallel.training_parts import peak_memory, training_overlap
from common.analysis.data_parallel.training_runs import open_learning, open_training
from common.errors import UserError

MIB = 2**20
DDP, FULL, GRAD = "DDP", "FULL_SHARD", "SHARD_GRAD_OP"

_training = cache(open_training)
_strategies = cache(open_strategies)
_learning = cache(open_learning)


@cache
def _emulated(run_dir: str) -> EmulatedStrategies:
    run = open_emulated(run_dir)
    if run.left_out:
        raise UserError(run.left_out)
    return run


def _equal_losses(run_dir: str) -> Seen:
    curves = agreement(_training(run_dir))
    if curves.equal is None:
        raise UserError("a single loss curve")
    return counted(curves.equal, f"{curves.largest_nats:.1g} nats, {curves.curves} curves")


def _below_ranks(run_dir: str) -> Seen:
    """Says whether ranks that exchange nothing are less than n times as fast as one device."""
    strategies = _strategies(run_dir)
    return below(replace(strategies.speedups[1, "local"], null=float(strategies.ranks)))


def above_at(name: str, accumulation: int) -> Look:
    """Says whether an attribute of the strategies lies above its null at an accumulation."""

    def look(run_dir: str) -> Seen:
        numbers = getattr(_strategies(run_dir), name)
        if accumulation not in numbers:
            raise UserError(f"no steps of {accumulation} micro-batches with and without exchange")
        number = numbers[accumulation]
        return above(number, "{:.2f}" if number.null else "{:+.2f}")

    return look


def _falls(index: int, form: str) -> Look:
    """Says whether the exchange adds less with two micro-batches: as a share (index 0) or in ms."""

    def look(run_dir: str) -> Seen:
        falls = _strategies(run_dir).exchange_falls
        if 2 not in falls:
            raise UserError("no steps of 1 and 2 micro-batches with and without exchange")
        return above(falls[2][index], form)

    return look


def _overlap(run_dir: str, strategy: str) -> pd.Series:
    table = training_overlap(_training(run_dir)).set_index("strategy")
    if strategy not in table.index:
        raise UserError(f"{strategy} was not traced")
    return table.loc[strategy]


def _few_buckets(run_dir: str) -> Seen:
    collectives = _overlap(run_dir, DDP)["collectives"]
    return counted(collectives in ("1 all_reduce", "2 all_reduce"), collectives)


def _hides_little(strategy: str, most: float) -> Look:
    return lambda run_dir: below(
        replace(_overlap(run_dir, strategy)["judged"], null=most), "{:.0%}"
    )


def _memory(run_dir: str, strategy: str) -> pd.Series:
    table = peak_memory(_training(run_dir)).dropna(subset="measured_bytes")
    if strategy not in set(table["strategy"]):
        raise UserError("this run did not measure memory to the byte")
    return table[table["strategy"] == strategy].iloc[-1]


def _buckets_beside(run_dir: str) -> Seen:
    row = _memory(run_dir, DDP)
    return counted(row["over_single_bytes"] > 0, f"{row['over_single_bytes'] / MIB:+,.1f} MiB")


def _memory_predicted(*strategies: str) -> Look:
    def look(run_dir: str) -> Seen:
        worst = max(abs(_memory(run_dir, strategy)["error"]) for strategy in strategies)
        return counted(worst < 0.01, f"at most {worst:.2%}")

    return look


def _near_entropy(run_dir: str) -> Seen:
    training = _learning(run_dir)
    if training.left_out:
        raise UserError(training.left_out)
    loss = learned(training.learning)
    number = f"{loss.above_entropy_nats:+.3f} nats, {loss.share:.0%} learned"
    return counted(0 <= loss.above_entropy_nats < 0.1, number)


def _more_than_half(run_dir: str) -> Seen:
    share, ranks = _memory(run_dir, FULL)["share_of_ddp"], _strategies(run_dir).ranks
    return counted(share > 1 / ranks, f"{share:.0%} on {ranks} ranks")


def _grad_op_between(run_dir: str) -> Seen:
    full, grad = (_memory(run_dir, strategy)["share_of_ddp"] for strategy in (FULL, GRAD))
    return counted(full < grad < 1, f"{full:.0%}, {grad:.0%} and 100%")


def _sent(run_dir: str, strategy: str) -> pd.Series:
    """Returns measured bytes over DDP's, by micro-batches."""
    sent = _strategies(run_dir).sent().dropna(subset="measured_bytes")
    rows = sent[sent["strategy"] == strategy].set_index("accumulation")["ratio_to_ddp"]
    if rows.empty:
        raise UserError("the sockets did not tell")
    return rows


def _one_and_a_half(run_dir: str) -> Seen:
    ratios = _sent(run_dir, GRAD)
    return counted(bool(ratios.between(1.45, 1.55).all()), f"{ratios.iloc[0]:.2f}")


def _grows(run_dir: str) -> Seen:
    ratios = _sent(run_dir, FULL)
    if len(ratios) < 2:
        raise UserError("a single number of micro-batches")
    listed = ", ".join(f"{ratio:.2f} with {count}" for count, ratio in ratios.items())
    return counted(ratios.is_monotonic_increasing, listed)


def _sent_predicted(run_dir: str) -> Seen:
    errors = _strategies(run_dir).sent()["error"].abs().dropna()
    if errors.empty:
        raise UserError("the sockets did not tell")
    return counted(errors.max() < 1e-3, f"off by at most {errors.max():.3%}")


def _nccl(run_dir: str) -> Seen:
    table = tables.sent_by_backend(_strategies(run_dir))
    ratios = table[table["strategy"] == GRAD]["NCCL over DDP"].dropna()
    if ratios.empty:
        raise UserError(f"no steps of {GRAD} beside {DDP}'s")
    return by_prediction(bool((ratios - 1).abs().max() < 0.01), f"{ratios.max():.2f}")


def _is_fastest(accumulation: int) -> Look:
    return lambda run_dir: _first(_strategies(run_dir), accumulation)


def _require_rounds(strategies: StrategyTimes, accumulation: int) -> None:
    if accumulation not in strategies.rounds:
        raise UserError(f"no steps of {accumulation} micro-batches")


def _first(strategies: StrategyTimes, accumulation: int) -> Seen:
    _require_rounds(strategies, accumulation)
    times = strategies.exchanging.get(accumulation, pd.DataFrame())
    return is_first(times, DDP, claims=strategies.pairs, **strategies.conditions)


def _full_over_grad(accumulation: int) -> Look:
    def look(run_dir: str) -> Seen:
        strategies = _strategies(run_dir)
        _require_rounds(strategies, accumulation)
        return above(strategies.step_time_ratios_to(accumulation, GRAD)[FULL])

    return look


def _too_short(strategy: str) -> Look:
    def look(run_dir: str) -> Seen:
        rows = _emulated(run_dir).table().set_index("strategy")
        return below(rows.loc[[strategy], "judged"].iloc[0])

    return look


def _fastest_between_hosts(run_dir: str) -> Seen:
    return _first(_emulated(run_dir).measured, 1)


def _predicted_fastest(run_dir: str) -> Seen:
    predicted_ms = _emulated(run_dir).table().set_index("strategy")["predicted_ms"]
    return by_prediction(predicted_ms.idxmin() == DDP, predicted_ms.idxmin())


def _mostly_exposed(run_dir: str) -> Seen:
    share = _emulated(run_dir).table().set_index("strategy")["exposed_share"]
    return by_prediction(share[FULL] > 0.5, f"{share[FULL]:.0%}, of DDP's {share[DDP]:.0%}")


CONCLUSIONS = {
    "assignment1_ddp": [
        (1, "rounding explains how far the loss curves are apart", _equal_losses),
        (2, "without an exchange, n ranks are less than n times as fast", _below_ranks),
        (2, "the second gap is the larger one, 1 micro-batch", above_at("second_gap", 1)),
        (2, "the second gap is the larger one, 2 micro-batches", above_at("second_gap", 2)),
        (3, "the exchange makes the step longer, 1 micro-batch", above_at("exchange", 1)),
        (3, "the exchange makes the step longer, 2 micro-batches", above_at("exchange", 2)),
        (3, "the exchange's share falls with the micro-batches", _falls(0, "{:+.0%}")),
        (3, "the exchange's milliseconds fall with the micro-batches", _falls(1, "{:+.0f} ms")),
        (4, "all gradients make one bucket or two", _few_buckets),
        (4, "DDP hides less than half of its communication", _hides_little(DDP, 0.5)),
        (5, "DDP's peak is above that of one device", _buckets_beside),
        (5, "DDP's peak is predicted within 1 %", _memory_predicted(DDP)),
        (6, "the loss ends within 0.1 nats of the entropy, not below it", _near_entropy),
    ],
    "assignment1_fsdp": [
        (1, "FULL_SHARD needs more than 1/n of DDP's memory", _more_than_half),
        (1, "SHARD_GRAD_OP lies between FULL_SHARD and DDP", _grad_op_between),
        (1, "peaks are predicted within 1 %", _memory_predicted(DDP, FULL, GRAD)),
        (2, "SHARD_GRAD_OP sends 1.5 times DDP's bytes", _one_and_a_half),
        (2, "FULL_SHARD's bytes grow with the micro-batches", _grows),
        (2, "bytes are predicted within 0.1 %", _sent_predicted),
        (3, "over NCCL SHARD_GRAD_OP sends as much as DDP", _nccl),
        (4, "FULL_SHARD hides less than 5 % over gloo", _hides_little(FULL, 0.05)),
        (4, "SHARD_GRAD_OP hides less than 5 %", _hides_little(GRAD, 0.05)),
        (5, "DDP is the fastest, 1 micro-batch", _is_fastest(1)),
        (5, "DDP is the fastest, 2 micro-batches", _is_fastest(2)),
        (5, "FULL_SHARD is slower than SHARD_GRAD_OP, 1 micro-batch", _full_over_grad(1)),
        (5, "FULL_SHARD is slower than SHARD_GRAD_OP, 2 micro-batches", _full_over_grad(2)),
        (6, "between hosts DDP is the fastest", _fastest_between_hosts),
        (6, "between hosts DDP is predicted to be the fastest", _predicted_fastest),
        (6, "DDP's step is predicted too short", _too_short(DDP)),
        (6, "FULL_SHARD's step is predicted too short", _too_short(FULL)),
        (6, "SHARD_GRAD_OP's step is predicted too short", _too_short(GRAD)),
        (6, "most of FULL_SHARD's step is exposed communication", _mostly_exposed),
    ],
}
