"""Raw samples as arrays: what the tables hold before any median is taken.

A prediction takes medians of all samples. Taking them of a drawn part instead gives another
prediction that might as well have come out (``uncertainty``). So each kind of sample can say its
medians for any rows of it; without rows, for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.profile import BackwardProfile, DdpCosts


@dataclass(frozen=True, eq=False)
class ReadySamples:
    """When each gradient was ready in each pass on each rank, in the order of rank 0.

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
        """From rows of ``gradient-ready-times.csv`` that were checked."""
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
        """How many backward passes were watched."""
        return self.ready_s.shape[0]

    @property
    def ranks(self) -> int:
        """On how many ranks."""
        return self.ready_s.shape[1]

    def profile(
        self, passes: NDArray | None = None, *, rank: int | None = None, per_rank: bool = False
    ) -> BackwardProfile:
        """The median over passes of when the slowest rank had each gradient.

        Args:
            passes: rows to take, repeated ones too; by default each once.
            rank: take this rank's times alone.
            per_rank: keep the median of each rank, too (``rank_ready_s``). A bucket is then ready
                on the rank that is usually last; of two equal ranks a different one is last in
                each pass, so this is a little early there. It is meant for ranks that differ.
        """
        chosen = self.ready_s if passes is None else self.ready_s[passes]
        ranks = _median(chosen, axis=0) if per_rank else None
        slowest = _slowest(chosen) if rank is None else chosen[:, rank]
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
        """From rows of ``allreduce-samples.csv`` of one mode that were checked."""
        size, round_, iteration = (
            pd.factorize(table[column], sort=True)[0]
            for column in ("total_bytes", "round", "iteration")
        )
        time_s = np.full((size.max() + 1, round_.max() + 1, iteration.max() + 1), np.nan)
        np.fmax.at(time_s, (size, round_, iteration), table["time_ms"].to_numpy(float) / 1e3)
        sizes = np.unique(table["total_bytes"].to_numpy(float))
        return cls(sizes, time_s, int(table["rank"].max()) + 1)

    def curve(
        self, rounds: NDArray | None = None, iterations: NDArray | None = None
    ) -> MeasuredAllReduce:
        """The median of each size.

        Args:
            rounds: rounds to take, repeated ones too.
            iterations: int [sizes, rounds taken, iterations], which to take of each.
        """
        times = self.time_s if rounds is None else self.time_s[:, rounds]
        if iterations is not None:
            times = np.take_along_axis(times, iterations, axis=2)
        return MeasuredAllReduce(self.sizes_bytes, _median(times.reshape(len(times), -1), axis=1))


UNDER_WAY = 2
"""All-reduces that are under way at a time, at most (gloo's; NCCL has one)."""


