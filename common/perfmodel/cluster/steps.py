"""The steps of one job on every number of GPUs of a cluster, with all draws at once.

A case is a scaling, a number of GPUs and a draw. Every quantity is an array over all cases, so that
a bucketing, or a micro-batch of FSDP, is simulated for all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.architectures.architecture import Layer
from common.perfmodel.buckets import MIB
from common.perfmodel.cluster.assumptions import Assumptions
from common.perfmodel.cluster.cap_grid import (
    Circumstances,
    best_rows,
    cap_rows,
    default_row,
    near_interval,
    simulate_grid,
    single_row,
)
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.cluster.computed_profile import timed_profile
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.nccl import NcclAllReduce, NcclRing, between_nodes
from common.perfmodel.cluster.pass_time import adamw_s, backward_s, forward_s
from common.perfmodel.fsdp.communication import FLOAT32_BYTES, padded_elements
from common.perfmodel.fsdp.schedule import ShardedModel, simulate_step
from common.perfmodel.one_device.peaks import DevicePeak, copy_s_per_byte
from common.perfmodel.one_device.sharding import whole_tensors
from common.samples import middle

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
        samples: samples of a GPU's step.
        global_samples: samples of a step on all GPUs.
    """

    scaling: str
    network: int
    gpus: int
    samples: int
    global_samples: int


