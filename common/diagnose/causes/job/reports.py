"""Causes from averages: what DDP logs about itself, and tables that HTA and TraceLens made."""

from __future__ import annotations

from statistics import median

from common.diagnose.causes.job.failures import NO_OUTPUT, USE_ALL
from common.diagnose.causes.job.traces import exposed, idle, keeps_waiting
from common.diagnose.evidence.case import VALIDITY, Verdict, percent
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind
from common.diagnose.evidence.measured_surroundings import named_ranks
from common.traces.logs.ddp_log import DdpRecord
from common.traces.logs.profile_tables import BREAKDOWN, COLLECTIVES, STRAGGLERS, TIMELINE, Row

AVERAGES = "averages, whose spread is not known"
SLOW_RATIO = 1.1
"""A rank whose own passes take a tenth longer than the others' is slower than noise makes one."""
MORE_OVERLAP = (
    "More work for each exchange (accumulation inside no_sync(), a larger batch), fewer bytes "
    "(bf16 gradients), or a faster network; ddplab diagnose on the script says what each gains."
)


def _timed(job: LeftBehind) -> dict[int, DdpRecord]:
    records = {rank: r for rank, r in job.printed.ddp.records.items() if r.times_ms}
    if not records:
        raise NotJudged("DDP's log has no times (TORCH_DISTRIBUTED_DEBUG=DETAIL)")
    return records


def exposed_by_ddp(job: LeftBehind) -> Verdict | None:
    """Judges by DDP's own averages whether its exchange outlasts the backward pass."""
    records = _timed(job)
    times = {rank: record.times_ms for rank, record in records.items()}
    rank = min(times, key=lambda rank: times[rank][2])  # it waits for nobody
    forward, backward, later = times[rank]
    share = later / (forward + backward + later)
    return exposed(
        share,
        evidence=(
            f"On rank {rank}, which waits least, DDP's exchange goes on for {later:.3g} ms after "
            f"a backward pass of {backward:.3g} ms (forward pass {forward:.3g} ms): "
            f"{percent(share)} of the three {records[rank].where}.",
        ),
        confidence="medium",
        reason=f"{AVERAGES}; without the optimizer and the loader",
        change=MORE_OVERLAP,
    )


def slow_rank_by_ddp(job: LeftBehind) -> Verdict | None:
    """Judges by DDP's own averages whether one rank's passes take longer than the others'."""
    passes_ms = {rank: sum(r.times_ms[:2]) for rank, r in _timed(job).items()}
    if len(passes_ms) < 2:
        raise NotJudged("DDP's times of one rank have no other to be slower than")
    rank = max(passes_ms, key=passes_ms.get)
    usual = median(value for other, value in passes_ms.items() if other != rank)
    if passes_ms[rank] < SLOW_RATIO * usual:
        return None
    return _slow(
        rank,
        f"Rank {rank}'s forward and backward pass take {passes_ms[rank]:.3g} ms, the others' "
        f"{usual:.3g} ms: {passes_ms[rank] / usual:.2f} times as long "
        f"{job.printed.ddp.records[rank].where}.",
        (passes_ms[rank] - usual) / passes_ms[rank],
    )


def _slow(rank: int, sentence: str, share: float) -> Verdict:
    return keeps_waiting(
        rank,
        "the device (clocks, temperature, other jobs), more work for this rank, its loader, or "
        "Python of its own.",
        evidence=(sentence,),
        lost_share=share,
        confidence="medium",
        reason=AVERAGES,
    )


def slow_rank_by_tables(job: LeftBehind) -> Verdict | None:
    """Judges by TraceLens' table of stragglers whether one rank comes last most often."""
    rows = [row for row in job.printed.tables.of(STRAGGLERS) if row.rank is not None]
    waits = {row.rank: row.number("total_wait_time_us") for row in rows}
    lasts = {row.rank: row.number("times_arrived_last") or 0 for row in rows}
    if len(waits) < 2 or None in waits.values():
        raise NotJudged("no table of stragglers of several ranks")
    rank = max(lasts, key=lasts.get)
    all_times = sum(lasts.values())
    usual = median(wait for other, wait in waits.items() if other != rank)
    if lasts[rank] <= all_times / 2 or waits[rank] >= usual / SLOW_RATIO:
        return None
    row = next(row for row in rows if row.rank == rank)
    return _slow(
        rank,
        f"Rank {rank} came last to {lasts[rank]:.0f} of {all_times:.0f} collectives and waited "
        f"{waits[rank] / 1e3:.3g} ms in all, the others {usual / 1e3:.3g} ms {row.where}.",
        0.0,
    )


