"""Computes what the best cap gains over DDP's default, by size of the gradients and network.

DDP's default is a first bucket of 1 MiB and others of 25. Of gradients that fit into two buckets it
leaves nothing to overlap, and another cap gains much; of large ones it makes many buckets. So a
gain that was measured on a small model says nothing of a large one. Everything here is predicted:
passes are those of GPT-2s of several sizes, computed as ``predict --cluster`` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd

from common.analysis.buckets.measurements import Assignment2Run, open_run
from common.analysis.buckets.networks import NetworkRun, measured_networks
from common.errors import UserError
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.buckets import MIB, DdpOptions
from common.perfmodel.cluster.clusters import COURSE_CLUSTERS, Cluster, load_cluster
from common.perfmodel.cluster.computed_profile import (
    computed_model,
    computed_profile,
    predicted_profile,
)
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.nccl import NcclAllReduce
from common.perfmodel.cluster.steps import default_caps_mib
from common.perfmodel.ddp.bucketings import distinct_bucketings, profile_buckets
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.architecture import CONFIGS, GPT2Config
from common.perfmodel.one_device.peaks import known_peak
from common.perfmodel.one_device.workload import Workload
from common.runtime.wording import digits

MODELS = ("gpt2-nano", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
GPUS = 64
"""Number of GPUs of a cluster, unless another is asked for."""
WORKLOAD = Workload(model="gpt2", precision="bfloat16")
"""The batch of a GPU on a cluster, whatever the model."""
CAPS = 60
"""Number of caps among which the best is looked for, evenly spaced on a log axis."""
GRADIENTS = {
    "gradients": "gradients of",
    "gradient_bytes": ("size (MB)", "{:,.0f}"),
    "default_buckets": "buckets",
}
"""Titles of ``gain_matrix``, whose buckets are the default's; a network is a column of its own."""


@dataclass(frozen=True)
class Passes:
    """A network, or a cluster, on which backward passes would run.

    Attributes:
        network: name of the network, or of the cluster.
        seq_len: tokens of a sequence.
        tokens: tokens of one backward pass.
        profile_of: returns the backward pass of a model and a number of samples.
        model_of: returns what predicts a profile's passes there.
    """

    network: str
    seq_len: int
    tokens: int
    profile_of: Callable[[Architecture, float], BackwardProfile]
    model_of: Callable[[BackwardProfile], DdpModel]

    def profile(self, config: GPT2Config) -> BackwardProfile:
        """Computes when the gradients of a GPT-2 of this size are ready."""
        seq_len = min(self.seq_len, config.n_positions)
        samples = self.tokens / seq_len
        return self.profile_of(config.architecture(seq_len), samples)


def on_clusters(gpus: int = GPUS) -> list[Passes]:
    """Returns the clusters of ``COURSE_CLUSTERS``, each with this number of GPUs.

    Raises UserError for a number that one of them cannot have.
    """
    return [_on_cluster(load_cluster(name), gpus) for name in COURSE_CLUSTERS]


def on_networks(run_dir: str | Path) -> list[Passes]:
    """Returns the networks that a run of assignment 2 measured, at its device's own speed.

    Raises UserError for no such run, and for one that did not compute a GPT-2's passes.
    """
    run = open_run(run_dir)
    model = str(run.settings.get("model"))
    if run.settings.get("replay") or model.startswith("replay of "):
        raise UserError(f"{run_dir}: it replays {model}: its device's speed is not known")
    return [_on_network(network, run) for network in measured_networks(run)]


def cap_gains(passes: Iterable[Passes], gradient_mib: Sequence[float] = ()) -> pd.DataFrame:
    """Predicts what the best cap gains, for GPT-2s of several sizes and for gradients of one's own.

    Gradients of another size than a GPT-2's are those of the nearest one, all in proportion, with
    as many operations to a parameter.

    Args:
        passes: where the passes would run.
        gradient_mib: sizes in MiB of further models' gradients.

    Returns:
        a row per model and network, small models first. Columns: gradients (whose they are),
        gradient_bytes, default_buckets, network, default_s, best_cap_mib, best_buckets, and gain,
        the share of the default's backward pass that the best cap takes off.

    Raises UserError for a size that is none.
    """
    for size in gradient_mib:
        if not (math.isfinite(size) and size > 0):
            raise UserError(f"gradients of {size:g} MiB: a number above 0 is needed")
    rows = [row for where in passes for row in _gains_on(where, gradient_mib)]
    return pd.DataFrame(rows).sort_values("gradient_bytes", kind="stable", ignore_index=True)


def gain_matrix(table: pd.DataFrame) -> pd.DataFrame:
    """Returns ``cap_gains`` with a row per model and a column per network, which has the gain."""
    keys = list(GRADIENTS)
    gains = table.pivot(index=keys, columns="network", values="gain")
    gains = gains[table["network"].drop_duplicates()]
    return gains.reset_index().sort_values("gradient_bytes", ignore_index=True)


def _gains_on(where: Passes, gradient_mib: Sequence[float]) -> Iterator[dict]:
    """Yields the rows of ``cap_gains`` of one network."""
    profiles = {name: where.profile(GPT2Config.named(name)) for name in MODELS}
    for size in gradient_mib:
        nearest = min(CONFIGS, key=lambda name: abs(math.log(_mib(name) / size)))
        factor = size / _mib(nearest)
        profile = where.profile(GPT2Config.named(nearest)).scaled(compute=factor, size=factor)
        profiles[f"yours, {digits(size)} MiB"] = profile
    for name, profile in profiles.items():
        model = where.model_of(profile)
        caps = default_caps_mib(profile.total_bytes, CAPS)
        bucketings = distinct_bucketings(profile, caps)
        best = model.best_cap(caps, bucketings=bucketings)
        default_s = model.backward_s(None)
        yield {
            "gradients": name,
            "gradient_bytes": profile.total_bytes,
            "default_buckets": len(profile_buckets(profile, DdpOptions(None))),
            "network": where.network,
            "default_s": default_s,
            "best_cap_mib": best.cap_mib,
            "best_buckets": best.candidate(best.cap_mib).num_buckets,
            "gain": 1 - best.total_s / default_s,
        }


def _mib(name: str) -> float:
    """Returns the size of a model's gradients in MiB, in float32."""
    return 4 * GPT2Config.named(name).num_parameters() / MIB


def _on_cluster(cluster: Cluster, gpus: int) -> Passes:
    peak = known_peak(cluster.gpu)
    network = NcclAllReduce(cluster, gpus)
    return Passes(
        network=cluster.name,
        seq_len=WORKLOAD.seq_len,
        tokens=WORKLOAD.seq_len * WORKLOAD.batch_size,
        profile_of=lambda architecture, samples: predicted_profile(
            Job(architecture, precision=WORKLOAD.precision), peak, samples
        ),
        model_of=lambda profile: computed_model(profile, network, peak.memory_bytes_per_s),
    )


def _on_network(network: NetworkRun, run: Assignment2Run) -> Passes:
    config, seq_len = GPT2Config.named(run.settings["model"]), int(run.settings["max_seq_len"])
    tokens = seq_len * int(run.settings["batch_size"])
    # The rate at which this device's backward pass does the operations that are counted for it.
    operations = 2 * config.architecture(seq_len).forward_flops * int(run.settings["batch_size"])
    return Passes(
        network=network.link,
        seq_len=seq_len,
        tokens=tokens,
        profile_of=partial(computed_profile, flops_per_s=operations / run.profile.backward_s),
        model_of=lambda profile: replace(network.model, profile=profile),
    )
