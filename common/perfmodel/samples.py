"""Raw samples as arrays: what the tables hold before any median is taken.

A prediction takes medians of all samples. Medians of a drawn part give another prediction, that
might as well have come out (``uncertainty``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts, SecondsBySize
from common.samples import resampled, slowest_rank


@dataclass(frozen=True, eq=False)
class ReadySamples:
    """The times at which each gradient was ready, by pass and rank, in the order of rank 0.

    Attributes:
        names, sizes_bytes, kinds, registration: as in ``BackwardProfile``.
        ready_s: float [passes, ranks, gradients], seconds from the start of the pass; NaN where a
            rank has no sample.
    """

    names: tuple[str, ...]
    sizes_bytes: NDArray
    kinds: tuple[str, ...]
    registration: tuple[int, ...]
    ready_s: NDArray

    @classmethod
    def of(cls, table: pd.DataFrame) -> ReadySamples:
        """Makes samples of checked rows of ``gradient-ready-times.csv``, ordered as on rank 0.

        Raises UserError where that order is not known.
        """
        # Rows are scattered into an array that begins as NaN, which ``fmax`` overwrites; of several
        # rows for one place it keeps the latest time.
        keys = ["parameter", "registration_index", "dtype", "size_bytes"]
        gradient = table.groupby(keys, sort=False).ngroup().to_numpy()
        passes, rank = (
            pd.factorize(table[column], sort=True)[0] for column in ("iteration", "rank")
        )
        ready_s = np.full((passes.max() + 1, rank.max() + 1, gradient.max() + 1), np.nan)
        np.fmax.at(ready_s, (passes, rank, gradient), table["ready_time_ms"].to_numpy(float) / 1e3)
        about = table.drop_duplicates(keys)
        order = _median(_slowest(ready_s), axis=0)
        if "ready_index" in table.columns:
            on_first = table[table["rank"] == 0].groupby("parameter")["ready_index"].median()
            order = about["parameter"].map(on_first).to_numpy(float)
            if np.isnan(order).any():
                name = about["parameter"].iloc[int(np.isnan(order).argmax())]
                raise UserError(f"no row of {name} on rank 0, by whose order DDP goes")
        by_order = np.argsort(order, kind="stable")
        about = about.iloc[by_order]
        return cls(
            names=tuple(about["parameter"]),
            sizes_bytes=about["size_bytes"].to_numpy(np.int64),
            kinds=tuple(about["dtype"]),
            registration=tuple(about["registration_index"]),
            ready_s=ready_s[:, :, by_order],
        )

    @property
    def passes(self) -> int:
        """Returns the number of backward passes that were watched."""
        return self.ready_s.shape[0]

    @property
    def ranks(self) -> int:
        """Returns the number of ranks that they were watched on."""
        return self.ready_s.shape[1]

    def profile(
        self, passes: NDArray | None = None, *, rank: int | None = None, per_rank: bool = False
    ) -> BackwardProfile:
        """Returns the profile: the median over passes of the slowest rank's ready times.

        Args:
            passes: rows to take, repeated ones too; by default each once.
            rank: take this rank's times alone.
            per_rank: keep each rank's median, too (``rank_ready_s``), where ranks differ. Of equal
                ranks a different one is last in each pass: a bucket is then ready a little early.
        """
        chosen = self.ready_s if passes is None else self.ready_s[passes]
        ranks = _median(chosen, axis=0) if per_rank else None
        slowest = _slowest(chosen) if rank is None else chosen[:, rank]
        # Medians of neighbours may come out in the other order; a profile never decreases.
        ready_s = np.maximum.accumulate(_median(slowest, axis=0))
        last = float(ready_s[-1])
        return BackwardProfile(
            names=self.names,
            sizes_bytes=self.sizes_bytes,
            ready_s=ready_s,
            backward_s=last if ranks is None else max(last, float(np.nanmax(ranks))),
            kinds=self.kinds,
            registration=self.registration,
            rank_ready_s=ranks,
        )


@dataclass(frozen=True, eq=False)
class AllReduceSamples:
    """All-reduces of the slowest rank: ``time_s`` [sizes, rounds, iterations], NaN where none."""

    sizes_bytes: NDArray
    time_s: NDArray
    world_size: int

    @classmethod
    def of(cls, table: pd.DataFrame) -> AllReduceSamples:
        """Makes samples from checked rows of one mode of ``allreduce-samples.csv``."""
        size, round_, iteration = (
            pd.factorize(table[column], sort=True)[0]
            for column in ("total_bytes", "round", "iteration")
        )
        time_s = np.full((size.max() + 1, round_.max() + 1, iteration.max() + 1), np.nan)
        np.fmax.at(time_s, (size, round_, iteration), table["time_ms"].to_numpy(float) / 1e3)
        sizes = np.unique(table["total_bytes"].to_numpy(float))
        return cls(sizes, time_s, int(table["rank"].max()) + 1)

    def drawn(self, generator: np.random.Generator) -> MeasuredAllReduce:
        """Returns the curve of samples drawn with replacement: as many rounds, then calls in each.

        Rounds are the same for all sizes; of a size with few calls as few are drawn.
        """
        # A bootstrap in two stages, as calls of one round are alike. The known calls of a round
        # stand first, so a number from 0 to 1 times their count is the index of one of them, and
        # the last place is NaN where there are fewer than places.
        sizes, _, calls = self.time_s.shape
        # A run that was stopped in a round has not all sizes in it.
        complete = np.flatnonzero((~np.isnan(self.time_s)).any(axis=2).all(axis=0))
        chosen = np.arange(self.time_s.shape[1])  # all of them, where none has all sizes
        if len(complete):
            [chosen] = resampled(complete, draws=1, seed=generator)
        present = (~np.isnan(self.time_s[:, chosen])).sum(axis=2, keepdims=True)
        iterations = (generator.random((sizes, len(chosen), calls)) * present).astype(int)
        iterations = np.where(np.arange(calls) < present, iterations, calls - 1)
        return self.curve(chosen, iterations)

    def curve(
        self, rounds: NDArray | None = None, iterations: NDArray | None = None
    ) -> MeasuredAllReduce:
        """Returns the curve of each size's median.

        ``rounds`` are taken, repeated ones too, and of each ``iterations`` [sizes, rounds, calls].
        """
        times = self.time_s if rounds is None else self.time_s[:, rounds]
        if iterations is not None:
            times = np.take_along_axis(times, iterations, axis=2)
        return MeasuredAllReduce(self.sizes_bytes, _median(times.reshape(len(times), -1), axis=1))

    def least(self) -> MeasuredAllReduce:
        """Returns the curve of each size's shortest time: of all-reduces that nothing disturbed."""
        return MeasuredAllReduce(self.sizes_bytes, np.nanmin(self.time_s, axis=(1, 2)))


