"""The steps of one workload on every number of GPUs of a cluster, with all draws at once.

A case is a scaling, a number of GPUs and a draw. Every quantity is an array over all cases, so that
a bucketing, or a micro-batch of FSDP, is simulated for all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.buckets import MIB
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.cap_grid import (
    Circumstances,
    best_rows,
    cap_rows,
    default_row,
    near_interval,
    simulate_grid,
)
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.cluster.computed_profile import computed_profile, forward_parts_s
from common.perfmodel.cluster.nccl import NcclAllReduce, NcclRing
from common.perfmodel.cluster.stragglers import slowest_of
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.fsdp.communication import step_collectives
from common.perfmodel.fsdp.schedule import ShardedModel, simulate_step
from common.perfmodel.one_device.peaks import DevicePeak
from common.perfmodel.one_device.workload import Workload
from common.samples import middle

ADAMW_BYTES = 28
"""Bytes that AdamW moves per parameter: weight, gradient and both moments are read, all but the
gradient written, float32 each."""
BAND = 0.9
SMALLEST_CAP_MIB, CAPS = 0.25, 200


def default_caps_mib(total_bytes: float, count: int = CAPS) -> NDArray:
    """Returns caps from 0.25 MiB to one bucket of all gradients, evenly spaced on a log axis."""
    return np.geomspace(SMALLEST_CAP_MIB, total_bytes / MIB, count)


class Base(NamedTuple):
    """A scaling on a number of GPUs.

    Attributes:
        scaling: strong or weak.
        network: index into the networks, which is that of the number of GPUs.
        gpus: number of GPUs.
        sequences: sequences of a GPU's step.
        global_sequences: sequences of a step on all GPUs.
    """

    scaling: str
    network: int
    gpus: int
    sequences: int
    global_sequences: int


class ClusterSteps:
    """The steps of one workload on a cluster, for all cases at once.

    Cases are bases × (prediction, draws), flattened: a base's are ``width`` neighbours, of which
    the first is the prediction.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        peak: DevicePeak,
        gpus: Sequence[int],
        global_batch_size: int,
        assumptions: Assumptions,
    ) -> None:
        self.workload, self.cluster, self.gpus = workload, cluster, gpus
        self.networks = [NcclAllReduce(cluster, n) for n in gpus]
        self.config = workload.config
        self.flops_per_s = peak.flops(workload.precision, workload.tf32)
        self.memory_bytes_per_s = peak.memory_bytes_per_s
        weak = [
            Base("weak", index, n, workload.batch_size, n * workload.batch_size)
            for index, n in enumerate(gpus)
        ]
        strong = [
            Base("strong", index, n, math.ceil(global_batch_size / n), global_batch_size)
            for index, n in enumerate(gpus)
            if n <= global_batch_size
        ]
        self.bases = weak + strong
        draws = assumptions.drawn()
        self.width = len(draws.mfu)
        self.index = self._of_bases([base.network for base in self.bases])
        self.gpus_of_case = self._of_bases([base.gpus for base in self.bases])
        self.sequences = self._of_bases([base.sequences for base in self.bases])
        self.micro_batches = -(-self.sequences // workload.batch_size)
        self.mfu = np.tile(draws.mfu, len(self.bases))
        self.network_scale = 1 / np.tile(draws.network_speed, len(self.bases))
        self.slowdown = np.tile(draws.overlap_slowdown, len(self.bases))
        kind = assumptions.straggler_distribution
        slowest = [slowest_of(n, draws.straggler_spread, kind) for n in gpus]
        self.straggler = np.concatenate([slowest[base.network] for base in self.bases])
        self.profile = computed_profile(
            config=workload.config,
            seq_len=workload.seq_len,
            tokens=workload.seq_len,
            flops_per_s=self.flops_per_s,
        )
        block_s, head_s = forward_parts_s(
            config=workload.config,
            seq_len=workload.seq_len,
            tokens=workload.seq_len,
            flops_per_s=self.flops_per_s,
        )
        self.forward_s = self.config.n_layer * block_s + head_s
        # The times above are of one sequence at the whole peak; a case takes this many times them.
        self.of_sequences = self.sequences / self.mfu
        self.of_micro_batch = self.of_sequences / self.micro_batches
        self.update_s = ADAMW_BYTES * self.config.num_parameters() / self.memory_bytes_per_s

    def _of_bases(self, values: list[int]) -> NDArray:
        return np.repeat(np.array(values), self.width)

    def one_gpu_s(self) -> NDArray:
        """Computes the seconds of one GPU's step without exchange; if strong, divided by n."""
        step = (self.forward_s + self.profile.backward_s) * self.of_sequences + self.update_s
        shares = self._of_bases([base.global_sequences for base in self.bases]) / self.gpus_of_case
        alone = (self.forward_s + self.profile.backward_s) * shares / self.mfu
        strong = alone + self.update_s / self.gpus_of_case
        is_strong = self._of_bases([base.scaling == "strong" for base in self.bases])
        return np.where(is_strong, strong, step)

    def ddp(self, caps_mib: Sequence[float] | None) -> list[dict]:
        """Predicts the steps of DDP: a row per base, at the best cap of each."""
        if caps_mib is None:
            caps_mib = default_caps_mib(self.profile.total_bytes)
        rows = cap_rows(self.profile, caps_mib)
        copy = 2 / self.memory_bytes_per_s
        cases = Circumstances(
            compute_scale=self.of_micro_batch * self.straggler,
            network=self.index,
            network_scale=self.network_scale,
            compute_slowdown=self.slowdown,
        )
        grid = simulate_grid(
            profile=self.profile,
            networks=self.networks,
            rows=(*rows, default_row(self.profile)),
            cases=cases,
            costs=DdpCosts(copy_in_s_per_byte=copy, copy_out_s_per_byte=copy),
        )
        local = (self.forward_s + self.profile.backward_s) * self.of_sequences + self.update_s
        # The grid has the last micro-batch's backward pass, which exchanges; this is the rest.
        before = local * self.straggler - self.profile.backward_s * cases.compute_scale
        step_s = before + grid.total_s
        copies = np.full(len(before), copy * self.profile.total_bytes)
        best = best_rows(grid.total_s[:-1])
        steps = []
        for number, base in enumerate(self.bases):
            span = slice(number * self.width, (number + 1) * self.width)
            if base.gpus == 1:  # nothing to reduce, and no bucket to copy into
                steps.append(self._row("DDP", number, *self._alone(span)))
                continue
            chosen = best[span.start]
            low, high = near_interval(rows, step_s[:-1, span.start], chosen)
            cap = rows[chosen].cap_mib
            row = self._row(
                strategy="DDP",
                number=number,
                step_s=step_s[chosen, span],
                local_s=local[span],
                copies_s=copies[span],
                slowed_s=grid.slowed_s[chosen, span],
                exposed_s=grid.exposed_s[chosen, span],
            )
            steps.append(
                {
                    **row,
                    **_banded("bucket_cap", "mib", np.array([rows[i].cap_mib for i in best[span]])),
                    "num_buckets": len(rows[chosen].last),
                    "algorithm": self.networks[base.network].choice(cap * MIB),
                    "near_low_mib": low,
                    "near_high_mib": high,
                    "default_step_s": step_s[-1, span.start],
                }
            )
        return steps

    def fsdp(self, strategy: str) -> list[dict]:
        """Predicts the steps of FSDP under one strategy: a row per base."""
        collective_s, copy_s, shards_s = self._collectives(strategy)
        block_s, head_s = forward_parts_s(
            self.config, self.workload.seq_len, self.workload.seq_len, self.flops_per_s
        )
        pace = self.of_micro_batch * self.straggler
        model = ShardedModel(
            self.config.n_layer, block_s * pace, head_s * pace, collective_s, copy_s
        )
        total, slowed, exposed = simulate_step(model, strategy, self.micro_batches, self.slowdown)
        passes = (self.forward_s + self.profile.backward_s) * self.of_sequences
        local = passes + shards_s
        step_s = total + shards_s * self.straggler
        copies = total - slowed - exposed - passes * self.straggler
        rows = []
        for number, base in enumerate(self.bases):
            span = slice(number * self.width, (number + 1) * self.width)
            if base.gpus == 1:
                rows.append(self._row(strategy, number, *self._alone(span)))
                continue
            row = self._row(
                strategy=strategy,
                number=number,
                step_s=step_s[span],
                local_s=local[span],
                copies_s=copies[span],
                slowed_s=slowed[span],
                exposed_s=exposed[span],
            )
            rows.append(row)
        return rows

    def _alone(self, span: slice) -> tuple[NDArray, ...]:
        """Returns the parts of one GPU's step: (step, local, copies, slowed, exposed), seconds."""
        passes = (self.forward_s + self.profile.backward_s) * self.of_sequences[span]
        local = passes + self.update_s
        nothing = np.zeros_like(local)
        return local, local, nothing, nothing, nothing

    def _collectives(self, strategy: str) -> tuple[dict, dict, NDArray]:
        """Computes the seconds of collectives, of their copies, and of a rank's update.

        The first two are by (operation, unit); all arrays are over cases.
        """
        half = self.workload.precision != "float32"
        times: dict[tuple[str, str], list[float]] = {}
        copies: dict[tuple[str, str], list[float]] = {}
        update = []
        for n in self.gpus:
            parts = step_collectives(
                config=self.config,
                strategy=strategy,
                ranks=n,
                parameter_bytes=2 if half else 4,
            )
            reduced = 0
            for part in parts:
                key = (part.operation, part.unit)
                size = part.size_bytes
                ring_s = NcclRing(self.cluster, n, part.operation).time_s(size)
                times.setdefault(key, []).append(ring_s)
                copies.setdefault(key, []).append(2 * size / self.memory_bytes_per_s)
                reduced += part.count * size if key[0] == "reduce_scatter" else 0
            update.append(ADAMW_BYTES * reduced / 4 / n / self.memory_bytes_per_s)
        collective_s = {
            key: np.array(seconds)[self.index] * self.network_scale
            for key, seconds in times.items()
        }
        copy_s = {key: np.array(seconds)[self.index] for key, seconds in copies.items()}
        return collective_s, copy_s, np.array(update)[self.index]

    def _row(
        self,
        strategy: str,
        number: int,
        step_s: NDArray,
        local_s: NDArray,
        copies_s: NDArray,
        slowed_s: NDArray,
        exposed_s: NDArray,
    ) -> dict:
        """Makes one row of the table; arrays are the prediction and its draws."""
        base = self.bases[number]
        span = slice(number * self.width, (number + 1) * self.width)
        tokens = base.global_sequences * self.workload.seq_len
        straggler = local_s * (self.straggler[span] - 1)
        return {
            "scaling": base.scaling,
            "strategy": strategy,
            "gpus": base.gpus,
            "nodes": self.cluster.nodes(base.gpus),
            "sequences_per_gpu": base.sequences,
            "micro_batches": int(self.micro_batches[span.start]),
            **_banded("step", "s", step_s),
            "computation_s": local_s[0],
            "straggler_s": straggler[0],
            "copies_s": copies_s[0],
            "slowed_s": slowed_s[0],
            **_banded("exposed", "s", exposed_s),
            **_banded("efficiency", "", self.one_gpu_s()[span] / step_s),
            **_banded("tokens_per_s", "", tokens / step_s),
        }


def _banded(name: str, unit: str, values: NDArray) -> dict[str, float]:
    """Returns the prediction (the first value) and its band, the quantiles of the draws."""
    # Caps come from a list: a quantile between two of them would be a cap that nobody simulated.
    method = "nearest" if unit == "mib" else "linear"
    low, high = middle(values[1:], confidence=BAND, method=method)
    end = f"_{unit}" if unit else ""
    return {f"{name}{end}": values[0], f"{name}_low{end}": low, f"{name}_high{end}": high}
