"""A model on GPUs that nobody has timed: its passes by ``pass_time``, or at a stated rate.

The backward pass of a layer that is trained takes twice as long as its forward pass, and what
checkpointing repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.perfmodel.architectures.architecture import Architecture, Layer
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.cluster.assumptions import OVERLAP_SLOWDOWN
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.pass_time import backward_s, forward_s
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.layer_tables import profile_of_layers
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.peaks import DevicePeak, copy_s_per_byte


def computed_profile(
    architecture: Architecture, samples: float, flops_per_s: float
) -> BackwardProfile:
    """Computes the ready times of a model's gradients (float32) from its operations alone.

    Args:
        samples: sequences, or images, of one backward pass.
        flops_per_s: the rate that the GPU reaches; a peak times an MFU.
    """
    profile = timed_profile(
        architecture,
        lambda layer: layer.backward_ratio * layer.forward_flops * samples / flops_per_s,
    )
    work = "all matrix products run at one rate, and nothing else takes time"
    return replace(profile, assumptions=(work, *profile.assumptions))


def timed_profile(
    architecture: Architecture, backward_s: Callable[[Layer], float]
) -> BackwardProfile:
    """Computes the ready times of a model's gradients (float32) from its layers' backward passes.

    ``backward_s`` gives the seconds of a layer's, with what checkpointing repeats.
    """
    return profile_of_layers([(layer, backward_s(layer)) for layer in architecture.one_by_one()])


def predicted_profile(job: Job, peak: DevicePeak, samples: float) -> BackwardProfile:
    """Computes the ready times of a job's gradients on a GPU, as ``pass_time`` has its passes.

    ``samples`` are sequences, or images, of the pass, in place of the job's micro-batch.
    """
    return timed_profile(
        job.architecture,
        lambda layer: (
            samples
            * (backward_s(job, layer, peak) + job.recomputed(layer) * forward_s(job, layer, peak))
        ),
    )


def computed_model(
    profile: BackwardProfile, network: AllReduceModel, memory_bytes_per_s: float
) -> DdpModel:
    """Returns the model of DDP on GPUs that copy at their memory's bandwidth.

    Computation beside all-reduces is slowed as is assumed for a cluster.
    """
    copy = copy_s_per_byte(memory_bytes_per_s)
    costs = DdpCosts(
        copy_in_s_per_byte=copy, copy_out_s_per_byte=copy, compute_slowdown=OVERLAP_SLOWDOWN.value
    )
    return calibrated_model(profile, network, costs)