def _shares(job: LeftBehind, column: str, kinds: tuple[str, ...]) -> list[tuple[float, Row]]:
    """Returns a share of each rank, from HTA's breakdown or TraceLens' timeline."""
    tables = job.printed.tables
    rows = [(row.number(column), row) for row in tables.of(BREAKDOWN)]
    rows += [(r.number("percent"), r) for r in tables.of(TIMELINE) if r.cells["type"] in kinds]
    shares = [(value / 100, row) for value, row in rows if value is not None]
    if not shares:
        raise NotJudged("no table with shares of a step")
    return shares


def exposed_by_tables(job: LeftBehind) -> Verdict | None:
    """Judges by a table whether communication that nothing hides takes much of the time."""
    shares = _shares(job, "non_compute_time_pctg", ("exposed_comm_time",))
    share, row = min(shares, key=lambda pair: pair[0])
    also = ", with copies" if "non_compute_time_pctg" in row.cells else ""
    return exposed(
        share,
        evidence=(
            f"At least {percent(share)} of the time of each of {len(shares)} ranks goes into "
            f"communication{also} while nothing is computed {row.where}.",
        ),
        confidence="medium" if len(shares) > 1 else "low",
        reason=AVERAGES
        if len(shares) > 1
        else f"{AVERAGES}; one rank's holds its waits for others",
        change=MORE_OVERLAP,
    )


def idle_by_tables(job: LeftBehind) -> Verdict | None:
    """Judges by a table whether GPUs wait for their hosts."""
    shares = _shares(job, "idle_time_pctg", ("idle_time", "idle"))
    share, row = min(shares, key=lambda pair: pair[0])
    sentence = f"On every rank the device is idle for at least {percent(share)} {row.where}."
    return idle(share, sentence, "medium", AVERAGES)


def late_arrivals(job: LeftBehind) -> Verdict | None:
    """Judges by TraceLens' table of collectives whether ranks come to them at different times."""
    rows = job.printed.tables.of(COLLECTIVES)
    if not rows:
        raise NotJudged("no table of collectives (TraceLens' nccl_summary_implicit_sync)")
    late = []
    for row in rows:
        skew, latency = row.number("skew in start time_mean"), row.number("comm_latency_mean")
        if skew and latency and skew > latency:
            late.append((skew * (row.number("count") or 1), skew, latency, row))
    if not late:
        return None
    _, skew, latency, row = max(late, key=lambda item: item[0])
    return Verdict(
        cause="late-arrivals",
        title="ranks come to collectives at different times",
        evidence=(
            f"{row.cells['Collective name']}: the last rank comes {skew / 1e3:.3g} ms after the "
            f"first, the exchange itself takes {latency / 1e3:.3g} ms {row.where}.",
        ),
        confidence="medium",
        reason=AVERAGES,
        change="Give all ranks equal work (lengths, batches), and look for one that is slow: "
        "TraceLens' straggler_summary, or traces of all ranks.",
    )


def needless_search(job: LeftBehind) -> Verdict | None:
    """Judges whether DDP looks for unused parameters in each step, and finds none."""
    output, records = job.printed.output, job.printed.ddp.records
    if not (records or output.says_anything):
        raise NotJudged("no log of DDP")
    searching = {
        rank: record
        for rank, record in records.items()
        if record.number("find_unused_parameters") == 1
        and record.number("unused_parameter_size") == 0
        and (record.number("iteration") or 0) > 0
    }
    where = [record.where for record in searching.values()] or output.needless_search
    if not where:
        return None
    return Verdict(
        cause="needless-search",
        title="unused parameters are looked for in each step, and there are none",
        evidence=(f"DDP looks for them and says that all are used {where[0]}.",),
        confidence="medium",
        reason="of the steps until then; what it costs is not said",
        change="Leave out find_unused_parameters=True.",
    )


def unused_parameters(job: LeftBehind) -> Verdict | None:
    """Judges whether parameters got no gradient, so that DDP refused the next step."""
    output = job.printed.output
    if not output.says_anything:
        raise NotJudged(NO_OUTPUT)
    if not output.unused:
        return None
    by_names: dict[str, list[int]] = {}
    for rank, (names, _) in sorted(output.unused.items()):
        by_names.setdefault(names, []).append(rank)
    where = next(iter(output.unused.values()))[1]
    return Verdict(
        cause="unused-parameters",
        title="parameters got no gradient, and DDP refuses the next step",
        evidence=tuple(
            f"{named_ranks(ranks)}: {names} {where}." for names, ranks in by_names.items()
        ),
        lost_share=None,
        confidence="high",
        reason="DDP names them",
        change=f"{USE_ALL} The ranks differ in theirs: some data take another branch."
        if len(by_names) > 1
        else USE_ALL,
        group=VALIDITY,
    )
