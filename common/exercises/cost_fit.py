"""A3.3: the cost of a micro-batch, c0 + c1·b·m + c2·b·m², fitted to measured steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fit_cost(batch_size: NDArray, longest: NDArray, time_s: NDArray) -> tuple[float, float, float]:
    """Fits (c0, c1, c2), in seconds, to measured steps by least squares of their relative errors.

    None is negative, whatever the noise: a cost must not fall as batches or texts grow. Errors are
    relative, as else the longest steps alone would decide.

    Args:
        batch_size, longest, time_s: float64 [n] each, above 0; index i is one measured step of b
            texts, padded to m tokens. They stay as they are.
    """
    # BEGIN SOLUTION A3.3
    # Non-negative least squares of (predicted − measured) / measured (Lawson and Hanson, Solving
    # Least Squares Problems, 1974). Each row is divided by its measured time, so the target is 1.
    # Each column is divided by its maximum, as the third is 10⁶ times the first, and the solution
    # is scaled back.
    from scipy.optimize import nnls

    terms = np.stack([np.ones_like(time_s), batch_size * longest, batch_size * longest**2], axis=1)
    scale = terms.max(axis=0)
    solution, _ = nnls(terms / scale / time_s[:, None], np.ones_like(time_s))
    c0_s, c1_s, c2_s = (solution / scale).tolist()
    return c0_s, c1_s, c2_s
    # END SOLUTION
