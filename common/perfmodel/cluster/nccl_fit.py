"""An all-reduce model fitted to a measured table.

Which shape (``nccl_shapes``) a table has is decided by its own points: each shape is fitted to two
thirds of them and predicts the rest, in turn. Of the shapes that are not significantly worse than
the best (by less than two standard errors of the differences, point by point), the one with the
fewest parameters is taken, so a noisy table gets a plain line and a clean one keeps its switches.

Beyond four times the largest measured message a fit refuses to answer, unless asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.cluster.nccl import RAMP, NcclAllReduce, Ramp
from common.perfmodel.cluster.nccl_shapes import Curve, Paths, Protocols
from common.perfmodel.collectives import MeasuredAllReduce

FARTHEST = 4
"""Upper bound on the messages that a table can speak for, in multiples of its largest."""
FEWEST = 2
"""Lower bound on the sizes of a fit."""
FOLDS = 3
SIGMA = 0.03
"""Relative error expected of a time whose spread is not stated."""
LEAST_SIGMA = 0.01
NOISY = 0.1
SIGNIFICANT = 2.0
"""Standard errors by which a shape has to be worse to be left out."""
MIB = 2**20

Shape = Paths | Protocols


@dataclass(frozen=True)
class FittedAllReduce:
    """A fitted all-reduce (``AllReduceModel``).

    Attributes:
        shape: its name, such as ``NCCL's protocols`` or ``3 paths``.
        parameters: fitted values by name; units end the names.
        largest_bytes: the table's largest message.
        extrapolate: True if it answers beyond ``FARTHEST`` times that.
        held_out_error: mean relative error at points of the table that it was not fitted to.
        std_share: the table's own standard deviation relative to its times, median; None where it
            is not stated or was not checked, as for the next.
        left_out_s: each size's time as the others predict it.
        within_std: number of these within one standard deviation.
        notes: sentences to show with a result.
    """

    shape: str
    parameters: dict[str, float]
    largest_bytes: float
    extrapolate: bool
    held_out_error: float
    std_share: float | None = None
    left_out_s: tuple[float, ...] | None = None
    within_std: int | None = None
    notes: tuple[str, ...] = ()
    _shape: Shape = field(default=None, repr=False, compare=False)
    _logs: NDArray = field(default=None, repr=False, compare=False)

    def time_s(self, size_bytes: ArrayLike) -> float | NDArray:
        """Computes the seconds for ``size_bytes``; a scalar for a scalar, else an array.

        Raises UserError beyond ``FARTHEST`` times the largest measured message unless the fit may
        extrapolate.
        """
        sizes = np.asarray(size_bytes, dtype=float)
        if not self.extrapolate and self.is_extrapolated(sizes).any():
            raise UserError(
                f"an all-reduce of {sizes.max() / MIB:.3g} MiB is beyond {FARTHEST} times the "
                f"largest measured message ({self.largest_bytes / MIB:.3g} MiB): measure larger "
                "ones, or ask for extrapolation (extrapolate=True)"
            )
        times = self._shape.predict(self._logs, np.atleast_1d(sizes).ravel())
        return float(times[0]) if sizes.ndim == 0 else times.reshape(sizes.shape)

    def is_extrapolated(self, size_bytes: ArrayLike) -> NDArray:
        """Returns True for each size beyond what the table can speak for."""
        return np.asarray(size_bytes, dtype=float) > FARTHEST * self.largest_bytes


def fit_nccl(
    cluster: Cluster | None,
    gpus: int | None,
    size_bytes: ArrayLike,
    time_s: ArrayLike,
    std_s: ArrayLike | None = None,
    *,
    extrapolate: bool = False,
    algorithms: Collection[str] | None = None,
    check: bool = True,
) -> FittedAllReduce:
    """Fits an all-reduce model to a measured table.

    Args:
        cluster, gpus: where it was measured; None where it is not a known cluster, which leaves out
            the shape that needs NCCL's tuner.
        size_bytes, time_s: the table, ascending.
        std_s: standard deviation of each time, which is its weight.
        extrapolate: answer also beyond ``FARTHEST`` times the table's range.
        algorithms: as for ``NcclAllReduce``.
        check: where standard deviations are stated, of three sizes or more, also leave every size
            out once and say how many were predicted within one (about a second).

    Raises UserError for fewer than two sizes and unusable values.
    """
    curve, shares = _curve(size_bytes, time_s, std_s)
    shapes = _shapes(cluster, gpus, algorithms)
    fitted = _fit(curve, shapes, extrapolate)
    if shares is None or not check or len(curve.sizes) <= FEWEST:
        return fitted
    left_out = _leave_one_out(curve, shares * curve.times, shapes)
    within = int((np.abs(left_out - curve.times) <= shares * curve.times).sum())
    share = float(np.median(shares))
    judged = "noisy" if share > NOISY else "steady"
    note = (
        f"a {judged} table: its own standard deviation is {share:.0%} of a time (median; at most "
        f"{shares.max():.0%}). Left out one at a time, {within} of {len(shares)} sizes are "
        "predicted within one standard deviation."
    )
    return replace(
        fitted,
        std_share=share,
        left_out_s=tuple(left_out.tolist()),
        within_std=within,
        notes=(*fitted.notes, note),
    )


def calibrate_ramp(cluster: Cluster, gpus: int, size_bytes: ArrayLike, time_s: ArrayLike) -> Ramp:
    """Fits launch, slowdown and slice to a table, as was done for ``nccl.RAMP``."""
    from scipy.optimize import least_squares

    curve, _ = _curve(size_bytes, time_s, None)

    def errors(logs: NDArray) -> NDArray:
        model = NcclAllReduce(cluster, gpus, ramp=Ramp(*np.exp(logs)))
        return curve.errors(model.time_s(curve.sizes))

    # Logarithms keep all three above 0. The fit starts 35 % above ``RAMP``, not at its own result.
    start = np.log([RAMP.launch_s, RAMP.slowdown, RAMP.slice_bytes]) + 0.3
    return Ramp(*np.exp(least_squares(errors, start, loss="soft_l1").x).tolist())


def _shapes(
    cluster: Cluster | None, gpus: int | None, algorithms: Collection[str] | None
) -> list[Shape]:
    shapes: list[Shape] = [Paths(1), Paths(2), Paths(3)]
    if cluster is not None and gpus is not None:
        model = NcclAllReduce(cluster, gpus, algorithms=algorithms)
        if model.choices:
            shapes.append(Protocols(model))
    return shapes


def _fit(curve: Curve, shapes: list[Shape], extrapolate: bool) -> FittedAllReduce:
    shape, error = _select(curve, shapes)
    logs = shape.fit(curve)
    notes = [f"{shape.name}, fitted to {len(curve.sizes)} sizes"]
    if extrapolate:
        notes.append(
            f"extrapolated where a message is above {FARTHEST * curve.sizes[-1] / MIB:.3g} MiB, "
            f"{FARTHEST} times the largest measured"
        )
    return FittedAllReduce(
        shape=shape.name,
        parameters={name: float(value) for name, value in shape.parameters(logs).items()},
        largest_bytes=float(curve.sizes[-1]),
        extrapolate=extrapolate,
        held_out_error=error,
        notes=tuple(notes),
        _shape=shape,
        _logs=logs,
    )


def _select(curve: Curve, shapes: list[Shape]) -> tuple[Shape, float]:
    """Selects the shape to take; returns it and its mean relative error at held-out points."""
    # Cross-validation. A fold is every third point, so that each fold spans the whole range.
    place = np.arange(len(curve.sizes)) % FOLDS
    smallest = min((place != fold).sum() for fold in range(FOLDS))
    able = [shape for shape in shapes if shape.fewest_points <= smallest]
    if not able:  # too few to leave any out
        return shapes[0], float("nan")
    predicted = np.empty((len(able), len(place)))
    for row, shape in zip(predicted, able, strict=True):
        for fold in range(FOLDS):
            logs = shape.fit(curve.take(place != fold))
            row[place == fold] = shape.predict(logs, curve.sizes[place == fold])
    # Shapes are compared with the best one point by point, so that points that are hard for all of
    # them cancel. Of those that are not significantly worse, the simplest is taken.
    errors = np.abs(curve.errors(predicted))
    means = errors.mean(axis=1)
    worse = errors - errors[means.argmin()]
    allowed = SIGNIFICANT * worse.std(axis=1) / np.sqrt(len(place))
    good = np.flatnonzero(worse.mean(axis=1) <= allowed)
    index = min(good, key=lambda i: (able[i].num_parameters, means[i]))
    return able[index], float(np.abs(predicted[index] / curve.times - 1).mean())


def _leave_one_out(curve: Curve, std_s: NDArray, shapes: list[Shape]) -> NDArray:
    predicted = []
    for out in range(len(curve.sizes)):
        rest = np.arange(len(curve.sizes)) != out
        others, _ = _curve(curve.sizes[rest], curve.times[rest], std_s[rest])
        fitted = _fit(others, shapes, extrapolate=True)
        predicted.append(fitted.time_s(curve.sizes[out]))
    return np.array(predicted)


def _curve(
    size_bytes: ArrayLike, time_s: ArrayLike, std_s: ArrayLike | None
) -> tuple[Curve, NDArray | None]:
    """Returns the checked curve, and the standard deviations relative to its times where stated.

    A standard deviation of a few samples is itself uncertain, so for the weights each is pooled
    with the median of all.
    """
    table = MeasuredAllReduce(size_bytes, time_s)
    sizes, times = table.sizes_bytes, table.times_s
    if std_s is None:
        return Curve(sizes, times, np.full(len(sizes), SIGMA)), None
    std = np.asarray(std_s, dtype=float)
    if std.shape != times.shape or not np.isfinite(std).all() or (std < 0).any():
        raise UserError(
            f"{std.size} standard deviations for {times.size} times: one for each, of at least 0"
        )
    shares = std / times
    pooled = np.sqrt((shares**2 + np.median(shares) ** 2) / 2)
    return Curve(sizes, times, np.maximum(pooled, LEAST_SIGMA)), shares