class ClusterSteps:
    """The steps of one job on a cluster, for all cases at once.

    Cases are bases × (prediction, draws), flattened: a base's are ``width`` neighbours, of which
    the first is the prediction.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        peak: DevicePeak,
        gpus: Sequence[int],
        global_batch_size: int,
        assumptions: Assumptions,
    ) -> None:
        self.job, self.cluster, self.gpus = job, cluster, gpus
        self.networks = [NcclAllReduce(cluster, n) for n in gpus]
        self.memory_bytes_per_s = peak.memory_bytes_per_s
        a_step = job.batch_size * job.accumulation
        weak = [Base("weak", index, n, a_step, n * a_step) for index, n in enumerate(gpus)]
        strong = [
            Base("strong", index, n, math.ceil(global_batch_size / n), global_batch_size)
            for index, n in enumerate(gpus)
            if n <= global_batch_size
        ]
        self.bases = weak + strong
        draws = assumptions.drawn()
        self.width = len(draws.pass_rate)
        self.index = self._of_bases([base.network for base in self.bases])
        self.gpus_of_case = self._of_bases([base.gpus for base in self.bases])
        self.samples = self._of_bases([base.samples for base in self.bases])
        self.micro_batches = -(-self.samples // job.batch_size)
        self.pass_rate = np.tile(draws.pass_rate, len(self.bases))
        speed = np.tile(draws.network_speed, len(self.bases))
        self.network_scale = 1 / np.where(self.gpus_of_case == cluster.measured_gpus, 1.0, speed)
        self.slowdown = np.tile(draws.overlap_slowdown, len(self.bases))
        slowest = [assumptions.slowest(n, draws) for n in gpus]
        self.straggler = np.concatenate([slowest[base.network] for base in self.bases])
        # Times of one sample at the whole peak, or as ``pass_time`` has them; a case takes
        # ``of_samples`` times them.
        layers = job.architecture.layers
        self.layer_passes_s = {
            id(layer): self._layer_passes_s(layer, peak, bool(assumptions.mfu)) for layer in layers
        }
        self.profile = timed_profile(
            job.architecture, lambda layer: self.layer_passes_s[id(layer)][1]
        )
        self.forward_s = sum(layer.count * self.layer_passes_s[id(layer)][0] for layer in layers)
        self.passes_s = self.forward_s + self.profile.backward_s
        self.of_samples = self.samples / self.pass_rate
        self.of_micro_batch = self.of_samples / self.micro_batches
        self.update_s = adamw_s(job.architecture.num_trained, self.memory_bytes_per_s)

    def _layer_passes_s(self, layer: Layer, peak: DevicePeak, by_peak: bool) -> tuple[float, float]:
        """Returns the seconds of a sample's forward and backward pass of one layer.

        ``by_peak`` tells whether products at the whole peak are all that takes time.
        """
        if by_peak:
            forward = layer.forward_flops / peak.flops(self.job.precision, self.job.tf32)
            backward = layer.backward_ratio * forward
        else:
            forward = forward_s(self.job, layer, peak)
            backward = backward_s(self.job, layer, peak)
        return forward, backward + self.job.recomputed(layer) * forward

    def _of_bases(self, values: list[int]) -> NDArray:
        return np.repeat(np.array(values), self.width)

    def one_gpu_s(self) -> NDArray:
        """Computes the seconds of one GPU's step without exchange; if strong, divided by n."""
        step = self.passes_s * self.of_samples + self.update_s
        shares = self._of_bases([base.global_samples for base in self.bases]) / self.gpus_of_case
        strong = self.passes_s * shares / self.pass_rate + self.update_s / self.gpus_of_case
        is_strong = self._of_bases([base.scaling == "strong" for base in self.bases])
        return np.where(is_strong, strong, step)

    def ddp(self, caps_mib: Sequence[float] | None, strategy: str = "DDP") -> list[dict]:
        """Predicts the steps of DDP, or ZERO1: a row per base, at the best cap of each.

        ZERO1 updates a part of the parameters on each GPU, and gathers them all afterwards. Caps of
        None are ``default_caps_mib``; without any, all gradients are in one bucket.
        """
        if caps_mib is None:
            caps_mib = default_caps_mib(self.profile.total_bytes)
        profile = self.profile.scaled(size=self.job.gradient_bytes / FLOAT32_BYTES)
        one_bucket = single_row(profile)
        rows = cap_rows(profile, caps_mib) if len(caps_mib) else (one_bucket,)
        default = default_row(profile) if len(caps_mib) else one_bucket
        copy = copy_s_per_byte(self.memory_bytes_per_s)
        cases = Circumstances(
            compute_scale=self.of_micro_batch * self.straggler,
            network=self.index,
            network_scale=self.network_scale,
            compute_slowdown=self.slowdown,
        )
        grid = simulate_grid(
            profile=profile,
            networks=self.networks,
            rows=(*rows, default),
            cases=cases,
            copy_s_per_byte=copy,
        )
        update_s, gathering_s = self._update(strategy)
        local = self.passes_s * self.of_samples + update_s
        # The grid has the last micro-batch's backward pass, which exchanges; this is the rest.
        before = local * self.straggler - profile.backward_s * cases.compute_scale + gathering_s
        step_s = before + grid.total_s
        copies = np.full(len(before), copy * profile.total_bytes)
        best = best_rows(grid.total_s[:-1])
        steps = []
        for number, base in enumerate(self.bases):
            span = self._span(number)
            chosen = best[span.start]
            row = self._row(
                strategy=strategy,
                number=number,
                step_s=step_s[chosen],
                local_s=local,
                copies_s=copies,
                slowed_s=grid.slowed_s[chosen],
                exposed_s=grid.exposed_s[chosen] + gathering_s,
            )
            if base.gpus > 1:
                low, high = near_interval(rows, step_s[:-1, span.start], chosen)
                row |= {
                    **_banded("bucket_cap", "mib", np.array([rows[i].cap_mib for i in best[span]])),
                    "num_buckets": len(rows[chosen].last),
                    "algorithm": self.networks[base.network].choice(rows[chosen].cap_mib * MIB),
                    "near_low_mib": low,
                    "near_high_mib": high,
                    "default_step_s": step_s[-1, span.start],
                }
            steps.append(row)
        return steps

    def _update(self, strategy: str) -> tuple[NDArray, NDArray]:
        """Computes the seconds of a GPU's update, and of gathering what the others updated."""
        if strategy == "DDP":
            return np.full(len(self.index), self.update_s), np.zeros(len(self.index))
        size = FLOAT32_BYTES * self.job.architecture.num_trained
        gather_s = [NcclRing(self.cluster, n, "all_gather").time_s(size) for n in self.gpus]
        parts = [whole_tensors(self.job.architecture.parameter_sizes(), n) for n in self.gpus]
        largest = np.array([max(part) / sum(part) for part in parts])
        return (
            self.update_s * largest[self.index],
            np.array(gather_s)[self.index] * self.network_scale,
        )

    def fsdp(self, strategy: str) -> list[dict]:
        """Predicts the steps of FSDP under one strategy: a row per base."""
        collective_s, copy_s, shards_s = self._collectives(strategy)
        blocks = [layer for layer in self.job.architecture.one_by_one() if layer.is_block]
        pace = self.of_micro_batch * self.straggler
        forward, backward = self._unit_times()
        model = ShardedModel(
            blocks=tuple(block.name for block in blocks),
            forward_s={unit: seconds * pace for unit, seconds in forward.items()},
            backward_s={unit: seconds * pace for unit, seconds in backward.items()},
            collective_s=collective_s,
            copy_s=copy_s,
            prefetch=self.job.prefetch,
            forward_only=frozenset(b.name for b in blocks if not b.is_gathered_again),
        )
        total, slowed, exposed = simulate_step(
            model, strategy, self.micro_batches, self.slowdown, reduces_each=self.job.reduces_each
        )
        passes = self.passes_s * self.of_samples
        local = passes + shards_s
        step_s = total + shards_s * self.straggler
        copies = total - slowed - exposed - passes * self.straggler
        return [
            self._row(strategy, number, step_s, local, copies, slowed, exposed)
            for number in range(len(self.bases))
        ]

    def _unit_times(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the seconds of a sample's forward and backward pass, by FSDP's unit."""
        forward, backward = {"root": 0.0}, {"root": 0.0}
        for layer in self.job.architecture.layers:
            seconds, again = self.layer_passes_s[id(layer)]
            if layer.is_block:
                forward[layer.name], backward[layer.name] = seconds, again
            else:
                forward["root"] += layer.count * seconds
                backward["root"] += layer.count * again
        return forward, backward

    def _collectives(self, strategy: str) -> tuple[dict, dict, NDArray]:
        """Computes the seconds of collectives, of their copies, and of a rank's update.

        The first two are by (operation, unit); all arrays are over cases.
        """
        times: dict[tuple[str, str], list[float]] = {}
        copies: dict[tuple[str, str], list[float]] = {}
        update, types = [], self.job.passes.numerics
        for n in self.gpus:
            group = min(n, self.cluster.gpus_per_node) if strategy == "HYBRID_SHARD" else n
            padded_to: dict[str, int] = {}
            # Blocks of one name are equal: one stands for all.
            for layer in {layer.name: layer for layer in self._units()}.values():
                padded = padded_elements([tensor.shape for tensor in layer.tensors], group)
                frozen = padded_elements([tensor.shape for tensor in layer.frozen], group)
                item_bytes = types.compute_bytes if layer.is_block else types.root_bytes
                sizes = {
                    "all_gather": item_bytes * (padded + frozen),
                    "reduce_scatter": self.job.gradient_bytes * padded,
                }
                for operation, size in sizes.items():
                    ring_s = NcclRing(self.cluster, group, operation).time_s(size) if size else 0.0
                    times.setdefault((operation, layer.name), []).append(ring_s)
                    copied_s = size * copy_s_per_byte(self.memory_bytes_per_s)
                    copies.setdefault((operation, layer.name), []).append(copied_s)
                if strategy == "HYBRID_SHARD":
                    between = between_nodes(self.cluster, n)
                    part_s = between.time_s(sizes["reduce_scatter"] / group) if padded else 0.0
                    times.setdefault(("all_reduce", layer.name), []).append(part_s)
                padded_to[layer.name] = padded
            elements = sum(layer.count * padded_to[layer.name] for layer in self._units())
            update.append(adamw_s(elements / group, self.memory_bytes_per_s))
        collective_s = {
            key: np.array(seconds)[self.index] * self.network_scale
            for key, seconds in times.items()
        }
        copy_s = {key: np.array(seconds)[self.index] for key, seconds in copies.items()}
        return collective_s, copy_s, np.array(update)[self.index]

    def _units(self) -> list[Layer]:
        """Returns FSDP's units: the blocks, and one layer of all that is in no block."""
        return [*self.job.architecture.blocks, self.job.architecture.root]

    def _span(self, base: int) -> slice:
        return slice(base * self.width, (base + 1) * self.width)

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
        """Makes the row of base ``number``; arrays are over all cases."""
        base = self.bases[number]
        span = self._span(number)
        parts = [seconds[span] for seconds in (step_s, local_s, copies_s, slowed_s, exposed_s)]
        if base.gpus == 1:  # nothing to reduce, and no bucket to copy into
            alone_s = self.passes_s * self.of_samples[span] + self.update_s
            parts = [alone_s, alone_s, *np.zeros((3, self.width))]
        step_s, local_s, copies_s, slowed_s, exposed_s = parts
        tokens = base.global_samples * self.job.tokens_per_sample
        straggler = local_s * (self.straggler[span] - 1)
        return {
            "scaling": base.scaling,
            "strategy": strategy,
            "gpus": base.gpus,
            "nodes": self.cluster.nodes(base.gpus),
            "sequences_per_gpu": base.samples,
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
