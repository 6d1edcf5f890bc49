"""A3.2: the factor of each rank's loss where ranks have different numbers of samples."""

from __future__ import annotations

from common.errors import UserError, unknown_name

LOSS_MEANS = ("samples", "tokens")


def loss_scale(mean: str, world_size: int, local: int, total: int) -> float:
    """Returns the factor of a rank's mean loss that makes DDP's mean one over the global batch.

    DDP averages gradients over ranks, as if all had as many samples.

    Args:
        mean: the units that the loss is a mean over, samples or tokens.
        world_size: G ranks.
        local, total: these samples (b_g, B), or tokens (n_g, N), of the rank and of all.

    Raises:
        UserError: another kind of mean.
    """
    if mean not in LOSS_MEANS:
        raise UserError(unknown_name("mean of the loss", mean, LOSS_MEANS))
    # BEGIN SOLUTION A3.2
    # DDP averages the ranks' gradients: (1/G)·Σ G·(b_g/B)·mean_g = Σ (b_g/B)·mean_g.
    return world_size * local / total
    # END SOLUTION
