"""Causes in what a script does on every rank beside its model: exchanges, updates, other work.

How long it takes is measured: a phase of the step, or what a pass takes longer in the training than
by itself. What it is, looks at the script tell (``stacks.csv``), a share of those of its phase.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from common.diagnose.causes.gpu import NORMS_EXCHANGE, OTHER_NORMS
from common.diagnose.causes.sharing import EXCHANGES, PARTS, together_times
from common.diagnose.evidence.case import (
    Case,
    Verdict,
    confidence,
    gain_without,
    in_modules,
    line_of,
    looks,
    most_costly,
    percent,
)
from common.diagnose.evidence.evidence import (
    ALL_REDUCE,
    COSTS,
    EXCHANGING,
    FACTS,
    PROBES,
    STACKS,
    STEPS,
    NotJudged,
    standard_error,
)
from common.perfmodel.tables import read_all_reduce
from common.runtime.wording import size_text

LEAST_SHARE = 0.05
"""Share of the step that an exchange of the script's own must take."""
UPDATE_SHARE, UPDATE_SAVED = 0.10, 0.08
"""Shares of the step that an update must take, and that another one would save: what that takes is
computed, not measured."""
MOVED_AGAIN = 1.75
"""An update with two moments reads four tensors and writes three; a copy there and back, as it is
timed, reads two and writes two."""
LONGER, LONGER_SHARE = 1.25, 0.08
"""A pass that takes a quarter longer in the training than by itself, beyond what the other pass of
the step does, and the share of the step that this must be: machines drift by less."""
SURELY_LONGER = 1.5
"""No machine drifts by so much between a run and its probes."""
LIBRARIES = ("torch.optim.", "transformers.", "accelerate.", "lightning.", "pytorch_lightning.")
"""Callers of an optimizer: what they take in the phase of the update is the update itself."""
GRADIENTS = ("all_reduce", "reduce_scatter", "all_gather_into_tensor", "all_reduce_coalesced")
BARRIER = "Leave the barrier out: collectives wait for all ranks by themselves."
CHANGES = {
    "barrier": BARRIER,
    "wait_for_everyone": BARRIER,
    "object": (
        "Put the numbers into one tensor and exchange that, every so many steps: objects are "
        "pickled, and their sizes sent before them."
    ),
}
OTHER_EXCHANGE = "Leave the call out, or make it once in many steps; send all tensors in one call."
BACKWARD = "whole_backward_time_ms"
COLUMN_OF = {"forward": "forward_time_ms", "backward": BACKWARD}
BESIDE = (
    "Look at what the script does there beside its model, such as metrics, logging, hooks or a "
    "loss that is computed in pieces; do it every so many steps."
)
OTHER_MODULES = (
    "Leave them where the method trains on what they give, as on that of a teacher; what stays the "
    "same can be kept with the data."
)
DERIVATIVES = ("torch.autograd.__init__.grad", "torch.autograd.functional.", "torch._functorch.")
"""Beginnings of the calls that take derivatives of what the model gives, as part of a loss."""
NOT_SEEN = "low", "whether the method needs them is not seen"
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers that PyTorch can run as one kernel."""


@dataclass(frozen=True)
class _Taken:
    """What looks tell to be of a kind: ms of a step of the rank that waits for nobody."""

    time_ms: float
    share: float
    error: float
    looks: pd.DataFrame


def _phases(case: Case) -> pd.DataFrame:
    """Returns the mean ms of each phase in a step, by rank, as looks tell phases apart."""
    steps = case.run.measured
    if STACKS not in case.run.tables or not {"fetch_time_ms", BACKWARD} <= {*steps}:
        raise NotJudged(f"no {STACKS} in {case.run.name}, or steps of an earlier watch")
    columns = {
        "data": steps["fetch_time_ms"],
        "copy": (steps["data_time_ms"] - steps["fetch_time_ms"]).clip(lower=0),
        "forward": steps["forward_time_ms"],
        "backward": steps[BACKWARD],
        "optimizer": steps["optimizer_time_ms"],
        "between": steps["between_time_ms"].fillna(0),
        "step": steps["step_time_ms"] + steps["between_time_ms"].fillna(0),
    }
    return pd.DataFrame(columns).astype(float).groupby(steps["rank"]).mean()


def _taken(case: Case, rows: pd.DataFrame, chosen: pd.DataFrame) -> _Taken | None:
    """Returns what some of the looks at phases take; None where there are none.

    Of several ranks, the one that takes least waits for no other.

    Args:
        case: the run.
        rows: all looks at these phases.
        chosen: looks of them that count.
    """
    times = _phases(case)
    if chosen.empty:
        return None
    counts = rows.groupby(["rank", "phase"])["samples"].sum()
    mine = chosen.groupby(["rank", "phase"])["samples"].sum()
    by_rank = {}
    for rank in times.index:
        time_ms = variance = 0.0
        for phase in [phase for phase in times if (rank, phase) in mine.index]:
            count, part = counts[rank, phase], mine[rank, phase] / counts[rank, phase]
            time_ms += times.loc[rank, phase] * part
            # Looks are drawn: their share has the error of a binomial one.
            variance += times.loc[rank, phase] ** 2 * max(part * (1 - part), 1 / count) / count
        by_rank[rank] = (time_ms, math.sqrt(variance))
    time_ms, error_ms = min(by_rank.values())
    step_ms = float(times["step"].mean())
    return _Taken(time_ms, time_ms / step_ms, error_ms / step_ms, chosen)


def _exchange(case: Case) -> _Taken | None:
    """Returns what the script's own exchanges take; None for none that matters."""
    rows = looks(case, ("data", "copy", "forward", "backward", "optimizer", "between"))
    taken = _taken(case, rows, rows[rows["call"].str.startswith(EXCHANGES)])
    return None if taken is None or taken.share < LEAST_SHARE else taken