@dataclass(frozen=True, eq=False)
class OverlapSamples:
    """What DDP adds to a backward pass, by round (the last axis); seconds, NaN where none.

    Attributes:
        bookkeeping_s: what DDP over one rank adds to the pass.
        paced_s: (message size, messages) → what so many all-reduces beside it add.
        continuous_s: message size → [2, variants, rounds], the pass beside all-reduces without
            pause, and from its start until the last of these is done.
        all_reduce_s: message size → [variants, rounds], those all-reduces alone.
        local_s: the pass alone.
        gradient_bytes: of the model.
        done: message size → [rounds], how many all-reduces without pause ended during the pass;
            empty where that was not counted.
        messages: message size → how many of them there were in all.
    """

    bookkeeping_s: NDArray
    paced_s: Mapping[tuple[float, float], NDArray]
    continuous_s: Mapping[float, NDArray]
    all_reduce_s: Mapping[float, NDArray]
    local_s: NDArray
    gradient_bytes: float
    done: Mapping[float, NDArray] = field(default_factory=dict)
    messages: Mapping[float, float] = field(default_factory=dict)

    @classmethod
    def of(cls, table: pd.DataFrame) -> OverlapSamples:
        """From rows of ``overlap-times.csv`` that were checked. Raises UserError where all-reduces
        beside the pass were not measured alone."""
        keys = ["arm", "message_bytes", "messages", "round"]
        times = ["backward_time_ms", "all_reduce_time_ms"]
        slowest = table.groupby([*keys, "iteration"])[times].max() / 1e3
        by_round = slowest.groupby(keys).median()
        by_round.columns = ["backward_s", "all_reduce_s"]
        arms = {  # (arm, size, messages) → rounds × the two times
            name: rows.droplevel([0, 1, 2]).reindex(sorted(set(table["round"])))
            for name, rows in by_round.groupby(level=[0, 1, 2])
        }

        def column(arm: str, name: str, size: float | None = None) -> NDArray:
            found = [
                rows[name].to_numpy()
                for (kind, bytes_, _), rows in arms.items()
                if kind == arm and size in (None, bytes_)
            ]
            return np.array(found)

        local_s = column("local", "backward_s")[0]
        alone, beside = (
            sorted({size for kind, size, _ in arms if kind == arm})
            for arm in ("all_reduce", "continuous")
        )
        for size in beside:
            if size not in alone:
                raise UserError(f"no all_reduce samples of {size:.0f} bytes, as continuous has")
        return cls(
            bookkeeping_s=column("bookkeeping", "backward_s")[0] - local_s,
            paced_s={
                (size, count): rows["backward_s"].to_numpy() - local_s
                for (kind, size, count), rows in arms.items()
                if kind == "paced"
            },
            continuous_s={
                size: np.array([column("continuous", name, size) for name in by_round.columns])
                for size in beside
            },
            all_reduce_s={size: column("all_reduce", "all_reduce_s", size) for size in alone},
            local_s=local_s,
            gradient_bytes=float(table["gradient_bytes"].iloc[0]),
            **_counted(table),
        )

    @property
    def rounds(self) -> int:
        """How many rounds there are to draw from."""
        return len(self.local_s)

    def costs(self, rounds: NDArray | None = None) -> DdpCosts:
        """Bookkeeping and contention; how they follow is said in ``tables.read_costs``.

        Args:
            rounds: rounds to take, repeated ones too.
        """
        taken = slice(None) if rounds is None else rounds
        bookkeeping = max(0.0, _middle(self.bookkeeping_s[taken]))
        per_byte = bookkeeping / 2 / self.gradient_bytes
        lost = sorted(
            (size, max(0.0, _middle(added[taken])) / count)
            for (size, count), added in self.paced_s.items()
        )
        costs = DdpCosts(
            copy_in_s_per_byte=per_byte,
            copy_out_s_per_byte=per_byte,
            communication_slowdown=self._communication_slowdown(taken),
        )
        if not lost:
            return costs
        sizes, seconds = zip(*lost, strict=True)
        seconds = np.maximum.accumulate(seconds)
        return replace(costs, lost_compute=(tuple(map(float, sizes)), tuple(seconds.tolist())))

    def saturated_costs(self) -> DdpCosts:
        """Bookkeeping, and contention of each size beside all-reduces without pause.

        While the backward pass lasts t beside them instead of t₀, n all-reduces are done: each
        takes t/n and costs (t − t₀)/n of computation. Those under way when the pass ends are done
        in part, as far as the time tells that the rest then take. Differences are taken within a
        round; medians over rounds. Raises UserError where nothing was counted.
        """
        if not self.done:
            raise UserError("overlap samples: all-reduces that were done in time were not counted")
        sizes = sorted(self.done)
        lost_s, slower = [], []
        for size in sizes:
            beside_s, until_done_s = (_middle(one) for one in self.continuous_s[size])
            each_s = _middle(self.all_reduce_s[size]) / self.messages[size]
            counted = _middle(self.done[size])
            all_done = self._all_done(size)
            by_time = self.messages[size] - (until_done_s - beside_s) / each_s
            done = max(0.5, min(max(by_time, counted), counted + UNDER_WAY, self.messages[size]))
            slower.append(1.0 if all_done else max(1.0, beside_s / done / each_s))
            added_s = _middle(self.continuous_s[size][0] - self.local_s)
            lost_s.append(max(0.0, added_s) / done)
        known = tuple(map(float, sizes))
        return replace(
            self.costs(), lost_compute=(known, tuple(lost_s)), slowdowns=(known, tuple(slower))
        )

    def _all_done(self, size: float, taken: slice | NDArray = slice(None)) -> bool:
        """Whether the pass outlasted the all-reduces beside it; False where none was counted.

        They may then have been done long before the pass was, so that its time says nothing about
        how fast they were.
        """
        return bool(self.done) and _middle(self.done[size][taken]) >= self.messages[size]

    def _communication_slowdown(self, taken: slice | NDArray) -> float:
        slowdowns = []
        for size, both in self.continuous_s.items():
            if self._all_done(size, taken):
                slowdowns.append(1.0)
                continue
            beside, until_done = (_middle(one[:, taken]) for one in both)
            alone, left = _middle(self.all_reduce_s[size][:, taken]), until_done - beside
            if alone > left:
                slowdowns.append(max(1.0, beside / (alone - left)))
        return float(np.median(slowdowns or [1.0]))


def _counted(table: pd.DataFrame) -> dict[str, dict]:
    """``done`` and ``messages`` of the continuous arms.

    As times are the slowest rank's, its count goes with them: the one whose pass is longest has
    seen the most all-reduces end.
    """
    if "messages_done" not in table:
        return {}
    own = table[table["arm"] == "continuous"]
    most = own.groupby(["message_bytes", "round", "iteration"])["messages_done"].max()
    by_round = most.groupby(level=[0, 1]).median().unstack()
    by_round = by_round.reindex(columns=sorted(set(table["round"])))
    messages = own.groupby("message_bytes")["messages"].first()
    return {
        "done": {size: row.to_numpy() for size, row in by_round.iterrows()},
        "messages": messages.to_dict(),
    }


def _slowest(ready_s: NDArray) -> NDArray:
    """Over ranks, of [passes, ranks, gradients]; NaN where no rank has a sample."""
    return np.fmax.reduce(ready_s, axis=1)


def _median(values: NDArray, axis: int) -> NDArray:
    return (np.nanmedian if np.isnan(values).any() else np.median)(values, axis=axis)


def _middle(values: NDArray) -> float:
    """The median of what is there; NaN of nothing."""
    there = values[~np.isnan(values)]
    return float(np.median(there)) if there.size else float("nan")
