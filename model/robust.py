"""Robust maximum a posteriori fit of constants in log space, for many constants and few rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of a robust MAP fit: x [K], covariance [K, K], residuals in log units [N]."""

    x: Array
    covariance: Array
    residuals: Array
    #: what was minimised: robust misfit plus distance from the prior
    cost: float


def robust_map(
    predict: Callable[[Array], Array],
    observed_N: Array,
    rel_sd_N: Array,
    x0_K: Array,
    precision_KK: Array,
    *,
    start_K: Array | None = None,
    degrees: float = 4.0,
    iterations: int = 25,
) -> Fit:
    """Gauss-Newton with Student-t weights: minimises prior + sum of t residuals in log space.

    ``predict(x_DK) -> [D, N]`` gives the predicted (positive) values of all observations for D
    constant vectors at once; ``rel_sd_N`` is the standard deviation of log(observed).
    """
    log_observed = np.log(observed_N)
    num = x0_K.size
    delta = 1e-4
    probes = np.concatenate([np.zeros((1, num)), delta * np.eye(num)])
    weight_floor = degrees + 1.0

    def cost(residual: Array, x: Array) -> float:
        t = 0.5 * weight_floor * np.log1p((residual / rel_sd_N) ** 2 / degrees).sum()
        d = x - x0_K
        return float(t + 0.5 * d @ precision_KK @ d)

    x = (x0_K if start_K is None else start_K).copy()
    log_DN = np.log(predict(x + probes))
    residual = log_observed - log_DN[0]
    current = cost(residual, x)
    damping = 1e-3
    for _ in range(iterations):
        jacobian = ((log_DN[1:] - log_DN[0]) / delta).T
        weight = weight_floor / (degrees + (residual / rel_sd_N) ** 2) / rel_sd_N**2
        normal = jacobian.T @ (jacobian * weight[:, None]) + precision_KK
        gradient = jacobian.T @ (weight * residual) + precision_KK @ (x0_K - x)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        step *= min(1.0, 1.5 / max(np.abs(step).max(), 1e-12))
        trial_DN = np.log(predict(x + step + probes))
        trial = cost(log_observed - trial_DN[0], x + step)
        if trial <= current + 1e-12:
            gain = current - trial
            x, log_DN, current = x + step, trial_DN, trial
            residual = log_observed - log_DN[0]
            damping = max(damping / 5, 1e-9)
            if gain < 1e-4 * max(1.0, current):
                break
        else:
            damping *= 8
            if damping > 1e6:
                break
    jacobian = ((log_DN[1:] - log_DN[0]) / delta).T
    weight = weight_floor / (degrees + (residual / rel_sd_N) ** 2) / rel_sd_N**2
    normal = jacobian.T @ (jacobian * weight[:, None]) + precision_KK
    return Fit(x, np.linalg.inv(normal), residual, current)


#: residual, in sd, from which on an observation pulls no harder
_HUBER = 2.0
#: when some residual is beyond this at the end, outliers are let go
_OUTLIER = 4.0
#: rows that agree with each other less well than their sd says are believed less, up to this
_MAX_NOISE = 3.0
_LONGEST_STEP = 2.0