def _is_of_norms(case: Case, exchange: _Taken) -> bool:
    """Returns True for an exchange most of whose forward passes are in norms of the script's own.

    In a backward pass nothing tells of which module an exchange is.
    """
    facts = case.run.need(FACTS)
    ranges = str(facts["norm_lines"].iloc[0]) if "norm_lines" in facts else ""
    norms = [re.fullmatch(r"(.*):(\d+)-(\d+)", line) for line in ranges.split(";")]
    forward = exchange.looks[exchange.looks["phase"] == "forward"]
    lines = forward["place"].astype(str).str.extract(r"^(.*):(\d+) forward$")
    within = pd.Series(data=False, index=forward.index)
    for norm in filter(None, norms):
        within |= (lines[0] == norm[1]) & lines[1].astype(float).between(int(norm[2]), int(norm[3]))
    return bool(forward.loc[within, "samples"].sum() > forward["samples"].sum() / 2)


def own_norms(case: Case) -> Verdict | None:
    """Judges whether batch norms that the script has written wait for an exchange in every pass."""
    if case.ranks < 2 or not case.run.need(FACTS).get("norm_lines", pd.Series(dtype=str)).any():
        return None
    exchange = _exchange(case)
    if exchange is None or not _is_of_norms(case, exchange):
        return None
    forward = exchange.looks[exchange.looks["phase"] == "forward"]
    return case.verdict(
        cause="synchronised-norms",
        title=f"{NORMS_EXCHANGE}{line_of(forward)}",
        evidence=(_time_of(exchange),),
        lost=exchange.share,
        sure=confidence(exchange.share, LEAST_SHARE, exchange.error),
        change=OTHER_NORMS,
    )


def _time_of(exchange: _Taken) -> str:
    return (
        f"Such calls take {exchange.time_ms:.3g} of {exchange.time_ms / exchange.share:.3g} ms "
        f"from step to step, {percent(exchange.share)}, on the rank that takes least for them and "
        f"so waits least: {exchange.looks['samples'].sum()} stack samples [{STACKS}] [{STEPS}]."
    )


def own_exchange(case: Case) -> Verdict | None:
    """Judges whether ranks exchange something by calls of the script's own, in every step."""
    taken = _exchange(case) if case.ranks > 1 else None
    if taken is None or _is_of_norms(case, taken):
        return None
    facts = case.run.need(FACTS)
    counts = taken.looks.groupby("call")["samples"].sum()
    call = str(counts.idxmax()).rpartition(".")[2]
    line = line_of(taken.looks)
    alone = facts["wrapper"].astype(object).fillna("").eq("").all() if "wrapper" in facts else False
    gradients = alone and call in GRADIENTS
    title = f"every rank calls {call} in each step{line}"
    change = next((text for name, text in CHANGES.items() if name in call), OTHER_EXCHANGE)
    sentences, needed_ms = [], 0.0
    if gradients:
        size = case.run.gradient_bytes
        title = f"the script exchanges gradients by itself, with {call}{line}"
        change = (
            "DistributedDataParallel(model), which sends gradients in buckets while others are "
            "computed; or one all_reduce of all gradients, flattened."
        )
        if case.run.opened.has(ALL_REDUCE):
            curve = read_all_reduce(case.run.folder / ALL_REDUCE).curve
            needed_ms = min(taken.time_ms, float(curve.time_s(size)) * 1e3)
            sentences.append(
                f"One all-reduce of all {size_text(size)} takes {needed_ms:.3g} ms [{ALL_REDUCE}]."
            )
    lost = min(0.99, taken.share * (1 - needed_ms / taken.time_ms))
    if lost < LEAST_SHARE:
        return None
    sure = confidence(lost, LEAST_SHARE, taken.error)
    if gradients and not sentences:
        sure = "low", "how long one all-reduce of all gradients takes was not timed"
    return case.verdict(
        cause="own-exchange",
        title=title,
        evidence=(_time_of(taken), *sentences),
        lost=lost,
        sure=sure,
        change=change,
    )