IN_FLIGHT = {"gloo": 2, "nccl": 1, "emulated": 1}
"""Backend → all-reduces that it has under way at a time."""


@dataclass(frozen=True, eq=False)
class OverlapSamples:
    """Costs that DDP adds to a backward pass, by round (the last axis); seconds, NaN where none.

    Attributes:
        bookkeeping_s: time that DDP over one rank adds to the pass, all gradients in one bucket.
        local_s: the pass alone.
        copy_out_s: the part of it that copies gradients back, by DDP's own record.
        per_bucket_s: time that each further bucket adds to it where nothing is sent.
        beside: message size → the pass beside all-reduces of it without pause, ascending.
        launched: message size → the pass that launches all-reduces of it as its gradients become
            ready; empty in runs that have none.
        launches_hidden: whether a GPU was held back before the passes beside all-reduces, so that
            what the host takes to launch these is not in their times.
        backend: decides how many all-reduces can be under way; None allows for the most of any.
    """

    bookkeeping_s: NDArray
    local_s: NDArray
    gradient_bytes: float
    copy_out_s: NDArray | None = None
    per_bucket_s: NDArray | None = None
    beside: Mapping[float, BesideMessages] = field(default_factory=dict)
    launched: Mapping[float, BesideMessages] = field(default_factory=dict)
    launches_hidden: bool = False
    backend: str | None = None

    @classmethod
    def of(cls, table: pd.DataFrame, backend: str | None = None) -> OverlapSamples:
        """Makes samples from checked rows of ``overlap-times.csv``.

        Raises UserError where all-reduces beside the pass were not measured alone, and where the
        pass alone, or DDP over one rank, has messages.
        """
        # The rank whose pass is longest has seen the most all-reduces end.
        times = ["backward_time_ms", "all_reduce_time_ms", "messages_done", "copy_out_time_ms"]
        keys = ["arm", "message_bytes", "round"]
        rows = table.reindex(columns=[*keys, "iteration", *times])  # older runs lack the last one
        by_round = slowest_rank(rows, times, by=[*keys, "iteration"]).groupby(keys).median()
        rounds = sorted(set(table["round"]))

        def samples(arm: str, column: str, size: float = 0) -> NDArray:
            return by_round.loc[(arm, size), column].reindex(rounds).to_numpy(float)

        arms = sorted(set(by_round.droplevel("round").index))
        for arm, size in arms:
            if arm in ("local", "bookkeeping") and size:
                raise UserError(f"{arm} with message_bytes {size:g}: it sends nothing, so 0")
        local_s = samples("local", "backward_time_ms") / 1e3
        messages = table.groupby(["arm", "message_bytes"])["messages"].first()

        def beside_pass(arm: str) -> dict[float, BesideMessages]:
            return {size: of_size(arm, size) for kind, size in arms if kind == arm}

        def of_size(arm: str, size: float) -> BesideMessages:
            if ("all_reduce", size) not in arms:
                raise UserError(f"no all_reduce samples of {size:.0f} bytes, as {arm} has")
            alone_s = samples("all_reduce", "all_reduce_time_ms", size) / 1e3
            return BesideMessages(
                messages=float(messages[arm, size]),
                backward_s=samples(arm, "backward_time_ms", size) / 1e3,
                until_done_s=samples(arm, "all_reduce_time_ms", size) / 1e3,
                alone_s=alone_s * messages[arm, size] / messages["all_reduce", size],
                done=samples(arm, "messages_done", size),
            )

        def per_bucket_s() -> NDArray | None:
            passes_s = {1: samples("bookkeeping", "backward_time_ms") / 1e3}
            for arm, size in arms:
                if arm == "buckets":
                    count = int(messages[arm, size])
                    passes_s[count] = samples(arm, "backward_time_ms", size) / 1e3
            most = max(passes_s)
            return None if most == 1 else (passes_s[most] - passes_s[1]) / (most - 1)

        return cls(
            bookkeeping_s=samples("bookkeeping", "backward_time_ms") / 1e3 - local_s,
            local_s=local_s,
            gradient_bytes=float(table["gradient_bytes"].iloc[0]),
            copy_out_s=(
                samples("bookkeeping", "copy_out_time_ms") / 1e3
                if "copy_out_time_ms" in table
                else None
            ),
            per_bucket_s=per_bucket_s(),
            beside=beside_pass("continuous"),
            launched=beside_pass("launched"),
            # One bucket is timed by itself where a GPU was held back in the other arms. Over gloo,
            # whose collectives make the host wait, none is.
            launches_hidden=backend not in (None, "gloo")
            and any(arm == "buckets" and messages[arm, size] == 1 for arm, size in arms),
            backend=backend,
        )

    @property
    def rounds(self) -> int:
        """Returns the number of rounds to draw from."""
        return len(self.local_s)

    def costs(self, rounds: NDArray | None = None) -> DdpCosts:
        """Returns DDP's copies, and contention by message size where it was measured.

        Copies out are known from DDP's own record, and copies in move as many bytes. Runs without
        that record have what DDP over one rank adds to the pass, halved (within a round, so that
        drift cancels; medians over rounds). Buckets cost something by themselves over NCCL, where
        the passes beside all-reduces had their launches hidden; elsewhere these hold them.
        ``rounds`` are those to take, repeated ones too.
        """
        taken = np.arange(self.rounds) if rounds is None else rounds
        # Two passes on a busy machine differ by many times what copies take, in either direction,
        # so their difference is only taken where nothing better is known.
        copy_s = float("nan") if self.copy_out_s is None else _middle(self.copy_out_s[taken])
        if np.isnan(copy_s):
            copy_s = max(0.0, _middle(self.bookkeeping_s[taken])) / 2
        per_byte = copy_s / self.gradient_bytes
        launch_s = 0.0
        if self.per_bucket_s is not None and self.launches_hidden:
            launch_s = max(0.0, _middle(self.per_bucket_s[taken]))
        copies = DdpCosts(
            copy_in_s_per_byte=per_byte, copy_out_s_per_byte=per_byte, launch_s=launch_s
        )
        if not self.beside:
            return copies
        most = IN_FLIGHT.get(self.backend or "", max(IN_FLIGHT.values()))

        def contention(passes: Mapping[float, BesideMessages]) -> tuple[SecondsBySize, ...]:
            pairs = [slowed.contention(self.local_s, taken, most) for slowed in passes.values()]
            lost_s, delay_s = zip(*pairs, strict=True)
            sizes = tuple(map(float, passes))
            return (sizes, lost_s), (sizes, delay_s)

        lost, delays = contention(self.beside)
        if self.launched:
            lost, _ = contention(self.launched)
        return replace(copies, lost_compute=lost, delays=delays)