def following_map(
    predict: Callable[[Array], Array],
    observed_N: Array,
    rel_sd_N: Array,
    x0_K: Array,
    covariance_KK: Array,
    *,
    least_K: Array | float = -np.inf,
    most_K: Array | float = np.inf,
    prior_degrees: float = 4.0,
    iterations: int = 24,
) -> Fit:
    """Like ``robust_map``, for priors that may be far off: measurements are followed.

    No constant leaves ``least_K`` to ``most_K``: what the data would make of it beyond stays a
    residual.

    An outlier is one relative to the other measurements, not to the prior. Residuals first pull
    with Huber's loss: one that is 70 sd from the prior pulls as hard as one at 2 sd, and not less.
    Where all have been followed as well as they can, those still far off are let go (Student t).
    The prior is a Student t in its own whitened coordinates, so one constant that is 3 or 30 times
    off costs a logarithm, not a square; near its centre it is the normal prior. The scale of the
    residuals is their own robust spread where that is above what their sd says.
    """
    problem = _Problem(np.log(observed_N), rel_sd_N, x0_K, covariance_KK, prior_degrees)
    delta = 1e-4
    probes = np.concatenate([np.zeros((1, x0_K.size)), delta * np.eye(x0_K.size)])
    x = x0_K.copy()
    log_DN = np.log(predict(x + probes))
    residual = problem.log_observed - log_DN[0]
    heavy, scale, damping = False, problem.noise(residual), 1e-3
    for _ in range(iterations):
        jacobian = ((log_DN[1:] - log_DN[0]) / delta).T
        hessian, gradient = problem.normal(residual, x, jacobian, scale, heavy)
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        step *= min(1.0, _LONGEST_STEP / max(np.abs(step).max(), 1e-12))
        # one derivative's step inside the limits, where the model still feels the constant
        step = np.clip(x + step, least_K + 2 * delta, most_K - 2 * delta) - x
        trial_DN = np.log(predict(x + step + probes))
        before = problem.cost(residual, x, scale, heavy)
        trial = problem.log_observed - trial_DN[0]
        gain = before - problem.cost(trial, x + step, scale, heavy)
        if gain < -1e-12:
            damping *= 8
            if damping > 1e6:
                break
            continue
        x, log_DN, residual = x + step, trial_DN, trial
        damping = max(damping / 5, 1e-9)
        previous, scale = scale, problem.noise(residual)
        if gain < 2e-3 * max(1.0, before) and scale > 0.95 * previous:
            if heavy or np.abs(residual / (scale * rel_sd_N)).max() < _OUTLIER:
                break
            heavy = True
    jacobian = ((log_DN[1:] - log_DN[0]) / delta).T
    hessian, _ = problem.normal(residual, x, jacobian, scale, heavy)
    return Fit(x, np.linalg.inv(hessian), residual, problem.cost(residual, x, scale, heavy))


class _Problem:
    """Cost of residuals and of the distance from the prior; ``heavy`` lets outliers go."""

    def __init__(
        self, log_observed: Array, rel_sd: Array, x0: Array, covariance: Array, degrees: float
    ) -> None:
        self.log_observed, self._sd, self._x0, self._degrees = log_observed, rel_sd, x0, degrees
        self._whiten = np.linalg.inv(np.linalg.cholesky(covariance))

    def cost(self, residual: Array, x: Array, scale: float, heavy: bool) -> float:
        """What is minimised."""
        size = np.abs(residual / (scale * self._sd))
        if heavy:
            data = 2.5 * np.log1p(size**2 / 4.0)
        else:
            data = np.where(size > _HUBER, _HUBER * (size - 0.5 * _HUBER), 0.5 * size**2)
        z = self._whiten @ (x - self._x0)
        prior = 0.5 * self._degrees * np.log1p(z**2 / self._degrees)
        return float(data.sum() + prior.sum())

    def normal(
        self, residual: Array, x: Array, jacobian: Array, scale: float, heavy: bool
    ) -> tuple[Array, Array]:
        """(Hessian, descent direction) of the reweighted problem."""
        sd = scale * self._sd
        size = np.abs(residual / sd)
        weight = 5.0 / (4.0 + size**2) if heavy else _HUBER / np.maximum(size, _HUBER)
        weight = weight / sd**2
        z = self._whiten @ (x - self._x0)
        prior = self._whiten.T * (1.0 / (1.0 + z**2 / self._degrees))
        hessian = jacobian.T @ (jacobian * weight[:, None]) + prior @ self._whiten
        return hessian, jacobian.T @ (weight * residual) - prior @ z

    def noise(self, residual: Array) -> float:
        """Robust spread of the residuals in units of their sd, at least 1."""
        return float(np.clip(1.4826 * np.median(np.abs(residual / self._sd)), 1.0, _MAX_NOISE))