def heavy_update(case: Case) -> Verdict | None:
    """Judges whether the update, or what a script does before it, takes much on every rank."""
    times, rows = _phases(case), looks(case, ("optimizer",))
    computing = rows[~rows["call"].str.startswith(EXCHANGES)]
    by_library = computing["call"].str.startswith(LIBRARIES)
    beside, update = (_taken(case, rows, computing[of]) for of in (~by_library, by_library))
    if beside is not None and (update is None or beside.time_ms > update.time_ms):
        call = str(beside.looks.groupby("call")["samples"].sum().idxmax())
        within = f" in {call.rpartition('.')[2]}" if call else ""
        return _updating(
            case,
            beside,
            saved=beside.share,
            least=LEAST_SHARE,
            title=f"every rank spends much time{within} before its update",
            change=(
                "Do it every so many steps, or for all parameters in one call (torch._foreach_..., "
                "clip_grad_norm_(..., foreach=True)) in place of one after another."
            ),
        )
    facts, costs = case.run.need(FACTS), case.run.rows(COSTS)
    if update is None or update.share < UPDATE_SHARE or "optimizer" not in facts:
        return None
    name, copies = str(facts["optimizer"].iloc[0]), costs[costs["cost"] == "copy"]
    if name not in FUSED or str(facts["is_fused"].iloc[0]) == "True" or copies.empty:
        return None
    per_byte = float((copies["time_ms"] / copies["size_bytes"]).median())
    least_ms = MOVED_AGAIN * per_byte * case.run.gradient_bytes
    return _updating(
        case,
        update,
        saved=max(0.0, update.share - least_ms / float(times["step"].mean())),
        least=UPDATE_SAVED,
        title="the update takes long on every rank",
        change=f"torch.optim.{name}(..., fused=True)",
        least_ms=least_ms,
    )


def _updating(
    case: Case,
    taken: _Taken,
    saved: float,
    least: float,
    title: str,
    change: str,
    least_ms: float = 0.0,
) -> Verdict | None:
    if saved < least:
        return None
    level, reason = confidence(saved, least, taken.error)
    moved = f"To move each tensor of the update once takes {least_ms:.3g} ms [{COSTS}]."
    return case.verdict(
        cause="heavy-update",
        title=title + line_of(taken.looks),
        evidence=(
            f"It takes {taken.time_ms:.3g} ms, {percent(taken.share)} of a step [{STEPS}] "
            f"[{STACKS}].",
            moved if least_ms else "",
        ),
        lost=saved,
        sure=(
            "medium" if level == "high" else "low",
            f"{reason}; what would be left of it was not tried",
        ),
        change=change,
        gain_low=1.0,  # an upper bound may bring nothing
        gain_high=gain_without(saved),
    )


def beside_the_model(case: Case) -> Verdict | None:
    """Judges whether a pass takes longer in the training than the model's own, on every rank.

    Other modules that run before the pass or before backward(), such as a teacher or a loss, and
    derivatives of what the model gives may be part of the method: what they take is a hint.
    """
    before = _before_the_pass(case)
    if together_times(case) is None or case.run.mixed or BACKWARD not in case.run.measured:
        if before is None:
            raise NotJudged(f"no {PROBES} of the script's own batches in {case.run.name}")
        return before
    ratios, alone_ms = _over_alone(case)
    rows = looks(case, ("forward",))
    rows = rows.assign(derives=rows["call"].str.startswith(DERIVATIVES))
    chosen = rows[rows["in_loss"] & (in_modules(rows) | rows["derives"])]
    modules = None if rows.empty else _taken(case, rows, chosen)
    if modules is None:
        return most_costly(before, _longer(case, ratios, alone_ms))
    modules_ms = modules.time_ms / case.run.accumulation
    without = ratios | {"forward": ratios["forward"] - modules_ms / alone_ms["forward"]}
    # A backward pass goes through the derivatives, too.
    longer = None if chosen["derives"].any() else _longer(case, without, alone_ms)
    return most_costly(before, longer or _longer(case, ratios, alone_ms, modules))