@dataclass(frozen=True, eq=False)
class BesideMessages:
    """A backward pass beside all-reduces of one size, by round.

    Attributes:
        messages: number of all-reduces.
        backward_s: duration of the pass.
        until_done_s: time from the pass's start until the last all-reduce is done.
        alone_s: duration of all all-reduces with nothing beside them.
        done: number of all-reduces that ended during the pass; NaN where that was not counted.
    """

    messages: float
    backward_s: NDArray
    until_done_s: NDArray
    alone_s: NDArray
    done: NDArray

    def contention(self, local_s: NDArray, taken: NDArray, in_flight: int) -> tuple[float, float]:
        """Returns the computation that one all-reduce costs and its own delay, both in seconds.

        While the pass lasts t instead of t₀, n all-reduces are done: each takes t/n and costs
        (t − t₀)/n of computation. n need not be whole, as those in flight when the pass ends are
        done in part. It is all of them less those that fit into the time after the pass, at the
        speed they have alone; but at least the number that was counted, and at most that number
        and those that can be in flight. Where all were done before the pass was, its time says
        nothing of theirs.
        """
        backward_s = _middle(self.backward_s[taken])
        each_s = _middle(self.alone_s[taken]) / self.messages
        count = self.messages - (_middle(self.until_done_s[taken]) - backward_s) / each_s
        counted = _middle(self.done[taken])
        if not np.isnan(counted):
            count = min(max(count, counted), counted + in_flight, self.messages)
        count = max(0.5, count)
        lost_s = max(0.0, _middle((self.backward_s - local_s)[taken])) / count
        if counted >= self.messages:
            return lost_s, 0.0
        return lost_s, max(0.0, backward_s / count - each_s)


def _slowest(ready_s: NDArray) -> NDArray:
    """Returns the latest time over ranks, [passes, gradients]; NaN where none has a sample."""
    return np.fmax.reduce(ready_s, axis=1)


def _median(values: NDArray, axis: int) -> NDArray:
    return (np.nanmedian if np.isnan(values).any() else np.median)(values, axis=axis)


def _middle(values: NDArray) -> float:
    """Returns the median of the values that are not NaN; NaN if there are none."""
    there = values[~np.isnan(values)]
    return float(np.median(there)) if there.size else float("nan")