def _before_the_pass(case: Case) -> Verdict | None:
    """Judges what other modules take between a batch and the model's pass, on every rank."""
    if STACKS not in case.run.tables:
        return None
    rows = looks(case, ("copy",))
    modules = _taken(case, rows, rows[in_modules(rows)])
    if modules is None or modules.share < LONGER_SHARE:
        return None
    return case.verdict(
        cause="beside-the-model",
        title=(
            f"other modules run for {modules.time_ms:.3g} ms before the model's own pass"
            f"{line_of(modules.looks)}"
        ),
        evidence=(
            f"That is {percent(modules.share)} of a step, on the rank that takes least: "
            f"{modules.looks['samples'].sum()} stack samples [{STACKS}] [{STEPS}].",
        ),
        lost=modules.share,
        sure=NOT_SEEN,
        change=OTHER_MODULES,
    )


def _over_alone(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """Returns each pass' time in a step over the model's own, and that in ms, by pass."""
    probed = case.run.own_passes.groupby("rank")
    exchanging = case.run.rows(EXCHANGING)
    if exchanging.empty:
        exchanging = case.run.own_passes
    after = exchanging[[part for part in PARTS[1:] if part in exchanging]].sum(axis=1)
    ratios, alone = {}, {}
    for name, column, alone_ms in (
        ("forward", COLUMN_OF["forward"], probed["forward_time_ms"].median()),
        ("backward", COLUMN_OF["backward"], after.groupby(exchanging["rank"]).median()),
    ):
        ratio = (case.run.by_step(column).median() / case.run.accumulation / alone_ms).dropna()
        if ratio.empty:
            raise NotJudged(f"no {name} passes of the script's own batches in {case.run.name}")
        ratios[name], alone[name] = float(ratio.min()), float(alone_ms[ratio.idxmin()])
    return ratios, alone


def _longer(
    case: Case,
    ratios: Mapping[str, float],
    alone_ms: Mapping[str, float],
    modules: _Taken | None = None,
) -> Verdict | None:
    """Judges passes by their time over the model's own; ``modules`` run in them, too."""
    # Of a backward pass in a step it is not known what is exchange, unless that was measured, too.
    has_exchange = not case.run.rows(EXCHANGING).empty
    name = max(ratios, key=ratios.get) if has_exchange else "forward"
    # What both passes take longer may be the machine's, up to what no machine does.
    drift = min(max(1.0, min(ratios.values())), SURELY_LONGER)
    ratio, step_ms = ratios[name] / drift, float(case.run.slowest_ms.median())
    over_ms = (ratios[name] - drift) * alone_ms[name] * case.run.accumulation
    share = over_ms / step_ms
    if not (ratio > LONGER and share > LONGER_SHARE):
        return None
    error = standard_error(case.run.by_step(COLUMN_OF[name]).min(axis=1))
    level, reason = confidence(share, LONGER_SHARE, error * case.run.accumulation / step_ms)
    rows = looks(case, (name,))
    beside = rows[~rows["place"].astype(str).str.endswith(" forward")]
    beside = beside if beside["samples"].sum() > rows["samples"].sum() / 5 else rows
    line = line_of(modules.looks if modules else beside)
    longer = f"{name} passes take {over_ms:.3g} ms longer in the training than the model alone"
    if modules:
        longer = f"other modules run for {over_ms:.3g} ms between the model's pass and backward()"
        if modules.looks["derives"].any():
            longer = f"derivatives of its outputs make {name} passes {over_ms:.3g} ms longer"
        level, reason = NOT_SEEN
    return case.verdict(
        cause="beside-the-model",
        title=longer + line,
        evidence=(
            f"A {name} pass takes {ratios[name]:.2f} times as long in a step [{STEPS}] as "
            f"the model's own [{PROBES}], on every rank; the other pass "
            f"{min(ratios.values()):.2f} times.",
        ),
        lost=share,
        sure=(
            level if line and ratio > SURELY_LONGER else "low",
            reason if line else f"{reason}; nothing tells what it is",
        ),
        change=OTHER_MODULES if modules else BESIDE,
    )
